"""Runs plans: all modules that have threads."""

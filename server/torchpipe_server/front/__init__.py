"""Connections, and what happens between their bytes and the methods."""

"""Backends that run models, and what they share."""

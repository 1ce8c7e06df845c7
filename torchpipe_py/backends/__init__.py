"""Backends, one module for each library they need; heavy imports happen in ``setup``."""

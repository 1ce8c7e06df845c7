"""Backends for images, one module for each library."""

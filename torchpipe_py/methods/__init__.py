"""Handlers that answer requests with a pipe, for ``torchpipe-serve`` and for Ray Serve."""

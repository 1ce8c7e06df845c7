"""Connections and their states, the I/O loop."""

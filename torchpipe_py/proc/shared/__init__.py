"""Nodes that an engine process runs for all workers: its memory, and its other end in a worker."""

"""A worker process: one pipe and its methods."""

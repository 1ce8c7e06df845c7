"""A worker process: one pipe, its handlers."""

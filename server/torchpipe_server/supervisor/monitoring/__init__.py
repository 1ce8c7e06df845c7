"""The monitoring port: figures of all processes, as JSON, metrics and a page."""

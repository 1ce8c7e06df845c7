"""The monitoring port: statistics of all processes as JSON, metrics and a page."""

"""Inside a service: the processor time of its threads, and what they are at. On ``PYTHONPATH`` of that service."""

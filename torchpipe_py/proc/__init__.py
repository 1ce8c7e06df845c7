"""One way to run something in another process."""

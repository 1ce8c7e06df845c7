"""What the methods of a worker do."""

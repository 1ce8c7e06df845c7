"""The methods that a worker serves."""

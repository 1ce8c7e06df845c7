"""What runs a plan: everything that has threads."""

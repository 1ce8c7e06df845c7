"""What is read: datasets, readers, the order of an epoch, its randomness."""

"""Whole batches made in the DataLoader's worker processes."""

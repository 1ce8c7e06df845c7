"""Batches that a DataLoader's workers make."""

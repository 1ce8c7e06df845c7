"""From planned indices to a batch on the device: read, decode, transform, collate."""

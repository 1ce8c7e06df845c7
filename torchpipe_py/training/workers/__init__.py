"""Worker processes of a DataLoader, and how batches travel from them to the training process."""

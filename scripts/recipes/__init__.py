"""What the training scripts share: options, model, data, epochs, checkpoints."""

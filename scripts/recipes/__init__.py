"""Common parts of the training scripts: options, model, data, epochs, checkpoints."""

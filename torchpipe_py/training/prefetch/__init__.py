"""Work ahead of the training loop: threads, buffers, CUDA streams."""

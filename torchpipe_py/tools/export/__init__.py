"""``torchpipe export``: writes a PyTorch module as an ONNX file, and the TOML that serves it."""

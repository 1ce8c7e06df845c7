"""``torchpipe quantize``: writes an int8 copy of a configuration's ONNX model, only if it is as good."""

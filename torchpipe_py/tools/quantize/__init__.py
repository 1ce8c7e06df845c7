"""``torchpipe quantize``: an int8 model of the ONNX model in a configuration, written only where it is as good."""

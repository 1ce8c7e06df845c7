"""TensorRT engines: differences between versions, building, and the cache file."""

"""TensorRT engines: what its versions differ in, building, the file that keeps one."""

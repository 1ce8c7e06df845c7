"""On a GPU: what the machine can do, the classic recipe, the pipe and the service."""

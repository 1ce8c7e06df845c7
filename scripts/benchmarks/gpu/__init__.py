"""Benchmarks on a GPU: the machine's limit, the classic recipe, the pipe and the service."""

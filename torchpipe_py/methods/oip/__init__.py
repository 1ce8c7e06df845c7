"""The Open Inference Protocol, version 2, over HTTP: what Triton's and KServe's clients speak."""

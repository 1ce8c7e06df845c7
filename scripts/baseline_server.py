#!/usr/bin/env python3
"""The recipe that users come from: TensorRT, one image at a time, a lock around the engine.

    python scripts/baseline_server.py --engine resnet50.engine --port 8888
    python scripts/baseline_server.py --onnx configs/demo/model.onnx --size 64 --port 8888

The benchmarks compare the pipeline with it. It serves the same ``idl/inference.thrift`` (``ping`` and
``infer_batch``) from a thread per connection. The calling thread decodes and resizes with OpenCV, copies to and from
the GPU by PyCUDA (or PyTorch, if that is missing or with ``--cuda torch``), and applies softmax in NumPy. The engine
takes RGB values 0 to 255 as float32 N×3×H×W, mean and std inside, and gives logits. Without a GPU, ``--onnx`` runs an
ONNX model by ONNX Runtime in TensorRT's place; ImageNet's mean and std are written into it.
"""

from __future__ import annotations

import sys

from benchmarks.gpu.baseline import main

if __name__ == "__main__":
    sys.exit(main())

"""``python scripts/bench_gpu.py NAME|all``: limit, baseline and the pipe on a GPU, in one run.

``limits``: no pipeline; ``g1g2``: one client and many, 500×375 JPEGs; ``processes``: many, decoded by ``Process[...]``
(a minute with ``--rounds 3``); ``g5``: 1080×1080 JPEGs on three cores;
``g6``: the engine alone; ``int8``: that in int8 against fp16; ``g3g4``: the service over Thrift, with 1 to 8 workers;
``shared``: with one engine process for all of them; ``mosec``: that against mosec; ``sizes``: with other images.
Needs a CUDA device, TensorRT, torchvision, pycuda for the baseline, and ONNX Runtime for ``int8``. Engines are built at
the first run (minutes) and kept in ``--work``; those of ``--version-compatible`` TensorRT's lean runtime takes too.
Exit status 0 when every target is met, 1 when one is missed, 2 where it cannot run.
"""

from __future__ import annotations

import sys

from benchmarks.command import main_gpu

if __name__ == "__main__":
    sys.exit(main_gpu())

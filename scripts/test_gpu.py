"""Accuracy of a trained model on labelled images, served by a pipe or run by PyTorch; on a GPU, or the CPU.

python scripts/test_gpu.py --checkpoint last.pt --data DIR/val --toml configs/preprocess_gpu.toml --solution both
"""

from __future__ import annotations

import sys

from recipes.evaluation import main

if __name__ == "__main__":
    sys.exit(main())

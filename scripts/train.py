"""Train a classifier on one GPU or the CPU, on images that a pipe decodes.

python scripts/train.py --data DIR --toml configs/preprocess_cpu.toml --checkpoint run/last.pt
"""

from __future__ import annotations

import sys

from recipes.training import train as main

if __name__ == "__main__":
    sys.exit(main())

"""Train a classifier on one GPU or the CPU, on images that NVIDIA DALI decodes.

python scripts/train_dali.py --data DIR --augment both --checkpoint run/last.pt
"""

from __future__ import annotations

import sys

from recipes.training import train_dali as main

if __name__ == "__main__":
    sys.exit(main())

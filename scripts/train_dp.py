"""Train a classifier in one process on several GPUs: each decodes its share of a batch, and runs the model on one.

python scripts/train_dp.py --data DIR --toml configs/train_gpu.toml
"""

from __future__ import annotations

import sys

from recipes.training import train_dp as main

if __name__ == "__main__":
    sys.exit(main())

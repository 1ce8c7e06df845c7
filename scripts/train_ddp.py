"""Train a classifier with a process for each GPU, or several on the CPU.

torchrun --nproc_per_node 2 scripts/train_ddp.py --data DIR --toml configs/train_gpu.toml
"""

from __future__ import annotations

import sys

from recipes.training import train_ddp as main

if __name__ == "__main__":
    sys.exit(main())

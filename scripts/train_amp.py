"""Train a classifier in mixed precision on one GPU, or in bf16 on the CPU.

python scripts/train_amp.py --data DIR --toml configs/train_gpu.toml --precision fp16
"""

from __future__ import annotations

import sys

from recipes.training import train_amp as main

if __name__ == "__main__":
    sys.exit(main())

"""Where the time of a training goes: waiting for data, the GPU's work, copies, operators.

python scripts/profile_training.py --data DIR --toml configs/preprocess_gpu.toml --arch resnet50 --precision bf16
"""

from __future__ import annotations

import sys

from recipes.experiments.profiling import main

if __name__ == "__main__":
    sys.exit(main())

"""Images per second of data loaders that all make the same batches: torchvision, DALI, and ours.

python scripts/loader_throughput.py --data DIR --workers 1,2,4,8,16 --batch-sizes 64,256
"""

from __future__ import annotations

import sys

from recipes.experiments.throughput import main

if __name__ == "__main__":
    sys.exit(main())

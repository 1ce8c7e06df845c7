"""Draw a small labelled JPEG set, train a small network on it, and write what the demo pipeline needs.

python scripts/train_demo.py --out configs/demo
"""

from __future__ import annotations

import sys

from examples.demo import main

if __name__ == "__main__":
    sys.exit(main())

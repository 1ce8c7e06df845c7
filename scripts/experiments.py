"""The tables of training and serving: accuracy, throughput, epochs, and a report of all three.

python scripts/experiments.py accuracy --work DIR
"""

from __future__ import annotations

import sys

from recipes.experiments.command import main

if __name__ == "__main__":
    sys.exit(main())

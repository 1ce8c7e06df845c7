"""``python scripts/bench.py NAME|all``: limit, baselines and the pipe in one run.

Exit status 0 when every target is met, 1 when one is missed.
"""

from __future__ import annotations

import sys

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main())

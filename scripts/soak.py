#!/usr/bin/env python3
"""``python scripts/soak.py NAME|all``: the events of the reliability table in their long form, judged."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from chaos.soak import main

if __name__ == "__main__":
    sys.exit(main())

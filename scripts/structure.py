#!/usr/bin/env python3
"""``python scripts/structure.py [checkout ...]``: what a reader of this repository meets, counted."""

from __future__ import annotations

import sys

from benchmarks.structure import main

if __name__ == "__main__":
    main(sys.argv[1:])

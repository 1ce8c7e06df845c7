"""Compare JPEG decoders on a folder of images: speed, difference from OpenCV's pixels, EXIF orientation.

    python scripts/compare_decoders.py --img_dir DIR --limit 100 --threads 1,4

A decoder whose library or GPU is not there is listed as not measured, with the reason. Images are decoded from memory.
"""

from __future__ import annotations

import sys

from benchmarks.decoders.compare import main

if __name__ == "__main__":
    sys.exit(main())

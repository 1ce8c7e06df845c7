"""Draw a JPEG classification set of fine textures, the same for the same seed and libraries.

python scripts/make_textures.py --out DIR --train 200 --val 50
"""

from __future__ import annotations

import sys

from examples.textures import main

if __name__ == "__main__":
    sys.exit(main())

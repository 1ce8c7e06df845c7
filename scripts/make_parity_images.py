"""Write JPEGs of every kind a decoder meets, the same for the same seed and libraries.

    python scripts/make_parity_images.py --out images --count 200

For ``torchpipe parity``, which runs them through two preprocessing configurations. What a file is stands in its name:
number, width x height as stored, quality, chroma subsampling (444, 422, 420 or gray), ``prog`` for progressive, ``rst``
and the blocks between restart markers, ``exif`` and the orientation, then what it shows. The photographs are those of
scikit-learn where it is installed, drawn scenes otherwise. ``--odd`` adds CMYK and broken files.
"""

from __future__ import annotations

import sys

from examples.parity_images import main

if __name__ == "__main__":
    sys.exit(main())

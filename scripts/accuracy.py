"""Send every image of a folder to the service once and compare its label with the file's.

``python scripts/accuracy.py --img_dir configs/demo/images --port 8888``; a file is ``LABEL/name`` or ``LABEL_name``.
Also an example of a client.
"""

from __future__ import annotations

import sys

from examples.accuracy import main

if __name__ == "__main__":
    sys.exit(main())

"""Send every image of a folder to the service once and compare its label with the file's name.

``python scripts/accuracy.py --img_dir configs/demo/images --port 8888``; an image is called ``<label>_<anything>``.
Also an example of a client: all that a call needs is ``idl/inference.thrift`` and a Thrift library.
"""

from __future__ import annotations

import sys

from examples.accuracy import main

if __name__ == "__main__":
    sys.exit(main())

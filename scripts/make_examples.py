"""Draw digit scenes and text lines, train three small networks on them, and write what the example pipelines need.

    python scripts/make_examples.py --out configs/examples

writes ``detector.onnx``, ``digits.onnx``, ``textline.onnx``, ``digits.txt`` (one label per line, in class order), and
``scenes/*.jpg`` and ``lines/*.png`` with a ``truth.json`` each, pictures the networks were never trained on. Everything
is drawn from ``--seed`` and scikit-learn's own 8×8 digits; nothing is downloaded. Takes some minutes on one core.
"""

from __future__ import annotations

import sys

from examples.make import main

if __name__ == "__main__":
    sys.exit(main())

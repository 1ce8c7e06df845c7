"""Export a torchvision classification model to a single ONNX file with a dynamic batch, and check it.

python scripts/export_onnx.py --arch resnet50 --out resnet50.onnx
"""

from __future__ import annotations

import sys

from examples.export import main

if __name__ == "__main__":
    sys.exit(main())

"""What ``scripts/first_model.sh`` needs of PyTorch: trained weights, and torchvision's own results to compare with."""

from __future__ import annotations

import sys

from examples.first_model import main

if __name__ == "__main__":
    sys.exit(main())

"""Measures how sharp a picture is, and refuses blurred ones."""

import cv2

from torchpipe_py import ItemBackend, NoResult, Param, register_backend
from torchpipe_py.metrics import Counter


class Blurred(NoResult):
    """A picture is not sharp enough to be classified."""


@register_backend
class Sharpness(ItemBackend):
    """Passes on a Mat that is sharp; a blurred one has a ``Blurred`` error. Writes ``sharpness`` beside the result."""

    least = Param(float, 50, doc="variance of the Laplacian that a picture needs", low=0)

    def setup(self):
        self.refused = Counter("blurred", "Pictures that were refused")

    def forward_item(self, item):
        gray = cv2.cvtColor(item["data"], cv2.COLOR_BGR2GRAY)
        item["sharpness"] = float(cv2.Laplacian(gray, cv2.CV_64F).var())
        if item["sharpness"] < self.least:
            self.refused.inc()
            item["error"] = Blurred(f"sharpness {item['sharpness']:.0f}, at least {self.least:.0f} is needed")
        else:
            item["result"] = item["data"]

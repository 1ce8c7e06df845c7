"""What the example pipelines need beside the built-in backends: ``torchpipe … --import configs/examples/backends.py``.

Each is a class with ``forward(items)``, a method that changes the requests' dicts in place.
"""

from __future__ import annotations

from typing import Any

import postprocess

from torchpipe_py import Status, register_backend, register_filter

Data = dict[str, Any]

LINE_RATIO = 1.8
"""Width over height from which a picture is taken for a line of text."""


@register_backend
class DecodeBoxes:
    """The detector's Tensor 1×5×h×w to a list of boxes [left, top, right, bottom], the best first."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            boxes = postprocess.decode_boxes(item["data"].numpy())
            item["result"] = boxes[:, :4].tolist()


@register_backend
class LabelBoxes:
    """The list of (label, score) under ``data`` and the list under ``box`` to a list of dicts with all three."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            digits = zip(item["box"], item["data"], strict=True)
            item["result"] = [{"box": box, "label": label, "score": score} for box, (label, score) in digits]


@register_backend
class ReadText:
    """The reader's Tensor 1×T×11 to the text."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = postprocess.ctc_text(item["data"].numpy())


@register_filter
def only_lines(data: Data) -> Status:
    """Skip what reads text where the picture under ``result`` is no line."""
    height, width = data["result"].shape[:2]
    if width < LINE_RATIO * height:
        del data["result"]
        return Status.SubGraphSkip
    data["data"] = data.pop("result")
    return Status.Run


@register_filter
def only_scenes(data: Data) -> Status:
    """Skip what looks for objects where the picture under ``result`` is a line."""
    height, width = data["result"].shape[:2]
    if width >= LINE_RATIO * height:
        del data["result"]
        return Status.SubGraphSkip
    data["data"] = data.pop("result")
    return Status.Run

"""The decoders of a plan: how they decode, outside its pipe too, and small images that they accept."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from torchpipe_py.backends.base import BackendConfig, Data
from torchpipe_py.backends.image.decode import DecodeMat
from torchpipe_py.backends.image.mat import Recolor
from torchpipe_py.backends.signature import MAT, TENSOR
from torchpipe_py.errors import DecodeError
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import Pipeline

_SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp", "bmp": ".bmp", "tiff": ".tiff", "pnm": ".ppm"}
"""Formats that OpenCV encodes."""
_OF_PILLOW = ("gif", "avif")


@dataclass(frozen=True)
class Decoders:
    """The decoders of a plan, in the order in which they try an image, and the ``color`` of its result.

    Each is a ``DecodeMat`` with the parameters of the plan; one stands for a ``DecodeTensor``, and one with its
    defaults for the decoder of a plan that has only custom ones.
    """

    plans: tuple[BackendPlan, ...]
    color: str

    @classmethod
    def of(cls, pipeline: Pipeline, root: str | None = None) -> Decoders:
        """Those of the nodes that a request may run which enters at ``root``, a ``node_name``."""
        plans, color = list[BackendPlan](), ""
        for part in _parts(pipeline, root):
            if part.cls.__module__.partition(".")[0] != __name__.partition(".")[0] or "color" not in part.params:
                continue  # ``color`` of a custom class may have nothing to do with an image
            if part.cls is DecodeMat:
                plans.append(part)
            elif part.cls.__name__ == "DecodeTensor":
                plans.append(_decode_mat(part.params["color"], formats=("jpeg",), max_pixels=part.params["max_pixels"]))
            if part.cls.gives in (MAT, TENSOR):
                color = part.params["color"]
        color = color or "rgb"
        return cls(tuple(plans) or (_decode_mat(color),), color)

    def in_color(self, color: str) -> Decoders:
        """Decoders of the same formats and limits, for whole images in another color."""
        kept = [{name: plan.params[name] for name in ("formats", "max_pixels")} for plan in self.plans]
        return Decoders(tuple(_decode_mat(color, **params) for params in kept), color)

    def decode(self, encoded: bytes) -> np.ndarray:
        """The Mat of ``encoded`` in the plan's ``color``: what its pipe computes, but for resizes and crops.

        Raises ``DecodeError`` for what the decoders refuse.
        """
        *others, last = self._backends
        for backend in others:
            try:
                return self._decoded(backend, encoded)
            except DecodeError:
                continue
        return self._decoded(last, encoded)

    @cached_property
    def _backends(self) -> tuple[DecodeMat, ...]:
        """The decoders of whole images, which any thread may use."""
        made = []
        for plan in self.plans:
            # NOTE: gray is not converted back: from a gray decoder come three equal channels, as in the pipe.
            color = plan.params["color"] if "gray" in (plan.params["color"], self.color) else self.color
            whole = {"color": color, "at_least": "", "reduced_for": ()}
            backend: Any = replace(plan, params={**plan.params, **whole}).create(BackendConfig())
            backend.setup()
            made.append(backend)
        return tuple(made)

    def __getstate__(self) -> dict[str, Any]:
        return {"plans": self.plans, "color": self.color}  # another process makes its own decoders

    def _decoded(self, backend: DecodeMat, encoded: bytes) -> np.ndarray:
        item: Data = {TASK_DATA_KEY: encoded}
        backend.forward_item(item)
        if TASK_ERROR_KEY in item:
            raise item[TASK_ERROR_KEY]
        mat: np.ndarray = item[TASK_RESULT_KEY]
        if item[TASK_COLOR_KEY] == self.color:
            return mat
        return Recolor(self.color)({TASK_DATA_KEY: mat, TASK_COLOR_KEY: item[TASK_COLOR_KEY]})

    def small_image(self, height: int = 64, width: int = 64) -> bytes | np.ndarray:
        """``small_mat`` of this size as the decoders take it: encoded in one of their formats, JPEG if it is one.

        It is smaller if ``max_pixels`` is. The Mat itself if this machine can encode none of their formats (HEIC).
        """
        most = self.plans[-1].params["max_pixels"]
        if height * width > most:
            scale = math.sqrt(most / (height * width))
            height = min(most, max(1, int(height * scale)))
            width = max(1, min(int(width * scale), most // height))
        mat = small_mat(height, width)
        formats = self.plans[-1].params["formats"]
        for name in sorted(formats, key="jpeg".__ne__):
            encoded = _encoded(mat, name)
            if encoded:
                return encoded
        return mat


def small_mat(height: int = 64, width: int = 64) -> np.ndarray:
    """A small Mat with a range of colors."""
    down, across = (np.linspace(0, 252, side, dtype=np.uint8) for side in (height, width))
    return np.stack([*np.meshgrid(across, down), np.full((height, width), 128, np.uint8)], axis=2)


def _encoded(mat: np.ndarray, name: str) -> bytes:
    """The Mat, BGR, as a file of a format; empty if it cannot be encoded here."""
    import cv2
    from PIL import Image

    if name in _SUFFIXES:
        return bytes(cv2.imencode(_SUFFIXES[name], mat)[1].tobytes())
    if name not in _OF_PILLOW:
        return b""
    file = io.BytesIO()
    try:
        Image.fromarray(np.ascontiguousarray(mat[:, :, ::-1])).save(file, name.upper())
    except (KeyError, OSError):  # this Pillow was built without it
        return b""
    return file.getvalue()


def _decode_mat(color: str, **params: Any) -> BackendPlan:
    defaults = {name: param.default for name, param in DecodeMat.parameters().items()}
    return BackendPlan(DecodeMat, DecodeMat.__name__, {**defaults, "color": color, **params})


def _parts(pipeline: Pipeline, root: str | None) -> Iterator[BackendPlan]:
    """The backends of the nodes that a request runs, in the order of the graph."""
    graph = pipeline.graph
    entered = pipeline.roots.get(root) if root is not None else pipeline.only_root
    waiting = list(graph.roots if entered is None else [entered])
    reached = set[str]()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [*graph.successors[name], *graph.jumps.get(name, ())]
    for name in graph.order:
        if name in reached:
            for backend in pipeline.plans[name].backends:
                yield from backend.parts()

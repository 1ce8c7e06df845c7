"""What a backend takes and gives, as far as it can say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.keys import TASK_DATA_KEY

BYTES = "bytes"
"""The dtype of texts, files and encoded images."""


ENCODED, MAT, TENSOR, NUMBERS = "encoded bytes", "a Mat", "a Tensor", "a list of numbers"
"""Kinds of ``data`` and ``result``, as messages have them: what the class of a backend says before it is set up."""


@dataclass(frozen=True)
class ImageSpec:
    """What is known of an image before anything runs: its kind, its size in pixels, its channels; ``None``: nothing."""

    kind: str
    height: int | None = None
    width: int | None = None
    channels: int | None = None


@dataclass(frozen=True)
class TensorSpec:
    """What a model says of an input or output: ``dims`` with the batch, ``None`` for any size, empty if unknown.

    ``dtype`` is a name that NumPy and PyTorch share, or ``bfloat16``, or ``bytes``; empty if unknown.
    """

    name: str
    dims: tuple[int | None, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        return " ".join([self.name, *([shown_dims((1, *self.dims[1:]))] if self.dims else []), self.dtype]).strip()


def shown_dims(dims: Sequence[int | None]) -> str:
    """A shape as messages have it: ``1x3x?x?``."""
    return "x".join("?" if dim is None else str(dim) for dim in dims) or "a scalar"


@dataclass(frozen=True)
class Signature:
    """The tensors that ``data`` and ``result`` hold, in their order; none where that cannot be said.

    An input that is ``data`` itself is named so. The outputs of a result ``(label, score)``, and of a list of such
    pairs, are ``label`` and ``score``.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


ENCODED_IMAGE = Signature(inputs=(TensorSpec(TASK_DATA_KEY, (None, 1), BYTES),))
"""Of a decoder."""

LABEL_AND_SCORE = (TensorSpec("label", (None,), BYTES), TensorSpec("score", (None,), "float32"))
RANKING = (TensorSpec("label", (None, None), BYTES), TensorSpec("score", (None, None), "float32"))
"""Of a list of pairs."""

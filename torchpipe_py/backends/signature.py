"""Types of a backend's input and output, as far as known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.keys import TASK_DATA_KEY

BYTES = "bytes"
"""The dtype of strings, files and encoded images."""


ENCODED, MAT, TENSOR, NUMBERS = "encoded bytes", "a Mat", "a Tensor", "a list of numbers"
"""Kinds of ``data`` and ``result``, as worded in messages; a backend's class declares them before it is set up."""


@dataclass(frozen=True)
class ImageSpec:
    """Known properties of an image before anything runs: its kind, size in pixels and channels; ``None``: unknown.

    ``is_normalised``: ``mean`` and ``std`` were applied, so it is of float32.
    """

    kind: str
    height: int | None = None
    width: int | None = None
    channels: int | None = None
    is_normalised: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """A model's declaration of an input or output: ``dims`` with the batch, ``None`` for any size, empty if unknown.

    ``dtype`` is a name common to NumPy and PyTorch, or ``bfloat16``, or ``bytes``; empty if unknown. ``labels``
    name the classes of an output that has one number per class. ``is_scalar``: an output has no dimensions, not
    even that of a batch. ``is_optional``: the model has a value for an input that a request leaves out. ``is_image``:
    its bytes are an encoded image, which JSON may have as base64 text. ``rows_mix``: two rows of an input together have
    other results than each alone, so its first dimension is not a batch, and a request has one row.
    """

    name: str
    dims: tuple[int | None, ...] = ()
    dtype: str = ""
    labels: tuple[str, ...] = ()
    is_scalar: bool = False
    is_optional: bool = False
    is_image: bool = False
    rows_mix: bool = False

    def __str__(self) -> str:
        shape = [shown_dims((1, *self.dims[1:]))] if self.dims else []
        return " ".join([self.name, *shape, self.dtype, *["(optional)"] * self.is_optional]).strip()


def shown_dims(dims: Sequence[int | None]) -> str:
    """A shape for messages, such as ``1x3x?x?``."""
    return "x".join("?" if dim is None else str(dim) for dim in dims) or "a scalar"


@dataclass(frozen=True)
class Signature:
    """The tensors in ``data`` and ``result``, in order; empty if unknown.

    If ``data`` itself is the input, its name is ``data``. The outputs of a result ``(label, score)``, and of a list of
    such pairs, are ``label`` and ``score``; those of ``Detections`` are ``detection_outputs``.

    ``parameters`` are the names of a request's parameters that the backend reads, under the key ``parameters``.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: tuple[str, ...] = ()


ENCODED_IMAGE = Signature(inputs=(TensorSpec(TASK_DATA_KEY, (None, 1), BYTES, is_image=True),))
"""The signature of a decoder."""

LABEL_AND_SCORE = (TensorSpec("label", (None,), BYTES), TensorSpec("score", (None,), "float32"))
RANKING = (TensorSpec("label", (None, None), BYTES), TensorSpec("score", (None, None), "float32"))
"""The outputs of a list of ``(label, score)`` pairs."""


def detection_outputs(
    has_labels: bool = True, keypoints: int | None = None, has_masks: bool = False
) -> tuple[TensorSpec, ...]:
    """The outputs of ``Detections``: R rows, those of all items, whose own are the rows between two of ``offsets``.

    ``has_labels``: classes have names. ``keypoints``: their number in a detection, if it has any.
    """
    points = () if keypoints is None else (TensorSpec("keypoints", (None, keypoints, 3), "float32"),)
    return (
        TensorSpec("boxes", (None, 4), "float32"),
        TensorSpec("scores", (None,), "float32"),
        TensorSpec("classes", (None,), "int64"),
        *([TensorSpec("labels", (None,), BYTES)] if has_labels else []),
        *points,
        *([TensorSpec("masks", (None,), BYTES)] if has_masks else []),
        TensorSpec("offsets", (None,), "int64"),
    )

"""Embeddings: vectors of length 1."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from torchpipe_py.backends.model.inputs import to_numpy
from torchpipe_py.backends.model.postprocess.classes import OfClasses
from torchpipe_py.backends.signature import TensorSpec

LEAST_LENGTH = 1e-12
"""Shorter vectors are divided by this, as by PyTorch's ``normalize``: zeros stay zeros."""


class L2Normalize(OfClasses):
    """The first output, N×D or N×D×1×1, with vectors of length 1: a CPU tensor 1×D, float32.

    The product of two is their cosine.
    """

    uses: ClassVar[Collection[str]] = ()
    least_classes = 0

    def forward(self, outputs: list[Any]) -> list[Any]:
        return self.rows(self.on_device(outputs)[0], "values")

    def on_device(self, outputs: list[Any]) -> list[Any]:
        import torch

        self.check(outputs[0].shape)
        vectors = outputs[0].detach().float().flatten(1)
        if vectors.is_cuda:
            return [torch.nn.functional.normalize(vectors, dim=1, eps=LEAST_LENGTH)]
        rows = to_numpy(vectors)
        with np.errstate(invalid="ignore"):  # infinity becomes NaN, which is reported
            return [torch.from_numpy(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), LEAST_LENGTH))]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return self.rows(tensors[0].clone(), "values")

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return [replace(output, dims=output.dims[:2], dtype="float32") for output in outputs[:1]]

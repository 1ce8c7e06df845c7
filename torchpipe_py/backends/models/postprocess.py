"""Results from a model's outputs, for the whole batch at once, with one copy to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Param, Postprocessors
from torchpipe_py.errors import ConfigError, nearest


class Postprocessor:
    """``init(config)`` once; then ``forward(outputs)`` for each batch, on the instance's thread.

    ``outputs`` are the model's output tensors, each N×…; ``forward`` returns N results. Any class with these two
    methods can be registered with ``register_postprocessor``; ``init`` may be missing.

    On a GPU, one that has ``on_device`` and ``on_host`` besides is split: ``on_device(outputs)`` enqueues GPU work
    only and returns tensors N×…, and becomes part of the model's CUDA graph; these are copied to pinned memory at
    once, and ``on_host(tensors)`` makes the N results of them. It must not keep the tensors: the next batch overwrites
    them.
    """

    def init(self, config: Mapping[str, Any]) -> None:
        """``config`` holds ``labels``, the path of the label file or an empty string."""

    def forward(self, outputs: list[Any]) -> list[Any]:
        raise NotImplementedError(type(self).__name__)


class PostprocessorParam(Param):
    """A parameter that names a registered postprocessor; typed, it is the class."""

    def read(self, value: Any, registry: Postprocessors) -> type:
        cls = registry.find_postprocessor(str(value))
        if cls is None:
            raise ValueError(f"no postprocessor {value!r}; {nearest(str(value), registry.postprocessor_names())}")
        return cls


def make_postprocessor(cls: type, config: Mapping[str, Any]) -> Postprocessor:
    """An initialised ``cls``."""
    made: Postprocessor = cls()
    if hasattr(made, "init"):
        made.init(config)
    return made


def softmax(logits: Any) -> np.ndarray:
    """Softmax over dimension 1 as a float32 array on the host.

    By NumPy on purpose: PyTorch's CPU operators wake a pool of threads that spin beside the ones that decode.
    """
    values = logits.detach().float().cpu().numpy()
    shifted = np.exp(values - values.max(1, keepdims=True))
    result: np.ndarray = shifted / shifted.sum(1, keepdims=True)
    return result


class Cpu(Postprocessor):
    """Outputs as CPU tensors 1×…; several outputs as a list."""

    def forward(self, outputs: list[Any]) -> list[Any]:
        return _rows([output.cpu() for output in outputs])

    def on_device(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return _rows([tensor.clone() for tensor in tensors])


class SoftmaxCpu(Postprocessor):
    """Softmax of the first output over its classes: a CPU tensor 1×C of probabilities, float32."""

    def forward(self, outputs: list[Any]) -> list[Any]:
        import torch

        return _rows([torch.from_numpy(softmax(outputs[0]))])

    def on_device(self, outputs: list[Any]) -> list[Any]:
        return [outputs[0].float().softmax(1)]

    def on_host(self, tensors: list[Any]) -> list[Any]:
        return _rows([tensors[0].clone()])


class SoftmaxMax(Postprocessor):
    """``(label, score)``: the most probable class of the first output, N×C, and its softmax probability.

    The label is the line of the label file, or the class index where there is none.
    """

    def init(self, config: Mapping[str, Any]) -> None:
        path = config.get("labels")
        self._labels = Path(path).read_text(encoding="utf-8").splitlines() if path else None

    def forward(self, outputs: list[Any]) -> list[Any]:
        self._check(outputs[0].shape)
        probabilities = softmax(outputs[0])
        return self._labelled(probabilities.argmax(1).tolist(), probabilities.max(1).tolist())

    def on_device(self, outputs: list[Any]) -> list[Any]:
        import torch

        self._check(outputs[0].shape)
        scores, indices = outputs[0].float().softmax(1).max(1)
        return [torch.stack([scores, indices.float()], 1)]  # one copy; indices are exact up to 2**24

    def on_host(self, tensors: list[Any]) -> list[Any]:
        rows = tensors[0].tolist()
        return self._labelled([int(row[1]) for row in rows], [row[0] for row in rows])

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) != 2:
            raise ValueError(f"SoftmaxMax takes an output NxC, got {'x'.join(map(str, shape))}")
        if self._labels is not None and len(self._labels) != shape[1]:
            raise ConfigError(f"{len(self._labels)} labels for {shape[1]} classes")

    def _labelled(self, indices: list[int], scores: list[float]) -> list[Any]:
        labels = indices if self._labels is None else [self._labels[index] for index in indices]
        return list(zip(labels, scores, strict=True))


def _rows(outputs: list[Any]) -> list[Any]:
    """For each item its row 1×… of the output, or the list of its rows of several outputs."""
    rows = [[output[index : index + 1] for output in outputs] for index in range(len(outputs[0]))]
    return [row[0] if len(row) == 1 else row for row in rows]

"""What of a model's outputs belongs to an item: its row of each, or all of them where it is alone in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError

_RESHAPES = (
    "a view, reshape or squeeze in the model fixes or drops the batch: write x.flatten(1) or x.view(x.shape[0], -1), "
    "and export it with a dynamic batch"
)
_ALONE = "; or set max = 1: an item that runs alone is given the outputs whole, as a model with NMS inside needs it"


class Rows:
    """Outputs N×…: each of the N items of a batch has a row of its own.

    ``advice`` says what to do about an output that is not so.
    """

    def __init__(self, advice: str = _RESHAPES) -> None:
        self._advice = advice

    def check_declared(self, model: str, outputs: Sequence[TensorSpec], least: int, most: int) -> None:
        """``ConfigError`` where an output declares another first dimension than batches of ``least`` to ``most``."""
        batches = f"{least}..{most}" if least < most else str(most)
        for spec in outputs:
            fixed = spec.dims[0] if spec.dims else None
            if fixed is not None and not least == most == fixed:
                raise ConfigError(
                    f"model {model}: output {spec.name!r} is {shown_dims(spec.dims)} for every batch, but batches here "
                    f"are {batches}, and each item needs a row of its own; {self._advice}"
                )

    def problem(self, shapes: Sequence[Sequence[int]], names: Sequence[str], size: int) -> str:
        """What is wrong where outputs of these shapes have not a row for each of ``size`` items; else empty."""
        for name, shape in zip(names_of(names, len(shapes)), shapes, strict=True):
            if not shape or shape[0] != size:
                items = f"{size} items" if size > 1 else "one item"
                shown = shown_dims(shape)
                return f"output {name!r} is {shown} for {items}, so it does not follow the batch; {self._advice}"
        return ""

    def check(self, outputs: Sequence[Any], names: Sequence[str], size: int) -> None:
        """``ValueError`` where an output has not a row for each of ``size`` items."""
        for output in outputs:
            if output.ndim == 0 or len(output) != size:
                raise ValueError(self.problem([each.shape for each in outputs], names, size))

    @staticmethod
    def first(outputs: Sequence[Any], count: int) -> list[Any]:
        """The rows of the first ``count`` items; others fill the batch up."""
        return [output[:count] for output in outputs]

    @staticmethod
    def of_items(outputs: Sequence[Any]) -> list[Any]:
        """For each item its row 1×… of the output, or the list of its rows of several outputs."""
        return [_alone([output[index : index + 1] for output in outputs]) for index in range(len(outputs[0]))]


class Whole:
    """Outputs of any shape, of batches of one item: they are that item's, as they are."""

    def check_declared(self, model: str, outputs: Sequence[TensorSpec], least: int, most: int) -> None:
        """Any shape is right."""

    def problem(self, shapes: Sequence[Sequence[int]], names: Sequence[str], size: int) -> str:
        """None."""
        return ""

    def check(self, outputs: Sequence[Any], names: Sequence[str], size: int) -> None:
        """Any shape is right."""

    @staticmethod
    def first(outputs: Sequence[Any], count: int) -> list[Any]:
        """All of them: nothing fills up a batch of one."""
        return list(outputs)

    @staticmethod
    def of_items(outputs: Sequence[Any]) -> list[Any]:
        """The output, or the list of several, of the one item."""
        return [_alone(list(outputs))]


Layout = Rows | Whole


def layout_of(most: int, needs_rows: bool) -> Layout:
    """Of a model in batches of up to ``most``; ``needs_rows``: what takes its outputs takes nothing but rows."""
    if most > 1:
        return Rows(_RESHAPES + _ALONE)
    return Rows() if needs_rows else Whole()


def names_of(names: Sequence[str], count: int) -> list[str]:
    """``names``, or numbers where a model does not say what its ``count`` outputs are called."""
    return list(names) if len(names) == count else [str(index) for index in range(count)]


def _alone(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts

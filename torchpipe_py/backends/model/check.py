"""Checks that a model fits its batches: bounds of its inputs, rows of its outputs, and a trial of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.backends.model.inputs import fits
from torchpipe_py.backends.model.normalisation import is_bare_image
from torchpipe_py.backends.signature import BYTES, TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError, first_line, logger
from torchpipe_py.values import Value, to_int, to_str

# -- bounds ------------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """One end of each profile's range: for each input a shape, of length 1 if only the batch size is set."""

    profiles: tuple[tuple[Shape, ...], ...]

    def __str__(self) -> str:
        return ";".join(",".join("x".join(map(str, shape)) for shape in profile) for profile in self.profiles)

    def batches(self) -> list[int]:
        """The batch size of each profile."""
        return [profile[0][0] for profile in self.profiles]

    def shape(self, index: int) -> Shape:
        """The first profile's shape of one input, of length 1 where only the batch is given."""
        return _of(self.profiles[0], index)

    def check(self, model: str, key: str, inputs: Sequence[TensorSpec]) -> None:
        """Raise ``ConfigError`` for shapes that do not fit the model's inputs."""
        for profile in self.profiles:
            if inputs and len(profile) > len(inputs):
                raise ConfigError(f"model {model}: {key} gives {len(profile)} inputs, the model has {len(inputs)}")
            for index, spec in enumerate(inputs):
                shape, dims = _of(profile, index), spec.dims
                if len(shape) > 1 and dims and not fits(shape[1:], dims[1:]):
                    got = shown_dims(shape)
                    raise ConfigError(f"model {model}: input {spec.name!r} is {shown_dims(dims)}, {key} sets {got}")

    def exceeds(self, most: Bounds) -> bool:
        """Whether any dimension is larger than in ``most``, which has as many profiles."""
        pairs = zip(self.profiles, most.profiles, strict=True)
        shapes = [pair for low, high in pairs for pair in zip(low, high, strict=False)]
        return any(small > large for low, high in shapes for small, large in zip(low, high, strict=False))


def allows(least: Bounds, most: Bounds, shapes: Sequence[Shape]) -> bool:
    """Whether a profile allows inputs of these shapes, without batch."""
    return any(
        all(_between(_of(low, index)[1:], shape, _of(high, index)[1:]) for index, shape in enumerate(shapes))
        for low, high in zip(least.profiles, most.profiles, strict=True)
    )


def _of(profile: tuple[Shape, ...], index: int) -> Shape:
    return profile[min(index, len(profile) - 1)]


def _between(low: Shape, shape: Shape, high: Shape) -> bool:
    return all(small <= size for small, size in zip(low, shape, strict=False)) and all(
        size <= large for size, large in zip(shape, high, strict=False)
    )


_EXPECTED = "expected a batch size or shapes like 4x3x224x224, at least 1 each, got {!r}"


def to_bounds(value: Value) -> Bounds:
    """``4``, ``"4x3x224x224"``, several inputs as ``"4x3x224x224,4x10"``, several profiles as ``"1;8"``."""
    if isinstance(value, (bool, float)):
        raise ValueError(_EXPECTED.format(value))
    text = to_str(value) if not isinstance(value, (list, tuple)) else ",".join(to_str(part) for part in value)
    bounds = []
    for profile in text.split(";"):
        shapes = [tuple(to_int(dim) for dim in shape.split("x")) for shape in profile.split(",") if shape.strip()]
        if not shapes or any(dim < 1 for shape in shapes for dim in shape):
            raise ValueError(_EXPECTED.format(value))
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"the inputs of a profile have one batch size, got {profile!r}")
        bounds.append(tuple(shapes))
    return Bounds(tuple(bounds))


# -- outputs -----------------------------------------------------------------------------------------------------------

_RESHAPES = (
    "a view, reshape or squeeze in the model fixes or drops the batch: write x.flatten(1) or x.view(x.shape[0], -1), "
    "and export it with a dynamic batch"
)
_ALONE = "; or set max = 1: an item that runs alone is given the outputs whole, as a model with NMS inside needs it"


@dataclass(frozen=True)
class Layout:
    """Assigns parts of a model's outputs to items: the item's row of each output.

    If ``is_whole``, batches have one item, and outputs of any shape belong to it. ``advice`` is the remedy for an
    output that lacks a row for each item.
    """

    is_whole: bool = False
    advice: str = _RESHAPES

    def check_declared(self, model: str, outputs: Sequence[TensorSpec], least: int, most: int) -> None:
        """Raise ``ConfigError`` if an output's declared first dimension does not fit batches of ``least``..``most``."""
        batches = f"{least}..{most}" if least < most else str(most)
        for spec in () if self.is_whole else outputs:
            fixed = spec.dims[0] if spec.dims else None
            if fixed is not None and not least == most == fixed:
                raise ConfigError(
                    f"model {model}: output {spec.name!r} is {shown_dims(spec.dims)} for every batch, but batches here "
                    f"are {batches}, and each item needs a row of its own; {self.advice}"
                )

    def problem(self, outputs: Sequence[Any], names: Sequence[str], size: int) -> str:
        """The problem if ``outputs`` lack a row for each of ``size`` items; else an empty string."""
        for index, output in enumerate(() if self.is_whole else outputs):
            if output.ndim == 0 or len(output) != size:
                items = f"{size} items" if size > 1 else "one item"
                shown = f"output {names_of(names, len(outputs))[index]!r} is {shown_dims(output.shape)} for {items}"
                return f"{shown}, so it does not follow the batch; {self.advice}"
        return ""

    def check(self, outputs: Sequence[Any], names: Sequence[str], size: int) -> None:
        """Raise ``ValueError`` if an output lacks a row for each of ``size`` items."""
        if problem := self.problem(outputs, names, size):
            raise ValueError(problem)

    def first(self, outputs: Sequence[Any], count: int) -> list[Any]:
        """The outputs of the first ``count`` items; the others are padding."""
        return list(outputs) if self.is_whole else [output[:count] for output in outputs]

    def of_items(self, outputs: Sequence[Any]) -> list[Any]:
        """Each item's row 1×… of the output, or the list of its rows of several outputs."""
        if self.is_whole:
            return [_alone(list(outputs))]
        return [_alone([output[index : index + 1] for output in outputs]) for index in range(len(outputs[0]))]


ROWS = Layout()


def layout_of(most: int, needs_rows: bool) -> Layout:
    """The layout for batches of up to ``most``; ``needs_rows``: the consumer of the outputs accepts only rows."""
    return Layout(advice=_RESHAPES + _ALONE) if most > 1 else Layout(is_whole=not needs_rows)


def names_of(names: Sequence[str], count: int) -> list[str]:
    """``names``, or numbers if a model does not name its ``count`` outputs."""
    return list(names) if len(names) == count else [str(index) for index in range(count)]


def _alone(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts


# -- batches -----------------------------------------------------------------------------------------------------------

Run = Callable[[list[np.ndarray]], list[np.ndarray]]
"""Runs a model: inputs N×… to outputs, all on the host."""

PROBES = 4  # items in the trial batch
TRIES = 3  # shapes to try if the model fails for the first
DIFFERENT_INTEGERS = 0.25  # allowed share: the index of the larger of two nearly equal values may change

# Largest difference by rounding, relative to the largest value of an output: kernels, and the order of their sums,
# depend on the batch. Networks as deep as ResNet-152 stay well below, models that mix items are far above.
EXACT = 1e-3  # float32; float64, since models use it only in part
TF32 = 1e-2  # float32 on a GPU, whose convolutions round their inputs to 10 bits of mantissa
HALF = 2e-2  # float16, also of 10 bits, in the sums too
BFLOAT16 = 5e-2  # 7 bits
QUANTISED = 1e-1  # int8; scales computed at run time are those of the whole batch


def check_inputs(model: str, inputs: Sequence[TensorSpec], least: int, most: int) -> None:
    """Raise ``ConfigError`` if an input's declared first dimension does not fit batches of ``least``..``most``."""
    for spec in inputs:
        fixed = spec.dims[0] if spec.dims else None
        if fixed is not None and not least == most == fixed:
            settings = "max = 1" if least == fixed == 1 else f"min = {fixed} and max = {fixed}"
            if most > 1 and fixed > 1 and any(other.dims and other.dims[0] != fixed for other in inputs):
                settings += "; if it has no batch, OnnxTensor takes it whole with max = 1"
            raise ConfigError(
                f"model {model}: input {spec.name!r} has a fixed batch of {fixed}, but the range is {least}..{most}; "
                f"export it with a dynamic batch, or set {settings}"
            )


Dims = tuple[int | None, ...]


def with_batch(inputs: Sequence[Dims], most: int, is_whole: bool = False) -> list[Dims]:
    """The dimensions of a model's inputs; with a batch of 1 before 3×H×W or H×W×3 if ``most`` is 1, for one image.

    Where ``is_whole``, also before a vector of fixed length, such as a size [height, width], and before a table, such
    as a camera matrix 3×3: its first dimension is fixed, and that of another input is another.
    """

    def lacks_batch(dims: Dims) -> bool:
        if most == 1 and is_bare_image(dims):
            return True
        if not is_whole or not dims or dims[0] in (None, 1):
            return False
        return len(dims) == 1 or any(other[0] != dims[0] for other in inputs if len(other) > 1)

    return [(1, *dims) if lacks_batch(dims) else dims for dims in inputs]


class _NotTakenError(Exception):
    """A model fails for one item."""


class BatchCheck:
    """The trial of one model, made once for all instances of a node, by the first that has shapes to try.

    ``layout`` assigns rows of the outputs to items. ``tolerance`` is a part of an output's largest value. Where
    ``is_normalised``, the model takes pixels of 0..255. ``rows_mix``: with ``max = 1``, two items together have other
    outputs than each alone.
    """

    def __init__(self, model: str, layout: Layout, tolerance: float, is_normalised: bool) -> None:
        self._model, self._layout, self._tolerance, self._is_normalised = model, layout, tolerance, is_normalised
        self._lock = threading.Lock()
        self._tries_left = TRIES
        self._problem = ""
        self.rows_mix = False

    def require(
        self, run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[str], least: int, most: int,
        tries_pair: bool = False,
    ) -> bool:  # fmt: skip
        """Raise ``ConfigError`` if items in batches of ``least`` to ``most`` mix, or do not get separate rows.

        Only the batch dimension of ``inputs`` may be open. ``outputs`` are the names, as far as the model has them.
        ``tries_pair``: find ``rows_mix``, if ``most`` is 1. Returns false if the model does not accept such inputs, and
        others may be tried.
        """
        with self._lock:
            if self._tries_left:
                self._tries_left -= 1
                try:
                    self._problem = self._try(run, inputs, outputs, least, most, tries_pair)
                    self._tries_left = 0
                except _NotTakenError as error:
                    logger.warning("%s: not warmed up: %s", self._model, error)
        if self._problem:
            raise ConfigError(f"model {self._model}: {self._problem}")
        return not self._tries_left

    def _try(
        self, run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[str], least: int, most: int, tries_pair: bool
    ) -> str:
        """The problem, or an empty string."""
        probes = [self._probe(inputs, index) for index in range(min(PROBES, most))]
        alone = []
        for probe in (*probes, probes[0]):  # the first one twice, to detect random outputs
            try:
                results = run([np.repeat(array, least, 0) for array in probe])
            except Exception as error:  # the model may fail for these numbers
                raise _NotTakenError(first_line(error)) from error
            outputs = names_of(outputs, len(results))
            if problem := self._layout.problem(results, outputs, least):
                return problem
            alone.append([result.copy() for result in self._layout.first(results, 1)])
        is_random = bool(self._differences([alone[0]], [alone[-1]], outputs))
        if is_random:
            logger.warning(
                "%s: gives another output each time for the same input, as random numbers and dropout in training mode "
                "do (export it after model.eval()); whether the items of a batch mix is unknown",
                self._model,
            )
        if most == 1:
            self.rows_mix = tries_pair and not is_random and self._pair_differs(run, inputs, alone[0], outputs)
            return ""
        # Each item at several places, in an irregular order.
        order = [*range(len(probes)), *np.random.default_rng(0).integers(0, len(probes), most)][:most]
        try:
            batch = run([np.concatenate([probes[which][index] for which in order]) for index in range(len(inputs))])
        except MemoryError as error:
            return f"not enough memory for a batch of max = {most}: {first_line(error)}; set a smaller max"
        except Exception as error:
            return (
                f"it takes a batch of {least}, but one of {most} fails: {first_line(error)}; export it with "
                f"a dynamic batch, or set max = {least}"
            )
        if problem := self._layout.problem(batch, outputs, most):
            return problem
        if is_random:
            return ""
        rows = [[result[place : place + 1] for result in batch] for place in range(most)]
        problem = self._differences(rows, [alone[which] for which in order], outputs)
        return problem and (
            f"an item's output depends on the rest of its batch: {problem}. BatchNorm in training mode (export it "
            "after model.eval()), operations over dimension 0 and wrong views do that; max = 1 serves it item by item"
        )

    def _pair_differs(
        self, run: Run, inputs: Sequence[TensorSpec], first: list[np.ndarray], outputs: Sequence[str]
    ) -> bool:
        """Whether two items together have other outputs than each alone, joined; false if this is unknown.

        ``first`` has those of the first probe.
        """
        probes = [self._probe(inputs, index) for index in range(2)]
        try:
            second = [result.copy() for result in run(probes[1])]
            pair = run([np.concatenate(arrays) for arrays in zip(*probes, strict=True)])
            joined = [np.concatenate([*map(np.atleast_1d, rows)]) for rows in zip(first, second, strict=True)]
        except Exception:  # a reshape in the model fixes the batch, or outputs differ in shape
            return False
        return bool(self._differences([pair], [joined], outputs))

    def _probe(self, inputs: Sequence[TensorSpec], index: int) -> list[np.ndarray]:
        """The inputs of one item, 1×…: the same in each call, and different for each ``index``."""
        rng = np.random.default_rng(index)
        return [self._values(spec, rng) for spec in inputs]

    def _values(self, spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
        shape = tuple(dim or 0 for dim in spec.dims[1:])
        if spec.dtype == BYTES:
            return rng.integers(0, 2, (1, *shape)).astype(str).astype(object)
        dtype = np.dtype("float32" if spec.dtype in ("", "bfloat16") else spec.dtype)
        if dtype != np.uint8 and not np.issubdtype(dtype, np.floating):
            return rng.integers(0, 2, (1, *shape)).astype(dtype)  # valid as an index of any table
        # A level for each channel: images of plain noise are all alike for a network that computes means.
        levels = rng.random((1, *shape[:1], *[1] * (len(shape) - 1)))
        values = 0.5 * levels + 0.5 * rng.random((1, *shape))
        scaled = 255 * values if dtype == np.uint8 or self._is_normalised else 4 * values - 2
        return scaled.astype(dtype)

    def _differences(
        self, given: Sequence[list[np.ndarray]], wanted: Sequence[list[np.ndarray]], outputs: Sequence[str]
    ) -> str:
        """Differences of the rows ``given`` from those ``wanted`` beyond rounding; empty if there are none."""
        for index, name in enumerate(outputs):
            pairs = [(row[index], want[index]) for row, want in zip(given, wanted, strict=True)]
            for row, want in pairs:
                if row.shape != want.shape:
                    return f"output {name!r} is {shown_dims(row.shape)} in a batch, {shown_dims(want.shape)} alone"
            have, right = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
            if not np.issubdtype(right.dtype, np.floating):
                share = float(np.mean(have != right)) if have.size else 0.0
                if share > DIFFERENT_INTEGERS:
                    return f"{share:.0%} of output {name!r} differ from the results of each item alone"
                continue
            have, right = have.astype(np.float64), right.astype(np.float64)
            with np.errstate(invalid="ignore"):
                errors = np.abs(have - right)
            same = (have == right) | (np.isnan(have) & np.isnan(right))
            error = float(np.max(np.where(same, 0.0, np.where(np.isfinite(errors), errors, np.inf)), initial=0.0))
            largest = float(np.max(np.abs(right), where=np.isfinite(right), initial=0.0))
            if error > self._tolerance * max(largest, 1e-6):
                return f"output {name!r} differs by {error:.3g} from the result of each item alone, up to {largest:.3g}"
        return ""

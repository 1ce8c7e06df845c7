"""Whether a model gives each item of a batch what it gives that item alone: what it declares, and a trial."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from torchpipe_py.backends.model.outputs import Layout, names_of
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError, first_line

logger = logging.getLogger("torchpipe_py")

Run = Callable[[list[np.ndarray]], list[np.ndarray]]
"""From a model's inputs N×… to its outputs, all on the host."""

PROBES = 4  # items that are tried
TRIES = 3  # shapes that are tried, where the model fails for the first
SHARE = 0.25  # of integers that may differ: the largest of two nearly equal values is not always the same one

# The most that rounding changes, as a part of the largest value of an output: kernels, and so the order in which they
# add, differ with the batch. Errors of networks as deep as ResNet-152 stay well below; items that mix are far above.
EXACT = 1e-3  # float32, and float64 which models have inside only in part
TF32 = 1e-2  # float32 on a GPU, whose convolutions round their inputs to 10 bits of mantissa
HALF = 2e-2  # float16, of 10 bits too, in the sums as well
BFLOAT16 = 5e-2  # 7 bits
QUANTISED = 1e-1  # int8; where scales are found as it runs, they are those of the whole batch


def check_inputs(model: str, inputs: Sequence[TensorSpec], least: int, most: int) -> None:
    """``ConfigError`` where an input's declared first dimension is not that of batches of ``least`` to ``most``."""
    for spec in inputs:
        fixed = spec.dims[0] if spec.dims else None
        if fixed is not None and not least == most == fixed:
            settings = "max = 1" if least == fixed == 1 else f"min = {fixed} and max = {fixed}"
            raise ConfigError(
                f"model {model}: input {spec.name!r} has a fixed batch of {fixed}, but the range is {least}..{most}; "
                f"export it with a dynamic batch, or set {settings}"
            )


def with_batch(dims: Sequence[int | None], most: int) -> tuple[int | None, ...]:
    """``dims`` of an input; with a batch of 1 before 3×H×W, the image that a model takes alone where ``most`` is 1."""
    return (1, *dims) if most == 1 and len(dims) == 3 and dims[0] == 3 else tuple(dims)


class _NotTakenError(Exception):
    """A model fails for one item."""


class BatchCheck:
    """The trial of one model, made once for all instances of a node, by the first that has shapes to try.

    ``layout`` says what of the outputs is an item's. ``tolerance`` is a part of an output's largest value. Where
    ``is_normalised``, the model takes pixels of 0..255.
    """

    def __init__(self, model: str, layout: Layout, tolerance: float, is_normalised: bool) -> None:
        self._model, self._layout, self._tolerance, self._is_normalised = model, layout, tolerance, is_normalised
        self._lock = threading.Lock()
        self._tries_left = TRIES
        self._problem = ""

    def require(self, run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[str], least: int, most: int) -> bool:
        """``ConfigError`` where items of batches of ``least`` to ``most`` mix, or get no rows of their own.

        ``inputs`` have no dimension that is open but the batch. ``outputs`` are named as far as the model names them.
        False where the model takes no such inputs, and others may be tried.
        """
        with self._lock:
            if self._tries_left:
                self._tries_left -= 1
                try:
                    self._problem = self._try(run, inputs, outputs, least, most)
                    self._tries_left = 0
                except _NotTakenError as error:
                    logger.warning("%s: not warmed up: %s", self._model, error)
        if self._problem:
            raise ConfigError(f"model {self._model}: {self._problem}")
        return not self._tries_left

    def _try(self, run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[str], least: int, most: int) -> str:
        """What is wrong, or an empty string."""
        probes = [self._probe(inputs, index) for index in range(min(PROBES, most))]
        alone = []
        for probe in (*probes, probes[0]):  # the first one twice
            try:
                results = run([np.repeat(array, least, 0) for array in probe])
            except Exception as error:  # these numbers need not be a meaningful input
                raise _NotTakenError(first_line(error)) from error
            outputs = names_of(outputs, len(results))
            if problem := self._layout.problem([result.shape for result in results], outputs, least):
                return problem
            alone.append([result.copy() for result in self._layout.first(results, 1)])
        is_random = bool(self._differences([alone[0]], [alone[-1]], outputs))
        if is_random:
            logger.warning(
                "%s: gives another output each time for the same input, as random numbers and dropout in training mode "
                "do (export it after model.eval()); whether the items of a batch mix cannot be told",
                self._model,
            )
        if most == 1:
            return ""
        # Every item at several places, in no regular order.
        order = [*range(len(probes)), *np.random.default_rng(0).integers(0, len(probes), most)][:most]
        try:
            batch = run([np.concatenate([probes[which][index] for which in order]) for index in range(len(inputs))])
        except MemoryError as error:
            return f"there is no memory for a batch of max = {most}: {first_line(error)}; set a smaller max"
        except Exception as error:
            return (
                f"it takes a batch of {least}, but one of {most} fails: {first_line(error)}; export it with "
                f"a dynamic batch, or set max = {least}"
            )
        if problem := self._layout.problem([result.shape for result in batch], outputs, most):
            return problem
        if is_random:
            return ""
        rows = [[result[place : place + 1] for result in batch] for place in range(most)]
        problem = self._differences(rows, [alone[which] for which in order], outputs)
        return problem and (
            f"an item's output depends on what else is in its batch: {problem}. BatchNorm in training mode (export it "
            "after model.eval()), operations over dimension 0 and wrong views do that; max = 1 serves it item by item"
        )

    def _probe(self, inputs: Sequence[TensorSpec], index: int) -> list[np.ndarray]:
        """The inputs of one item, 1×…: the same each time, and unlike those of another ``index``."""
        rng = np.random.default_rng(index)
        return [self._values(spec, rng) for spec in inputs]

    def _values(self, spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
        shape = tuple(dim or 0 for dim in spec.dims[1:])
        dtype = np.dtype("float32" if spec.dtype in ("", "bfloat16") else spec.dtype)
        if dtype != np.uint8 and not np.issubdtype(dtype, np.floating):
            return rng.integers(0, 2, (1, *shape)).astype(dtype)  # as an index, in range of any table
        # A level for each channel: pictures of plain noise all look the same to a network that takes means.
        levels = rng.random((1, *shape[:1], *[1] * (len(shape) - 1)))
        values = 0.5 * levels + 0.5 * rng.random((1, *shape))
        scaled = 255 * values if dtype == np.uint8 or self._is_normalised else 4 * values - 2
        return scaled.astype(dtype)

    def _differences(
        self, given: Sequence[list[np.ndarray]], wanted: Sequence[list[np.ndarray]], outputs: Sequence[str]
    ) -> str:
        """How the rows ``given`` differ from those ``wanted`` beyond rounding; an empty string if they do not."""
        for index, name in enumerate(outputs):
            pairs = [(row[index], want[index]) for row, want in zip(given, wanted, strict=True)]
            for row, want in pairs:
                if row.shape != want.shape:
                    return f"output {name!r} is {shown_dims(row.shape)} in a batch, {shown_dims(want.shape)} alone"
            have, right = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
            if not np.issubdtype(right.dtype, np.floating):
                share = float(np.mean(have != right)) if have.size else 0.0
                if share > SHARE:
                    return f"{share:.0%} of output {name!r} differ from what each item gives alone"
                continue
            have, right = have.astype(np.float64), right.astype(np.float64)
            with np.errstate(invalid="ignore"):
                errors = np.abs(have - right)
            same = (have == right) | (np.isnan(have) & np.isnan(right))
            error = float(np.max(np.where(same, 0.0, np.where(np.isfinite(errors), errors, np.inf)), initial=0.0))
            largest = float(np.max(np.abs(right), where=np.isfinite(right), initial=0.0))
            if error > self._tolerance * max(largest, 1e-6):
                return f"output {name!r} differs by {error:.3g} from what each item gives alone, up to {largest:.3g}"
        return ""

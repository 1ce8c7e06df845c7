"""A pipe in each actor of Ray Data, called with whole batches of rows. It can be called without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from torchpipe_py.backends.image.decoders import Decoders, small_mat
from torchpipe_py.backends.image.mat import MAT_COLORS
from torchpipe_py.errors import InvalidRequest, nearest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_NODE_NAME_KEY, TASK_RESULT_KEY
from torchpipe_py.ray.columns import Column, columns_of
from torchpipe_py.ray.resources import plan_replica, resources_of
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.pipe import Data, pipe
from torchpipe_py.training.decode import outcome, unlimited
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import check_bad_samples
from torchpipe_py.training.samples import EMPTY, NO_BYTES, WRONG, Sample

ERROR = "error"
PATH = "path"  # column of read_binary_files and read_images with include_paths
SIZES = ((64, 64), (48, 80))
LEAST_ROWS, TIMES_BUSY = 64, 8

Batch = dict[str, np.ndarray]


class PipeMapper:
    """A class for ``Dataset.map_batches``: a batch's rows go through a pipe together; its outputs become columns.

    ``dataset.map_batches(PipeMapper, fn_constructor_args=("preprocess.toml",), compute=ActorPoolStrategy(size=2))``:
    each actor builds the pipe once. ``config`` and its errors are those of ``pipe``.

    ``column`` holds encoded images, as ``ray.data.read_binary_files`` gives them, or decoded ones, H×W×C, as
    ``read_images`` does: then set ``color`` ("rgb"). The output lacks this column; the other columns and the order
    stay. ``node_name`` is the root to enter if the pipe has several.

    ``outputs`` are keys of a request's dict; their columns are ``columns_of``, with ``prefix`` before their names.
    Their types, the same for every batch, are those of the pipe's results for two small images, or for ``examples``,
    values as in ``column``. ``imports`` are modules or files that register backends, as for ``torchpipe --import``.

    ``bad_samples`` is the policy for images that cannot be decoded, as in ``wrap_dataloader_torchpipe``:
    "mask" keeps the row, with zeros or empty texts, and with the reason in a text column ``error``, which is empty for
    the others; "skip" drops the row; "raise" raises ``BadSample``. Any other error of the pipe, and a value of another
    type than its column, is a ``TrainingError`` that names the row. Several threads may call.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any],
        *,
        column: str = "bytes",
        outputs: Sequence[str] = (TASK_RESULT_KEY,),
        bad_samples: str = "mask",
        prefix: str = "",
        color: str | None = None,
        node_name: str | None = None,
        examples: Sequence[Any] = (),
        imports: Sequence[str] = (),
    ) -> None:
        check_bad_samples(bad_samples)
        if color is not None and color not in MAT_COLORS:
            raise ValueError(f"color {color!r} is not known; {nearest(str(color), MAT_COLORS)}")
        for name in imports:
            import_code(name)
        self._column, self._bad_samples, self._error = column, bad_samples, f"{prefix}{ERROR}"
        given = {TASK_COLOR_KEY: color, TASK_NODE_NAME_KEY: node_name}
        self._keys = {key: value for key, value in given.items() if value is not None}
        plan = plan_replica(config)
        make = Decoders.of(plan, node_name).small_image if color is None else small_mat
        self._pipe = pipe(unlimited(plan))
        try:
            tried = self._run_examples(examples or [make(*size) for size in SIZES])
            self._columns: list[Column] = []
            for key in outputs:
                self._columns += columns_of(key, [_written(request, key) for request in tried], prefix)
        except BaseException:
            self.close()
            raise

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the pipe's columns; ``InvalidRequest`` if it is not a dict, or lacks the column."""
        images, others = self._split(batch)
        rows = self._rows(images)
        for row in rows:
            if row.kind and (row.kind == WRONG or self._bad_samples == "raise"):
                raise row.error(_name_of(row.index, others))
        if self._bad_samples == "skip" and any(row.kind for row in rows):
            rows = [row for row in rows if not row.kind]
            indices = [row.index for row in rows]
            others = {name: np.asarray(column)[indices] for name, column in others.items()}
        outputs = {
            column.name: column.array([None if row.kind else row.image[place] for row in rows])
            for place, column in enumerate(self._columns)
        }
        if self._bad_samples == "mask":
            reasons = [f"{row.kind}: {row.reason}" if row.kind else "" for row in rows]
            outputs[self._error] = np.array(reasons, np.str_)
        return {**others, **outputs}

    @staticmethod
    def options(config: str | os.PathLike[str] | Mapping[str, Any], imports: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of ``map_batches``, computed from the plan of ``config`` without building a pipe.

        ``num_cpus`` of an actor, or ``num_gpus`` if nodes need CUDA; the actors must leave one CPU free, or Ray Data
        waits forever to read. ``batch_size``: enough rows that the pipe's start and end of a batch do not matter.
        """
        for name in imports:
            import_code(name)
        needs = resources_of(plan_replica(config))
        # Ray Data warns against asking for both.
        devices = {"num_gpus": needs.num_gpus} if needs.num_gpus else {"num_cpus": needs.num_cpus}
        return {**devices, "batch_size": max(LEAST_ROWS, TIMES_BUSY * needs.busy_requests)}

    def close(self) -> None:
        """Close the pipe. Idempotent; it also happens when Ray Data lets go of the actor."""
        self._pipe.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PipeMapper holds a pipe: give map_batches the class, and fn_constructor_args=(config,)")

    def _run(self, images: Sequence[Any]) -> tuple[list[Data], BaseException | None]:
        """A finished request for each image, and the first error that the pipe raised."""
        requests: list[Data] = [{TASK_DATA_KEY: image, **self._keys} for image in images]
        return requests, self._pipe.submit(requests).exception()

    def _run_examples(self, examples: Sequence[Any]) -> list[Data]:
        """Finished requests for the examples."""
        requests, problem = self._run(examples)
        for number, request in enumerate(requests):
            sample = outcome(Sample(number), request, problem)
            if not sample.kind:
                continue
            if problem is not None and not isinstance(problem, InvalidRequest):
                raise problem
            color = "leave color out for encoded" if TASK_COLOR_KEY in self._keys else 'color="rgb" is for decoded'
            hint = f"{color} images, examples=(…, …) sets what to try the pipe on"
            raise TrainingError(f"the pipe gave no result for an example: {sample.reason}; {hint}") from problem
        return requests

    def _rows(self, images: Any) -> list[Sample]:
        """A sample for each row; its ``image`` is replaced by its values, one for each column."""
        rows = [Sample(row, image) for row, image in enumerate(images)]
        for row in rows:
            if row.image is None or (isinstance(row.image, (bytes, bytearray, memoryview)) and not row.image):
                row.fail(EMPTY, NO_BYTES)
        with_image = [row for row in rows if not row.kind]
        requests, problem = self._run([row.image for row in with_image])
        for row, request in zip(with_image, requests, strict=True):
            row.image = None
            if outcome(row, request, problem).kind:
                continue
            row.image = []
            for column in self._columns:
                try:
                    row.image.append(column.value(_written(request, column.key)))
                except ValueError as error:
                    row.fail(WRONG, f"{column.key!r}: {error}; examples=(…, …) sets what the pipe may give")
                    break
        return rows

    def _split(self, batch: Any) -> tuple[np.ndarray, Batch]:
        """The images of a batch, and its other columns."""
        if not isinstance(batch, dict):
            raise InvalidRequest(f'expected a dict of arrays, got {type(batch).__name__}: use batch_format="numpy"')
        if self._column not in batch:
            raise InvalidRequest(f"the dataset has no column {self._column!r}; {nearest(self._column, batch)}")
        others = {name: column for name, column in batch.items() if name != self._column}
        outputs = [column.name for column in self._columns]
        if self._bad_samples == "mask":
            outputs.append(self._error)
        names = ", ".join(repr(name) for name in outputs if name in others)
        if names:
            raise InvalidRequest(f'the dataset has a column {names} already; prefix="pipe_" names the pipe\'s apart')
        return batch[self._column], others


def _written(request: Data, key: str) -> Any:
    """The pipe's output ``key``; ``InvalidRequest`` if it is missing."""
    if key not in request:
        raise InvalidRequest(f"the pipe wrote no {key!r}; {nearest(key, map(str, request))}")
    return request[key]


def _name_of(row: int, others: Batch) -> str:
    """The row's name in an error message, with its path if there is a column of paths."""
    return f"row {row} of a batch ({others[PATH][row]})" if PATH in others else f"row {row} of a batch"

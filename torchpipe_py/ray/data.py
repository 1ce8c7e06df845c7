"""Ray Data: a pipe in each actor, which takes whole batches of rows. Ray itself is not needed to call it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from torchpipe_py.backends.image.mat import MAT_COLORS
from torchpipe_py.errors import InvalidRequest, nearest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_NODE_NAME_KEY, TASK_RESULT_KEY
from torchpipe_py.ray.columns import Column, columns_of
from torchpipe_py.ray.resources import plan_replica, resources_of
from torchpipe_py.registry import import_code
from torchpipe_py.runtime.pipe import Data, pipe
from torchpipe_py.training.decode import outcome, small_jpeg, small_mat, unlimited
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import check_bad_samples
from torchpipe_py.training.samples import EMPTY, NO_BYTES, WRONG, Sample

ERROR = "error"
PATH = "path"  # of read_binary_files and read_images with include_paths
SIZES = ((64, 64), (48, 80))
LEAST_ROWS, TIMES_BUSY = 64, 8

Batch = dict[str, np.ndarray]


class PipeMapper:
    """For ``Dataset.map_batches``: the rows of a batch go through a pipe together, and what it writes becomes columns.

    ``dataset.map_batches(PipeMapper, fn_constructor_args=("preprocess.toml",), compute=ActorPoolStrategy(size=2))``:
    each actor builds the pipe once. ``config`` is what ``pipe`` takes, and raises what that raises.

    ``column`` holds encoded images, as ``ray.data.read_binary_files`` gives them, or decoded ones, H×W×C, as
    ``read_images`` does: then set ``color`` ("rgb"). It is left out of what comes back; the other columns stay, and
    so does the order. ``node_name`` is the root where the pipe has several.

    ``outputs`` are keys of a request's dict; their columns are ``columns_of``, with ``prefix`` before their names. The
    types are those that the pipe gives for two small images, or for ``examples``, values as in ``column``; so they are
    the same for every batch. ``imports`` are modules or files that register backends, as for ``torchpipe --import``.

    ``bad_samples`` decides what becomes of an image that cannot be decoded, as in ``wrap_dataloader_torchpipe``:
    "mask" keeps the row, with zeros or empty texts, and with the reason in a text column ``error``, which is empty for
    the others; "skip" drops the row; "raise" raises ``BadSample``. Whatever else the pipe raises, or what is of another
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
        self._pipe = pipe(unlimited(plan_replica(config)))
        try:
            make = small_jpeg if color is None else small_mat
            tried = self._tried(examples or [make(*size) for size in SIZES])
            self._columns: list[Column] = []
            for key in outputs:
                self._columns += columns_of(key, [_written(request, key) for request in tried], prefix)
        except BaseException:
            self.close()
            raise

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the pipe's columns; ``InvalidRequest`` if it is not a dict, or lacks the column."""
        images, others = self._taken_apart(batch)
        rows = self._rows(images)
        for row in rows:
            if row.kind and (row.kind == WRONG or self._bad_samples == "raise"):
                raise row.error(_name_of(row.index, others))
        if self._bad_samples == "skip" and any(row.kind for row in rows):
            rows = [row for row in rows if not row.kind]
            kept = [row.index for row in rows]
            others = {name: np.asarray(column)[kept] for name, column in others.items()}
        made = {
            column.name: column.array([None if row.kind else row.image[place] for row in rows])
            for place, column in enumerate(self._columns)
        }
        if self._bad_samples == "mask":
            reasons = [f"{row.kind}: {row.reason}" if row.kind else "" for row in rows]
            made[self._error] = np.array(reasons, np.str_)
        return {**others, **made}

    @staticmethod
    def options(config: str | os.PathLike[str] | Mapping[str, Any], imports: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments of ``map_batches`` that the plan of ``config`` gives; no pipe is built for it.

        ``num_cpus``, or ``num_gpus`` where nodes need CUDA, of an actor; beside all actors one CPU must be left, or Ray
        Data waits forever to read. ``batch_size``: rows that fill the pipe's batches so often that its start and its
        end do not count.
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

    def _tried(self, examples: Sequence[Any]) -> list[Data]:
        """Requests with what the pipe gives for the examples."""
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
        """A sample for each row; in the place of its image it has its values, one for each column."""
        rows = [Sample(row, image) for row, image in enumerate(images)]
        for row in rows:
            if row.image is None or (isinstance(row.image, (bytes, bytearray, memoryview)) and not row.image):
                row.fail(EMPTY, NO_BYTES)
        there = [row for row in rows if not row.kind]
        requests, problem = self._run([row.image for row in there])
        for row, request in zip(there, requests, strict=True):
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

    def _taken_apart(self, batch: Any) -> tuple[np.ndarray, Batch]:
        """The images of a batch, and its other columns."""
        if not isinstance(batch, dict):
            raise InvalidRequest(f'expected a dict of arrays, got {type(batch).__name__}: use batch_format="numpy"')
        if self._column not in batch:
            raise InvalidRequest(f"the dataset has no column {self._column!r}; {nearest(self._column, batch)}")
        others = {name: column for name, column in batch.items() if name != self._column}
        made = [column.name for column in self._columns]
        if self._bad_samples == "mask":
            made.append(self._error)
        names = ", ".join(repr(name) for name in made if name in others)
        if names:
            raise InvalidRequest(f'the dataset has a column {names} already; prefix="pipe_" names the pipe\'s apart')
        return batch[self._column], others


def _written(request: Data, key: str) -> Any:
    """What the pipe wrote under ``key``; ``InvalidRequest`` if the key is missing."""
    if key not in request:
        raise InvalidRequest(f"the pipe wrote no {key!r}; {nearest(key, map(str, request))}")
    return request[key]


def _name_of(row: int, others: Batch) -> str:
    """What an error message calls the row: the path too, where there is a column of them."""
    return f"row {row} of a batch ({others[PATH][row]})" if PATH in others else f"row {row} of a batch"

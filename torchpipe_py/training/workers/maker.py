"""Whole batches made in a DataLoader's worker, which has pipes of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that Tensors are sent by their place in shared memory
from torch.utils.data import get_worker_info

from torchpipe_py.errors import Failure, first_line
from torchpipe_py.training.ahead.prefetcher import moved_to
from torchpipe_py.training.assembly import Assembler, Read
from torchpipe_py.training.batch import Batch
from torchpipe_py.training.data.epoch import PlannedBatch
from torchpipe_py.training.decoding import Config, Decoder
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.reading import Ask, Sample, SampleReader, namer
from torchpipe_py.training.statistics import Counted, LoaderStatistics
from torchpipe_py.training.workers.loans import Lender
from torchpipe_py.training.workers.sending import SENDABLE, as_bytes, unpacked_value

KEPT_BYTES, LARGE_BYTES = 2**28, 2**25
"""How much freed memory each of malloc's heaps keeps at its end, and from which size on memory has none."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Task(NamedTuple):
    """What a worker is asked for: a batch of ``epoch``; ``reading`` is the borrower's."""

    reading: int
    epoch: int
    planned: PlannedBatch


@dataclass(frozen=True)
class MadeBatch:
    """A batch from a worker, ``None`` where all its samples are skipped; or the failure that takes its place.

    ``label``: the last that the worker has seen. Its images are lent on a GPU.
    """

    planned: PlannedBatch
    batch: Batch | None = None
    failure: Failure | None = None
    label: Any = None
    counted: Counted | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # NOTE: a queue pickles on a thread of its own, and drops what it cannot, without a word to the reader.
        try:
            content = as_bytes(tuple(getattr(self, field.name) for field in fields(self)))
        except Exception as error:
            problem = f"batch {self.planned.number} cannot be sent to the training process"
            told = TrainingError(f"{problem}: {type(error).__name__}: {first_line(error)}")
            told.__cause__ = error
            content = as_bytes((self.planned, None, Failure.of(told), None, self.counted))
        return _received, (content,)


def _received(content: bytes) -> MadeBatch:
    return MadeBatch(*unpacked_value(content))


class BatchMaker:
    """The dataset of workers that decode: ``__getitems__`` takes one ``Task`` and gives a ``MadeBatch``.

    ``sent``: ``packed`` samples, options and the user's ``worker_init_fn``. ``lent``: the borrower's. It is sent to the
    workers as it is, and makes pipes there. A worker's devices are those of the training process, its CUDA contexts
    and memory are its own.
    """

    def __init__(self, sent: Any, toml_path: Config, devices: Sequence[Any], lent: Any) -> None:
        self._sent, self._toml_path, self._devices, self._lent = sent, toml_path, list(devices), lent
        self._work: _Work | None = None
        self._failure: Failure | None = None

    def start(self, worker_id: int) -> None:
        """In the worker, before its first task, which waits for no pipe then; what goes wrong comes with that task."""
        _keep_freed_memory()
        threading.Thread(target=_end_with_the_training, name="torchpipe-watch", daemon=True).start()
        try:
            samples, options, worker_init_fn = unpacked_value(self._sent)
        except Exception as error:
            problem = f"dataset or transforms cannot be made in a worker ({type(error).__name__}: {first_line(error)})"
            self._failure = Failure.of(TrainingError(f"{problem}; {SENDABLE}"))
            return
        self.dataset = samples.dataset
        if worker_init_fn is not None:
            worker_init_fn(worker_id)
        # Of batches that end up on one device anyway, each device decodes some, and not a share of each.
        devices = [self._devices[worker_id % len(self._devices)]] if options.gather else self._devices
        try:
            self._work = _Work(samples, options, self._toml_path, devices, Lender(worker_id, self._lent))
        except Exception as error:
            self._failure = Failure.of(error)

    def __getitems__(self, tasks: list[Task]) -> MadeBatch:
        (task,) = tasks
        if self._work is None:
            return MadeBatch(task.planned, failure=self._failure)
        return self._work.made(task)


def start_worker(worker_id: int) -> None:
    """For ``worker_init_fn``."""
    info = get_worker_info()
    assert info is not None
    info.dataset.start(worker_id)


class _Work:
    """A worker's pipes, and what makes batches of what they give."""

    def __init__(
        self, samples: SampleReader, options: LoaderOptions, toml_path: Config, devices: Sequence[Any], lender: Lender
    ) -> None:
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])  # no context on another one
        self._samples, self._lender, self._statistics = samples, lender, LoaderStatistics()
        self._decoder = Decoder(toml_path, devices)
        name_of, trial = namer(samples.dataset), self._decoder.trial
        try:
            self._assembler = Assembler(options, devices, samples, name_of, self._statistics, trial)
        except BaseException:
            self._decoder.close()
            raise

    def made(self, task: Task) -> MadeBatch:
        """The batch, or its error."""
        try:
            batch = self._batch(task)
        except Exception as error:
            return MadeBatch(task.planned, failure=Failure.of(error), counted=self._statistics.taken())
        return MadeBatch(task.planned, batch, label=self._assembler.label, counted=self._statistics.taken())

    def _batch(self, task: Task) -> Batch | None:
        planned, streams = task.planned, self._assembler.streams
        asks = [Ask(task.epoch, index, planned.on_cpu) for index in planned.indices]
        with self._statistics.stage("decode"):
            if planned.on_cpu:
                read = Read(planned, [self._samples[one] for one in asks])
            else:
                read = self._assembler.stacked(planned, self._decoded(asks))
        with self._statistics.stage("transform"), streams.active():
            batch = self._assembler.assemble(task.epoch, read)
            if batch is not None:
                images = moved_to(batch.images, lambda tensor: self._lent(task.reading, tensor.detach()))
                batch = batch.with_parts(images, moved_to(batch.labels, lambda tensor: tensor.detach().cpu()))
            streams.synchronize()
        return batch

    def _lent(self, reading: int, tensor: Any) -> Any:
        """On the CPU the Tensor itself, which is sent in shared memory."""
        return self._lender.lend(reading, tensor) if tensor.is_cuda else tensor

    def _decoded(self, asks: Sequence[Ask]) -> list[Sample]:
        """The samples read and decoded; some are read while those before them are decoded."""
        some = self._decoder.chunk or max(1, len(asks))
        chunks = (asks[start : start + some] for start in range(0, len(asks), some))
        try:
            started = [self._decoder.start([self._samples[one] for one in chunk]) for chunk in chunks]
            return [sample for decoding in started for sample in decoding.finish()]
        finally:
            self._decoder.abandon()


def _keep_freed_memory() -> None:
    """Let malloc keep what a batch's files took for the next ones, where it would give it back to the system.

    To get it again, page by page, took 50 of the 65 µs in which a file of 65 KB was read.
    """
    with suppress(AttributeError):  # a C library other than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def _end_with_the_training() -> None:
    # NOTE: PyTorch's own watch looks at the parent, which is the fork server; that one lives as long as its children.
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)

"""Whole batches made in a DataLoader's worker, which has pipes of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that Tensors are sent by their place in shared memory
from torch.utils.data import get_worker_info

from torchpipe_py.errors import Failure, first_line
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.training.batches.batch import Batch
from torchpipe_py.training.batches.batcher import Batcher, DecodedBatch
from torchpipe_py.training.batches.decoder import Config, Decoder
from torchpipe_py.training.batches.reader import SAFE_PATH
from torchpipe_py.training.batches.sample import Sample, SampleKey, SampleReader, keys_of, namer
from torchpipe_py.training.batches.statistics import Counted, LoaderStatistics
from torchpipe_py.training.data.planner import PlannedBatch
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.prefetch.cuda import moved_to
from torchpipe_py.training.workers.slots import SlotWriter

KEPT_BYTES = 2**28
"""How much freed memory each of malloc's heaps keeps at its end: what a batch's files took."""

SENDABLE = "workers_decode needs what can be pickled: functions and classes at the top of a module"


class BatchKey(NamedTuple):
    """What a worker is asked for: a batch of ``epoch``; ``generation`` is that of the reader of slots."""

    generation: int
    epoch: int
    planned: PlannedBatch


@dataclass(frozen=True)
class WorkerBatch:
    """A batch from a worker, ``None`` where all its samples are skipped; or the failure that takes its place.

    ``label``: the last that the worker has seen. On a GPU its images are in slots.
    """

    planned: PlannedBatch
    batch: Batch | None = None
    failure: Failure | None = None
    label: Any = None
    counted: Counted | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # NOTE: a queue pickles on a thread of its own, and drops what it cannot, without a word to the reader.
        try:
            content = _as_bytes(tuple(getattr(self, field.name) for field in fields(self)))
        except Exception as error:
            problem = f"batch {self.planned.number} cannot be sent to the training process"
            told = TrainingError(f"{problem}: {type(error).__name__}: {first_line(error)}")
            told.__cause__ = error
            content = _as_bytes((self.planned, None, Failure.of(told), None, self.counted))
        return _received, (content,)


def _as_bytes(value: Any) -> bytes:
    """``value`` pickled, its Tensors by their place in shared memory."""
    return bytes(ForkingPickler.dumps(value))


def _received(content: bytes) -> WorkerBatch:
    return WorkerBatch(*pickle.loads(content))


class WorkerDataset:
    """The dataset of workers that decode: ``__getitems__`` takes one ``BatchKey`` and gives a ``WorkerBatch``.

    ``sent``: ``packed`` samples, options and the user's ``worker_init_fn``. ``in_use``: the flags of the
    ``SlotReader``. It is sent to the workers as it is, and makes pipes there. A worker's devices are those of the
    training process, its CUDA contexts and memory are its own.
    """

    def __init__(self, sent: Any, toml_path: Config, devices: Sequence[Any], in_use: Any) -> None:
        self._sent, self._toml_path, self._devices, self._in_use = sent, toml_path, list(devices), in_use
        self._maker: _BatchMaker | None = None
        self._failure: Failure | None = None

    def start(self, worker_id: int) -> None:
        """In the worker, before its first batch, so that it waits for no pipe; an error comes with that batch."""
        keep_freed_memory(KEPT_BYTES)
        threading.Thread(target=_end_with_the_training, name="torchpipe-watch", daemon=True).start()
        try:
            samples, options, worker_init_fn = unpacked(self._sent)
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
            self._maker = _BatchMaker(samples, options, self._toml_path, devices, SlotWriter(worker_id, self._in_use))
        except Exception as error:
            self._failure = Failure.of(error)

    def __getitems__(self, keys: list[BatchKey]) -> WorkerBatch:
        (key,) = keys
        if self._maker is None:
            return WorkerBatch(key.planned, failure=self._failure)
        return self._maker.made(key)


def start_worker(worker_id: int) -> None:
    """For ``worker_init_fn``."""
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]  # it is not meant for programs that a transform starts
    info = get_worker_info()
    assert info is not None
    info.dataset.start(worker_id)


class _BatchMaker:
    """A worker's pipes, and what makes batches of what they give."""

    def __init__(
        self,
        samples: SampleReader,
        options: LoaderOptions,
        toml_path: Config,
        devices: Sequence[Any],
        slots: SlotWriter,
    ) -> None:
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])  # no context on another one
        self._samples, self._slots, self._statistics = samples, slots, LoaderStatistics()
        self._decoder = Decoder(toml_path, devices)
        name_of, trial = namer(samples.dataset), self._decoder.trial
        try:
            self._batcher = Batcher(options, devices, samples, name_of, self._statistics, trial)
        except BaseException:
            self._decoder.close()
            raise

    def made(self, key: BatchKey) -> WorkerBatch:
        """The batch, or its error."""
        try:
            batch = self._batch(key)
        except Exception as error:
            return WorkerBatch(key.planned, failure=Failure.of(error), counted=self._statistics.taken())
        return WorkerBatch(key.planned, batch, label=self._batcher.label, counted=self._statistics.taken())

    def _batch(self, key: BatchKey) -> Batch | None:
        planned, streams = key.planned, self._batcher.streams
        keys = keys_of(key.epoch, planned)
        with self._statistics.stage("decode"):
            if planned.on_cpu:
                decoded = DecodedBatch(planned, [self._samples[sample] for sample in keys])
            else:
                decoded = self._batcher.stacked(planned, self._decoded(keys))
        with self._statistics.stage("transform"), streams.active():
            batch = self._batcher.batch(key.epoch, decoded)
            if batch is not None:
                images = moved_to(batch.images, lambda tensor: self._written(key.generation, tensor.detach()))
                batch = batch.with_parts(images, moved_to(batch.labels, lambda tensor: tensor.detach().cpu()))
            streams.synchronize()
        return batch

    def _written(self, generation: int, tensor: Any) -> Any:
        """On the CPU the Tensor itself, which is sent in shared memory."""
        return self._slots.write(generation, tensor) if tensor.is_cuda else tensor

    def _decoded(self, keys: Sequence[SampleKey]) -> list[Sample]:
        """The samples read and decoded; some are read while those before them are decoded."""
        size = self._decoder.chunk or max(1, len(keys))
        chunks = (keys[start : start + size] for start in range(0, len(keys), size))
        try:
            started = [self._decoder.start([self._samples[key] for key in chunk]) for chunk in chunks]
            return [sample for decoding in started for sample in decoding.finish()]
        finally:
            self._decoder.abandon()


def _end_with_the_training() -> None:
    # NOTE: PyTorch's own watch looks at the parent, which is the fork server; that one lives as long as its children.
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


def packed(value: Any, names: dict[str, Any]) -> Any:
    """``value`` pickled; as it is, where that works only while a process is started (a lock of multiprocessing, say).

    ``TrainingError`` for what cannot be pickled; of ``names``, the parts of ``value``, it names the first that cannot.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        if _is_inherited(error):
            return value
        name, cause = next(_unsendable(names), ("what goes to the workers", error))
        raise TrainingError(f"{name} cannot be sent to the workers ({first_line(cause)}); {SENDABLE}") from error


def unpacked(value: Any) -> Any:
    """What ``packed`` was given."""
    return pickle.loads(value) if isinstance(value, bytes) else value


def _unsendable(names: dict[str, Any]) -> Any:
    for name, value in names.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            if not _is_inherited(error):
                yield name, error


def _is_inherited(error: Exception) -> bool:
    return type(error) is RuntimeError and "inheritance" in str(error)

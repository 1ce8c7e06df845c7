"""Whole batches from a DataLoader's workers that have pipes of their own, and their way into the training process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that Tensors are sent by their place in shared memory

from torchpipe_py.errors import Failure, first_line
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.training.batcher import Batch, Batcher, DecodedBatch, LoaderStatistics
from torchpipe_py.training.decode import Config, Decoder
from torchpipe_py.training.errors import BadSample, TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import PlannedBatch
from torchpipe_py.training.prefetch import moved_to, tensors_in
from torchpipe_py.training.reader import BatchReader
from torchpipe_py.training.samples import BatchKey, Sample, SampleReader, pickled

SLOTS = 32  # of a worker; beyond these, memory is mapped for one batch alone

KEPT_BYTES = 2**28
"""How much freed memory each of malloc's heaps keeps at its end: what a batch's files took."""

DRAIN_SECONDS = 5.0
PRELOADED = "torchpipe_py.training.preload"
SENDABLE = "workers_decode needs what can be pickled: functions and classes at the top of a module"


@dataclass
class MadeBatch:
    """What a worker made: a batch, the samples of one that has no image at all, or the failure in its place.

    ``label``: the last that the worker has seen; ``figures``: what it counted.
    """

    batch: Batch | None = None
    samples: list[Sample] | None = None
    failure: Failure | None = None
    label: Any = None
    figures: dict[str, Any] | None = None


class SentBatch(NamedTuple):
    """A ``MadeBatch`` on its way, pickled without its images, and without its labels where they are one Tensor.

    These are in shared memory; images on a GPU are in slots.
    """

    made: bytes
    images: Any = None
    labels: Any = None


class WorkerDataset:
    """The dataset of workers that decode: ``__getitems__`` takes one ``BatchKey`` and gives a ``SentBatch``.

    ``sent``: samples, options and the user's ``worker_init_fn``, ``packed``. ``in_use``: the flags of the
    ``SlotReader``. It is sent to the workers as it is, and makes pipes there. A worker's devices are those of the
    training process, its CUDA contexts and memory are its own.
    """

    def __init__(self, sent: bytes, toml_path: Config, devices: Sequence[Any], in_use: Any) -> None:
        self._sent, self._toml_path, self._devices, self._in_use = sent, toml_path, list(devices), in_use
        self._failure: Failure | None = None

    def start(self, worker_id: int) -> None:
        """In the worker, before its first batch, so that it waits for no pipe; an error comes with that batch."""
        keep_freed_memory(KEPT_BYTES)
        threading.Thread(target=_end_with_the_training, name="torchpipe-watch", daemon=True).start()
        try:
            samples, options, worker_init_fn = pickle.loads(self._sent)
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
            self._start_pipes(samples, options, devices)
            self._slots = SlotWriter(worker_id, self._in_use)
        except Exception as error:
            self._failure = Failure.of(error)

    def _start_pipes(self, samples: SampleReader, options: LoaderOptions, devices: Sequence[Any]) -> None:
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])  # no context on another one
        self._samples, self._statistics = samples, LoaderStatistics()
        self._decoder = Decoder(self._toml_path, devices)
        try:
            self._batcher = Batcher(options, devices, samples, self._statistics, self._decoder.trial)
        except BaseException:
            self._decoder.close()
            raise

    def __getitems__(self, keys: list[BatchKey]) -> SentBatch:
        (key,) = keys
        if self._failure is not None:
            return SentBatch(pickled(MadeBatch(failure=self._failure)))
        try:
            return self._sent_batch(key)
        except Exception as error:
            return SentBatch(pickled(MadeBatch(failure=Failure.of(error), figures=self._statistics.taken())))

    def _sent_batch(self, key: BatchKey) -> SentBatch:
        planned, streams = key.planned, self._batcher.streams
        with self._statistics.stage("decode"):
            decoded = self._batcher.stacked(planned, self._decoded(key))
        if all(sample.kind for sample in decoded.samples):
            # The training process makes this one, whose labels look like the last that it has seen.
            return SentBatch(pickled(MadeBatch(samples=decoded.samples, figures=self._statistics.taken())))
        images = labels = None
        with self._statistics.stage("transform"), streams.active():
            batch = self._batcher.batch(key.epoch, decoded)
            if batch is not None:
                images = moved_to(batch.images, lambda tensor: self._written(tensor.detach(), key.generation))
                labels = moved_to(batch.labels, lambda tensor: tensor.detach().cpu())
            streams.synchronize()
        # NOTE: a queue pickles on a thread of its own, and drops what it cannot, without a word to the reader.
        try:
            shared = labels if isinstance(labels, torch.Tensor) else None
            for tensor in tensors_in([images, shared]):
                tensor.share_memory_()
            if batch is not None:
                batch = Batch(None, labels if shared is None else None, **vars(batch))
            made = pickled(MadeBatch(batch, label=self._batcher.label, figures=self._statistics.taken()))
        except Exception as error:
            problem = f"batch {planned.number} cannot be sent to the training process"
            raise TrainingError(f"{problem}: {type(error).__name__}: {first_line(error)}") from error
        return SentBatch(made, images, shared)

    def _written(self, tensor: Any, generation: int) -> Any:
        """On the CPU the Tensor itself."""
        return self._slots.write(generation, tensor) if tensor.is_cuda else tensor

    def _decoded(self, key: BatchKey) -> list[Sample]:
        """The samples read and decoded; some are read while those before them are decoded."""
        samples = self._samples.read(key.epoch, key.planned)
        if key.planned.on_cpu:
            return list(samples)
        size = self._decoder.chunk or max(1, len(key.planned.indices))
        chunks = iter(lambda: list(islice(samples, size)), [])
        started = [self._decoder.start(chunk) for chunk in chunks]
        return [sample for decoding in started for sample in decoding.finish()]


def _end_with_the_training() -> None:
    # NOTE: PyTorch's own watch looks at the parent, which is the fork server; that one lives as long as its children.
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


# -- the training process ---------------------------------------------------------------------------------------------


def worker_reader(
    dataloader: Any,
    samples: SampleReader,
    toml_path: Config,
    devices: Sequence[Any],
    options: LoaderOptions,
    in_use: Any,
) -> BatchReader:
    """A reader whose workers make whole batches; ``TrainingError`` where they cannot be started."""
    method = _start_method(dataloader)
    parts = {"the dataset": dataloader.dataset, "worker_init_fn": dataloader.worker_init_fn}
    parts |= {field.name: getattr(options, field.name) for field in fields(options)}
    sent = packed((samples, options, dataloader.worker_init_fn), parts)
    dataset = WorkerDataset(sent, toml_path, devices, in_use)
    # NOTE: a worker gets the dataset and its method in one pickle, so that they stay one object.
    return BatchReader(dataloader, dataset, options.seed, method, dataset.start)


def packed(value: Any, parts: Mapping[str, Any]) -> bytes:
    """``value`` pickled; a ``TrainingError`` names the first of its ``parts`` that cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception:
        for name, part in {**parts, "what goes to the workers": value}.items():
            try:
                pickle.dumps(part)
            except Exception as error:
                problem = f"{name} cannot be sent to the workers ({first_line(error)}); {SENDABLE}"
                raise TrainingError(problem) from error
        raise


def _start_method(dataloader: Any) -> str:
    if not dataloader.num_workers:
        problem = "workers_decode: the DataLoader has no workers (num_workers=0)"
        raise TrainingError(f"{problem}; give it some, or leave workers_decode out")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        problem = "workers_decode: a worker, which imports this script, would start workers of its own"
        raise TrainingError(f'{problem}; put what the script does under: if __name__ == "__main__":')
    context = dataloader.multiprocessing_context
    if context is None:
        # NOTE: not "__main__", which is there by default: a script that looks at the GPU at its top would be forked.
        others = getattr(forkserver._forkserver, "_preload_modules", [])
        kept = [module for module in others if module not in (PRELOADED, "__main__")]
        multiprocessing.set_forkserver_preload([PRELOADED, *kept])
        return "forkserver"
    method: str = context.get_start_method()
    if method == "fork":
        raise TrainingError("workers_decode: CUDA and pipes do not survive a fork; use multiprocessing_context='spawn'")
    return method


class DecodedByWorkers:
    """A source of batches that come from the workers complete; on a GPU they are copied out of the workers' memory.

    ``gathers``: they end up on the first of ``devices``.
    """

    def __init__(
        self,
        reader: BatchReader,
        devices: Sequence[Any],
        batcher: Batcher,
        statistics: LoaderStatistics,
        slots: SlotReader,
        gathers: bool,
    ) -> None:
        self._reader, self._batcher, self._statistics, self._slots = reader, batcher, statistics, slots
        self._devices, self._gathers = devices, gathers
        self._streams = batcher.aside

    # The methods are those of ``Source``.

    def read(self, epoch: int, plan: Sequence[PlannedBatch]) -> Iterator[SentBatch]:
        with self._streams.active():
            generation = self._slots.begin()
        return self._reader.read(epoch, plan, generation)

    def start(self, planned: PlannedBatch, sent: SentBatch) -> SentBatch:
        return sent

    def finish(self, planned: PlannedBatch, sent: SentBatch) -> MadeBatch:
        made: MadeBatch = pickle.loads(sent.made)
        if made.batch is not None:
            labels = made.batch.labels if sent.labels is None else sent.labels
            images, labels = self._own(sent.images, labels)
            made.batch = Batch(images, labels, **vars(made.batch))
        return made

    def batch(self, epoch: int, planned: PlannedBatch, made: MadeBatch) -> Batch | None:
        if made.figures is not None:
            self._statistics.add(made.figures)
        if made.failure is not None:
            error = made.failure.error(TrainingError)
            raise error from (None if isinstance(error, BadSample) else error.__cause__)
        if made.samples is not None:
            return self._batcher.batch(epoch, DecodedBatch(planned, made.samples))
        if made.label is not None:
            self._batcher.label = made.label
        return made.batch

    def close(self) -> None:
        """Forget the workers' memory, which goes with them, and what they still send."""
        with self._streams.active():
            self._slots.begin()
        if self._streams.are_any:
            self._reader.drain(DRAIN_SECONDS)

    def _own(self, sent: Any, labels: Any) -> tuple[Any, Any]:
        """Images and labels in Tensors of this process, for those in a worker's memory."""
        if not self._streams.are_any:
            return sent, labels
        is_list = isinstance(sent, list)
        written = sent if is_list else [sent]
        with self._streams.active():
            images = []
            for tensor in map(self._slots.read, written):
                home = self._devices[0] if self._gathers else tensor.device
                images.append(tensor.clone() if tensor.device == home else self._streams.to(tensor, home))
            labels = [
                moved_to(part, partial(self._streams.to, device=image.device))
                for image, part in zip(images, labels if is_list else [labels], strict=True)
            ]
        self._streams.synchronize()
        for place in written:
            self._slots.release(place)
        return (images, labels) if is_list else (images[0], labels[0])


# -- GPU memory of a worker that the training process reads: mapped once, used for one batch at a time ----------------


@dataclass(frozen=True)
class SlotTensor:
    """The first ``rows`` of slot ``slot`` of a worker, or, where ``slot`` is ``None``, all of ``tensor``.

    ``tensor`` is the slot itself where it is new.
    """

    worker: int
    slot: int | None
    rows: int
    tensor: Any = None


class SlotWriter:
    """In a worker: copies Tensors to slots that are not in use. ``in_use``: bool, shared by all, workers × ``SLOTS``.

    NOTE: to map another process's memory, and to let it go, waits for all that runs on the GPU; hence not for each
    batch.
    """

    def __init__(self, worker: int, in_use: Any) -> None:
        self._worker, self._in_use = worker, in_use[worker]
        self._slots: list[Any] = []
        self._generation = 0

    def write(self, generation: int, tensor: Any) -> SlotTensor:
        """Where ``tensor`` is now; in another ``generation`` all slots are new: the reader has forgotten the others."""
        if generation != self._generation:
            self._generation, self._slots = generation, []
            self._in_use.zero_()
        free = [number for number in range(len(self._slots)) if not self._in_use[number]]
        for number in free:
            slot = self._slots[number]
            kind = (slot.shape[1:], slot.dtype, slot.device)
            if len(tensor) <= len(slot) and kind == (tensor.shape[1:], tensor.dtype, tensor.device):
                slot[: len(tensor)].copy_(tensor)
                self._in_use[number] = True
                return SlotTensor(self._worker, number, len(tensor))
        # A copy: the Tensor can be a part of something larger, or one that a transform keeps for itself.
        slot = tensor.clone()
        number = free[0] if free else len(self._slots)
        if number == len(self._in_use):
            return SlotTensor(self._worker, None, len(tensor), slot)
        self._slots[number : number + 1] = [slot]
        self._in_use[number] = True
        return SlotTensor(self._worker, number, len(tensor), slot)


class SlotReader:
    """In the training process: finds what was written since ``begin``."""

    def __init__(self, workers: int) -> None:
        self.in_use: Any = torch.zeros(workers, SLOTS, dtype=torch.bool).share_memory_()
        self._slots: dict[tuple[int, int], Any] = {}
        self._generation = 0

    def begin(self) -> int:
        """Let all slots go; the number of the generation that begins."""
        self._slots.clear()
        self._generation += 1
        return self._generation

    def read(self, written: Any) -> Any:
        """The Tensor in the worker's memory, to be copied before it is released; a Tensor of the CPU as it is."""
        if not isinstance(written, SlotTensor):
            return written
        if written.slot is None:
            return written.tensor
        if written.tensor is not None:
            self._slots[written.worker, written.slot] = written.tensor
        return self._slots[written.worker, written.slot][: written.rows]

    def release(self, written: Any) -> None:
        """Nothing reads it any more: the worker may write there again."""
        if isinstance(written, SlotTensor) and written.slot is not None:
            self.in_use[written.worker, written.slot] = False

"""The batches of an epoch in their order: decoded in this process, or by the DataLoader's workers."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Generator, Sequence
from dataclasses import fields, replace
from functools import partial
from multiprocessing import forkserver
from typing import Any, Protocol

from torchpipe_py.training.batches.batch import Batch
from torchpipe_py.training.batches.batcher import Batcher, DecodedBatch
from torchpipe_py.training.batches.decoder import Config, Decoder, Decoding
from torchpipe_py.training.batches.reader import BatchReader
from torchpipe_py.training.batches.sample import Sample, SampleReader, keys_of, uncollated
from torchpipe_py.training.batches.statistics import LoaderStatistics
from torchpipe_py.training.data.planner import PlannedBatch
from torchpipe_py.training.errors import BadSample, TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.prefetch.background import BackgroundIterator
from torchpipe_py.training.prefetch.cuda import SideStreams, moved_to
from torchpipe_py.training.workers.slots import SlotReader
from torchpipe_py.training.workers.worker import BatchKey, WorkerBatch, WorkerDataset, packed, start_worker

DRAIN_SECONDS = 5.0
PRELOADED = "torchpipe_py.training.workers.preload"


class Source(Protocol):
    """Where a loader's batches come from."""

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[Any, None, None]:
        """What becomes a batch, for each in ``plan``, with up to ``depth`` more under way; has ``planned``.

        Runs on the background thread, and touches no global generator. An error comes after the batches before it.
        """

    def batch(self, epoch: int, item: Any) -> Batch | None:
        """The batch, on the thread that trains; ``None`` where every sample was bad and is skipped."""


class DecodedHere:
    """Encoded images come from the workers, the pipes are of this process, transforms run on the training thread."""

    def __init__(self, reader: BatchReader, decoder: Decoder, batcher: Batcher, statistics: LoaderStatistics) -> None:
        self._reader, self._decoder, self._batcher, self._statistics = reader, decoder, batcher, statistics

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[DecodedBatch, None, None]:
        """While a batch is decoded, up to ``depth`` more are read and started, on a thread of their own."""
        under_way = threading.Semaphore(depth + 1)
        source = self._started(epoch, plan, under_way)
        started = BackgroundIterator(source, depth, "torchpipe-read") if depth else source
        try:
            for planned, samples in started:
                if isinstance(samples, Decoding):
                    with self._statistics.stage("decode"):
                        decoded = self._batcher.stacked(planned, samples.finish())
                else:
                    decoded = DecodedBatch(planned, samples)
                under_way.release()
                yield decoded
        finally:
            under_way.release(depth + 1)
            started.close()
            self._decoder.abandon()

    def batch(self, epoch: int, item: DecodedBatch) -> Batch | None:
        """The batch after the transforms."""
        with self._statistics.stage("transform"):
            return self._batcher.batch(epoch, item)

    def _started(
        self, epoch: int, plan: list[PlannedBatch], under_way: threading.Semaphore
    ) -> Generator[tuple[PlannedBatch, list[Sample] | Decoding], None, None]:
        batches = self._reader.read(plan, partial(keys_of, epoch))
        for planned in plan:
            with self._statistics.stage("read"):
                samples = uncollated(*next(batches))
            under_way.acquire()
            yield planned, samples if planned.on_cpu else self._decoder.start(samples)


class DecodedByWorkers:
    """Batches come from the workers complete; on a GPU they are copied out of the workers' memory.

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
        self._streams = SideStreams(devices)

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[WorkerBatch, None, None]:
        """The workers have as many under way as the DataLoader's ``prefetch_factor`` says, whatever ``depth``."""
        with self._streams.active():
            generation = self._slots.begin()
        batches = self._reader.read(plan, lambda planned: [BatchKey(generation, epoch, planned)])
        for _ in plan:
            with self._statistics.stage("read"):
                made: WorkerBatch = next(batches)
            yield made if made.batch is None else replace(made, batch=self._copied(made.batch))

    def batch(self, epoch: int, item: WorkerBatch) -> Batch | None:
        """The batch; raises the error that the worker met."""
        if item.counted is not None:
            self._statistics.add(item.counted)
        if item.failure is not None:
            error = item.failure.error(TrainingError)
            raise error from (None if isinstance(error, BadSample) else error.__cause__)
        if item.label is not None:
            self._batcher.label = item.label
        elif item.batch is not None:
            return self._batcher.relabelled(item.batch)
        return item.batch

    def close(self) -> None:
        """Forget the workers' memory, which goes with them, and what they still send."""
        with self._streams.active():
            self._slots.forget()
        if self._streams.are_any:
            self._reader.drain(DRAIN_SECONDS)

    def _copied(self, batch: Batch) -> Batch:
        """With Tensors of this process, in the place of those in a worker's memory."""
        if not self._streams.are_any:
            return batch
        is_list = isinstance(batch.images, list)
        written, labels = (batch.images, batch.labels) if is_list else ([batch.images], [batch.labels])
        with self._streams.active():
            images = [self._own(self._slots.read(tensor)) for tensor in written]
            labels = [self._beside(image, label) for image, label in zip(images, labels, strict=True)]
        self._streams.synchronize()
        for tensor in written:
            self._slots.release(tensor)
        return batch.with_parts(images, labels) if is_list else batch.with_parts(images[0], labels[0])

    def _own(self, tensor: Any) -> Any:
        home = self._devices[0] if self._gathers else tensor.device
        return tensor.clone() if tensor.device == home else self._streams.to(tensor, home)

    def _beside(self, images: Any, labels: Any) -> Any:
        return moved_to(labels, lambda tensor: self._streams.to(tensor, images.device))


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
    names = {"the dataset": dataloader.dataset, "worker_init_fn": dataloader.worker_init_fn}
    names |= {field.name: getattr(options, field.name) for field in fields(options)}
    sent = packed((samples, options, dataloader.worker_init_fn), names)
    dataset = WorkerDataset(sent, toml_path, devices, in_use)
    return BatchReader(dataloader, dataset, as_it_is, options.seed, method, start_worker)


def as_it_is(made: Any) -> Any:
    """For ``collate_fn``."""
    return made


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

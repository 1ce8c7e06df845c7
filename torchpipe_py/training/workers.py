"""Whole batches made by the DataLoader's workers, each with pipes of its own, and their way to the training process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchpipe_py.errors import first_line
from torchpipe_py.training.assembly import Assembler, Read
from torchpipe_py.training.batch import Batch
from torchpipe_py.training.decoding import Config, Decoder
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.loans import Borrower, Lender
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import PlannedBatch
from torchpipe_py.training.prefetcher import moved_to
from torchpipe_py.training.reading import Ask, BatchReader, Sample, SampleReader, namer
from torchpipe_py.training.statistics import Counted, LoaderStatistics
from torchpipe_py.training.streams import SideStreams

DRAIN_SECONDS = 5.0

# What every worker needs, imported once in the process that they are forked from: each saves seconds.
PRELOADED = ["torchpipe_py.training.workers", "torchvision.io", "cv2"]


@dataclass(frozen=True)
class Made:
    """A batch from a worker, ``None`` where all its samples are skipped; or the error that takes its place."""

    planned: PlannedBatch
    batch: Batch | None = None
    error: Exception | None = None
    label: Any = None
    counted: Counted | None = None


class BatchMaker:
    """The dataset of workers that decode: ``__getitems__`` gives a batch ``Made``, its images lent on the devices.

    It is sent to the workers as it is, and makes pipes there. A worker's devices are those of the training process,
    its CUDA context and memory are its own.
    """

    def __init__(
        self, samples: SampleReader, toml_path: Config, devices: Sequence[Any], options: LoaderOptions, lent: Any
    ) -> None:
        self._samples, self._toml_path, self._devices, self._options = samples, toml_path, list(devices), options
        self._lent = lent
        self._made: tuple[Decoder, Assembler, LoaderStatistics, Lender] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, asks: list[Ask]) -> Made:
        reading, epoch, number, _, on_cpu = asks[0]
        planned = PlannedBatch(number, tuple(one.sample for one in asks), on_cpu)
        try:
            decoder, assembler, statistics, lender = self.open()
        except Exception as error:
            return Made(planned, error=portable(error))
        try:
            with statistics.stage("decode"):
                samples = [self._samples[one] for one in asks] if on_cpu else self._decoded(asks, decoder)
                read = Read(planned, samples) if on_cpu else assembler.stacked(planned, samples)
            with statistics.stage("transform"), assembler.streams.active():
                batch = assembler.assemble(epoch, read)
                if batch is not None and assembler.streams.are_any:
                    images = moved_to(batch.images, lambda tensor: lender.lend(reading, tensor))
                    batch = batch.with_parts(images, moved_to(batch.labels, lambda tensor: tensor.cpu()))
                assembler.streams.synchronize()
        except Exception as error:
            return Made(planned, error=portable(error), counted=statistics.taken())
        return Made(planned, batch, label=assembler.label, counted=statistics.taken())

    def _decoded(self, asks: Sequence[Ask], decoder: Decoder) -> list[Sample]:
        """The samples read and decoded; some are read while those before them are decoded."""
        some = decoder.chunk or len(asks)
        chunks = (asks[start : start + some] for start in range(0, len(asks), some))
        try:
            under_way = [decoder.start([self._samples[one] for one in chunk]) for chunk in chunks]
            return [sample for decoding in under_way for sample in decoding.finish()]
        finally:
            decoder.abandon()

    def open(self) -> tuple[Decoder, Assembler, LoaderStatistics, Lender]:
        """Pipes, what makes batches, what counts, and what lends; made at the first call, in a worker."""
        if self._made is None:
            info = get_worker_info()
            assert info is not None
            # Of batches that end up on one device anyway, each device decodes some, and not a share of each.
            devices = [self._devices[info.id % len(self._devices)]] if self._options.gather else self._devices
            if devices[0].type == "cuda":
                torch.cuda.set_device(devices[0])  # no context on another one
            decoder, statistics = Decoder(self._toml_path, devices), LoaderStatistics()
            name_of = namer(self._samples.dataset)
            assembler = Assembler(self._options, devices, self._samples, name_of, statistics, decoder.trial)
            self._made = decoder, assembler, statistics, Lender(info.id, self._lent)
        return self._made


class WorkerStart:
    """For ``worker_init_fn``: the user's, then the worker's pipes, so that its first batch does not wait for them."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        info = get_worker_info()
        assert info is not None
        try:
            info.dataset.open()
        except Exception:
            pass  # told with the first batch


class DecodedByWorkers:
    """Batches come from the workers as they are to be given away; here they are copied, and the workers' are let go."""

    def __init__(
        self,
        reader: BatchReader,
        devices: Sequence[Any],
        assembler: Assembler,
        statistics: LoaderStatistics,
        borrower: Borrower,
        gathers: bool,
    ) -> None:
        self._reader, self._assembler, self._statistics, self._borrower = reader, assembler, statistics, borrower
        self._devices, self._gathers = devices, gathers
        self._streams = SideStreams(devices)

    def close(self) -> None:
        """Let all that the workers lent go, since it goes with them."""
        self._borrower.forget()
        if self._streams.are_any:
            self._reader.drain(DRAIN_SECONDS)

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[Made, None, None]:
        """The planned batches; runs on the background thread."""
        self._borrower.forget()
        batches = self._reader.read(epoch, plan)
        for planned in plan:
            with self._statistics.stage("read"):
                made: Made | None = next(batches, None)
            if made is None:
                raise TrainingError(f"the workers gave no batch {planned.number} of {len(plan)}")
            yield made if made.batch is None else replace(made, batch=self._own(made.batch))

    def batch(self, epoch: int, made: Made) -> Batch | None:
        """The batch; raises the error that the worker met. On the thread that trains."""
        if made.counted is not None:
            self._statistics.add(made.counted)
        if made.error is not None:
            raise made.error
        self._assembler.label = made.label
        return made.batch

    def _own(self, batch: Batch) -> Batch:
        """With Tensors of this process, in the place of what a worker lent."""
        if not self._streams.are_any:
            return batch
        loans = batch.images if isinstance(batch.images, list) else [batch.images]
        with self._streams.active():
            images = [self._copied(self._borrower.tensor(one)) for one in loans]
            labels = batch.labels if isinstance(batch.images, list) else [batch.labels]
            labels = [self._beside(one, some) for one, some in zip(images, labels, strict=True)]
        self._streams.synchronize()
        for one in loans:
            self._borrower.give_back(one)
        if isinstance(batch.images, list):
            return batch.with_parts(images, labels)
        return batch.with_parts(images[0], labels[0])

    def _copied(self, images: Any) -> Any:
        home = self._devices[0] if self._gathers else images.device
        return images.clone() if images.device == home else self._streams.to(images, home)

    def _beside(self, images: Any, labels: Any) -> Any:
        return moved_to(labels, lambda tensor: self._streams.to(tensor, images.device))


def as_made(made: Made) -> Made:
    """For ``collate_fn``."""
    return made


def portable(error: Exception) -> Exception:
    """``error`` as it is, if it can go to another process; otherwise a ``TrainingError`` that tells the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainingError(f"{type(error).__name__}: {first_line(error)}")
    return error


def start_method(dataloader: Any) -> str:
    """How workers that decode are started; ``TrainingError`` where they cannot be."""
    if not dataloader.num_workers:
        raise TrainingError("workers_decode: the DataLoader has no workers (num_workers=0)")
    context = dataloader.multiprocessing_context
    if context is None:
        # NOTE: of no effect where the program has such a process already; and nothing else is forked from it here.
        multiprocessing.set_forkserver_preload(PRELOADED)
        return "forkserver"
    method: str = context.get_start_method()
    if method == "fork":
        raise TrainingError("workers_decode: CUDA and pipes do not survive a fork; use multiprocessing_context='spawn'")
    return method


def check_sendable(parts: dict[str, Any]) -> None:
    """``TrainingError`` that names the first of ``parts`` that cannot be sent to the workers."""
    for name, value in parts.items():
        try:
            pickle.dumps(value)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            hint = "workers_decode needs what can be pickled: define it at the top of a module"
            raise TrainingError(f"{name} cannot be sent to the workers ({first_line(error)}); {hint}") from error
        except RuntimeError:
            pass  # a lock of multiprocessing, say, which goes along when a process is started

"""The batches of an epoch in their order: what any source of them does, and the one that decodes in this process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, Protocol

from torchpipe_py.training.ahead.background import BackgroundIterator
from torchpipe_py.training.assembly import Assembler, Read
from torchpipe_py.training.batch import Batch
from torchpipe_py.training.data.epoch import PlannedBatch
from torchpipe_py.training.decoding import Decoder, Decoding
from torchpipe_py.training.reading import Ask, BatchReader, Sample, unpacked
from torchpipe_py.training.statistics import LoaderStatistics


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

    def __init__(
        self, reader: BatchReader, decoder: Decoder, assembler: Assembler, statistics: LoaderStatistics
    ) -> None:
        self._reader, self._decoder, self._assembler, self._statistics = reader, decoder, assembler, statistics

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[Read, None, None]:
        """While a batch is decoded, up to ``depth`` more are read and started, on a thread of their own."""
        under_way = threading.Semaphore(depth + 1)
        source = self._started(epoch, plan, under_way)
        started = BackgroundIterator(source, depth, "torchpipe-read") if depth else source
        try:
            for planned, samples in started:
                read = self._finished(planned, samples)
                under_way.release()
                yield read
        finally:
            under_way.release(depth + 1)
            started.close()
            self._decoder.abandon()

    def batch(self, epoch: int, item: Read) -> Batch | None:
        """The batch after the transforms."""
        with self._statistics.stage("transform"):
            return self._assembler.assemble(epoch, item)

    def _started(
        self, epoch: int, plan: list[PlannedBatch], under_way: threading.Semaphore
    ) -> Generator[tuple[PlannedBatch, list[Sample] | Decoding], None, None]:
        batches = self._reader.read(plan, lambda one: [Ask(epoch, index, one.on_cpu) for index in one.indices])
        for planned in plan:
            with self._statistics.stage("read"):
                samples = unpacked(*next(batches))
            under_way.acquire()
            yield planned, samples if planned.on_cpu else self._decoder.start(samples)

    def _finished(self, planned: PlannedBatch, samples: list[Sample] | Decoding) -> Read:
        if not isinstance(samples, Decoding):
            return Read(planned, samples)
        with self._statistics.stage("decode"):
            return self._assembler.stacked(planned, samples.finish())

"""The batches of an epoch in their order, read by the DataLoader's workers and decoded here."""

from __future__ import annotations

import threading
from collections.abc import Generator

from torchpipe_py.training.assembly import Assembler, Read
from torchpipe_py.training.background import BackgroundIterator
from torchpipe_py.training.batch import Batch
from torchpipe_py.training.decoding import Decoder, Decoding
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.plan import PlannedBatch
from torchpipe_py.training.reading import BatchReader, Sample, unpacked
from torchpipe_py.training.statistics import LoaderStatistics


class DecodedHere:
    """Encoded images come from the workers; the pipes are of this process, and transforms run on the training thread.

    ``ahead`` runs on the background thread, and touches no global generator; ``batch`` on the thread that trains.
    """

    def __init__(
        self, reader: BatchReader, decoder: Decoder, assembler: Assembler, statistics: LoaderStatistics
    ) -> None:
        self._reader, self._decoder, self._assembler, self._statistics = reader, decoder, assembler, statistics

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[Read, None, None]:
        """The planned batches read and decoded.

        While a batch is decoded, up to ``depth`` more are read and started, on a thread of their own. An error comes
        after the batches before it.
        """
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

    def batch(self, epoch: int, read: Read) -> Batch | None:
        """The batch after the transforms; ``None`` where every sample was bad and is skipped."""
        with self._statistics.stage("transform"):
            return self._assembler.assemble(epoch, read)

    def _started(
        self, epoch: int, plan: list[PlannedBatch], under_way: threading.Semaphore
    ) -> Generator[tuple[PlannedBatch, list[Sample] | Decoding], None, None]:
        batches = self._reader.read(epoch, plan)
        for planned in plan:
            with self._statistics.stage("read"):
                found = next(batches, None)
            if found is None:
                raise TrainingError(f"the workers gave no batch {planned.number} of {len(plan)}")
            samples = unpacked(*found)
            under_way.acquire()
            yield planned, samples if planned.on_cpu else self._decoder.start(samples)

    def _finished(self, planned: PlannedBatch, samples: list[Sample] | Decoding) -> Read:
        if not isinstance(samples, Decoding):
            return Read(planned, samples)
        with self._statistics.stage("decode"):
            return self._assembler.stacked(planned, samples.finish())

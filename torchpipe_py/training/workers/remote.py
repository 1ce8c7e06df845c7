"""The source whose batches the DataLoader's workers make."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Sequence
from dataclasses import replace
from multiprocessing import forkserver
from typing import Any

from torchpipe_py.training.ahead.prefetcher import moved_to
from torchpipe_py.training.ahead.streams import SideStreams
from torchpipe_py.training.assembly import Assembler
from torchpipe_py.training.batch import Batch
from torchpipe_py.training.data.epoch import PlannedBatch
from torchpipe_py.training.errors import BadSample, TrainingError
from torchpipe_py.training.reading import BatchReader
from torchpipe_py.training.statistics import LoaderStatistics
from torchpipe_py.training.workers.loans import Borrower, Loan
from torchpipe_py.training.workers.maker import MadeBatch, Task

DRAIN_SECONDS = 5.0
PRELOADED = "torchpipe_py.training.workers.preload"


class DecodedByWorkers:
    """Batches come from the workers complete; on a GPU they are copied out of the workers' memory.

    ``gathers``: they end up on the first of ``devices``.
    """

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

    def ahead(self, epoch: int, plan: list[PlannedBatch], depth: int) -> Generator[MadeBatch, None, None]:
        """The workers have as many under way as the DataLoader's ``prefetch_factor`` says, whatever ``depth``."""
        with self._streams.active():
            reading = self._borrower.begin()
        batches = self._reader.read(plan, lambda one: [Task(reading, epoch, one)])
        for _ in plan:
            with self._statistics.stage("read"):
                made: MadeBatch = next(batches)
            yield made if made.batch is None else replace(made, batch=self._own(made.batch))

    def batch(self, epoch: int, item: MadeBatch) -> Batch | None:
        """The batch; raises the error that the worker met."""
        if item.counted is not None:
            self._statistics.add(item.counted)
        if item.failure is not None:
            error = item.failure.error(TrainingError)
            raise error from (None if isinstance(error, BadSample) else error.__cause__)
        if item.label is not None:
            self._assembler.label = item.label
        elif item.batch is not None:
            return self._assembler.relabelled(item.batch)
        return item.batch

    def close(self) -> None:
        """Let all that the workers lent go, since it goes with them."""
        with self._streams.active():
            self._borrower.forget()
        if self._streams.are_any:
            self._reader.drain(DRAIN_SECONDS)

    def _own(self, batch: Batch) -> Batch:
        """With Tensors of this process, in the place of what a worker lent."""
        if not self._streams.are_any:
            return batch
        is_list = isinstance(batch.images, list)
        lent, labels = (batch.images, batch.labels) if is_list else ([batch.images], [batch.labels])
        with self._streams.active():
            images = [self._copied(one) for one in lent]
            labels = [self._beside(one, some) for one, some in zip(images, labels, strict=True)]
        self._streams.synchronize()
        for one in lent:
            self._borrower.give_back(one)
        return batch.with_parts(images, labels) if is_list else batch.with_parts(images[0], labels[0])

    def _copied(self, lent: Loan) -> Any:
        tensor = self._borrower.tensor(lent)
        home = self._devices[0] if self._gathers else tensor.device
        return tensor.clone() if tensor.device == home else self._streams.to(tensor, home)

    def _beside(self, images: Any, labels: Any) -> Any:
        return moved_to(labels, lambda tensor: self._streams.to(tensor, images.device))


def start_method(dataloader: Any) -> str:
    """How workers that decode are started; ``TrainingError`` where they cannot be."""
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
        multiprocessing.set_forkserver_preload(
            [PRELOADED, *(one for one in others if one not in (PRELOADED, "__main__"))]
        )
        return "forkserver"
    method: str = context.get_start_method()
    if method == "fork":
        raise TrainingError("workers_decode: CUDA and pipes do not survive a fork; use multiprocessing_context='spawn'")
    return method

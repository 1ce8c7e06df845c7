"""The wrapped DataLoader: an iterator over epochs of batches that the pipe has decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchpipe_py.training.batcher import Batch, Batcher, DecodedBatch, LoaderStatistics
from torchpipe_py.training.decode import Decoder, Decoding
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import PlannedBatch, Planner, digest_of
from torchpipe_py.training.prefetch import BackgroundIterator, tensors_in
from torchpipe_py.training.ranks import RankGroup, Step
from torchpipe_py.training.reader import BatchReader
from torchpipe_py.training.samples import Sample, SentSamples

STATE_VERSION = 1
WHY_ORDERS_DIFFER = (
    "a sampler draws from the global generators, or from a torch.Generator that is its attribute generator; "
    "reset(epoch) begins the epoch anew"
)


class Source(Protocol):
    """Where a loader's batches come from; each is read, started and finished in turn.

    The first three methods run on background threads and touch no global generator.
    """

    def read(self, epoch: int, plan: Sequence[PlannedBatch]) -> Iterator[Any]:
        """What the DataLoader's workers give for each batch."""

    def start(self, planned: PlannedBatch, given: Any) -> Any:
        """Begin to decode it."""

    def finish(self, planned: PlannedBatch, started: Any) -> Any:
        """Wait until it is decoded."""

    def batch(self, epoch: int, planned: PlannedBatch, finished: Any) -> Batch | None:
        """The batch, on the thread that trains; ``None`` where every sample was bad and is skipped."""


class DecodedHere:
    """Encoded images come from the workers, the pipes are of this process, transforms run on the training thread."""

    def __init__(self, reader: BatchReader, decoder: Decoder, batcher: Batcher, statistics: LoaderStatistics) -> None:
        self._reader, self._decoder, self._batcher, self._statistics = reader, decoder, batcher, statistics

    def read(self, epoch: int, plan: Sequence[PlannedBatch]) -> Iterator[SentSamples]:
        return self._reader.read(epoch, plan)

    def start(self, planned: PlannedBatch, given: SentSamples) -> list[Sample] | Decoding:
        samples = given.received()
        return samples if planned.on_cpu else self._decoder.start(samples)

    def finish(self, planned: PlannedBatch, started: list[Sample] | Decoding) -> DecodedBatch:
        if not isinstance(started, Decoding):
            return DecodedBatch(planned, started)
        with self._statistics.stage("decode"):
            return self._batcher.stacked(planned, started.finish())

    def batch(self, epoch: int, planned: PlannedBatch, finished: DecodedBatch) -> Batch | None:
        with self._statistics.stage("transform"):
            return self._batcher.batch(epoch, finished)


def decoded_ahead(
    source: Source, statistics: LoaderStatistics, epoch: int, plan: Sequence[PlannedBatch], depth: int
) -> Generator[tuple[PlannedBatch, Any], None, None]:
    """The finished batches of ``plan``, in order; an error comes after the batches before it.

    While one is decoded, up to ``depth`` more are read and started, on a thread of their own.
    """
    under_way = threading.Semaphore(depth + 1)

    def started() -> Generator[tuple[PlannedBatch, Any], None, None]:
        batches = source.read(epoch, plan)
        for planned in plan:
            with statistics.stage("read"):
                given = next(batches)
            under_way.acquire()
            yield planned, source.start(planned, given)

    items = BackgroundIterator(started(), depth, "torchpipe-read") if depth else started()
    try:
        for planned, item in items:
            finished = source.finish(planned, item)
            under_way.release()
            yield planned, finished
    finally:
        under_way.release(depth + 1)
        items.close()


@dataclass(frozen=True)
class LoaderParts:
    """What a loader works with. ``identity``: facts that a saved state must share. ``close`` ends workers and pipes."""

    options: LoaderOptions
    dataset: Any
    devices: list[Any]
    planner: Planner
    source: Source
    batcher: Batcher
    statistics: LoaderStatistics
    identity: dict[str, Any]
    close: Callable[[], None]


@dataclass
class _Outcome:
    """What a step came to: a batch, the end, or an error; ``position``: of the batch after it in the epoch."""

    step: Step
    position: int
    batch: Batch | None = None
    error: Exception | None = None
    events: list[Any] = field(default_factory=list)


class TorchpipeLoader:
    """Made by ``wrap_dataloader_torchpipe``. ``for images, labels in loader`` goes through one epoch.

    It is its own iterator: a ``for`` that was left early goes on where it stopped, and after the last batch ``reset()``
    begins the next epoch; without it another ``for`` raises ``TrainingError``. Iterate, ``reset`` and ``close`` on the
    thread that trains. An error comes at the batch it belongs to, and again at every ``next`` until ``reset``; in "ddp"
    it comes on every rank at the same step, ``PeerFailed`` on the others.
    """

    def __init__(self, parts: LoaderParts, ranks: RankGroup | None, batches: int | None) -> None:
        self._parts, self._ranks, self._batches = parts, ranks, batches
        self._batcher, self._statistics = parts.batcher, parts.statistics
        self._epoch = self._position = self._planned = 0
        self._order: str | None = None  # of the epoch, as it was when its first batches were given
        self._ahead: BackgroundIterator[Any] | Generator[Any, None, None] | None = None
        self._held: _Outcome | None = None
        self._error: Exception | None = None
        self._is_over = self._is_closed = False

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or begins with the next batch; from 0."""
        return self._epoch

    @property
    def devices(self) -> list[Any]:
        """Where images are decoded; batches lie on the first."""
        return list(self._parts.devices)

    @property
    def dataset(self) -> Any:
        """Of the DataLoader."""
        return self._parts.dataset

    def __len__(self) -> int:
        """Batches of an epoch, of the rank that has most; those that are skipped as a whole count."""
        if self._batches is None:
            raise TypeError("the DataLoader's batch sampler has no length")
        return self._batches

    def __iter__(self) -> TorchpipeLoader:
        if self._is_over:
            raise TrainingError(f"epoch {self._epoch} is over: call reset() before the next one")
        self._check_usable()
        if self._ranks is None:  # what a sampler raises is told on all ranks, at the first step
            self._begin()
        return self

    def __next__(self) -> Batch:
        if self._is_over:
            raise StopIteration
        try:
            with self._statistics.consumer_waits():
                self._check_usable()
                outcome = self._agreed(self._next_outcome())
                batch = outcome.batch
                if batch is not None:
                    self._batcher.streams.hand_over(outcome.events, tensors_in(list(batch)))
            if batch is not None:
                self._statistics.count(samples=int(batch.mask.sum()), batches=1, cpu_batches=int(batch.on_cpu))
        except BaseException as error:
            # After Ctrl-C the same batch is read again.
            self._error = error if isinstance(error, Exception) else None
            self._stop()
            raise
        # NOTE: behind all calls, since a signal may interrupt any: what counts as given is given.
        self._position = outcome.position
        if batch is None:
            self._is_over = True
            self._stop()
            raise StopIteration
        return batch

    def reset(self, epoch: int | None = None) -> None:
        """Begin the next epoch, or ``epoch``, with the next batch; what is left of this one is dropped."""
        self._go_to(self._epoch + 1 if epoch is None else epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: after the last batch it gave, whatever has been read ahead."""
        order = self._order if self._position else None
        place = {"epoch": self._epoch, "position": self._position, "order": order}
        return {"version": STATE_VERSION, **self._parts.identity, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with exactly the batches that were left. ``TrainingError`` if the state is of other data or options.

        A sampler that gives another order now, as one does that draws from a generator which the loader does not know,
        is a ``TrainingError`` when iteration begins.
        """
        if state.get("version") != STATE_VERSION:
            raise TrainingError(f"a loader's state of version {state.get('version')}, expected {STATE_VERSION}")
        for key, here in self._parts.identity.items():
            if state.get(key) != here:
                raise TrainingError(f"the state was saved with {key} = {state.get(key)}, here it is {here}")
        self._go_to(int(state["epoch"]), int(state["position"]), state.get("order"))

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the loader was made.

        ``samples`` (images given), ``batches``, ``cpu_batches`` (through ``transforms_cpu``), ``skipped`` and
        ``masked`` samples, ``filler_batches`` (masked as a whole, to make a step other ranks make). ``wait_s``: the
        training loop inside ``next``; ``busy_s``: between two of them; ``stall_share``: the first of both;
        ``samples_per_s``. ``stages_s``: ``read`` (waiting for the workers) and ``decode`` on the background thread,
        ``transform`` and ``agree`` (waiting for other ranks) inside ``wait_s``; with ``workers_decode``, ``decode``
        (with reading) and ``transform`` are sums over the workers. ``bad``: ``count``, ``kinds``
        (unreadable, empty, corrupt), and of the first 1000 ``samples`` epoch, index, name, kind and reason.
        """
        return {"epoch": self._epoch, **self._statistics.snapshot()}

    def close(self) -> None:
        """End the background thread, the workers and the pipes. Idempotent."""
        self._is_closed = True
        self._stop()
        self._parts.close()
        if self._ranks is not None:
            self._ranks.close()

    def __reduce__(self) -> Any:
        raise TypeError("a loader has threads and workers, which cannot be pickled or copied: wrap another DataLoader")

    def __enter__(self) -> TorchpipeLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one epoch ------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TrainingError("the loader is closed")
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        """Start reading, unless that is under way."""
        if self._ahead is not None:
            return
        plan = self._parts.planner.plan(self._epoch)
        order = digest_of(plan)
        if self._position and self._order not in (None, order):
            problem = f"the sampler does not give epoch {self._epoch} in the order in which its first batches were read"
            raise TrainingError(f"{problem}; {WHY_ORDERS_DIFFER}")
        self._planned, self._order = len(plan), order
        depth = self._parts.options.prefetch
        rest = plan[self._position :]
        source = decoded_ahead(self._parts.source, self._statistics, self._epoch, rest, min(1, depth))
        self._ahead = BackgroundIterator(source, depth, "torchpipe-prefetch") if depth else source

    def _stop(self) -> None:
        ahead, self._ahead, self._held = self._ahead, None, None
        if ahead is not None:
            ahead.close()

    def _go_to(self, epoch: int, position: int, order: str | None = None) -> None:
        if self._is_closed:
            raise TrainingError("the loader is closed")
        self._stop()
        self._epoch, self._position, self._order = epoch, position, order
        self._error, self._is_over = None, False
        self._statistics.pause()

    def _next_outcome(self) -> _Outcome:
        try:
            self._begin()
        except Exception as error:
            return _Outcome(Step.FAILED, self._position, error=error)
        outcome, self._held = self._held or self._produced(self._position), None
        streams = self._batcher.streams
        if outcome.step is Step.BATCH and streams.are_any and getattr(self._ahead, "is_ready", False):
            # Its kernels run on the side stream, beside the model's step on the batch that is given away now.
            self._held = self._produced(outcome.position)
        return outcome

    def _produced(self, position: int) -> _Outcome:
        """The next batch from ``position`` on; skipped ones are left out where no other rank makes a step."""
        assert self._ahead is not None
        while True:
            try:
                planned, item = next(self._ahead)
            except StopIteration:
                return _Outcome(Step.END, max(position, self._planned))
            except Exception as error:
                return _Outcome(Step.FAILED, position, error=error)
            try:
                batch = self._parts.source.batch(self._epoch, planned, item)
                if batch is None and self._ranks is not None:
                    batch = self._filler(planned.number)
            except Exception as error:
                return _Outcome(Step.FAILED, position, error=error)
            position = planned.number + 1
            if batch is not None:
                return _Outcome(Step.BATCH, position, batch, events=self._batcher.streams.mark())

    def _agreed(self, outcome: _Outcome) -> _Outcome:
        """The outcome that all ranks have: errors of any are raised, and who has no batch left gets a masked one."""
        step = outcome.step
        if self._ranks is not None:
            with self._statistics.stage("agree"):
                step = self._ranks.step(step, outcome.error)
        if outcome.error is not None:
            raise outcome.error
        if step is Step.BATCH and outcome.step is Step.END:
            batch = self._filler(self._position)
            return _Outcome(Step.BATCH, self._position + 1, batch, events=self._batcher.streams.mark())
        return outcome

    def _filler(self, number: int) -> Batch:
        self._statistics.count(filler_batches=1)
        return self._batcher.filler(self._epoch, number)

"""The wrapped DataLoader: an iterator over epochs of batches decoded by the pipe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchpipe_py.training.batcher import Batch, Batcher
from torchpipe_py.training.decode import Decoder
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.plan import PlannedBatch, Planner, digest_of
from torchpipe_py.training.prefetch import BackgroundIterator, moved_to, tensors_in
from torchpipe_py.training.ranks import RankGroup, Step
from torchpipe_py.training.workers.reader import BatchReader
from torchpipe_py.training.workers.transfer import ReadResult

DRAIN_SECONDS = 5.0
STATE_VERSION = 1
WHY_ORDERS_DIFFER = (
    "a sampler draws from the global generators, or from a torch.Generator that is its attribute generator; "
    "reset(epoch) begins the epoch anew"
)


class Source:
    """The source of a loader's batches; each is read, started and finished in order.

    ``decoder`` has the pipes that decode images from the workers of ``reader``. Without it the workers decode and send
    complete batches; on a GPU these are copied out of the workers' ``slots`` (the total number).
    """

    def __init__(self, reader: BatchReader, decoder: Decoder | None, batcher: Batcher, slots: int) -> None:
        self.batcher, self.statistics, self._streams = batcher, batcher.statistics, batcher.aside
        self._reader, self._decoder = reader, decoder
        self._mapped: deque[Any] = deque(maxlen=slots)  # so that PyTorch keeps the memory mapped

    def ahead(
        self, epoch: int, plan: Sequence[PlannedBatch], depth: int
    ) -> Generator[tuple[PlannedBatch, ReadResult], None, None]:
        """Yield the finished batches of ``plan`` in order; an error is raised after the batches before it.

        While one is decoded, a separate thread reads and starts up to ``depth`` more. It does not use the global
        generators.
        """
        under_way = threading.Semaphore(depth + 1)

        def started() -> Generator[tuple[PlannedBatch, ReadResult], None, None]:
            batches = self._reader.read(epoch, plan)
            for planned in plan:
                with self.statistics.stage("read"):
                    result = next(batches)
                under_way.acquire()
                if self._decoder is not None and result.samples is not None and not planned.on_cpu:
                    result.decoded = self._decoder.start(result.samples)
                yield planned, result

        items = BackgroundIterator(started(), depth, "torchpipe-read") if depth else started()
        try:
            for planned, result in items:
                if result.decoded is not None:
                    with self.statistics.stage("decode"):
                        result.samples, result.decoded = result.decoded(), None  # it refers to each image
                        result.stacks = self.batcher.stacked(planned, result.samples)
                elif result.batch is not None and self._streams.are_any:
                    result.batch = self._copied(result.batch)
                under_way.release()
                yield planned, result
        finally:
            under_way.release(depth + 1)
            items.close()

    def batch(self, epoch: int, planned: PlannedBatch, result: ReadResult) -> Batch | None:
        """Complete the batch, on the training thread; ``None`` if every sample was bad and is skipped."""
        if result.figures is not None:
            self.statistics.add(result.figures)
        if result.failure is not None:
            raise result.failure.error(TrainingError)
        if result.samples is not None:
            with self.statistics.stage("transform"):
                return self.batcher.batch(epoch, planned, result.samples, result.stacks)
        if result.label is not None:
            self.batcher.label = result.label
        return result.batch

    def close(self) -> None:
        """End the workers and the pipes. Idempotent."""
        # The workers' GPU memory ends with them: release it, and drop what they still send.
        with self._streams.active():
            self._mapped.clear()
        if self._decoder is not None:
            self._decoder.close()
        elif self._streams.are_any:
            self._reader.drain(DRAIN_SECONDS)
        self._reader.close()

    def _copied(self, batch: Batch) -> Batch:
        """The batch with images and labels copied to GPU memory of this process."""
        images, labels = [], []
        is_list = isinstance(batch.images, list)
        with self._streams.active():
            for slot, part in zip(*(batch if is_list else ([each] for each in batch)), strict=True):
                self._mapped.append(slot)
                home = self.batcher.devices[0] if self.batcher.options.gather else slot.device
                images.append(slot.clone() if slot.device == home else self._streams.to(slot, home))
                labels.append(moved_to(part, partial(self._streams.to, device=home)))
        self._streams.synchronize()
        return Batch(*((images, labels) if is_list else (images[0], labels[0])), **vars(batch))


@dataclass
class _Outcome:
    """The outcome of a step: a batch, the end, or an error; ``position`` is that of the next batch in the epoch."""

    step: Step
    position: int
    batch: Batch | None = None
    error: Exception | None = None
    events: list[Any] = field(default_factory=list)


class TorchpipeLoader:
    """The result of ``wrap_dataloader_torchpipe``. ``for images, labels in loader`` runs one epoch.

    It is its own iterator: after an early exit the next ``for`` continues where the last one stopped. After the last
    batch, call ``reset()`` to begin the next epoch; otherwise another ``for`` raises ``TrainingError``. So does
    ``set_epoch`` of the DataLoader's sampler, which the loader calls itself if the program does not. Iterate,
    ``reset`` and ``close`` on the training thread. An error is raised at the batch it belongs to, and again at every
    ``next`` until ``reset``; in "ddp" all ranks raise at the same step, the others ``PeerFailed``.
    """

    def __init__(
        self,
        dataloader: Any,
        source: Source,
        identity: dict[str, Any],
        ranks: RankGroup | None,
        batches: int | None,
    ) -> None:
        self._options = source.batcher.options
        self._planner = Planner(dataloader, self._options.seed, self._options.cpu_percentage)
        self._identity = identity  # must match that of a loaded state
        self._source, self._ranks, self._batches = source, ranks, batches
        self._batcher, self._statistics = source.batcher, source.statistics
        self.epoch = self._position = self._planned = 0
        """The current epoch, or the one that begins with the next batch; counted from 0."""
        self._order: str | None = None  # digest of the epoch's order when its first batches were returned
        self._ahead: BackgroundIterator[Any] | Generator[Any, None, None] | None = None
        self._held: _Outcome | None = None
        self._error: Exception | None = None
        self._is_over = self._is_closed = False
        self.devices: list[Any] = self._batcher.devices
        """The devices that decode images; batches are on the first one."""
        self.dataset: Any = dataloader.dataset
        """The dataset of the DataLoader."""

    def __len__(self) -> int:
        """Batches per epoch, on the rank with the most; batches that are skipped as a whole count."""
        if self._batches is None:
            raise TypeError("the DataLoader's batch sampler has no length")
        return self._batches

    def __iter__(self) -> TorchpipeLoader:
        self._take_up_chosen_epoch()
        if self._is_over:
            raise TrainingError(f"epoch {self.epoch} is over: call reset() before the next one")
        self._check_usable()
        if self._ranks is None:  # all ranks raise a sampler's error, at the first step
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
            # After Ctrl-C, the same batch is read again.
            self._error = error if isinstance(error, Exception) else None
            self._stop()
            raise
        # NOTE: after all calls, since a signal may interrupt any: only a returned batch may count as returned.
        self._position = outcome.position
        if batch is None:
            self._is_over = True
            self._stop()
            raise StopIteration
        return batch

    def reset(self, epoch: int | None = None) -> None:
        """Begin the next epoch, or ``epoch``, with the next batch; the rest of the current one is dropped.

        The next epoch is the one that the program has set by ``set_epoch`` of the sampler, if it has.
        """
        chosen = self._planner.take_chosen_epoch()
        following = self.epoch + 1 if chosen is None else chosen
        self._go_to(following if epoch is None else epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position: after the last returned batch, regardless of batches read ahead."""
        if not self._position:
            self._take_up_chosen_epoch()
        order = self._order if self._position else None
        place = {"epoch": self.epoch, "position": self._position, "order": order}
        return {"version": STATE_VERSION, **self._identity, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the remaining batches. ``TrainingError`` if the state has other data or options.

        If the sampler now produces another order (because it uses a generator unknown to the loader, for example),
        iteration raises ``TrainingError`` at its beginning.
        """
        if state.get("version") != STATE_VERSION:
            raise TrainingError(f"a loader's state of version {state.get('version')}, expected {STATE_VERSION}")
        for key, here in self._identity.items():
            if state.get(key) != here:
                raise TrainingError(f"the state was saved with {key} = {state.get(key)}, here it is {here}")
        self._go_to(int(state["epoch"]), int(state["position"]), state.get("order"))

    def stats(self) -> dict[str, Any]:
        """Counts and seconds since the loader was created.

        ``samples`` (images returned), ``batches``, ``cpu_batches`` (through ``transforms_cpu``), ``skipped`` and
        ``masked`` samples, ``filler_batches`` (masked as a whole, for a step that other ranks make). ``wait_s``: the
        training loop's time inside ``next``; ``busy_s``: its time between calls; ``stall_share``: ``wait_s`` as a share
        of both; ``samples_per_s``. ``stages_s``: ``read`` (waiting for the workers) and ``decode`` on the background
        thread, ``transform`` and ``agree`` (waiting for other ranks) inside ``wait_s``; with ``workers_decode``,
        ``decode`` (with reading) and ``transform`` are sums over the workers. ``bad``: ``count``, ``kinds``
        (unreadable, empty, corrupt), and epoch, index, name, kind and reason of the first 1000 ``samples``.
        """
        return {"epoch": self.epoch, **self._statistics.snapshot()}

    def close(self) -> None:
        """End the background thread, the workers and the pipes. Idempotent."""
        self._is_closed = True
        self._stop()
        self._source.close()
        if self._ranks is not None:
            self._ranks.close()
        self._planner.close()

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
        """Start reading, unless it has already started."""
        if self._ahead is not None:
            return
        self._take_up_chosen_epoch()
        plan = self._planner.plan(self.epoch)
        order = digest_of(plan)
        if self._position and self._order not in (None, order):
            problem = f"the sampler does not give epoch {self.epoch} in the order in which its first batches were read"
            raise TrainingError(f"{problem}; {WHY_ORDERS_DIFFER}")
        self._planned, self._order = len(plan), order
        depth = self._options.prefetch
        finished = self._source.ahead(self.epoch, plan[self._position :], min(1, depth))
        self._ahead = BackgroundIterator(finished, depth, "torchpipe-prefetch") if depth else finished

    def _take_up_chosen_epoch(self) -> None:
        """Begin the epoch that the program has set by ``set_epoch`` of a sampler since the last one was planned."""
        chosen = self._planner.take_chosen_epoch()
        if chosen is not None and self._position and not self._planned:  # a state was loaded, perhaps of an epoch's end
            self._planned = len(self._planner.plan(self.epoch))
        has_ended = self._is_over or 0 < self._planned <= self._position
        if chosen is None or (chosen == self.epoch and not has_ended):
            return
        if self._position and not has_ended:
            problem = f"the sampler was set to epoch {chosen} within epoch {self.epoch}"
            raise TrainingError(f"{problem}; reset({chosen}) begins it, without the rest of epoch {self.epoch}")
        self._go_to(chosen, 0)

    def _stop(self) -> None:
        ahead, self._ahead, self._held = self._ahead, None, None
        if ahead is not None:
            ahead.close()

    def _go_to(self, epoch: int, position: int, order: str | None = None) -> None:
        if self._is_closed:
            raise TrainingError("the loader is closed")
        self._stop()
        self.epoch, self._position, self._planned, self._order = epoch, position, 0, order
        self._error, self._is_over = None, False
        self._statistics.pause()

    def _next_outcome(self) -> _Outcome:
        outcome, self._held = self._held or self._produced(self._position), None
        if outcome.batch is not None and self._batcher.streams.are_any and getattr(self._ahead, "is_ready", False):
            # Its kernels run on the side stream, during the model's step on the batch that is returned now.
            self._held = self._produced(outcome.position)
        return outcome

    def _produced(self, position: int) -> _Outcome:
        """The next batch from ``position`` on; skipped ones are left out if there are no other ranks."""
        try:
            self._begin()
            assert self._ahead is not None
            for planned, result in self._ahead:
                batch = self._source.batch(self.epoch, planned, result)
                if batch is None and self._ranks is not None:
                    batch = self._filler(planned.number)
                position = planned.number + 1
                if batch is not None:
                    return self._given(batch, position)
        except Exception as error:
            return _Outcome(Step.FAILED, position, error=error)
        return _Outcome(Step.END, max(position, self._planned))

    def _given(self, batch: Batch, position: int) -> _Outcome:
        return _Outcome(Step.BATCH, position, batch, events=self._batcher.streams.mark())

    def _agreed(self, outcome: _Outcome) -> _Outcome:
        """Agree with all ranks: raise the error of any rank; a rank without batches gets a masked one."""
        step = outcome.step
        if self._ranks is not None:
            with self._statistics.stage("agree"):
                step = self._ranks.step(step, outcome.error)
        if outcome.error is not None:
            raise outcome.error
        if step is Step.BATCH and outcome.step is Step.END:
            return self._given(self._filler(self._position), self._position + 1)
        return outcome

    def _filler(self, number: int) -> Batch:
        self._statistics.count(filler_batches=1)
        return self._batcher.filler(self.epoch, number)

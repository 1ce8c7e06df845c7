"""From decoded samples to a batch on the device: transforms, the policy for bad samples, masks, figures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from time import perf_counter
from typing import Any

import numpy as np
import torch

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.training.decode import shares_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import BATCH, SAMPLE, PlannedBatch, forked, key_of
from torchpipe_py.training.prefetch import SideStreams, moved_to
from torchpipe_py.training.samples import WRONG, Sample, SampleReader

NO_SAMPLE = -1  # the index where no sample was planned

REMEMBERED = 1000  # bad samples named in stats(); all are counted
COUNTS = ("samples", "batches", "cpu_batches", "skipped", "masked", "filler_batches")
STAGES = ("read", "decode", "transform", "agree")


class Batch(tuple[Any, Any]):
    """``images, labels = batch``, with more to look at.

    ``images``: a Tensor N×C×H×W on the device. ``labels``: what the labels' collation made, on the device. ``mask``:
    bool N on the CPU; ``False`` where there is no sample: its image is zeros and its label ``ignore_index``.
    ``indices``: int64 N on the CPU, in the dataset; -1 where no sample was planned. ``number``: of the batch in its
    epoch. ``on_cpu``: it went through ``transforms_cpu``. In "dp" with ``gather=False`` images and labels are lists,
    by device.
    """

    number: int
    epoch: int
    on_cpu: bool
    mask: Any
    indices: Any

    def __new__(cls, images: Any, labels: Any, **facts: Any) -> Batch:
        batch = super().__new__(cls, (images, labels))
        vars(batch).update(facts)
        return batch

    def __getnewargs__(self) -> tuple[Any, Any]:
        return self[0], self[1]

    images: Any = property(itemgetter(0))
    labels: Any = property(itemgetter(1))


class Batcher:
    """Makes batches, on the thread that trains or in a worker, since transforms draw from global generators.

    ``stacked`` may be called on a thread beside it, which also uses ``aside``.

    ``trial``: a Tensor as the pipe gives it; the transforms are tried on it, and masked samples look like the outcome.
    """

    def __init__(
        self,
        options: LoaderOptions,
        devices: Sequence[Any],
        reader: SampleReader,
        statistics: LoaderStatistics,
        trial: Any,
    ) -> None:
        self.options, self.devices, self._reader, self.statistics = options, list(devices), reader, statistics
        self.streams, self.aside = SideStreams(devices), SideStreams(devices)
        self._is_gathered = options.gather or len(self.devices) == 1
        self.label: Any = None  # the last one seen: what ignored labels look like
        with self.streams.active(), forked(self.devices) as seed:
            seed(key_of(SAMPLE, options.seed))
            self.streams.adopt(trial)
            self._blank = torch.zeros_like(self._transformed(trial, "a small JPEG"), device="cpu")

    def stacked(self, planned: PlannedBatch, samples: Sequence[Sample]) -> list[Any] | None:
        """For ``batch``: the images of each share in one piece, unless transforms or an error have to come before.

        This runs where batches are decoded: on the background thread a thousand small calls do not keep the training
        loop from its next step.
        """
        if planned.on_cpu or self.options.transforms_gpu is not None or all(each.kind for each in samples):
            return None
        try:
            with self.aside.active():
                stacks = self._stacks(self._shares(samples), self.aside)
        except TrainingError:
            return None  # reported in its turn, after bad samples
        self.aside.synchronize()
        for sample in samples:
            sample.image = None  # it lives in its stack
        return stacks

    def batch(
        self, epoch: int, planned: PlannedBatch, samples: Sequence[Sample], stacks: list[Any] | None = None
    ) -> Batch | None:
        """The batch of decoded samples; ``None`` where all were bad and are skipped. ``BadSample`` under "raise"."""
        for sample in samples:
            if planned.on_cpu and isinstance(sample.image, bytes):  # without workers nobody has transformed them
                self._reader.transform(sample, epoch)
        self._look_for_bad(epoch, samples)
        with self.streams.active(), forked(self.devices) as seed:
            for sample in samples:
                if sample.image is None:
                    continue
                name = self._reader.name(sample.index)
                if planned.on_cpu:
                    sample.image = _as_image(sample.image, name)
                else:
                    self.streams.adopt(sample.image)
                    seed(sample.key(self.options.seed, epoch))
                    sample.image = self._transformed(sample.image, name)
            shares = self._shares(samples)
            kept = [sample for share in shares for sample in share]
            masked = sum(bool(sample.kind) for sample in kept)
            self.statistics.count(masked=masked, skipped=len(samples) - len(kept))
            if not kept:
                return None
            if stacks is None:
                stacks = self._stacks(shares, self.streams)
            else:
                for stack in stacks:
                    self.streams.adopt(stack)
            if self.options.transforms_batch is not None:
                for place, images in enumerate(stacks):
                    seed(key_of(BATCH, self.options.seed, epoch, planned.number))
                    stacks[place] = self._batch_transformed(images)
            if self._is_gathered:
                images, labels = stacks[0], self._labels(kept, self.devices[0])
            else:
                pairs = zip(shares, self.devices, strict=True)
                images, labels = stacks, [self._labels(share, device) for share, device in pairs if share]
        return Batch(
            images,
            labels,
            mask=torch.tensor([not _is_blank(sample) for sample in kept], dtype=torch.bool),
            indices=torch.tensor([sample.index for sample in kept], dtype=torch.int64),
            epoch=epoch,
            number=planned.number,
            on_cpu=planned.on_cpu,
        )

    def filler(self, epoch: int, number: int) -> Batch:
        """One masked sample, so that this rank makes a step while others have samples."""
        batch = self.batch(epoch, PlannedBatch(number, (), False), [Sample(NO_SAMPLE)])
        assert batch is not None
        return batch

    # -- samples --------------------------------------------------------------------------------------------------

    def _look_for_bad(self, epoch: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.label is not None:
                self.label = sample.label
            if not sample.kind:
                continue
            name = self._reader.name(sample.index)
            if sample.kind != WRONG:
                self.statistics.bad_sample(epoch, sample.index, name, sample.kind, sample.reason)
            if sample.kind == WRONG or self.options.bad_samples == "raise":
                raise sample.error(name)

    def _shares(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """The samples of each device, under "skip" without bad samples."""
        shares = shares_of(samples, len(self.devices))
        if self.options.bad_samples != "skip":
            return shares
        return [[sample for sample in share if not sample.kind] for share in shares]

    def _transformed(self, image: Any, name: str) -> Any:
        """C×H×W after ``transforms_gpu``."""
        if self.options.transforms_gpu is not None:
            image = _call(f"{name}: transforms_gpu", self.options.transforms_gpu, image)
        return _as_image(image, name)

    def _labels(self, samples: Sequence[Sample], device: Any) -> Any:
        """The collated labels on the device; of a blank sample one like it that is ignored."""
        labels = [self._ignored(sample.label) if _is_blank(sample) else sample.label for sample in samples]
        collated = _call("collate_labels", self.options.collate_labels, labels)
        return moved_to(collated, lambda tensor: self.streams.to(tensor, device))

    def _ignored(self, label: Any) -> Any:
        """A label of the same kind that is ignored; ``TypeError`` for a kind that has no such label."""
        label, index = self.label if label is None else label, self.options.ignore_index
        kind = "i" if label is None else str(getattr(label, "dtype", type(label).__name__)).removeprefix("torch.")[:1]
        if kind not in "iuf" or not isinstance(label, (int, float, np.generic, np.ndarray, torch.Tensor, type(None))):
            name = type(label).__name__
            raise TypeError(f"a label of type {name} cannot be ignored; masks need integers, floats, arrays or Tensors")
        if isinstance(label, torch.Tensor):
            return torch.full_like(label, index)
        if isinstance(label, np.ndarray):
            return np.full_like(label, index)
        return float(index) if kind == "f" else index

    # -- images ---------------------------------------------------------------------------------------------------

    def _stacks(self, shares: Sequence[Sequence[Sample]], streams: SideStreams) -> list[Any]:
        """The images of each share on its device; of all shares on the first device, unless they stay apart."""
        blank = self._blank_like([sample for share in shares for sample in share])
        stacks = []
        for share, device in zip(shares, self.devices, strict=True):
            images = [blank if sample.image is None else sample.image for sample in share]
            if images:
                # Images on the host go over in one piece; blank ones go where the others are.
                home = next((sample.image.device for sample in share if sample.image is not None), device)
                images = [image.to(home) for image in images]
                stack = torch.cat(images) if images[0].ndim == 4 else torch.stack(images)  # 1×C×H×W from a pipe
                stacks.append(streams.to(stack, device))
        if len(stacks) == 1 or not self._is_gathered:
            return stacks
        return [torch.cat([streams.to(stack, self.devices[0]) for stack in stacks])]

    def _blank_like(self, samples: Sequence[Sample]) -> Any:
        """Zeros like the images of this batch, if there is a blank one; they must be of one shape and dtype."""
        there = [sample for sample in samples if sample.image is not None]
        for sample in there:
            image, first = sample.image, there[0].image
            if (image.shape, image.dtype) != (first.shape, first.dtype):
                raise TrainingError(
                    f"the images of a batch differ: {self._reader.name(there[0].index)} is {shown_dims(first.shape)} "
                    f"of {first.dtype}, {self._reader.name(sample.index)} is {shown_dims(image.shape)} of "
                    f"{image.dtype}; end the TOML with one size (resize_h, resize_w), or crop in the transforms"
                )
        # NOTE: zeros of that size are PyTorch's parallel work, after which each of its threads spins for 10 ms.
        return torch.zeros_like(there[0].image, device="cpu") if 0 < len(there) < len(samples) else self._blank

    def _batch_transformed(self, images: Any) -> Any:
        assert self.options.transforms_batch is not None
        result = _call("transforms_batch", self.options.transforms_batch, images)
        if not isinstance(result, torch.Tensor) or len(result) != len(images):
            raise TrainingError("transforms_batch takes a Tensor NxCxHxW and gives one of the same N")
        return result


def _is_blank(sample: Sample) -> bool:
    return bool(sample.kind) or sample.index == NO_SAMPLE


def _call(what: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)``; an exception, also ``StopIteration``, becomes a ``TrainingError`` that says whose."""
    try:
        return function(argument)
    except Exception as error:
        raise TrainingError(f"{what} raised {type(error).__name__}: {error}") from error


def _as_image(image: Any, name: str) -> Any:
    if not isinstance(image, torch.Tensor):
        raise TrainingError(f"{name}: the transforms must give a Tensor, got {type(image).__name__}")
    if image.ndim == 4 and image.shape[0] == 1:
        image = image[0]
    if image.ndim != 3:
        raise TrainingError(f"{name}: the transforms must give a Tensor CxHxW, got {shown_dims(image.shape)}")
    return image


Figures = tuple[Counter[str], Counter[str], list[dict[str, Any]]]


class LoaderStatistics:
    """Counts and seconds since the loader was made; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Any = Counter()  # of COUNTS, and seconds
        self._kinds: Counter[str] = Counter()  # of bad samples
        self._bad: list[dict[str, Any]] = []
        self._returned: float | None = None

    def count(self, **numbers: int) -> None:
        """Add to counts by name."""
        with self._lock:
            self._sums.update(numbers)

    def bad_sample(self, epoch: int, index: int, name: str, kind: str, reason: str) -> None:
        """One more sample without an image."""
        bad = {"epoch": epoch, "index": index, "name": name, "kind": kind, "reason": reason}
        self.add((Counter(), Counter([kind]), [bad]))

    def taken(self) -> Figures:
        """For ``add`` in another process: all that was counted, after which it begins anew."""
        figures = self._sums, self._kinds, self._bad
        self._sums, self._kinds, self._bad = Counter(), Counter(), []
        return figures

    def add(self, figures: Figures) -> None:
        """What a worker has ``taken``."""
        sums, kinds, bad = figures
        with self._lock:
            self._sums.update(sums)
            self._kinds.update(kinds)
            self._bad += bad[: REMEMBERED - len(self._bad)]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Seconds spent inside go to ``name``."""
        began = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._sums[name] += perf_counter() - began

    @contextmanager
    def consumer_waits(self) -> Iterator[None]:
        """The training loop is inside the loader; what lies between two of these is its own work."""
        began = perf_counter()
        if self._returned is not None:
            self._sums["busy"] += began - self._returned
        with self.stage("wait"):
            try:
                yield
            finally:
                self._returned = perf_counter()

    def pause(self) -> None:
        """What the training program does until the next batch is not a step: validation, say."""
        self._returned = None

    def snapshot(self) -> dict[str, Any]:
        """See ``TorchpipeLoader.stats``."""
        with self._lock:
            sums = self._sums
            loop = float(sums["wait"] + sums["busy"])
            return {
                **{name: sums[name] for name in COUNTS},
                "wait_s": float(sums["wait"]),
                "busy_s": float(sums["busy"]),
                "stall_share": sums["wait"] / loop if loop else 0.0,
                "samples_per_s": sums["samples"] / loop if loop else 0.0,
                "stages_s": {name: float(sums[name]) for name in STAGES},
                "bad": {"count": self._kinds.total(), "kinds": dict(self._kinds), "samples": list(self._bad)},
            }

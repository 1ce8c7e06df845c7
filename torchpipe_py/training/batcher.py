"""Turns decoded samples into a batch on the device: transforms, the policy for bad samples, masks, statistics."""

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
from torchpipe_py.errors import counted
from torchpipe_py.training.augment import takes_seeds
from torchpipe_py.training.data import reads_floats_as_0_to_1
from torchpipe_py.training.decode import TRIAL, shares_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import BATCH, SAMPLE, PlannedBatch, forked, key_of
from torchpipe_py.training.prefetch import SideStreams, moved_to
from torchpipe_py.training.samples import WRONG, Sample, SampleReader

NO_SAMPLE = -1  # the index if no sample was planned

REMEMBERED = 1000  # maximum number of bad samples listed in stats(); all are counted
COUNTS = ("samples", "batches", "cpu_batches", "skipped", "masked", "filler_batches")
STAGES = ("read", "decode", "transform", "agree")


class Batch(tuple[Any, Any]):
    """``images, labels = batch``, with further attributes.

    ``images``: a Tensor N×C×H×W on the device. ``labels``: the collated labels, on the device. ``mask``: bool N on the
    CPU; ``False`` for a missing sample: its image is zeros and its label ``ignore_index``. ``indices``: int64 N on the
    CPU, positions in the dataset; -1 if no sample was planned. ``number``: of the batch in its epoch. ``on_cpu``: it
    was processed by ``transforms_cpu``. In "dp" with ``gather=False`` images and labels are lists, by device.
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

    @property
    def filler(self) -> bool:
        return not self.mask.any()


class Batcher:
    """Creates batches, on the training thread or in a worker, since transforms draw from global generators.

    ``stacked`` may be called on another thread at the same time, which also uses ``aside``.

    ``trial``: a Tensor as the pipe outputs it; the transforms are tried on it, and masked samples copy its outcome.
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
        self._gives_seeds = takes_seeds(options.transforms_batch)
        self.label: Any = None  # the last one seen, a template for ignored labels
        self._rounds = reads_floats_as_0_to_1(options.transforms_gpu)
        with self.streams.active(), forked(self.devices) as seed:
            seed(key_of(SAMPLE, options.seed))
            self.streams.adopt(trial)
            self._blank = torch.zeros_like(self._transformed(trial, TRIAL), device="cpu")

    def stacked(self, planned: PlannedBatch, samples: Sequence[Sample]) -> list[Any] | None:
        """The images of each share as one Tensor for ``batch``, or ``None`` if transforms or an error come first.

        This runs on the background thread that decodes, so that its many small calls do not delay the training loop.
        """
        if planned.on_cpu or self.options.transforms_gpu is not None or all(each.kind for each in samples):
            return None
        try:
            with self.aside.active():
                stacks = self._stacks(self._shares(samples), self.aside)
        except TrainingError:
            return None  # reported later, after bad samples
        self.aside.synchronize()
        for sample in samples:
            sample.image = None  # the stack now holds the image
        return stacks

    def batch(
        self, epoch: int, planned: PlannedBatch, samples: Sequence[Sample], stacks: list[Any] | None = None
    ) -> Batch | None:
        """The batch of decoded samples; ``None`` if all were bad and are skipped. ``BadSample`` under "raise"."""
        for sample in samples:
            if planned.on_cpu and isinstance(sample.image, bytes):  # without workers they are not transformed yet
                self._reader.transform(sample, epoch)
        self._look_for_bad(epoch, samples)
        with self.streams.active(), forked(self.devices) as seed:
            for sample in samples:
                if sample.image is None:
                    continue
                name = self._reader.name(sample.index)
                if planned.on_cpu:
                    sample.image = _as_image(sample.image, name)
                    found, expected = (counted(len(image), "channel") for image in (sample.image, self._blank))
                    if found != expected:
                        raise TrainingError(
                            f"{name}: transforms_cpu gives {found}, the images of the pipe have {expected}"
                        )
                else:
                    self.streams.adopt(sample.image)
                    seed(sample.key(self.options.seed, epoch))
                    sample.image = self._transformed(sample.image, name)
            shares = self._shares(samples)
            remaining = [sample for share in shares for sample in share]
            masked = sum(bool(sample.kind) for sample in remaining)
            self.statistics.count(masked=masked, skipped=len(samples) - len(remaining))
            if not remaining:
                return None
            if stacks is None:
                stacks = self._stacks(shares, self.streams)
            else:
                for stack in stacks:
                    self.streams.adopt(stack)
            stacked = [remaining] if self._is_gathered else [share for share in shares if share]
            if self.options.transforms_batch is not None:
                for place, share in enumerate(stacked):
                    seed(key_of(BATCH, self.options.seed, epoch, planned.number))
                    stacks[place] = self._batch_transformed(stacks[place], share, epoch)
            if self._is_gathered:
                images, labels = stacks[0], self._labels(remaining, self.devices[0])
            else:
                pairs = zip(shares, self.devices, strict=True)
                images, labels = stacks, [self._labels(share, device) for share, device in pairs if share]
        return Batch(
            images,
            labels,
            mask=torch.tensor([not _is_blank(sample) for sample in remaining], dtype=torch.bool),
            indices=torch.tensor([sample.index for sample in remaining], dtype=torch.int64),
            epoch=epoch,
            number=planned.number,
            on_cpu=planned.on_cpu,
        )

    def filler(self, epoch: int, number: int) -> Batch:
        """A batch of one masked sample, so that this rank makes a step while others have samples."""
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
            if self._rounds and image.is_floating_point():
                image = image.round().clamp_(0, 255).to(torch.uint8)
            image = _call(f"{name}: transforms_gpu", self.options.transforms_gpu, image)
        return _as_image(image, name)

    def _labels(self, samples: Sequence[Sample], device: Any) -> Any:
        """The collated labels on the device; a blank sample gets a label of the same kind that is ignored."""
        labels = [self._ignored(sample.label) if _is_blank(sample) else sample.label for sample in samples]
        collated = _call("collate_labels", self.options.collate_labels, labels)
        return moved_to(collated, lambda tensor: self.streams.to(tensor, device))

    def _ignored(self, label: Any) -> Any:
        """An ignored label of the same kind; ``TypeError`` for a kind without one."""
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
        """The images of each share on its device; all on the first device if they are gathered."""
        blank = self._blank_like([sample for share in shares for sample in share])
        stacks = []
        for share, device in zip(shares, self.devices, strict=True):
            images = [blank if sample.image is None else sample.image for sample in share]
            if images:
                # Copy images on the host in one piece; put blank ones where the others are.
                home = next((sample.image.device for sample in share if sample.image is not None), device)
                images = [image.to(home) for image in images]
                stack = torch.cat(images) if images[0].ndim == 4 else torch.stack(images)  # 1×C×H×W from a pipe
                stacks.append(streams.to(stack, device))
        if len(stacks) == 1 or not self._is_gathered:
            return stacks
        return [torch.cat([streams.to(stack, self.devices[0]) for stack in stacks])]

    def _blank_like(self, samples: Sequence[Sample]) -> Any:
        """Zeros like the images of this batch, if any is blank; all images must have one shape and dtype."""
        present = [sample for sample in samples if sample.image is not None]
        for sample in present:
            image, first = sample.image, present[0].image
            if (image.shape, image.dtype) != (first.shape, first.dtype):
                raise TrainingError(
                    f"the images of a batch differ: {self._reader.name(present[0].index)} is {shown_dims(first.shape)} "
                    f"of {first.dtype}, {self._reader.name(sample.index)} is {shown_dims(image.shape)} of "
                    f"{image.dtype}; end the TOML with one size (resize_h, resize_w), or crop in the transforms"
                )
        # NOTE: PyTorch fills so many zeros in parallel, and then each of its threads spins for 10 ms.
        return torch.zeros_like(present[0].image, device="cpu") if 0 < len(present) < len(samples) else self._blank

    def _batch_transformed(self, images: Any, samples: Sequence[Sample], epoch: int) -> Any:
        assert self.options.transforms_batch is not None
        seeds = {}
        if self._gives_seeds:
            keys = [sample.key(self.options.seed, epoch) for sample in samples]
            seeds["seeds"] = torch.tensor(keys, dtype=torch.int64)
        result = _call("transforms_batch", self.options.transforms_batch, images, **seeds)
        if not isinstance(result, torch.Tensor) or len(result) != len(images):
            raise TrainingError("transforms_batch takes a Tensor NxCxHxW and gives one of the same N")
        return result


def _is_blank(sample: Sample) -> bool:
    return bool(sample.kind) or sample.index == NO_SAMPLE


def _call(what: str, function: Callable[..., Any], argument: Any, **options: Any) -> Any:
    """Call the function; any exception, even ``StopIteration``, becomes a ``TrainingError`` that names it."""
    try:
        return function(argument, **options)
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
    """Counts and seconds since the loader was created; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Any = Counter()  # of COUNTS, and seconds
        self._kinds: Counter[str] = Counter()  # kinds of bad samples
        self._bad: list[dict[str, Any]] = []
        self._returned: float | None = None

    def count(self, **numbers: int) -> None:
        """Add to counts by name."""
        with self._lock:
            self._sums.update(numbers)

    def bad_sample(self, epoch: int, index: int, name: str, kind: str, reason: str) -> None:
        """Record a sample without an image."""
        bad = {"epoch": epoch, "index": index, "name": name, "kind": kind, "reason": reason}
        self.add((Counter(), Counter([kind]), [bad]))

    def taken(self) -> Figures:
        """Return all counts, for ``add`` in another process, and reset them."""
        figures = self._sums, self._kinds, self._bad
        self._sums, self._kinds, self._bad = Counter(), Counter(), []
        return figures

    def add(self, figures: Figures) -> None:
        """Add the counts that a worker has ``taken``."""
        sums, kinds, bad = figures
        with self._lock:
            self._sums.update(sums)
            self._kinds.update(kinds)
            self._bad += bad[: REMEMBERED - len(self._bad)]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context whose time is added to stage ``name``."""
        began = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._sums[name] += perf_counter() - began

    @contextmanager
    def consumer_waits(self) -> Iterator[None]:
        """A context in which the training loop waits for the loader; the time between two of these is its own work."""
        began = perf_counter()
        if self._returned is not None:
            self._sums["busy"] += began - self._returned
        with self.stage("wait"):
            try:
                yield
            finally:
                self._returned = perf_counter()

    def pause(self) -> None:
        """Do not count the time until the next batch as a step, for example during validation."""
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

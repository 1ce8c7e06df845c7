"""From decoded samples to a batch on the device: transforms, the policy for bad samples, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.training.batches.batch import Batch, ignored_label
from torchpipe_py.training.batches.decoder import shares_of
from torchpipe_py.training.batches.sample import WRONG, Sample, SampleReader
from torchpipe_py.training.batches.statistics import LoaderStatistics
from torchpipe_py.training.data.planner import PlannedBatch
from torchpipe_py.training.data.randomness import BATCH, SAMPLE, forked, key_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.prefetch.cuda import SideStreams, moved_to


class DecodedBatch(NamedTuple):
    """The samples of a batch, decoded; ``images``: already in one piece, as ``Batcher.stacked`` gives them."""

    planned: PlannedBatch
    samples: list[Sample]
    images: list[Any] | None = None


STACKED = "in the batch's images"  # in the place of an image that was copied there
NOBODY = -1  # the index of a sample that was not planned


class Batcher:
    """Makes batches, on the thread that trains or in a worker, since transforms draw from global generators.

    ``stacked`` may be called on a thread beside it.

    ``trial``: a Tensor as the pipe gives it; the transforms are tried on it, and masked samples look like the outcome.
    """

    def __init__(
        self,
        options: LoaderOptions,
        devices: Sequence[Any],
        reader: SampleReader,
        name_of: Callable[[int], str],
        statistics: LoaderStatistics,
        trial: Any,
    ) -> None:
        self._options, self._devices, self._reader, self._name_of = options, list(devices), reader, name_of
        self._statistics = statistics
        self.streams = SideStreams(devices)
        self._aside = SideStreams(devices)  # of the background thread
        self.label: Any = None  # the last one seen: what ignored labels look like
        with self.streams.active(), forked(self._devices) as fork:
            fork.seed(key_of(SAMPLE, options.seed))
            self.streams.adopt(trial)
            self._blank = torch.zeros_like(self._transformed(trial, "a small JPEG"), device="cpu")

    def stacked(self, planned: PlannedBatch, samples: list[Sample]) -> DecodedBatch:
        """The batch with the images of each share in one piece, unless that has to wait for transforms or an error.

        It is done where batches are decoded: on the background thread a thousand small calls do not keep the training
        loop from its next step.
        """
        decoded = DecodedBatch(planned, samples)
        if self._options.transforms_gpu is not None or not any(sample.image is not None for sample in samples):
            return decoded
        shares = self._kept(shares_of(samples, len(self._devices)))
        try:
            with self._aside.active():
                images = self._images([sample for share in shares for sample in share], shares, self._aside)
        except TrainingError:
            return decoded  # told in its turn, after bad samples
        self._aside.synchronize()
        samples = [sample if sample.image is None else sample.with_image(STACKED) for sample in samples]
        return DecodedBatch(planned, samples, images)

    def batch(self, epoch: int, decoded: DecodedBatch) -> Batch | None:
        """The batch; ``None`` where every sample was bad and is skipped. ``BadSample`` under "raise"."""
        planned, samples, images = decoded
        if planned.on_cpu:  # without workers nobody has transformed them
            samples = [
                self._reader.transformed(sample, epoch) if isinstance(sample.image, bytes) else sample
                for sample in samples
            ]
        self._look_for_bad(epoch, samples)
        with self.streams.active(), forked(self._devices) as fork:
            if images is None:
                samples = [self._on_device(sample, planned, epoch, fork.seed) for sample in samples]
            shares = self._kept(shares_of(samples, len(self._devices)))
            kept = [sample for share in shares for sample in share]
            self._statistics.count(
                masked=sum(sample.image is None for sample in kept), skipped=len(samples) - len(kept)
            )
            if not kept:
                return None
            if images is None:
                images = self._images(kept, shares, self.streams)
            else:
                for stack in images:
                    self.streams.adopt(stack)
            return self._joined(kept, shares, images, planned, epoch, fork.seed)

    def relabelled(self, batch: Batch) -> Batch:
        """A batch without any sample, its labels like those seen here; whoever made it had seen none."""
        if self.label is None:
            return batch
        ignored = ignored_label(self.label, self._options.ignore_index)
        is_list = isinstance(batch.images, list)
        with self.streams.active():
            parts = batch.images if is_list else [batch.images]
            labels = [self._collated([ignored] * len(part), part.device) for part in parts]
        return batch.with_parts(batch.images, labels if is_list else labels[0])

    def filler(self, epoch: int, number: int) -> Batch:
        """One masked sample, so that this rank makes a step while others have samples."""
        nothing = [Sample(NOBODY)]
        shares = shares_of(nothing, len(self._devices))
        with self.streams.active(), forked(self._devices) as fork:
            images = self._images(nothing, shares, self.streams)
            return self._joined(nothing, shares, images, PlannedBatch(number, (), False), epoch, fork.seed)

    # -- samples --------------------------------------------------------------------------------------------------

    def _look_for_bad(self, epoch: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.label is not None:
                self.label = sample.label
            if not sample.kind:
                continue
            name = self._name_of(sample.index)
            if sample.kind != WRONG:
                self._statistics.bad_sample(epoch, sample.index, name, sample.kind, sample.reason)
            if sample.kind == WRONG or self._options.bad_samples == "raise":
                raise sample.error(name)

    def _on_device(self, sample: Sample, planned: PlannedBatch, epoch: int, seed: Callable[[int], None]) -> Sample:
        if sample.image is None:
            return sample
        if planned.on_cpu:
            return sample.with_image(_as_image(sample.image, self._name_of(sample.index)))
        self.streams.adopt(sample.image)
        seed(sample.key(self._options.seed, epoch))
        return sample.with_image(self._transformed(sample.image, self._name_of(sample.index)))

    def _kept(self, shares: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        """The shares, under "skip" without bad samples."""
        if self._options.bad_samples != "skip":
            return shares
        return [[sample for sample in share if sample.image is not None] for share in shares]

    def _transformed(self, image: Any, name: str) -> Any:
        """C×H×W after ``transforms_gpu``."""
        if self._options.transforms_gpu is not None:
            image = _call(f"{name}: transforms_gpu", self._options.transforms_gpu, image)
        return _as_image(image, name)

    # -- batches --------------------------------------------------------------------------------------------------

    def _joined(
        self,
        kept: Sequence[Sample],
        shares: Sequence[Sequence[Sample]],
        images: Any,
        planned: PlannedBatch,
        epoch: int,
        seed: Callable[[int], None],
    ) -> Batch:
        if self._options.transforms_batch is not None:
            key = key_of(BATCH, self._options.seed, epoch, planned.number)
            images = [self._batch_transformed(stack, seed, key) for stack in images]
        collated: Any
        if not self._options.gather and len(self._devices) > 1:
            collated = [
                self._collated([self._label(sample) for sample in share], device)
                for share, device in zip(shares, self._devices, strict=True)
                if share
            ]
        else:
            (images,) = images
            collated = self._collated([self._label(sample) for sample in kept], self._devices[0])
        return Batch(
            images,
            collated,
            mask=torch.tensor([sample.image is not None for sample in kept], dtype=torch.bool),
            indices=torch.tensor([sample.index for sample in kept], dtype=torch.int64),
            epoch=epoch,
            number=planned.number,
            on_cpu=planned.on_cpu,
        )

    def _label(self, sample: Sample) -> Any:
        """The sample's own; without an image, one like it that is ignored."""
        if sample.image is not None:
            return sample.label
        return ignored_label(self.label if sample.label is None else sample.label, self._options.ignore_index)

    def _images(self, kept: Sequence[Sample], shares: Sequence[Sequence[Sample]], streams: SideStreams) -> list[Any]:
        """The images of each share on its device; of all shares on the first device, unless they stay apart."""
        blank = self._blank_like(kept)
        stacks = []
        for share, device in zip(shares, self._devices, strict=True):
            images = [blank if sample.image is None else sample.image for sample in share]
            if images:
                # Images on the host go over in one piece; blank ones go where the others are.
                home = next((sample.image.device for sample in share if sample.image is not None), device)
                stacks.append(streams.to(_in_one([image.to(home) for image in images]), device))
        if len(stacks) == 1 or not self._options.gather:
            return stacks
        return [torch.cat([streams.to(stack, self._devices[0]) for stack in stacks])]

    def _blank_like(self, kept: Sequence[Sample]) -> Any:
        """Zeros like the images of this batch, if there is a blank one; they must be of one shape and dtype."""
        first: Sample | None = None
        is_any_blank = False
        for sample in kept:
            image = sample.image
            if image is None:
                is_any_blank = True
                continue
            first = first or sample
            if (image.shape, image.dtype) != (first.image.shape, first.image.dtype):
                raise TrainingError(
                    f"the images of a batch differ: {self._name_of(first.index)} is {shown_dims(first.image.shape)} "
                    f"of {first.image.dtype}, {self._name_of(sample.index)} is {shown_dims(image.shape)} of "
                    f"{image.dtype}; end the TOML with one size (resize_h, resize_w), or crop in the transforms"
                )
        # NOTE: zeros of that size are PyTorch's parallel work, after which each of its threads spins for 10 ms.
        return torch.zeros_like(first.image, device="cpu") if first is not None and is_any_blank else self._blank

    def _batch_transformed(self, images: Any, seed: Callable[[int], None], key: int) -> Any:
        assert self._options.transforms_batch is not None
        seed(key)
        result = _call("transforms_batch", self._options.transforms_batch, images)
        if not isinstance(result, torch.Tensor) or len(result) != len(images):
            raise TrainingError("transforms_batch takes a Tensor NxCxHxW and gives one of the same N")
        return result

    def _collated(self, labels: list[Any], device: Any) -> Any:
        collated = _call("collate_labels", self._options.collate_labels, labels)
        return moved_to(collated, lambda tensor: self.streams.to(tensor, device))


def _call(what: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)``; an exception, also ``StopIteration``, becomes a ``TrainingError`` that says whose."""
    try:
        return function(argument)
    except Exception as error:
        raise TrainingError(f"{what} raised {type(error).__name__}: {error}") from error


def _in_one(images: list[Any]) -> Any:
    """N×C×H×W from images of one shape, C×H×W, or 1×C×H×W as pipes give them."""
    return torch.cat(images) if images[0].ndim == 4 else torch.stack(images)


def _as_image(image: Any, name: str) -> Any:
    if not isinstance(image, torch.Tensor):
        raise TrainingError(f"{name}: the transforms must give a Tensor, got {type(image).__name__}")
    if image.ndim == 4 and image.shape[0] == 1:
        image = image[0]
    if image.ndim != 3:
        raise TrainingError(f"{name}: the transforms must give a Tensor CxHxW, got {shown_dims(image.shape)}")
    return image

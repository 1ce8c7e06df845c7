"""Pairs of images from DALI, an input and its target, for a restoration: cropped and flipped alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.dali.errors import dali, explained
from recipes.dali.pipeline import checked, dali_seed
from torchpipe_py.backends.image.files import find_images
from torchpipe_py.training import TrainingError

Pairs = list[tuple[Path, Path]]

ROTATED = range(5, 9)
"""EXIF orientations that exchange the sides of an image; DALI applies them."""


@dataclass(frozen=True)
class PairOptions:
    """Options of a loader of pairs.

    ``crop``: both sides of the crop in pixels, from images that are first resized to the height ``resize``, if set.
    ``is_training``: shuffled anew in each epoch, cropped anywhere, flipped in either direction; otherwise in their
    order, cropped in the middle. ``decode``: "cpu", all but the last copy on the CPU, or "gpu", all but reading there.
    """

    crop: int
    batch_size: int
    is_training: bool
    resize: int | None = None
    decode: str = "cpu"
    threads: int = 2
    seed: int = 0
    prefetch: int = 2


def find_pairs(folder: Path, inputs: str, targets: str) -> Pairs:
    """Pairs of images of ``folder/inputs`` and ``folder/targets`` with the same path except for the suffix.

    ``TrainingError`` for an image without a partner, or two images that differ only in their suffix.
    """
    sides = []
    for name in (inputs, targets):
        root = folder / name
        side: dict[Path, Path] = {}
        try:
            for path in sorted(find_images(root)):
                other = side.setdefault(path.relative_to(root).with_suffix(""), path)
                if other != path:
                    raise TrainingError(
                        f"{other} and {path.name}: a pair has one image of a name; rename or remove one"
                    )
        except OSError as error:
            raise TrainingError(str(error)) from error
        sides.append(side)
    names = sorted(sides[0].keys() | sides[1].keys())
    alone = [
        (name, inputs if name in sides[0] else targets) for name in names if not all(name in side for side in sides)
    ]
    if alone:
        counts = f"{len(sides[0])} in {inputs}/, {len(sides[1])} in {targets}/"
        raise TrainingError(f"{folder}: {counts}; {len(alone)} without another, first {alone[0][0]}, in {alone[0][1]}/")
    return [(sides[0][name], sides[1][name]) for name in names]


def check_pairs(pairs: Pairs, options: PairOptions) -> None:
    """Raise ``TrainingError`` for a pair of different sizes, an image smaller than the crop, or an invalid image."""
    for paths in pairs:
        (width, height), other = map(_size_of, paths)
        if (width, height) != other:
            raise TrainingError(f"{paths[0]}: {width}x{height}, its target {paths[1]} is {other[0]}x{other[1]}")
        if options.resize is not None:
            width, height = int(width * options.resize / height), options.resize
        if min(width, height) < options.crop:
            resized = "" if options.resize is None else " after --resize"
            raise TrainingError(f"{paths[0]}: {width}x{height}{resized} is smaller than --crop {options.crop}")


def _size_of(path: Path) -> tuple[int, int]:
    """Width and height, from the file's head."""
    from PIL import ExifTags, Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow does not decode it
            with Image.open(path) as image:
                width, height = image.size
                # NOTE: without this chunk, Pillow would decode all pixels of a PNG to look for another one.
                is_turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in ROTATED
    except Image.DecompressionBombError as error:
        raise TrainingError(f"{path}: too large an image ({error})") from error
    except OSError as error:  # Pillow's UnidentifiedImageError is one
        raise TrainingError(f"{path}: not an image that can be read ({error})") from error
    return (height, width) if is_turned else (width, height)


class PairSource:
    """Called by DALI for each sample, with its place in the epoch: the encoded bytes of input and target.

    It has no state: the order of an epoch follows from ``seed`` and the epoch's number, so DALI's checkpoints cover it.
    After the last pair it gives that again, to fill the batch.
    """

    def __init__(self, pairs: Pairs, batch_size: int, seed: int | None) -> None:
        self._pairs, self._batches = pairs, -(-len(pairs) // batch_size)
        self._seed = seed
        self._order = lru_cache(2)(self._shuffled)

    def __call__(self, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        if sample.iteration >= self._batches:
            raise StopIteration
        last = len(self._pairs) - 1
        position = self._order(sample.epoch_idx)[min(sample.idx_in_epoch, last)]
        source, target = (np.fromfile(path, dtype=np.uint8) for path in self._pairs[position])
        return source, target

    def _shuffled(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self._pairs))
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._pairs)).tolist()
        return order


class PairLoader:
    """``for inputs, targets in loader``: one epoch of float32 N×3×crop×crop, -1 to 1, on ``device``.

    The last batch may be smaller. An epoch resets itself at its end: the next ``for`` is the next epoch. A state
    continues with exactly the next batch. ``TrainingError`` as ``check_pairs``, without DALI, for an image that cannot
    be decoded, for a state of other pairs or options, and for ``decode="gpu"`` without a CUDA device.
    """

    def __init__(self, pairs: Pairs, device: torch.device, options: PairOptions) -> None:
        dali(".fn")
        if options.decode == "gpu" and device.type != "cuda":
            raise TrainingError(f"--decode gpu needs a CUDA device, and this is {device}; --decode cpu works")
        check_pairs(pairs, options)
        self.pairs, self._device, self._options = pairs, device, options
        self._iterator: Any = self._open(None)

    def __len__(self) -> int:
        return -(-len(self.pairs) // self._options.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        try:
            for (outputs,) in self._iterator:
                yield outputs["inputs"], outputs["targets"]
        except RuntimeError as error:
            names = [(str(path), path.read_bytes) for pair in self.pairs for path in pair]
            raise explained(error, names) from error

    def state_dict(self) -> dict[str, Any]:
        checkpoint = torch.frombuffer(bytearray(self._iterator.checkpoints()[0]), dtype=torch.uint8)
        return {**self._identity(), "pipeline": checkpoint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise TrainingError(f"the state was saved with {key} = {state.get(key)}, here it is {here}")
        self._iterator = None  # and its threads, before there are others
        self._iterator = self._open(state["pipeline"].numpy().tobytes())

    def close(self) -> None:
        """End DALI's threads. Idempotent."""
        self._iterator = None

    def __enter__(self) -> PairLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, checkpoint: bytes | None) -> Any:
        policies = dali(".plugin.base_iterator").LastBatchPolicy
        try:
            pipeline = _make_pipeline(self.pairs, self._options, self._device, checkpoint)
            with warnings.catch_warnings():
                # NOTE: DALI warns of a given size wherever it is not that of a reader, which these pairs do not have.
                warnings.filterwarnings("ignore", "Please set `reader_name`")
                return dali(".plugin.pytorch").DALIGenericIterator(
                    [pipeline],
                    ["inputs", "targets"],
                    size=len(self.pairs),
                    last_batch_padded=True,
                    last_batch_policy=policies.PARTIAL,
                    auto_reset=True,
                    prepare_first_batch=False,
                )
        except RuntimeError as error:
            raise explained(error, ()) from error

    def _identity(self) -> dict[str, Any]:
        same = ("crop", "resize", "decode", "batch_size", "seed")
        options = {name: getattr(self._options, name) for name in same}
        return {"loader": f"DALI {dali().__version__}, pairs", "pairs": len(self.pairs), **options}


def _make_pipeline(pairs: Pairs, options: PairOptions, device: torch.device, checkpoint: bytes | None) -> Any:
    fn = dali(".fn")
    seed = dali_seed(options.seed)
    source = PairSource(pairs, options.batch_size, seed if options.is_training else None)
    on_gpu = device.type == "cuda"

    def graph() -> tuple[Any, Any]:
        encoded = fn.external_source(source=source, num_outputs=2, batch=False)
        position: tuple[Any, Any] = (0.5, 0.5)
        flips: tuple[Any, Any] = (0, 0)
        if options.is_training:
            position = fn.random.uniform(range=[0.0, 1.0]), fn.random.uniform(range=[0.0, 1.0])
            flips = fn.random.coin_flip(), fn.random.coin_flip()
        inputs, targets = (_transformed(images, options, position, flips) for images in encoded)
        return (inputs.gpu(), targets.gpu()) if on_gpu and options.decode == "cpu" else (inputs, targets)

    pipeline = dali().pipeline_def(graph)(
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=device.index if on_gpu else None,
        seed=seed,
        prefetch_queue_depth=options.prefetch,
        enable_checkpointing=True,
        checkpoint=checkpoint,
    )
    pipeline.build()
    return pipeline


def _transformed(encoded: Any, options: PairOptions, position: tuple[Any, Any], flips: tuple[Any, Any]) -> Any:
    """The image cropped and flipped; alike for both of a pair, since position and flips are the same."""
    fn = dali(".fn")
    where = "mixed" if options.decode == "gpu" else "cpu"
    images = fn.decoders.image(checked(encoded), device=where, output_type=dali(".types").RGB)
    if options.resize is not None:
        images = fn.resize(images, resize_y=options.resize)
    side = options.crop
    images = fn.crop(images, crop=(side, side), crop_pos_x=position[0], crop_pos_y=position[1])
    images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
    return fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1

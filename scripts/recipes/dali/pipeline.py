"""DALI's graphs for training and validation, and CutOut, which DALI lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes import augmentation
from recipes.dali.errors import dali
from recipes.data import MEAN, STD

READER = "reader"
"""The name of the reading operator, from which DALI's iterator gets the length of an epoch."""


@dataclass(frozen=True)
class DaliOptions:
    """Options of a loader by DALI.

    ``size``: both sides in pixels. ``decode``: "cpu", all but the last copy on the CPU, or "gpu", all but reading on
    the GPU. ``is_training``: shuffled, flipped at random, ``augments`` (of ``augmentation.AUGMENTS``) applied, an
    incomplete last batch left out; otherwise images in their order, each once. ``hardware_share``: of a batch's images
    that the GPU's JPEG engines decode, 0 to 1 (DALI's own choice: 0.65). ``prefetch``: batches made ahead. ``rank`` of
    ``ranks``: with several, each reads its part. ``unchecked``: decode without parsing the heads of a batch first, for
    files that are known to be images; DALI 2.4 may crash at one that is not.
    """

    size: int
    batch_size: int
    decode: str
    is_training: bool
    threads: int = 2
    seed: int = 0
    augments: tuple[str, ...] = ()
    hardware_share: float | None = None
    prefetch: int = 2
    rank: int = 0
    ranks: int = 1
    unchecked: bool = False


def make_pipeline(reader: Any, options: DaliOptions, device: torch.device, checkpoint: bytes | None = None) -> Any:
    """The built pipeline: float32 N×3×size×size, normalised, on ``device``, then the ``reader``'s outputs.

    It continues from ``checkpoint``. DALI raises ``RuntimeError`` if it cannot be built.
    """
    images_of = _training_images if options.is_training else _validation_images

    def graph() -> tuple[Any, ...]:
        encoded, *facts = reader.nodes()
        images = images_of(encoded, options)
        is_elsewhere = device.type == "cuda" and options.decode == "cpu"
        return (images.gpu() if is_elsewhere else images, *facts)

    pipeline = dali().pipeline_def(graph)(
        batch_size=options.batch_size,
        num_threads=options.threads,
        device_id=device.index if device.type == "cuda" else None,
        seed=dali_seed(options.seed + options.rank),
        prefetch_queue_depth=options.prefetch,
        enable_checkpointing=True,
        checkpoint=checkpoint,
    )
    pipeline.build()
    return pipeline


def dali_seed(seed: int) -> int:
    """``seed`` for DALI, which would draw a random one for -1."""
    return seed % 2**31


def _validation_images(encoded: Any, options: DaliOptions) -> Any:
    images = _resized(_decoded(encoded, options), options.size)
    return _normalised(images, mirror=0)


def _training_images(encoded: Any, options: DaliOptions) -> Any:
    """Training images, augmented in the order and with the numbers of ``recipes.augmentation``."""
    fn = dali(".fn")
    size, uniform = options.size, fn.random.uniform
    images = _decoded(encoded, options)
    if "crop" in options.augments:
        images = _resized(images, augmentation.enlarged(size))
        angle = uniform(range=[-augmentation.ROTATION, augmentation.ROTATION])
        images = fn.rotate(images, angle=angle, keep_size=True, fill_value=0)
        images = fn.random_resized_crop(
            images,
            size=[size, size],
            random_area=list(augmentation.AREA),
            random_aspect_ratio=list(augmentation.ASPECT_RATIO),
            antialias=False,
        )
    else:
        images = _resized(images, size)
    if "color" in options.augments:
        images = fn.color_twist(
            images,
            brightness=uniform(range=_around_one(augmentation.BRIGHTNESS)),
            contrast=uniform(range=_around_one(augmentation.CONTRAST)),
            saturation=uniform(range=_around_one(augmentation.SATURATION)),
            hue=uniform(range=[-360 * augmentation.HUE, 360 * augmentation.HUE]),
        )
    if "cutout" in options.augments:
        images = _cut_out(images, on_gpu=options.decode == "gpu")
    if "gridmask" in options.augments:
        tile = max(1, int(size * augmentation.TILE))
        images = fn.grid_mask(
            images,
            tile=tile,
            ratio=uniform(range=list(augmentation.TILE_RATIO)),
            shift_x=uniform(range=[0.0, float(tile)]),
            shift_y=uniform(range=[0.0, float(tile)]),
        )
    return _normalised(images, mirror=fn.random.coin_flip())


def _decoded(encoded: Any, options: DaliOptions) -> Any:
    """RGB images, uint8 H×W×3; on the GPU where ``options.decode`` is "gpu"."""
    share = {} if options.hardware_share is None else {"hw_decoder_load": options.hardware_share}
    where = {"device": "mixed", **share} if options.decode == "gpu" else {"device": "cpu"}
    heads = encoded if options.unchecked else checked(encoded)
    return dali(".fn").decoders.image(heads, output_type=dali(".types").RGB, **where)


def checked(encoded: Any) -> Any:
    """Encoded images, after all heads of the batch are parsed, which raises for an invalid image."""
    fn = dali(".fn")
    # NOTE: before decoding: DALI's decoder parses and decodes at the same time, so an invalid image would make it raise
    # while it decodes others, often into memory that is freed by then.
    sizes = fn.peek_image_shape(encoded)
    as_it_is = fn.cast(sizes[:1] * 0 - 1, dtype=dali(".types").INT32)
    return fn.reshape(encoded, shape=as_it_is)  # copies nothing, and waits for the sizes


def _resized(images: Any, side: int) -> Any:
    linear = dali(".types").INTERP_LINEAR  # without antialiasing, as OpenCV's and ``ResizeMat``'s
    return dali(".fn").resize(images, resize_x=side, resize_y=side, interp_type=linear, antialias=False)


def _normalised(images: Any, mirror: Any) -> Any:
    return dali(".fn").crop_mirror_normalize(
        images,
        dtype=dali(".types").FLOAT,
        output_layout="CHW",
        mean=[255.0 * value for value in MEAN],
        std=[255.0 * value for value in STD],
        mirror=mirror,
    )


def _around_one(most: float) -> list[float]:
    return [1 - most, 1 + most]


# -- CutOut, a custom operator ---------------------------------------------------------------------------------


def _cut_out(images: Any, on_gpu: bool) -> Any:
    """Centres are drawn by DALI, so that its seed and its checkpoints cover them; the squares are PyTorch's."""
    fn = dali(".fn")
    centres = fn.random.uniform(range=[0.0, 1.0], shape=[augmentation.HOLES, 2])
    more = {"batch_processing": True, "output_layouts": "HWC"}
    if not on_gpu:
        return fn.python_function(images, centres, function=_erase_arrays, **more)
    by_torch = dali(".plugin.pytorch.fn").torch_python_function
    return by_torch(images, centres.gpu(), function=erase_squares, device="gpu", **more)


def erase_squares(images: Sequence[Any], centres: Sequence[Any]) -> list[Any]:
    """CutOut of a batch: ``images`` uint8 H×W×C of one size, and ``centres`` HOLES×2, y and x as shares of the sides.

    Squares are ``augmentation.HOLE_SIDE`` of the sides, black, and cut off at the border. arXiv:1708.04552
    """
    erased, shares = torch.stack(list(images)), torch.stack(list(centres))
    rows = _within(shares[..., 0], erased.shape[1])
    columns = _within(shares[..., 1], erased.shape[2])
    for hole in range(shares.shape[1]):
        erased.masked_fill_((rows[:, hole, :, None] & columns[:, hole, None, :])[..., None], 0)
    return list(erased)


def _within(centres: Any, side: int) -> Any:
    """Whether each pixel is in the square, bool N×HOLES×side, for centres N×HOLES."""
    half = int(side * augmentation.HOLE_SIDE) // 2
    middle = (centres * side).long().clamp_(max=side - 1)
    offsets = torch.arange(side, device=centres.device) - middle[..., None]
    return (offsets >= -half) & (offsets < half)


def _erase_arrays(images: Sequence[Any], centres: Sequence[Any]) -> list[np.ndarray]:
    tensors = (list(map(torch.from_numpy, arrays)) for arrays in (images, centres))
    return [image.numpy() for image in erase_squares(*tensors)]

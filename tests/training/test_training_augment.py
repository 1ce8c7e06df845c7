"""Augmentations: their pixels beside a plain reference, their distributions beside DALI's, and seeds of samples."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.training_data import FORKS, same, taken, wrapped, write_images, write_toml
from recipes import augmentation as shared
from recipes.data import MEAN, STD, Normalise, augmentations
from torch.utils.data import DataLoader

from torchpipe_py.training import (
    Augmentation,
    ColorTwist,
    Compose,
    CutOut,
    GridMask,
    ImageFiles,
    RandomResizedCrop,
    TensorToTensor,
    cv2Resize,
    uniforms,
    wrap_dataloader_torchpipe,
)

pytestmark = FORKS

CROP = RandomResizedCrop(degrees=20, flip=0.5)
TWIST = ColorTwist(0.5, 0.5, 0.5, 0.3)
CUTOUT, GRID = CutOut(2, 0.5), GridMask(0.25, (0.2, 0.6), (-0.5, 0.5))
CHAIN = Compose([CROP, TWIST, CUTOUT, GRID])
EACH = pytest.mark.parametrize("augmentation", [CROP, TWIST, CUTOUT, GRID, CHAIN], ids=lambda one: type(one).__name__)


def seeds_of(count: int, first: int = 0) -> Any:
    return torch.arange(first, first + count, dtype=torch.int64)


def noise(count: int, height: int = 17, width: int = 23, channels: int = 3) -> Any:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


# -- random numbers ---------------------------------------------------------------------------------------------------


def splitmix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(1, 7))
def test_random_numbers_are_the_splitmix_sequence_of_the_hashed_seed(seeds: list[int], count: int) -> None:
    drawn = uniforms(torch.tensor(seeds), count)
    expected = [
        [
            (splitmix((splitmix(seed % 2**64) + k * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
            for k in range(1, count + 1)
        ]
        for seed in seeds
    ]
    assert drawn.dtype == np.float64
    assert drawn.tolist() == expected


def test_random_numbers_of_neighbouring_seeds_and_steps_are_independent() -> None:
    count = 20_000
    columns = [uniforms(seeds_of(count), 3)]
    Compose([lambda images, seeds: columns.append(uniforms(seeds, 3))] * 2)(
        torch.zeros(count, 1, 1, 1), seeds_of(count)
    )
    drawn = np.concatenate([*columns, np.roll(columns[0], 1, axis=0)], axis=1)
    assert 0 <= drawn.min() <= drawn.max() < 1
    histograms = [np.histogram(column, 50, (0, 1))[0] for column in drawn.T]
    chi_squares = [float(np.sum((histogram - count / 50) ** 2) / (count / 50)) for histogram in histograms]
    assert max(chi_squares) < 49 + 5 * math.sqrt(2 * 49)
    correlations = np.corrcoef(drawn.T) - np.eye(drawn.shape[1])
    assert np.abs(correlations).max() < 5 / math.sqrt(count)


# -- seeds ------------------------------------------------------------------------------------------------------------


@EACH
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_sample_is_augmented_alike_in_any_batch(augmentation: Any, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    height, width = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32]))
    seeds = torch.tensor(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count)))
    images = noise(count, height, width).to(dtype)
    before = images.clone()
    whole = augmentation(images, seeds=seeds)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    assert torch.equal(augmentation(images[order], seeds=seeds[order]), whole[order])
    assert torch.equal(
        torch.cat([augmentation(images[n : n + 1], seeds=seeds[n : n + 1]) for n in range(count)]), whole
    )
    assert torch.equal(augmentation(images[-1], seeds=seeds[-1:]), whole[-1])  # without a batch dimension
    assert torch.equal(images, before)
    assert whole.shape == images.shape
    assert whole.dtype == (dtype if augmentation in (CUTOUT, GRID) else torch.float32)


@EACH
def test_seeds_come_from_pytorchs_generator_by_default(augmentation: Any) -> None:
    images = noise(8)
    torch.manual_seed(3)
    first, second = augmentation(images), augmentation(images)
    torch.manual_seed(3)
    assert torch.equal(augmentation(images), first)
    assert not torch.equal(first, second)
    equal = augmentation(images[:1].repeat(8, 1, 1, 1))
    assert len({image.numpy().tobytes() for image in equal}) > 4  # each has its own


def test_steps_of_a_chain_have_their_own_seeds_also_between_plain_functions() -> None:
    images, seeds = torch.ones(50, 1, 16, 16), seeds_of(50)
    doubled = Compose([CutOut(1, 4), lambda images: images * 2, CutOut(1, 4)])(images, seeds=seeds)
    assert set(doubled.unique().tolist()) == {0.0, 2.0}
    once = Compose([CutOut(1, 4)])(images, seeds)
    first = once == 0
    assert bool((doubled[first] == 0).all())
    assert float((doubled == 0).sum()) > 1.5 * float(first.sum())
    inner = Compose([Compose([CutOut(1, 4)]), CutOut(1, 4)])(images, seeds)
    assert 1.5 * float(first.sum()) < float((inner == 0).sum()) <= 2 * 16 * 50


# -- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 40, 0.5])
@pytest.mark.parametrize("fill", [0, 7])
def test_cutout_erases_the_squares_of_the_authors_code(length: Any, fill: int) -> None:
    images, seeds, holes = noise(40), seeds_of(40, 9), 3
    erased = CutOut(holes, length, fill)(images, seeds=seeds)
    height, width = images.shape[-2:]
    half = (int(length * height) if isinstance(length, float) else length) // 2
    expected = images.numpy().copy()
    for image, drawn in zip(expected, uniforms(seeds, 2 * holes), strict=True):
        for y, x in zip(drawn[::2] * height, drawn[1::2] * width, strict=True):
            y1, y2 = (np.clip(int(y) + side, 0, height) for side in (-half, half))
            x1, x2 = (np.clip(int(x) + side, 0, width) for side in (-half, half))
            image[:, y1:y2, x1:x2] = fill
    assert np.array_equal(erased.numpy(), expected)


@pytest.mark.parametrize("angle", [0.0, (-3.0, 3.0)])
@pytest.mark.parametrize("fill", [0, 7])
def test_gridmask_erases_squares_of_a_grid(angle: Any, fill: int) -> None:
    images, seeds, tile = noise(40), seeds_of(40, 9), 6
    erased = GridMask(tile, (0.2, 0.8), angle, fill)(images, seeds=seeds)
    low, high = angle if angle else (0.0, 0.0)
    y, x = np.mgrid[: images.shape[2], : images.shape[3]]
    wrong = 0
    for image, result, drawn in zip(images.numpy(), erased.numpy(), uniforms(seeds, 4), strict=True):
        ratio, turn = 0.2 + 0.6 * drawn[0], low + (high - low) * drawn[3]
        across = (x * math.cos(turn) - y * math.sin(turn)) / tile - drawn[1]
        down = (x * math.sin(turn) + y * math.cos(turn)) / tile - drawn[2]
        black = (across % 1 < ratio) & (down % 1 < ratio)
        wrong += int((result != np.where(black, fill, image)).sum())
    assert wrong <= 2 * 3  # pixels on an edge, in float32


def bilinear(image: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``image`` (C×H×W) at places in pixels, of which 0 is the middle of the first; the border is repeated."""
    height, width = image.shape[1:]
    x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right, bottom = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    above = image[:, top, left] * (1 - (x - left)) + image[:, top, right] * (x - left)
    below = image[:, bottom, left] * (1 - (x - left)) + image[:, bottom, right] * (x - left)
    return np.asarray(above * (1 - (y - top)) + below * (y - top))


def box_of(drawn: np.ndarray, height: int, width: int, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
    """Top, left, height and width of torchvision's RandomResizedCrop.get_params, by these random numbers."""
    for area, shape in zip(drawn[:10], drawn[10:20], strict=True):
        pixels = height * width * (scale[0] + (scale[1] - scale[0]) * area)
        aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * shape)
        w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(drawn[20] * (height - h + 1)), int(drawn[21] * (width - w + 1)), h, w
    w, h = width, height
    if width / height < ratio[0]:
        h = round(w / ratio[0])
    elif width / height > ratio[1]:
        w = round(h * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("size", [None, 16, (9, 31)])
@pytest.mark.parametrize(("height", "width"), [(17, 23), (40, 8), (8, 40)])
def test_crop_rotates_crops_resizes_and_flips_in_one_resampling(size: Any, height: int, width: int) -> None:
    scale, ratio, degrees = (0.2, 1.0), (0.7, 1.5), 30
    images, seeds = noise(40, height, width), seeds_of(40, 5)
    result = RandomResizedCrop(size, scale, ratio, degrees, flip=0.4)(images, seeds=seeds)
    rows, columns = (height, width) if size is None else (size, size) if isinstance(size, int) else size
    fallbacks = 0
    for image, cropped, drawn in zip(images.numpy(), result.numpy(), uniforms(seeds, 24), strict=True):
        top, left, h, w = box_of(drawn, height, width, scale, ratio)
        fallbacks += (top, left) == ((height - h) // 2, (width - w) // 2)
        y, x = np.mgrid[:rows, :columns]
        y, x = (y + 0.5) * h / rows + top - height / 2, (x + 0.5) * w / columns + left - width / 2
        turn = math.radians(-degrees + 2 * degrees * drawn[22])
        source_x = x * math.cos(turn) - y * math.sin(turn) + width / 2
        source_y = x * math.sin(turn) + y * math.cos(turn) + height / 2
        expected = bilinear(image.astype(float), source_x - 0.5, source_y - 0.5)
        expected *= (source_x >= 0) & (source_x <= width) & (source_y >= 0) & (source_y <= height)
        expected = expected[:, :, ::-1] if drawn[23] < 0.4 else expected
        assert np.quantile(np.abs(cropped - expected), 0.99) < 0.01  # all but pixels at the edge of the black corners
    assert fallbacks < 40 if height == 17 else fallbacks > 5


@pytest.mark.parametrize("degrees", [90.0, 30.0, -17.0])
def test_rotation_is_counter_clockwise_as_opencvs(degrees: float) -> None:
    mat = picture(60, 60, 4)
    images = torch.from_numpy(mat).permute(2, 0, 1)
    rotated = RandomResizedCrop(scale=1.0, ratio=None, degrees=(degrees, degrees))(images)
    matrix = cv2.getRotationMatrix2D((29.5, 29.5), degrees, 1.0)
    expected = cv2.warpAffine(mat, matrix, (60, 60), flags=cv2.INTER_LINEAR).transpose(2, 0, 1)
    inside = cv2.erode(cv2.warpAffine(np.ones((60, 60), np.uint8), matrix, (60, 60)), np.ones((5, 5))) > 0
    assert inside.sum() > 2000
    assert np.abs(rotated.numpy() - expected)[:, inside].max() < 4  # OpenCV's weights have five bits
    outside = cv2.dilate(cv2.warpAffine(np.ones((60, 60), np.uint8), matrix, (60, 60)), np.ones((5, 5))) == 0
    assert not rotated.numpy()[:, outside].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_color_twist_is_the_matrix_of_its_factors(dtype: Any) -> None:
    images, seeds = noise(40).to(dtype), seeds_of(40, 5)
    result = ColorTwist(0.5, (0.3, 1.4), 1.5, 0.3)(images, seeds=seeds)
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    for image, twisted, drawn in zip(images.double().numpy(), result.numpy(), uniforms(seeds, 4), strict=True):
        brightness, contrast, saturation = 0.5 + drawn[0], 0.3 + 1.1 * drawn[1], 2.5 * drawn[2]
        turn = 2 * math.pi * (-0.3 + 0.6 * drawn[3])
        luma, i, q = np.tensordot(to_yiq, image, 1)
        turned = i * math.cos(turn) + q * math.sin(turn), q * math.cos(turn) - i * math.sin(turn)
        colors = np.tensordot(np.linalg.inv(to_yiq), np.stack([luma, *(saturation * one for one in turned)]), 1)
        expected = np.clip(brightness * (128 + contrast * (colors - 128)), 0, 255)
        assert np.abs(twisted - expected).max() < 0.002


@pytest.mark.parametrize(
    "augmentation",
    [
        CutOut(0, 8),
        CutOut(3, 0),
        GridMask(8, 0.0, (-1.0, 1.0)),
        RandomResizedCrop(scale=1.0, ratio=None),
        ColorTwist(),
        Compose([]),
        Compose([CutOut(0), GridMask(ratio=0.0), RandomResizedCrop(scale=1.0, ratio=None), ColorTwist()]),
    ],
)
@pytest.mark.parametrize("shape", [(5, 3, 17, 23), (3, 24, 10), (0, 3, 4, 4), (2, 3, 1, 1)])
def test_identity_parameters_change_nothing(augmentation: Any, shape: Any) -> None:
    images = torch.rand(shape) * 255
    assert torch.allclose(augmentation(images), images, rtol=0, atol=1e-3)
    assert torch.allclose(augmentation(images.byte()).float(), images.byte().float(), rtol=0, atol=1e-3)


def test_a_flip_alone_mirrors_that_share_of_images() -> None:
    images = noise(400)
    flipped = RandomResizedCrop(scale=1.0, ratio=None, flip=0.25)(images, seeds=seeds_of(400)).round().byte()
    is_flipped = (flipped != images).flatten(1).any(1)
    assert torch.equal(flipped[is_flipped], images[is_flipped].flip(-1))
    assert abs(float(is_flipped.sum()) - 100) < 5 * math.sqrt(400 * 0.25 * 0.75)


# -- distributions ----------------------------------------------------------------------------------------------------

COUNT, SIDE = 20_000, 24
TILE, RATIO, HOLE = 8, (0.2, 0.6), 10


def erased_by(augmentation: Augmentation) -> np.ndarray:
    """Bool N×H×W."""
    images = torch.ones(COUNT, 1, SIDE, SIDE, dtype=torch.uint8)
    return np.asarray(augmentation(images, seeds=seeds_of(COUNT))[:, 0].numpy() == 0)


def spread(areas: np.ndarray) -> float:
    """The variance of the variance of a sample of so many areas."""
    return float(((areas - areas.mean()) ** 4).mean() - areas.var() ** 2) / len(areas)


def check(erased: np.ndarray, mean: float, variance: float, shares: np.ndarray) -> None:
    """The erased area has this mean and variance, each pixel is erased in this share; five standard errors."""
    areas = erased.sum(axis=(1, 2)).astype(float)
    assert abs(areas.mean() - mean) < 5 * math.sqrt(variance / COUNT)
    assert abs(areas.var() - variance) < 5 * math.sqrt(spread(areas))
    errors = np.sqrt(shares * (1 - shares) / COUNT)
    assert (np.abs(erased.mean(axis=0) - shares) <= 5.5 * errors).all()  # of 576 pixels


def check_same(one: np.ndarray, other: np.ndarray) -> None:
    """Two samples of masks have the same distribution; see ``check``."""
    areas, others = (masks.sum(axis=(1, 2)).astype(float) for masks in (one, other))
    assert abs(areas.mean() - others.mean()) < 5 * math.sqrt((areas.var() + others.var()) / COUNT)
    assert abs(areas.var() - others.var()) < 5 * math.sqrt(spread(areas) + spread(others))
    shares = (one.mean(axis=0) + other.mean(axis=0)) / 2
    errors = np.sqrt(2 * shares * (1 - shares) / COUNT)
    assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) <= 5.5 * errors).all()
    most = SIDE * SIDE + 1
    counts, more = (np.bincount(each.astype(int), minlength=most).cumsum() / COUNT for each in (areas, others))
    assert np.abs(counts - more).max() < 2.3 * math.sqrt(2 / COUNT)  # Kolmogorov and Smirnov, one in 20,000


def test_the_area_of_cutout_is_that_of_its_formula() -> None:
    centres = np.arange(SIDE)
    sides = np.clip(centres + HOLE // 2, 0, SIDE) - np.clip(centres - HOLE // 2, 0, SIDE)
    mean = sides.mean() ** 2
    variance = (sides.astype(float) ** 2).mean() ** 2 - mean**2
    pixels = np.arange(SIDE)[:, None]
    shares = ((pixels >= centres - HOLE // 2) & (pixels < centres + HOLE // 2)).mean(axis=1)
    check(erased_by(CutOut(1, HOLE)), mean, variance, shares[:, None] * shares)


def test_the_area_of_gridmask_is_that_of_its_formula() -> None:
    ratios = np.linspace(*RATIO, 100_001)
    # A tile has the whole part of its erased length, and the pixel after that as often as the fraction says.
    whole, fraction = np.divmod(ratios * TILE, 1)
    square = whole**2 * (1 - fraction) + (whole + 1) ** 2 * fraction
    mean = (ratios**2).mean() * SIDE**2
    variance = (square**2).mean() * (SIDE // TILE) ** 4 - mean**2
    check(erased_by(GridMask(TILE, RATIO)), mean, variance, np.full((SIDE, SIDE), (ratios**2).mean()))


def dali_on(images: Any, operator: Any, **arguments: Any) -> np.ndarray:
    """The output of ``operator(fn, images, **arguments)`` for images N×H×W×C and an argument for each, on the CPU."""
    dali = pytest.importorskip("nvidia.dali", reason="DALI is not installed")

    @dali.pipeline_def(batch_size=len(images), num_threads=1, device_id=None, seed=7)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        def source(values: Any) -> Any:
            return dali.fn.external_source(source=lambda: list(values), batch=True)

        given = {name: source(values) for name, values in arguments.items()}
        return operator(dali.fn, dali.fn.reshape(source(images), layout="HWC"), **given)

    built = pipeline()
    built.build()
    return np.asarray(built.run()[0].as_array())


def test_cutout_has_the_distribution_of_dalis_erase() -> None:
    def erase(fn: Any, images: Any) -> Any:
        centre = pytest.importorskip("nvidia.dali.math").floor(fn.random.uniform(range=[0.0, float(SIDE)], shape=[2]))
        return fn.erase(images, anchor=centre - HOLE // 2, shape=[HOLE, HOLE], axis_names="HW", fill_value=0)

    theirs = dali_on(np.ones((COUNT, SIDE, SIDE, 1), np.uint8), erase)[..., 0] == 0
    check_same(erased_by(CutOut(1, HOLE)), theirs)


def test_gridmask_has_the_distribution_of_dalis() -> None:
    def grid_mask(fn: Any, images: Any) -> Any:
        ratio = fn.random.uniform(range=list(RATIO))
        shifts = [fn.random.uniform(range=[0.0, float(TILE)]) for _ in range(2)]
        return fn.grid_mask(images, tile=TILE, ratio=ratio, shift_x=shifts[0], shift_y=shifts[1])

    theirs = dali_on(np.ones((COUNT, SIDE, SIDE, 1), np.uint8), grid_mask)[..., 0] == 0
    check_same(erased_by(GridMask(TILE, RATIO)), theirs)


def test_gridmask_has_the_pixels_of_dalis_at_the_same_ratio_phase_and_angle() -> None:
    images, seeds, tile = noise(64, 40, 50), seeds_of(64), 9
    ours = GridMask(tile, (0.1, 0.9), (-3.0, 3.0))(images, seeds=seeds)
    drawn = uniforms(seeds, 4).astype(np.float32)
    ratio, shifts, angle = 0.1 + 0.8 * drawn[:, 0], drawn[:, 1:3] * tile, -3.0 + 6.0 * drawn[:, 3]

    theirs = dali_on(
        images.permute(0, 2, 3, 1).contiguous().numpy(),
        lambda fn, images, **given: fn.grid_mask(images, tile=tile, **given),
        ratio=ratio,
        shift_x=shifts[:, 0],
        shift_y=shifts[:, 1],
        angle=angle,
    )
    assert (ours.permute(0, 2, 3, 1).numpy() != theirs).mean() < 1e-4  # pixels on an edge, in float32


def test_color_twist_has_the_values_of_dalis() -> None:
    images, seeds = noise(64), seeds_of(64)
    ours = ColorTwist(0.5, 0.5, 0.5, 0.3)(images, seeds=seeds)
    drawn = uniforms(seeds, 4).astype(np.float32)
    names = ("brightness", "contrast", "saturation")
    given = {name: 0.5 + drawn[:, place] for place, name in enumerate(names)}
    given["hue"] = 360 * (-0.3 + 0.6 * drawn[:, 3])

    theirs = dali_on(
        images.permute(0, 2, 3, 1).contiguous().numpy(),
        lambda fn, images, **given: fn.color_twist(images, **given),
        **given,
    )
    differences = np.abs(ours.permute(0, 2, 3, 1).numpy() - theirs)
    assert differences.max() < 4  # DALI rounds the result, and the inverse of the matrix to three digits
    assert differences.mean() < 0.6


# -- loaders ----------------------------------------------------------------------------------------------------------


class CropOnTheCpu:
    """A ``transforms_cpu`` that ends with an augmentation."""

    def __call__(self, image: Any) -> Any:
        return Compose([cv2Resize(24, 20), TensorToTensor(), CUTOUT, lambda image: image * 255])(image)


def epochs(dataset: Any, toml: str, **options: Any) -> list[Any]:
    with wrapped(dataset, toml, transforms_gpu=None, shuffle=True, seed=5, **options) as loader:
        batches = []
        for _ in range(2):
            batches += taken(loader)
            loader.reset()
    return batches


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2, "prefetch": 3},
        {"workers": 2, "workers_decode": True},
        {"workers": 1, "workers_decode": True, "prefetch": 0},
    ],
)
@pytest.mark.parametrize("policy", ["mask", "skip"])
def test_augmented_batches_do_not_depend_on_workers(
    tmp_path: Path, toml: str, options: dict[str, Any], policy: str
) -> None:
    dataset = write_images(tmp_path / "images", 14, corrupt=[3], missing=[8, 9])
    more: dict[str, Any] = {"bad_samples": policy, "transforms_batch": augmentations(shared.AUGMENTS)}
    assert same(epochs(dataset, toml, **options, **more), epochs(dataset, toml, prefetch=0, **more))


def by_sample(batches: list[Any]) -> dict[int, Any]:
    return {index: image for images, _, indices, *_ in batches for index, image in zip(indices, images, strict=True)}


def test_augmentation_depends_on_the_seed_of_the_sample_only(dataset: ImageFiles, toml: str) -> None:
    def epoch(**options: Any) -> dict[int, Any]:
        with wrapped(dataset, toml, transforms_gpu=None, transforms_batch=CHAIN, **options) as loader:
            return by_sample(taken(loader))

    drawn = epoch(batch_size=3)
    for other in (epoch(batch_size=5), epoch(batch_size=4, shuffle=True)):
        assert all(torch.equal(drawn[index], other[index]) for index in range(11))
    anew = epoch(batch_size=3, seed=1)
    assert not any(torch.equal(drawn[index], anew[index]) for index in range(11))


def test_repeated_sample_is_augmented_anew(dataset: ImageFiles, toml: str) -> None:
    plain = DataLoader(dataset, 3, sampler=[2, 2, 5, 2])  # type: ignore[arg-type]
    with wrap_dataloader_torchpipe("single", plain, toml, transforms_batch=CROP) as loader:
        images = torch.cat([batch.images for batch in loader])
    assert not any(torch.equal(images[one], images[other]) for one, other in ((0, 1), (0, 3), (1, 3)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("gather", [True, False])
def test_each_share_of_dp_gets_the_seeds_of_its_samples(tmp_path: Path, toml: str, workers: int, gather: bool) -> None:
    dataset = write_images(tmp_path / "images", 11, corrupt=[0, 1, 5])
    options: dict[str, Any] = {"bad_samples": "skip", "transforms_batch": CHAIN}
    with wrapped(dataset, toml, transforms_gpu=None, **options) as loader:
        expected = [batch.images for batch in loader]
    plain = DataLoader(dataset, 4, num_workers=workers)  # type: ignore[arg-type]
    devices = {"devices": ["cpu"] * 3, "gather": gather, "workers_decode": bool(workers)}
    with wrap_dataloader_torchpipe("dp", plain, toml, **devices, **options) as loader:
        batches = [batch.images if gather else torch.cat(batch.images) for batch in loader]
    assert all(map(torch.equal, batches, expected))


@pytest.mark.parametrize("place", ["transforms_gpu", "transforms_cpu"])
def test_without_seeds_a_loader_seeds_each_sample(dataset: ImageFiles, toml: str, place: str) -> None:
    options = {"transforms_gpu": CUTOUT} if place == "transforms_gpu" else {"transforms_cpu": CropOnTheCpu()}

    def epoch(**more: Any) -> dict[int, Any]:
        share = 1.0 if place == "transforms_cpu" else 0.0
        with wrapped(dataset, toml, cpu_percentage=share, **{"transforms_gpu": None, **options, **more}) as loader:
            return by_sample(taken(loader))

    drawn = epoch(batch_size=3)
    assert all(0 < float((image == 0).all(dim=0).float().mean()) < 0.7 for image in drawn.values())
    for other in (epoch(batch_size=5), epoch(batch_size=4, workers=2, shuffle=True)):
        assert all(torch.equal(drawn[index], other[index]) for index in range(11))


class Recorder(torch.nn.Module):
    """Keeps the seeds that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[Any] = []

    def forward(self, images: Any, seeds: Any) -> Any:
        self.seeds.append(seeds)
        return images


def test_modules_get_seeds_and_functions_without_that_parameter_get_none(tmp_path: Path, toml: str) -> None:
    dataset, recorder = write_images(tmp_path / "images", 6, corrupt=[4]), Recorder()
    with wrapped(dataset, toml, transforms_gpu=None, transforms_batch=recorder, bad_samples="mask") as loader:
        list(loader)
        loader.reset()
        list(loader)
    assert [(len(seeds), seeds.dtype, seeds.device.type) for seeds in recorder.seeds] == [
        (count, torch.int64, "cpu") for count in (4, 2, 4, 2)
    ]
    assert len(set(torch.cat(recorder.seeds).tolist())) == 12  # a bad sample has its own, each epoch has others
    for plain in (torch.neg, lambda images, scale=2: images * scale):
        with wrapped(dataset, toml, transforms_gpu=None, transforms_batch=plain, bad_samples="mask") as loader:
            assert len(list(loader)) == 2


def test_masked_images_are_augmented_black_ones(tmp_path: Path, toml: str) -> None:
    dataset = write_images(tmp_path / "images", 4, corrupt=[1])
    options: dict[str, Any] = {"transforms_gpu": None, "bad_samples": "mask"}
    with wrapped(dataset, toml, transforms_batch=Compose([CROP, CUTOUT, GRID]), **options) as loader:
        assert not next(loader).images[1].any()
    with wrapped(dataset, toml, transforms_batch=augmentations([]), **options) as loader:
        assert torch.equal(next(loader).images[1], Normalise()(torch.zeros(1, 3, 24, 20))[0])


# -- the training script ----------------------------------------------------------------------------------------------


def test_the_script_erases_before_it_normalises() -> None:
    images, seeds = torch.full((200, 3, 32, 32), 200, dtype=torch.uint8), seeds_of(200)
    black, white = (Normalise()(torch.full((1, 3, 1, 1), value))[0, :, 0, 0] for value in (0, 200))
    assert torch.allclose(black, -torch.tensor(MEAN) / torch.tensor(STD))
    for name, share in (("cutout", (1 / 16, 4 / 16)), ("gridmask", (1 / 64, 25 / 64))):
        result = augmentations([name])(images, seeds=seeds)
        erased = (result == black.view(1, 3, 1, 1)).all(dim=1)
        assert torch.equal(erased, ~(result == white.view(1, 3, 1, 1)).all(dim=1))
        assert share[0] <= float(erased.float().mean(dim=(1, 2)).min())
        assert float(erased.float().mean(dim=(1, 2)).max()) <= share[1]


def test_the_script_flips_half_of_the_images_and_nothing_else_by_default() -> None:
    images, seeds = noise(400), seeds_of(400)
    result, normalised = augmentations([])(images, seeds=seeds), Normalise()(images)
    is_same = (result == normalised).flatten(1).all(1)
    assert torch.equal(result[~is_same], normalised[~is_same].flip(-1))
    assert abs(int(is_same.sum()) - 200) < 5 * math.sqrt(400 / 4)


def test_script_orders_augmentations_independently_of_arguments() -> None:
    images, seeds = noise(8), seeds_of(8)
    both = [augmentations(names)(images, seeds=seeds) for names in (shared.AUGMENTS, shared.AUGMENTS[::-1])]
    assert torch.equal(*both)
    without = augmentations(shared.AUGMENTS[1:])(images, seeds=seeds)
    assert not torch.equal(both[0], without)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: CutOut(-1, 8), "holes is a whole number from 0 up, got -1"),
        (lambda: CutOut(1.0, 8), "holes is a whole number from 0 up, got 1.0"),
        (lambda: CutOut(1, -8), "length is a whole number from 0 up, got -8"),
        (lambda: CutOut(1, 8.0), "length is a whole number of pixels, or a share of the side from 0.0 to 1.0, got 8.0"),
        (lambda: CutOut(1, math.nan), "length is a whole number of pixels, or a share .* got nan"),
        (lambda: GridMask(0), "tile is a whole number from 1 up, got 0"),
        (lambda: GridMask("8"), "tile is a whole number from 1 up, got '8'"),
        (lambda: GridMask(8, 1.5), "ratio must be within 0 to 1, and a range go from low to high, got 1.5"),
        (lambda: GridMask(8, (0.6, 0.2)), r"ratio must be within 0 to 1, .* got \(0.6, 0.2\)"),
        (lambda: GridMask(8, angle=math.inf), "angle must be finite"),
        (lambda: GridMask(8, angle=(0, 1, 2)), r"angle is a number, or a range \(low, high\), got \(0, 1, 2\)"),
        (lambda: RandomResizedCrop(0), "size is a whole number from 1 up, got 0"),
        (lambda: RandomResizedCrop((8, 8, 3)), r"size is one number of pixels, or height and width, got \(8, 8, 3\)"),
        (lambda: RandomResizedCrop(scale=1.1), "scale must be within 0 to 1"),
        (lambda: RandomResizedCrop(ratio=(0.0, 1.0)), "ratio must be within 0.001 to 1000"),
        (lambda: RandomResizedCrop(degrees=400), "degrees must be within -360 to 360"),
        (lambda: RandomResizedCrop(flip=2), "flip is a probability from 0 to 1, got 2"),
        (lambda: ColorTwist(brightness=-0.5), "brightness must be within 0 to 1e"),
        (lambda: ColorTwist(saturation="more"), r"saturation is a number, or a range \(low, high\), got 'more'"),
        (lambda: ColorTwist(hue=0.6), "hue must be within -0.5 to 0.5"),
    ],
)
def test_impossible_parameters_are_refused(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((3, 4, 4), np.uint8), "CutOut takes a Tensor NxCxHxW or CxHxW, got ndarray"),
        (torch.zeros(4, 4), "CutOut takes a Tensor NxCxHxW or CxHxW, got 4x4"),
        (torch.zeros(1, 3, 0, 4), "CutOut takes a Tensor NxCxHxW or CxHxW, got 1x3x0x4"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "CutOut takes uint8 or floats in 0..255, got torch.int64"),
    ],
)
def test_refuses_values_that_are_not_image_batches(images: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CutOut(1, 2)(images)


def test_refuses_invalid_seeds_channels_and_steps() -> None:
    images = torch.zeros(2, 3, 4, 4)
    for seeds in (5, [1, 2], torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.zeros(2, 1, dtype=torch.int64)):
        for takes in (CUTOUT, CHAIN):
            with pytest.raises(TypeError, match="seeds are a Tensor of 2 int64 on the CPU, got "):
                takes(images, seeds=seeds)
    with pytest.raises(TypeError, match="ColorTwist takes RGB images, Nx3xHxW, got 2x1x4x4"):
        TWIST(images[:, :1])
    with pytest.raises(TypeError, match="step 1 of Compose cannot be called: it is of type str"):
        Compose([CUTOUT, "gridmask"])  # type: ignore[list-item]


def test_augmentations_can_be_pickled() -> None:
    images, seeds = noise(3), seeds_of(3)
    assert torch.equal(pickle.loads(pickle.dumps(CHAIN))(images, seeds=seeds), CHAIN(images, seeds=seeds))


@pytest.mark.parametrize("workers", [0, 1])
def test_instances_and_pieces_make_no_difference(dataset: ImageFiles, tmp_path: Path, workers: int) -> None:
    batches = [
        epochs(dataset, write_toml(tmp_path, instances), workers=workers, transforms_batch=CHAIN)
        for instances in (1, 3)
    ]
    assert same(*batches)


@pytest.mark.parametrize("kind", [CutOut, GridMask])
@pytest.mark.parametrize("fill", [-1, 256, float("nan"), "black", None, True, (0, 0, 0)])
def test_erased_pixels_have_a_number_from_0_to_255(kind: Any, fill: Any) -> None:
    with pytest.raises(ValueError, match="fill is a number from 0 to 255, got"):
        kind(fill=fill)

"""The batches and shapes that a model takes, as ``min`` and ``max`` say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.backends.model.inputs import fits
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError
from torchpipe_py.values import Value, to_int, to_str

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """One end of each profile's range: for each input a shape, of length 1 where only the batch is given."""

    profiles: tuple[tuple[Shape, ...], ...]

    def __str__(self) -> str:
        return ";".join(",".join("x".join(map(str, shape)) for shape in profile) for profile in self.profiles)

    def batches(self) -> list[int]:
        """The batch size of each profile."""
        return [profile[0][0] for profile in self.profiles]

    def shape(self, index: int) -> Shape:
        """The first profile's shape of one input, of length 1 where only the batch is given."""
        return _of(self.profiles[0], index)

    def check(self, model: str, key: str, inputs: Sequence[TensorSpec]) -> None:
        """``ConfigError`` for shapes that the model does not take."""
        for profile in self.profiles:
            if inputs and len(profile) > len(inputs):
                raise ConfigError(f"model {model}: {key} gives {len(profile)} inputs, the model has {len(inputs)}")
            for index, spec in enumerate(inputs):
                shape, dims = _of(profile, index), spec.dims
                if len(shape) > 1 and dims and not fits(shape[1:], dims[1:]):
                    got = shown_dims(shape)
                    raise ConfigError(f"model {model}: input {spec.name!r} is {shown_dims(dims)}, {key} says {got}")

    def exceeds(self, most: Bounds) -> bool:
        """Whether a batch or another dimension is larger than in ``most``, which has as many profiles."""
        pairs = zip(self.profiles, most.profiles, strict=True)
        shapes = [pair for low, high in pairs for pair in zip(low, high, strict=False)]
        return any(small > large for low, high in shapes for small, large in zip(low, high, strict=False))


def allows(least: Bounds, most: Bounds, shapes: Sequence[Shape]) -> bool:
    """Whether a profile takes inputs of these shapes, which are without batch."""
    return any(
        all(_between(_of(low, index)[1:], shape, _of(high, index)[1:]) for index, shape in enumerate(shapes))
        for low, high in zip(least.profiles, most.profiles, strict=True)
    )


def _of(profile: tuple[Shape, ...], index: int) -> Shape:
    return profile[min(index, len(profile) - 1)]


def _between(low: Shape, shape: Shape, high: Shape) -> bool:
    return all(small <= size for small, size in zip(low, shape, strict=False)) and all(
        size <= large for size, large in zip(shape, high, strict=False)
    )


_EXPECTED = "expected a batch size or shapes like 4x3x224x224, at least 1 each, got {!r}"


def to_bounds(value: Value) -> Bounds:
    """``4``, ``"4x3x224x224"``, several inputs as ``"4x3x224x224,4x10"``, several profiles as ``"1;8"``."""
    if isinstance(value, (bool, float)):
        raise ValueError(_EXPECTED.format(value))
    text = to_str(value) if not isinstance(value, (list, tuple)) else ",".join(to_str(part) for part in value)
    bounds = []
    for profile in text.split(";"):
        shapes = [tuple(to_int(dim) for dim in shape.split("x")) for shape in profile.split(",") if shape.strip()]
        if not shapes or any(dim < 1 for shape in shapes for dim in shape):
            raise ValueError(_EXPECTED.format(value))
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"the inputs of a profile have one batch size, got {profile!r}")
        bounds.append(tuple(shapes))
    return Bounds(tuple(bounds))

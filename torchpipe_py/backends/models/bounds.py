"""The batches and shapes that a model takes, as ``min`` and ``max`` say them."""

from __future__ import annotations

from dataclasses import dataclass

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

    def exceeds(self, most: Bounds) -> bool:
        """Whether a batch or another dimension is larger than in ``most``, which has as many profiles."""
        pairs = zip(self.profiles, most.profiles, strict=True)
        shapes = [pair for low, high in pairs for pair in zip(low, high, strict=False)]
        return any(small > large for low, high in shapes for small, large in zip(low, high, strict=False))


def to_bounds(value: Value) -> Bounds:
    """``4``, ``"4x3x224x224"``, several inputs as ``"4x3x224x224,4x10"``, several profiles as ``"1;8"``."""
    text = to_str(value) if not isinstance(value, (list, tuple)) else ",".join(to_str(part) for part in value)
    bounds = []
    for profile in text.split(";"):
        shapes = [tuple(to_int(dim) for dim in shape.split("x")) for shape in profile.split(",") if shape.strip()]
        if not shapes or any(dim < 1 for shape in shapes for dim in shape):
            raise ValueError(f"expected a batch size or shapes like 4x3x224x224, at least 1 each, got {value!r}")
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"the inputs of a profile have one batch size, got {profile!r}")
        bounds.append(tuple(shapes))
    return Bounds(tuple(bounds))

"""``mean`` and ``std`` of a model's node: the inputs that they apply to, and the dimension of the channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError, counted, nearest

Numbers = tuple[float, ...]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")

_EACH = "; give one for each channel, or one for all"


class NormalisationError(ConfigError):
    """``mean`` or ``std`` that do not fit the inputs of a model; ``key`` is the key at fault."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of an input: one number for all of it, or one for each channel; empty means 0 or 1.

    ``axis`` is the dimension of the channels, counted from the last, which is -1.
    """

    mean: Numbers
    std: Numbers
    axis: int

    def arrays(self, rank: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std, with ``rank`` dimensions, to be broadcast over an input."""
        shape = (*[1] * (rank + self.axis), -1, *[1] * (-self.axis - 1))
        mean, std = self.mean or (0.0,), self.std or (1.0,)
        return np.array(mean, dtype).reshape(shape), np.array(std, dtype).reshape(shape)

    def misfit(self, shape: Sequence[int]) -> str:
        """Why an input of ``shape`` cannot be normalised; empty if it can."""
        count = max(len(self.mean), len(self.std))
        if count <= 1 or (len(shape) >= -self.axis and shape[self.axis] == count):
            return ""
        order = "HxWxC" if self.axis == -1 else "CxHxW"
        return f"mean and std are for {order}, {counted(count, 'number')} here; got {shown_dims(shape)}"


@dataclass(frozen=True)
class Normalisation:
    """``mean`` and ``std`` for the images that a model takes; ``means`` and ``stds`` for inputs by their names."""

    mean: Numbers = ()
    std: Numbers = ()
    means: tuple[tuple[str, Numbers], ...] = ()
    stds: tuple[tuple[str, Numbers], ...] = ()

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Normalisation:
        """That of a model's parameters."""
        return cls(params["mean"], params["std"], params["means"], params["stds"])

    def __bool__(self) -> bool:
        return bool(self.mean or self.std or self.means or self.stds)

    def by_key(self) -> dict[str, Numbers]:
        """The numbers by the keys of the node that set them."""
        named = {f"{key}::{name}": numbers for key, each in self._named() for name, numbers in each}
        return {key: numbers for key, numbers in {"mean": self.mean, "std": self.std, **named}.items() if numbers}

    def pairs(self) -> list[tuple[Numbers, Numbers]]:
        """Mean and std, without a name and for each name."""
        means, stds = dict(self.means), dict(self.stds)
        return [(self.mean, self.std), *((means.get(name, ()), stds.get(name, ())) for name in {*means, *stds})]

    def scales(self, inputs: Sequence[TensorSpec]) -> dict[int, Scale]:
        """The scale of each input that has one, by its index.

        ``inputs`` have the dimensions that the model declares. ``mean`` and ``std`` without a name are for the inputs
        that are images: those of four dimensions, or an only input of more than two. ``NormalisationError`` if several
        inputs may be meant, and for numbers that do not fit an input.
        """
        if not self:
            return {}
        self.check_names(inputs)
        images = self._images(inputs) if self.mean or self.std else ()
        means, stds = dict(self.means), dict(self.stds)
        scales = {}
        for index, spec in enumerate(inputs):
            mean = means.get(spec.name, self.mean if index in images else ())
            std = stds.get(spec.name, self.std if index in images else ())
            if mean or std:
                keys = "mean" + f"::{spec.name}" * (spec.name in means), "std" + f"::{spec.name}" * (spec.name in stds)
                scales[index] = _scale(spec, mean, std, *keys)
        return scales

    def check_names(self, inputs: Sequence[TensorSpec]) -> None:
        """Raise ``NormalisationError`` for a name that no input has, or if one is needed and the shapes are unknown."""
        names = [spec.name for spec in inputs]
        for key, each in self._named():
            for name, _ in each:
                if name not in names:
                    near = nearest(name, names)
                    raise NormalisationError(f"{key}::{name}", f"the model has no input {name!r}; {near}")
        if (self.mean or self.std) and len(inputs) > 1 and not all(spec.dims for spec in inputs):
            key = "mean" if self.mean else "std"
            text = f"the model has {len(inputs)} inputs of undeclared shapes ({', '.join(names)})"
            raise NormalisationError(key, f'{text}; write "{key}::{names[0]}" and so on')

    def _named(self) -> tuple[tuple[str, tuple[tuple[str, Numbers], ...]], ...]:
        return ("mean", self.means), ("std", self.stds)

    def _images(self, inputs: Sequence[TensorSpec]) -> Sequence[int]:
        """The inputs that ``mean`` and ``std`` without a name apply to."""
        images = [index for index, spec in enumerate(inputs) if _is_image(spec)]
        if len(inputs) == 1 and len(inputs[0].dims) > 2:
            return [0]
        key = "mean" if self.mean else "std"
        listed = ", ".join(map(str, inputs))
        if len(inputs) == 1:
            wanted = f"{key} needs an input NxCxHxW or NxHxWxC"
            raise NormalisationError(key, f"{wanted}, and {listed} is not; 'mean::{inputs[0].name}' names it")
        kinds = {(inputs[index].dims, inputs[index].dtype) for index in images}
        by_name = {name for _, each in self._named() for name, _ in each}
        if len(kinds) == 1 or (images and all(inputs[index].name in by_name for index in images)):
            return images
        count = counted(len(inputs), "input")
        has = f"of its {count}, {len(images) or 'none'} have four dimensions"
        example = inputs[images[0] if images else 0].name
        raise NormalisationError(
            key, f'{has} ({listed}); write "{key}::{example}" and so on, by the names of the inputs that it is for'
        )


def has_channels_last(dims: Sequence[int | None]) -> bool:
    """Whether four sizes look like N×H×W×C."""
    return dims[3] in (1, 3, 4) and dims[1] not in (1, 3, 4)


def is_bare_image(dims: Sequence[int | None]) -> bool:
    """Whether an input is one image without a batch: 3×H×W, or H×W×3 of a fixed height."""
    return len(dims) == 3 and (dims[0] == 3 or (dims[2] == 3 and dims[0] not in (None, 1)))


def _is_image(spec: TensorSpec) -> bool:
    return spec.dtype in ("", *FLOATS, *INTEGERS) and (len(spec.dims) == 4 or is_bare_image(spec.dims))


def _scale(spec: TensorSpec, mean: Numbers, std: Numbers, mean_key: str, std_key: str) -> Scale:
    """The scale of one input; ``NormalisationError`` if the numbers do not fit it."""
    both = {mean_key: len(mean), std_key: len(std)}
    key = mean_key if mean else std_key
    if spec.dtype and spec.dtype not in (*FLOATS, *INTEGERS):
        raise NormalisationError(key, f"input {spec.name!r} takes {spec.dtype}, and only numbers can be normalised")
    count = max(both.values())
    axis = _channel_axis(spec.dims, count)
    if axis is None:
        if count > 1:
            wanted = "one number for each channel needs an input NxCxHxW or NxHxWxC"
            raise NormalisationError(key, f"{wanted}, and {spec} is not; give one number")
        return Scale(mean, std, -1)
    channels = spec.dims[axis]
    if channels is None and len({size for size in both.values() if size > 1}) > 1:
        raise NormalisationError(mean_key, f"{len(mean)} numbers, and {std_key} has {len(std)}{_EACH}")
    for key, size in both.items():
        if size > 1 and channels not in (None, size):
            has = f"input {spec.name!r} has {counted(channels or 0, 'channel')}"
            raise NormalisationError(key, f"{size} numbers, and {has}{_EACH}")
    return Scale(mean, std, axis)


def _channel_axis(dims: Sequence[int | None], count: int) -> int | None:
    """The dimension of the channels from the last, for ``count`` numbers; ``None`` if ``dims`` do not tell."""
    if len(dims) == 4:
        if count > 1 and count in (dims[1], dims[3]):
            return -3 if dims[1] == count else -1
        return -1 if has_channels_last(dims) else -3
    if is_bare_image(dims):
        return -3 if dims[0] == 3 else -1
    # A clip, N×T×C×H×W, N×C×T×H×W or N×T×H×W×C: where only one dimension has the size.
    places = [place for place in (-4, -3, -1) if len(dims) == 5 and count > 1 and dims[place] == count]
    return places[0] if len(places) == 1 else None

"""The preprocessing of an exported model, and the TOML beside its ONNX file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.files import output_problem, replace_file
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import GLOBAL, parse_toml
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.report import ToolError, refuse_existing

Sides = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Transform:
    """``Resize(resize)``, ``CenterCrop(crop)``, ``ToTensor``, ``Normalize(mean, std)``.

    ``resize`` is the shorter side, or height and width; ``mean`` and ``std`` are of pixels from 0 to 1.
    """

    resize: int | Sides = 256
    crop: Sides | None = (224, 224)
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.crop is None and isinstance(self.resize, int):
            raise ToolError(f"--resize {self.resize}: images keep their shape; give the model's size with --crop")
        height, width = _sides(self.resize)
        if self.crop is not None and (self.crop[0] > height or self.crop[1] > width):
            raise ToolError(f"--crop {_text(_side(self.crop))}: more than --resize {_text(self.resize)} leaves")
        if not isinstance(self.resize, int) and self.interpolation != "bilinear":
            raise ToolError(f"--interpolation {self.interpolation}: a resize to HxW supports only bilinear")
        if max(self.mean, default=0.0) > 1 or max(self.std, default=0.0) > 1.5:
            numbers = (("mean", self.mean, 1), ("std", self.std, 1.5))
            meant = [
                f"--{key} {','.join(f'{value / 255:.6g}' for value in values)}"
                for key, values, most in numbers
                if max(values, default=0.0) > most
            ]
            raise ToolError(
                "--mean, --std: expected values for pixels 0 to 1, as in Normalize; those of pixels 0 to 255, as in "
                f"the TOML, are divided by 255: {' '.join(meant)}"
            )
        if 0.0 in self.std:
            raise ToolError("--std: contains a zero")

    @classmethod
    def of(cls, preset: Any) -> Transform:
        """From ``weights.transforms()`` of torchvision's classifiers."""
        crop = (*preset.crop_size, *preset.crop_size)[:2]
        sizes = tuple(preset.resize_size)
        resize = sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])
        mean, std = tuple(map(float, preset.mean)), tuple(map(float, preset.std))
        return cls(resize, crop, preset.interpolation.value, mean, std)

    @property
    def size(self) -> Sides:
        """Height and width of the model's input."""
        return self.crop or _sides(self.resize)

    def __str__(self) -> str:
        crop = f", CenterCrop({_text(_side(self.crop))})" if self.crop else ""
        return f"Resize({_text(self.resize)}, {self.interpolation}){crop}, {self.normalisation()}"

    def normalisation(self) -> str:
        """A description of mean and std."""
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"mean {mean}, std {std}"

    def node(self, color: str) -> dict[str, Any]:
        """The node that turns encoded bytes into a Mat of ``size``."""
        sizes: dict[str, Any]
        if isinstance(self.resize, int):
            names, sizes = ["ResizeShorterMat"], {"size": self.resize}
        else:
            names, sizes = ["PillowResizeMat"], dict(zip(("resize_h", "resize_w"), self.resize, strict=True))
        if self.interpolation != "bilinear":
            sizes["interpolation"] = self.interpolation
        if self.crop:
            names, sizes = [*names, "CenterCropMat"], {**sizes, "crop_h": self.crop[0], "crop_w": self.crop[1]}
        return {"backend": f"S[{','.join(['DecodeMat', *names, 'cvtColorMat'])}]", **sizes, "color": color}


def _sides(size: int | Sides) -> Sides:
    return (size, size) if isinstance(size, int) else size


def _side(sides: Sides) -> int | Sides:
    return sides[0] if sides[0] == sides[1] else sides


def _text(size: int | Sides) -> str:
    return str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"


class Files:
    """The files NAME.onnx, NAME.toml, NAME.labels.txt and, later, NAME.trt for TensorRT's engine."""

    def __init__(self, name: Path) -> None:
        suffixes = (".onnx", ".toml", ".labels.txt", ".trt")
        self.name = name
        self.model, self.toml, self.labels, self.engine = (name.with_name(name.name + each) for each in suffixes)

    def check(self, force: bool, writes_labels: bool = True) -> None:
        """Raise ``ToolError`` if one that is to be written exists, unless ``force``, or if they cannot be written."""
        # Missing folders will be created.
        folder = next(parent for parent in self.model.parents if os.path.lexists(parent))
        if problem := output_problem(folder / self.model.name, replaces=True):
            raise ToolError(f"--out {self.name}: {problem}")
        written = (self.model, self.toml, *([self.labels] if writes_labels else []))
        refuse_existing(written, force, "--out NAME gives another name")

    def take(self, made: Files) -> None:
        """Move files made elsewhere into place, each atomically, the TOML last. Raises ``ToolError``."""
        try:
            self.name.parent.mkdir(parents=True, exist_ok=True)
            for source, target in ((made.model, self.model), (made.labels, self.labels), (made.toml, self.toml)):
                if source.exists():
                    replace_file(target, source.read_bytes())
        except OSError as error:
            raise ToolError(f"--out {self.name}: {error.strerror}") from error


ENGINE = "SyncTensor[FirstAvailable[TensorrtTensor,OnnxTensor]]"
MOST = 8  # items of a batch
TRIALS = ((240, 320), (375, 250))  # height and width of trial images, which show the output size of a preprocessing


def model_node(
    files: Files, transform: Transform, has_labels: bool, postprocessor: str = "SoftmaxMax"
) -> dict[str, Any]:
    """The node of the model, whose files are beside the TOML."""
    mean, std = (", ".join(f"{255 * value:.10g}" for value in each) for each in (transform.mean, transform.std))
    node = {
        "backend": ENGINE,
        "model": files.model.name,
        "model::cache": files.engine.name,
        "max": MOST,
        "batching_timeout": 2,
        "mean": mean,
        "std": std,
    }
    if postprocessor:
        node["postprocessor"] = postprocessor
    if has_labels:
        node["labels"] = files.labels.name
    return node


def followed_by(tables: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with ``node`` after the last one; ``ToolError`` if several are last."""
    nodes = {name: dict(table) for name, table in tables.items() if isinstance(table, Mapping) and name != GLOBAL}
    ends = [name for name, table in nodes.items() if not table.get("next")]
    if len(ends) != 1:
        raise ToolError(f"the TOML ends in {len(ends)} nodes ({', '.join(ends)}); a model follows one")
    name = "model"
    while name in nodes:
        name += "_"
    nodes[ends[0]]["next"] = name
    return {GLOBAL: dict(tables.get(GLOBAL, {})), **nodes, name: dict(node)}


def read_preprocessing(path: Path) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The tables of a TOML file, and channels, height and width of the images that it makes.

    Raises ``ToolError`` if it makes something else, or images of several sizes.
    """
    tables = parse_toml(path)
    plan = plan_pipeline(tables)
    decoders = Decoders.of(plan)
    sizes = set()
    with pipe(plan) as run:
        for height, width in TRIALS:
            run(data := {"data": decoders.small_image(height, width)})
            result = data.get("result")
            shape = tuple(getattr(result, "shape", ()))
            if isinstance(result, np.ndarray) and len(shape) == 3:
                shape = (1, shape[2], *shape[:2])
            if len(shape) != 4 or shape[0] != 1:
                kind = shown_dims(shape) if shape else str(data.get("error", type(result).__name__))
                raise ToolError(f"{path}: makes {kind} from an image; expected a Mat or a Tensor 1xCxHxW")
            sizes.add((int(shape[1]), int(shape[2]), int(shape[3])))
    if len(sizes) > 1:
        found = " and ".join(map(shown_dims, sorted(sizes)))
        raise ToolError(f"{path}: makes images of several sizes, {found} for two; the model takes one")
    return tables, sizes.pop()


COMMENTS = {
    "size": "the shorter side, smoothed as torchvision's Resize does",
    "color": "channel order of the model",
    "model::cache": "with TensorRT: the engine, kept between starts",
    "max": "requests in one run of the model",
    "batching_timeout": "ms; how long a request waits for others at most",
}
"""For ``to_toml``, of keys that exported files have."""


def to_toml(config: Mapping[str, Mapping[str, Any]], comments: Mapping[str, str] | None = None) -> str:
    """TOML with the scalars of ``global`` first, then a table for each node; ``comments`` is by key."""
    tables = []
    for name in [GLOBAL, *(name for name in config if name != GLOBAL)]:
        lines = [] if name == GLOBAL else [f"[{_key(name)}]"]
        for key, value in config.get(name, {}).items():
            line = f"{_key(key)} = {_value(value)}"
            lines.append(f"{line:37} # {comments[key]}" if comments and key in comments else line)
        tables.append("\n".join(lines))
    return "\n\n".join(filter(None, tables)) + "\n"


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "a").replace("-", "a").isalnum() else _value(key)


def _value(value: Any) -> str:
    # Like JSON, without surrogate pairs; TOML also requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

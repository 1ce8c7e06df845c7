"""Changes that change results, which ``--allow-pixels`` tries, and what ``torchpipe parity`` says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.registry import canonical
from torchpipe_py.tools.compare_models.figures import accuracy, agreement, spreads
from torchpipe_py.tools.compare_models.images import images_of
from torchpipe_py.tools.compare_models.run import Settings, compare_configs
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.shapes import Shape, copied

LEAST_AGREEMENT = 0.95
"""The least share of images whose class must stay the same."""

MOST_IMAGES = 200


@dataclass(frozen=True)
class Alternative:
    """Another value of ``key``, or other backends, by the name of those that they replace."""

    name: str
    key: str = ""
    value: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    needs_gpu: bool = False


_GPU_TWINS = ("Decode", "Resize", "PillowResize", "ResizePad", "ResizeShorter", "LetterBox", "CenterCrop", "cvtColor")

ALTERNATIVES = (
    Alternative("nearest interpolation", "interpolation", "nearest"),
    Alternative("OpenCV's resize", backends={"PillowResizeMat": "ResizeMat", "PillowResizeTensor": "ResizeTensor"}),
    Alternative(
        "GPU decode",
        backends={"Mat2Tensor": "Identity", **{f"{name}Mat": f"{name}Tensor" for name in _GPU_TWINS}},
        needs_gpu=True,
    ),
    Alternative("fp16", "precision", "fp16", needs_gpu=True),
)
UNAVAILABLE = (
    "decoding at a reduced size: no backend has a key for it",
    "int8: torchpipe quantize makes the model and measures its loss",
)


def changed(shape: Shape, alternative: Alternative) -> Shape | None:
    """The shape with an alternative; ``None`` if that changes nothing or is refused."""
    tables = copied(shape.config, shape.config.source)
    for name in shape.units:
        for backend in shape.pipeline.plans[name].backends:
            for part in backend.parts():
                _set(tables[name], part, alternative)
        _replace(tables[name], alternative)
    try:
        made = Shape.of(f"{shape.name}, {alternative.name}", tables)
    except ConfigError:
        return None
    return None if made.units == shape.units else replace(made, alternative=alternative.name)


def _set(table: dict[str, Any], part: BackendPlan, alternative: Alternative) -> None:
    """Set another value, where the backend has such a key."""
    names = {param.key: name for name, param in part.cls.parameters().items()}
    name = names.get(alternative.key)
    if name is not None and part.params[name] != alternative.value:
        table[part.keys.get(name, alternative.key)] = alternative.value
        if alternative.key == "precision" and part.params["cache"]:  # NOTE: the user's engine must stay
            table[part.keys["cache"]] = f"{part.params['cache']}.{alternative.value}"
    if part.cls.__name__ == "DecodeMat" and "DecodeMat" in alternative.backends:
        table["DecodeMat::color"] = part.params["color"]  # the default of another decoder may differ


def _replace(table: dict[str, Any], alternative: Alternative) -> None:
    """Replace backends, and the names that keys are scoped with."""
    names, written = alternative.backends, str(table.get("backend", "Identity"))
    expression = re.sub(r"\w+", lambda name: names.get(canonical(name[0]), name[0]), written)
    if expression == written:
        return
    old = dict(table)
    table.clear()
    for key, value in old.items():
        scope, mark, rest = key.partition("::")
        table[f"{names.get(scope, scope)}{mark}{rest}"] = value
    needs_stream = alternative.needs_gpu and "SyncTensor" not in written
    table["backend"] = f"SyncTensor[{expression}]" if needs_stream else expression


def parity_of(written: Shape, other: Shape, img_dir: str) -> tuple[str, bool]:
    """How results of another shape differ from those of the original file, in words, and whether few enough do.

    Compares at most ``MOST_IMAGES`` images of the folder. Raises ``TorchpipeError`` if they cannot be compared.
    """
    paths = images_of(img_dir)
    paths = paths[:: -(-len(paths) // MOST_IMAGES)]
    tables = {written.name: written.config, other.name: other.config}
    parity = compare_configs(Settings(written.name, other.name, img_dir, paths=paths, tables=tables))
    if not parity.compared:
        raise ToolError("parity has no image with comparable results")
    agreed, right = agreement(parity.compared), accuracy(parity.compared)
    if agreed is None:
        mean = spreads(parity.compared)["mean"]
        return f"pixels differ by {mean.mean:.2f} of 255 on average, by {mean.worst:.2f} in the worst image", True
    words = f"the same class for {agreed.hits} of {agreed.total} images"
    if right is not None:
        words += f", accuracy {right.a.share:.1%} before and {right.b.share:.1%} after"
    return words, agreed.share >= LEAST_AGREEMENT

"""Changes of a file that change its results: of pixels and of precision; and how far results differ by agreement.

``--allow-pixels`` of ``torchpipe tune`` tries them, and so does ``torchpipe compile``, which measures what each loses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.registry import canonical
from torchpipe_py.tools.compare_models.figures import Compared, agreement, measured, objects_of
from torchpipe_py.tools.compare_models.images import Pictures, ResultSource, images_of
from torchpipe_py.tools.compare_models.report import summary
from torchpipe_py.tools.compare_models.run import compare
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.candidates import Candidate, copied, with_other_sharing

LEAST_AGREEMENT = 0.95
"""The least share of classes or objects that must stay the same, or the least mean IoU or cosine."""

MOST_IMAGES = 200


@dataclass(frozen=True)
class Alternative:
    """Other values of keys, or other backends by the name of the old ones, with values of theirs; of one ``part``.

    Alternatives of one part exclude each other. Keys change where the backend has the values ``where``. ``needs`` is a
    backend that the file must have. ``drops`` are keys that go, unless another backend of the node reads them.
    """

    name: str
    part: str
    keys: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    drops: tuple[str, ...] = ()
    needs_gpu: bool = False


_TWINS = ("Decode", "Resize", "PillowResize", "ResizePad", "ResizeShorter", "LetterBox", "CenterCrop", "cvtColor")

_ON_GPU = {"Mat2Tensor": "Identity", **{f"{name}Mat": f"{name}Tensor" for name in _TWINS}}
_ON_CPU = {f"{name}Tensor": f"{name}Mat" for name in _TWINS}
_BY_OPENCV = {"PillowResizeMat": "ResizeMat", "PillowResizeTensor": "ResizeTensor"}

ALTERNATIVES = (
    Alternative('at_least = "2x"', "decode size", {"at_least": "2x"}),
    Alternative('at_least = "1x"', "decode size", {"at_least": "1x"}),
    Alternative("OpenCV's area resize", "resize", {"interpolation": "area"}, _BY_OPENCV),
    Alternative("OpenCV's resize", "resize", {}, _BY_OPENCV),
    Alternative("bilinear interpolation", "resize", {"interpolation": "bilinear"}),
    Alternative("nearest interpolation", "resize", {"interpolation": "nearest"}),
    Alternative("CPU decode", "decoder", {}, _ON_CPU, needs="DecodeTensor", drops=("max", "decoder", "unchecked")),
    Alternative("GPU decode", "decoder", {}, _ON_GPU, needs="DecodeMat", needs_gpu=True),
    Alternative("fp16", "precision", {"precision": "fp16"}, needs_gpu=True),
)
"""Of each part, those that lose least first."""

NO_GPU = "there is no GPU"
NO_NODE = "no node of the file can change to it"
UNAVAILABLE = ("int8: torchpipe compile makes the model and measures its loss",)


def alternatives_of(
    shapes: Sequence[Candidate], img_dir: str | None, images: Sequence[bytes], has_gpu: bool
) -> tuple[list[Candidate], dict[str, str], list[str]]:
    """The shapes with each alternative, the first of ``shapes`` being the user's file.

    Returns those whose results differ little enough on the images of the folder, or on ``images``; how they differ by
    the alternative's name; and why others are not tried.
    """
    found, parity, not_tried = list[Candidate](), dict[str, str](), list(UNAVAILABLE)
    with TemporaryDirectory() as folder:
        for number, body in enumerate([] if img_dir else images):
            Path(folder, f"{number}.jpg").write_bytes(body)
        for alternative in ALTERNATIVES:
            try:
                if alternative.needs_gpu and not has_gpu:
                    raise ToolError(NO_GPU)
                other = with_alternative(shapes[0], alternative)
                parity[alternative.name] = parity_of(shapes[0], other, img_dir or folder)
            except TorchpipeError as error:
                not_tried.append(f"{alternative.name}: {error}")
                continue
            found += shapes_with(shapes, [alternative])
    return found, parity, not_tried


def with_alternative(shape: Candidate, alternative: Alternative) -> Candidate:
    """The shape with an alternative. ``ToolError`` if that changes nothing, ``ConfigError`` if it cannot be planned."""
    tables = copied(shape.config, shape.config.source)
    parts = [part for plan in shape.nodes.values() for part in plan.parts()]
    if alternative.needs and not any(part.cls.__name__ == alternative.needs for part in parts):
        raise ToolError(NO_NODE)
    for name, plan in shape.nodes.items():
        of_node = [*plan.parts()]
        for part in of_node:
            if alternative.backends:
                _keep_color(tables[name], part, alternative)
                _drop(tables[name], part, of_node, alternative)
            else:
                _set(tables[name], part, alternative)
        _replace(tables[name], alternative)
    if tables == shape.config:
        raise ToolError(NO_NODE)
    names = ", ".join(filter(None, (shape.alternative, alternative.name)))
    other = replace(shape, shape=f"{shape.shape}, {alternative.name}", config=tables, alternative=names)
    plan_pipeline(tables)
    return other


def with_alternatives(shape: Candidate, alternatives: Iterable[Alternative]) -> Candidate:
    """The shape with all of them. Raises as ``with_alternative``."""
    for alternative in alternatives:
        shape = with_alternative(shape, alternative)
    return shape


def shapes_with(shapes: Sequence[Candidate], alternatives: Sequence[Alternative]) -> list[Candidate]:
    """The first shape, and those without shared nodes, each with all ``alternatives`` if it can have them.

    Those that decode on the GPU follow once more with such nodes shared.
    """
    found = list[Candidate]()
    for shape in [shapes[0], *(shape for shape in shapes[1:] if not shape.heads)]:
        with suppress(TorchpipeError):  # its nodes are not those of the file
            found.append(with_alternatives(shape, alternatives))
    if any(alternative.needs_gpu for alternative in alternatives):
        found += [shared for shared in map(with_other_sharing, found) if shared is not None]
    return found


def _set(table: dict[str, Any], part: BackendPlan, alternative: Alternative) -> None:
    """Set other values, where the backend has such keys."""
    params = part.cls.parameters()
    names = {param.key: name for name, param in params.items()}
    if any(part.params.get(name) != value for name, value in alternative.where.items()):
        return
    for key, value in alternative.keys.items():
        name = names.get(key)
        if name is None or part.params[name] == value or (params[name].choices and value not in params[name].choices):
            continue
        table[part.keys.get(name, key)] = value
        if key in ("precision", "model") and part.params.get("cache"):  # NOTE: the user's engine must stay
            table[part.keys["cache"]] = f"{part.params['cache']}.{alternative.name}"


def _keep_color(table: dict[str, Any], part: BackendPlan, alternative: Alternative) -> None:
    """Write the color of a decoder that is replaced: another one may have another default."""
    name = part.cls.__name__
    if name in ("DecodeMat", "DecodeTensor") and name in alternative.backends:
        table[f"{name}::color"] = part.params["color"]


def _drop(table: dict[str, Any], part: BackendPlan, parts: Sequence[BackendPlan], alternative: Alternative) -> None:
    """Drop the keys of a backend that is replaced, which the other one does not have."""
    if part.cls.__name__ == alternative.needs:
        read = {param.key for other in parts if other is not part for param in other.cls.parameters().values()}
        for name, param in part.cls.parameters().items():
            if param.key in alternative.drops and param.key not in read and name in part.keys:
                table.pop(part.keys[name], None)


def _replace(table: dict[str, Any], alternative: Alternative) -> None:
    """Replace backends, and the names that keys are scoped with."""
    names, written = alternative.backends, str(table.get("backend", "Identity"))
    replaced = set[str]()

    def other(match: re.Match[str]) -> str:
        new = names.get(canonical(match[0]))
        replaced.update([new] if new else [])
        return new or match[0]

    expression = re.sub(r"\w+", other, written)
    if expression == written:
        return
    old = dict(table)
    table.clear()
    for key, value in old.items():
        scope, mark, rest = key.partition("::")
        table[f"{names.get(scope, scope)}{mark}{rest}"] = value
    table.update({f"{name}::{key}": value for name in sorted(replaced) for key, value in alternative.keys.items()})
    needs_stream = alternative.needs_gpu and "SyncTensor" not in written
    table["backend"] = f"SyncTensor[{expression}]" if needs_stream else expression


def parity_of(written: Candidate, other: Candidate, img_dir: str) -> str:
    """How results of another shape differ from those of the original file, in words.

    Compares at most ``MOST_IMAGES`` images of the folder. Raises ``TorchpipeError`` if they cannot be compared, or
    differ too much.
    """
    paths = images_of(img_dir)
    some = Pictures(img_dir, paths[:: -(-len(paths) // MOST_IMAGES)])
    outcome = compare(ResultSource(written.shape, written.config), ResultSource(other.shape, other.config), some)
    if refused := [image for image in outcome.refused if image.b and not image.a]:
        raise ToolError(f"{refused[0].name} has no result: {refused[0].b}")
    words = summary(outcome)
    if not words or _share_kept(outcome.compared) < LEAST_AGREEMENT:
        raise ToolError(words or "parity has no image with comparable results")
    return words


def _share_kept(compared: Sequence[Compared]) -> float:
    """The share of classes or objects that are the same, or the mean IoU or cosine; 1 for pixels."""
    if (agreed := agreement(compared)) is not None:
        return agreed.share
    if (objects := objects_of(compared)) is not None:
        return objects.matched / max(objects.a, objects.b, 1)
    means = [spread.mean for name in ("iou", "cosine") if (spread := measured(compared, name, is_best_high=True))]
    return min(means, default=1.0)

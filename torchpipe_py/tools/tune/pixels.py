"""Settings that change results, which ``--allow-pixels`` tries, and how far the results differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.registry import canonical
from torchpipe_py.tools.compare_models.figures import Compared, agreement, measured, objects_of
from torchpipe_py.tools.compare_models.images import Pictures, Source, images_of
from torchpipe_py.tools.compare_models.report import summary
from torchpipe_py.tools.compare_models.run import compare
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.candidates import Candidate, copied, is_valid, with_other_sharing

LEAST_AGREEMENT = 0.95
"""The least share of classes or objects that must stay the same, or the least mean IoU or cosine."""

MOST_IMAGES = 200


@dataclass(frozen=True)
class Alternative:
    """A replaced setting, or replaced backends by the name of the old ones."""

    name: str
    key: str = ""
    value: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    needs_gpu: bool = False


_GPU_TWINS = ("Decode", "Resize", "PillowResize", "ResizePad", "ResizeShorter", "LetterBox", "CenterCrop", "cvtColor")

_ON_GPU = {"Mat2Tensor": "Identity", **{f"{name}Mat": f"{name}Tensor" for name in _GPU_TWINS}}

ALTERNATIVES = (
    Alternative("nearest interpolation", "interpolation", "nearest"),
    Alternative("OpenCV's resize", backends={"PillowResizeMat": "ResizeMat", "PillowResizeTensor": "ResizeTensor"}),
    Alternative("GPU decode", backends=_ON_GPU, needs_gpu=True),
    Alternative("fp16", "precision", "fp16", needs_gpu=True),
)
UNAVAILABLE = ("int8: torchpipe quantize makes the model and measures its loss",)


def alternatives_of(
    shapes: Sequence[Candidate], img_dir: str | None, images: Sequence[bytes], has_gpu: bool
) -> tuple[list[Candidate], dict[str, str], list[str]]:
    """The shapes with each alternative, the first of ``shapes`` being the user's file.

    Returns those whose results differ little enough on the images of the folder, or on ``images``; how they differ by
    the alternative's name; and why others are not tried.
    """
    found, parity, not_tried = list[Candidate](), dict[str, str](), list(UNAVAILABLE)
    plain = [shapes[0], *(shape for shape in shapes[1:] if not shape.heads)]
    with TemporaryDirectory() as folder:
        for number, body in enumerate([] if img_dir else images):
            Path(folder, f"{number}.jpg").write_bytes(body)
        for alternative in ALTERNATIVES:
            changes = [change for shape in plain if (change := with_alternative(shape, alternative)) is not None]
            try:
                if alternative.needs_gpu and not has_gpu:
                    raise ToolError("there is no GPU")
                if not changes:
                    raise ToolError("no node of the file can change to it")
                parity[alternative.name] = parity_of(shapes[0], changes[0], img_dir or folder)
            except TorchpipeError as error:
                not_tried.append(f"{alternative.name}: {error}")
                continue
            found += changes
            if alternative.needs_gpu:  # a node that decodes on the GPU can be shared
                found += [shared for shared in map(with_other_sharing, changes) if shared is not None]
    return found, parity, not_tried


def with_alternative(shape: Candidate, alternative: Alternative) -> Candidate | None:
    """The shape with an alternative; ``None`` if that changes nothing or is refused."""
    tables = copied(shape.config, shape.config.source)
    for name, plan in shape.nodes.items():
        for backend in plan.backends:
            for part in backend.parts():
                _set(tables[name], part, alternative)
        _replace(tables[name], alternative)
    if tables == shape.config:
        return None
    other = replace(shape, shape=f"{shape.shape}, {alternative.name}", config=tables, alternative=alternative.name)
    return other if is_valid(other) else None


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


def parity_of(written: Candidate, other: Candidate, img_dir: str) -> str:
    """How results of another shape differ from those of the original file, in words.

    Compares at most ``MOST_IMAGES`` images of the folder. Raises ``TorchpipeError`` if they cannot be compared, or
    differ too much.
    """
    paths = images_of(img_dir)
    some = Pictures(img_dir, paths[:: -(-len(paths) // MOST_IMAGES)])
    outcome = compare(Source(written.shape, written.config), Source(other.shape, other.config), some)
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

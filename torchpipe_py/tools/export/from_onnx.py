"""``torchpipe export model.onnx``: the TOML that serves an ONNX file, and what it assumes."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.backends.model.onnx_graph import noted_normalisation
from torchpipe_py.backends.model.postprocess import read_labels, uses
from torchpipe_py.backends.model.postprocess.settings import names_of
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import ConfigError, TorchpipeError, counted, first_line, nearest
from torchpipe_py.files import output_problem
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import GLOBAL, parse_toml
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.export.config import (
    COMMENTS,
    ENGINE,
    MOST,
    TRIALS,
    Files,
    Sides,
    Transform,
    followed_by,
    read_preprocessing,
    to_toml,
)
from torchpipe_py.tools.export.onnx_model import FLOATS, ImageInput, OnnxModel
from torchpipe_py.tools.export.readings import (
    CROP,
    LETTERBOX,
    SEGMENTER,
    STRETCH,
    WHOLE,
    Pixels,
    Reading,
    read_kind,
    read_named,
    read_pixels,
    readers_of_labels,
)
from torchpipe_py.tools.report import ToolError, printable, refuse_existing

DETECTOR_SIDE, SIDE = 640, 224
"""Sizes of models whose file leaves the size open, as most are trained."""
OWN_COMMENTS = {
    **COMMENTS,
    "mean": "of pixels 0..255",
    "std": "of pixels 0..255",
    "original_size": "the map has the size of the picture; false: of the model's output",
}


@dataclass(frozen=True)
class Assumed:
    """A line of the report: a key, what it was set to and why, and what to write instead."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"  {self.key:15} {self.text}"


def export_onnx(args: argparse.Namespace) -> int:
    """Write NAME.toml, and NAME.labels.txt for labels, for a file that stays where it is; print what was assumed.

    Raises ``ToolError`` and ``ConfigError``, and then writes nothing.
    """
    path = Path(args.source)
    _check_options(args)
    files = Files(Path(args.out) if args.out is not None else path.with_suffix(""))
    _check_writable(files, args.force)
    model = OnnxModel(path)
    image = model.image_input()
    labels = _given_labels(args.labels)
    made = _without_image(model, args) if image is None else _with_image(model, image, args, labels)
    with tempfile.TemporaryDirectory() as folder:
        temporary = Files(Path(folder, files.name.name))
        answered = _write_and_try(made, temporary, files, model)
        files.take(temporary)
    print(f"{files.toml}: serves {path}, {made.reading.kind} ({made.reading.why})")
    for word, specs in (("inputs", model.inputs), ("outputs", made.outputs)):
        print(Assumed(word, ", ".join(map(_declared, specs))))
    print("assumed; the TOML has the keys:")
    for line in made.assumed:
        print(line)
    for note in made.reading.notes:
        print(f"  NOTE: {note}")
    if answered:
        print(f"a picture of {TRIALS[0][1]}x{TRIALS[0][0]} was answered: {answered}")
    print(f"torchpipe-serve {shlex.quote(str(files.toml))} serves it")
    return 0


def _declared(spec: TensorSpec) -> str:
    return " ".join(filter(None, [spec.name, shown_dims(spec.dims) if spec.dims else "", spec.dtype]))


def _check_options(args: argparse.Namespace) -> None:
    for name in ("weights", "transforms"):
        if getattr(args, name) is not None:
            raise ToolError(f"--{name}: for PyTorch models; {args.source} holds its weights")
    for name in ("resize", "crop", "fit", "interpolation") if args.preprocess else ():
        if getattr(args, name) is not None:
            raise ToolError(f"--{name}: --preprocess {args.preprocess} decodes and resizes")
    if args.postprocessor and registry.default.find_postprocessor(args.postprocessor) is None:
        valid = nearest(args.postprocessor, registry.default.postprocessor_names())
        raise ToolError(f"--postprocessor {args.postprocessor}: {valid}")


def _check_writable(files: Files, force: bool) -> None:
    folder = next(parent for parent in files.toml.absolute().parents if os.path.lexists(parent))
    if problem := output_problem(folder / files.toml.name, replaces=True):
        raise ToolError(f"{files.toml}: {problem}; --out NAME gives another name")
    refuse_existing((files.toml, files.labels), force, "--out NAME gives another name")


def _given_labels(path: Path | None) -> Sequence[str]:
    if path is None:
        return ()
    try:
        return read_labels(str(path))
    except (OSError, ConfigError) as error:
        raise ToolError(f"--labels {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error


# -- what is written --------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """The tables before the model's, its node, and what they rest on."""

    reading: Reading
    outputs: Sequence[TensorSpec]
    tables: dict[str, Any]
    node: dict[str, Any]
    labels: Sequence[str]
    assumed: list[Assumed]
    takes_pictures: bool


def _without_image(model: OnnxModel, args: argparse.Namespace) -> Made:
    """The TOML of a model whose requests hold its inputs as they are."""
    for name in ("resize", "crop", "fit", "mean", "std", "preprocess", "labels"):
        if getattr(args, name) is not None:
            inputs = ", ".join(map(str, model.inputs))
            raise ToolError(f"--{name}: for a model whose only input is an image; {model.path} takes {inputs}")
    batches = {spec.dims[0] for spec in model.inputs if spec.dims}
    most = MOST if all(map(model.takes_a_batch, model.inputs)) else 1
    fixed = batches.pop() if len(batches) == 1 else None
    node: dict[str, Any] = {"backend": "OnnxTensor", "max": most}
    if fixed is not None and fixed > 1 and all(len(spec.dims) > 1 for spec in model.inputs):
        node |= {"min": fixed, "max": fixed}
    names = ", ".join(spec.name for spec in model.inputs)
    how = f"data is a dict by name: {names}" if len(model.inputs) > 1 else f"data is the input {names}"
    assumed = [Assumed("inputs", f"{how}, or inputs of a request; nothing is decoded or scaled"), _batch(node)]
    why = f"{counted(len(model.inputs), 'input')}, and not just one image" if len(model.inputs) > 1 else "not of images"
    reading = Reading("a model of tensors", why, args.postprocessor or "")
    return Made(reading, model.outputs, {}, node, (), assumed, takes_pictures=False)


def _with_image(model: OnnxModel, image: ImageInput, args: argparse.Namespace, labels: Sequence[str]) -> Made:
    """The TOML of a model of one image: decoding, the model's size and pixels, the model, its postprocessor."""
    sides = _sides(model, image, args)
    outputs, arrays = model.run(image, sides)
    if args.postprocessor is None:
        reading = read_kind(model, image, outputs, arrays, sides, labels)
    else:
        reading = read_named(args.postprocessor, outputs, arrays)
        if reading.kind == "a classifier":
            reading.labels = labels or names_of(model.metadata.get("names", ""))
    if reading.is_yolo and None in image.sides and sides == (SIDE, SIDE) and args.resize is None and args.crop is None:
        sides = (DETECTOR_SIDE, DETECTOR_SIDE)
        outputs, arrays = model.run(image, sides)
    if reading.postprocessor == "BoxesScoresLabels" and None in image.sides and args.resize is None:
        reading.fit = WHOLE
    if image.is_last and reading.fit == CROP:
        reading.fit = STRETCH
    pixels = _pixels(model, image, reading, args)
    assumed: list[Assumed] = []
    tables, sides = _decoding(image, sides, reading, args, assumed)
    assumed.append(Assumed("mean, std", _of_pixels(pixels)))
    node = _node(model, image, sides, reading, pixels)
    assumed.append(_batch(node))
    written = labels or reading.labels
    if _has_labels(reading):
        assumed.append(_of_labels(written, model))
    elif labels:
        found = f"{reading.kind} ({reading.why}), whose answers have no labels"
        raise ToolError(f"--labels {args.labels}: read as {found}; {readers_of_labels(model, outputs, labels)}")
    if reading.postprocessor:
        assumed.append(Assumed("postprocessor", f'{reading.postprocessor}; "" answers the outputs as they are'))
    return Made(reading, outputs, tables, node, written, assumed, takes_pictures=True)


def _sides(model: OnnxModel, image: ImageInput, args: argparse.Namespace) -> Sides:
    """Height and width of the model's input."""
    wanted = args.crop if args.crop is not None else args.resize
    given = (wanted, wanted) if isinstance(wanted, int) else wanted
    if args.preprocess:
        _, (_, *made) = read_preprocessing(args.preprocess)
        given = (made[0], made[1])
    if given is None:
        given = _imgsz(model.metadata.get("imgsz", "")) or (SIDE, SIDE)
    elif any(have not in (None, want) for have, want in zip(image.sides, given, strict=True)):
        if isinstance(args.resize, int) and args.crop is None:
            given = image.sides  # the shorter side before the crop to the model's size
        else:
            takes = shown_dims(image.spec.dims)
            raise ToolError(f"images of {shown_dims(given)}: {model.path} takes {takes}")
    height, width = (want if have is None else have for have, want in zip(image.sides, given, strict=True))
    return int(height or SIDE), int(width or SIDE)


def _imgsz(text: str) -> Sides | None:
    """Ultralytics' ``imgsz``: ``[640, 480]``, or ``640``."""
    numbers = [int(part) for part in text.strip("[]() ").replace(",", " ").split() if part.isascii() and part.isdigit()]
    if not numbers or not all(0 < number <= 2**14 for number in numbers):
        return None
    return numbers[0], numbers[-1]


def _decoding(
    image: ImageInput, sides: Sides, reading: Reading, args: argparse.Namespace, assumed: list[Assumed]
) -> tuple[dict[str, Any], Sides]:
    """The tables that make the model's image of a picture, and that image's size."""
    if args.preprocess:
        tables, (channels, height, width) = read_preprocessing(args.preprocess)
        if channels != image.channels:
            raise ToolError(
                f"--preprocess {args.preprocess}: makes {counted(channels, 'channel')}, not {image.channels}"
            )
        assumed.append(Assumed("preprocessing", f"that of {args.preprocess}"))
        return tables, (height, width)
    color = args.color or ("gray" if image.channels == 1 else "rgb")
    if (color == "gray") != (image.channels == 1):
        raise ToolError(f"--color {color}: the model takes {counted(image.channels, 'channel')}")
    fit = args.fit or reading.fit
    if args.fit is None and (args.crop is not None or isinstance(args.resize, int)) and fit != LETTERBOX:
        fit = CROP
    height, width = sides
    size = f"{width}x{height} (width x height)"
    keys: dict[str, Any] = {}
    if fit == CROP and height == width:
        resize = args.resize if args.resize is not None else round(height * reading.shorter)
        transform = Transform(resize, sides, args.interpolation or "bilinear")
        table = transform.node(color)
        text = f"the shorter side to {table.get('size', 'fit')}, then the centre, {size}"
        others = "--fit stretch or letterbox"
    elif fit == LETTERBOX:
        keys = {"max_h": height, "max_w": width}
        table = {"backend": "S[DecodeMat,LetterBoxMat,cvtColorMat]", **keys, "color": color}
        text, others = f"letterboxed to {size}: the whole picture, gray borders", "--fit stretch (ResizeMat) or crop"
    elif fit == WHOLE:
        if None not in image.sides:
            raise ToolError(f"--fit whole: the model takes {shown_dims(image.spec.dims)}")
        table = {"backend": "S[DecodeMat,cvtColorMat]", "color": color}
        text, others = "pictures keep their size", "--resize HxW"
    else:
        keys = {"resize_h": height, "resize_w": width}
        table = {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", **keys, "color": color}
        text = f"stretched to {size}: the whole picture, proportions change"
        others = "--fit letterbox (LetterBoxMat) or crop"
    assumed.append(Assumed("backend", f"{text}; {others} changes that"))
    how = {"rgb": "the model takes red first", "bgr": "the model takes blue first", "gray": "one channel"}[color]
    other = {"rgb": '; "bgr" for models trained on images of OpenCV', "bgr": "", "gray": ""}[color]
    assumed.append(Assumed("color", f'"{color}": {how}{other}'))
    if None in image.sides and fit != WHOLE:
        assumed.append(Assumed("size", f"the file leaves it open; --resize HxW gives another than {size}"))
    if not image.is_sure:
        assumed.append(Assumed("layout", "the file does not say; read as Nx3xHxW"))
    return {"decode": {**table, "instance_num": 2}}, sides


def _pixels(model: OnnxModel, image: ImageInput, reading: Reading, args: argparse.Namespace) -> Pixels:
    found = read_pixels(model, image, reading)
    if args.mean is None and args.std is None:
        return found
    if image.spec.dtype == "uint8":
        raise ToolError(f"--mean, --std: {model.path} takes uint8: pixels 0 to 255 as they are")
    mean, std = args.mean or found.mean or (0.0,), args.std or found.std or (1.0,)
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) not in (1, image.channels):
            raise ToolError(f"--{name}: {counted(len(numbers), 'number')}; the model takes {image.channels} channels")
    Transform(mean=mean, std=std)  # refuse values for pixels 0 to 255
    return Pixels(mean, std, "as the options say")


def _of_pixels(pixels: Pixels) -> str:
    if not pixels.mean:
        return f"none: pixels {pixels.words}"
    return f"pixels {pixels.words}; --mean and --std give others"


def _node(model: OnnxModel, image: ImageInput, sides: Sides, reading: Reading, pixels: Pixels) -> dict[str, Any]:
    """The model's node, without the paths of its files."""
    is_static = reading.postprocessor != "BoxesScoresLabels" and image.has_batch and image.spec.dtype in FLOATS
    node: dict[str, Any] = {"backend": ENGINE if is_static else "OnnxTensor"}
    if image.batch is not None:
        node["max"] = image.batch
        if image.batch > 1:
            node["min"] = image.batch
    elif None in image.sides and reading.fit != WHOLE:
        least, most = ("x".join(map(str, image.shape(batch, sides))) for batch in (1, MOST))
        node |= {"min": least, "max": most}
    else:
        node["max"] = 1 if reading.fit == WHOLE else MOST
    if node["max"] != 1:
        node["batching_timeout"] = 2
    noted = noted_normalisation(str(model.path))
    if noted and pixels.words != "as the options say":
        values = dict(part.split(" = ") for part in noted.split(" and "))
        node |= {name: text.strip('"') for name, text in values.items()}
    elif pixels.mean:
        for name, numbers in (("mean", pixels.mean), ("std", pixels.std)):
            node[name] = ", ".join(f"{255 * value:.10g}" for value in numbers)
    if reading.postprocessor:
        node["postprocessor"] = reading.postprocessor
    return {**node, **reading.keys}


def _batch(node: dict[str, Any]) -> Assumed:
    most, least = node["max"], node.get("min", 1)
    if most == 1:
        return Assumed("max", "1: each request runs alone, as the file fixes the batch or an input has none")
    text = "and min: the file fixes the batch" if least == most else "the file leaves the batch open"
    return Assumed("max", f"{most}; {text}")


def _has_labels(reading: Reading) -> bool:
    """Whether answers name classes; the maps of a segmenter do not."""
    cls: Any = registry.default.find_postprocessor(reading.postprocessor) if reading.postprocessor else ""
    return uses(cls, "labels") and reading.kind != SEGMENTER


def _of_labels(labels: Sequence[str], model: OnnxModel) -> Assumed:
    own = names_of(model.metadata.get("names", ""))
    if labels:
        source = "the file's metadata" if tuple(labels) == own else "your file"
        return Assumed("labels", f"{counted(len(labels), 'label')} of {source}: {labels[0]} to {labels[-1]}")
    if own:
        return Assumed(
            "labels", f"{len(own)} of the file's metadata: {own[0]} to {own[-1]}; --labels FILE gives others"
        )
    return Assumed("labels", "none: answers have class numbers; --labels FILE, a line for each class, names them")


# -- trial ------------------------------------------------------------------------------------------------------------


def _write_and_try(made: Made, temporary: Files, files: Files, model: OnnxModel) -> str:
    """Write the TOML, check it, and answer a picture with it; where batches fail, requests run alone.

    Returns what the answer was, for a model of tensors an empty string. ``ToolError`` if there is none.
    """
    if made.labels:
        temporary.labels.write_text("".join(f"{label}\n" for label in made.labels), encoding="utf-8")
    _write(made, temporary, files, model)
    answer, problem = _try(made, temporary, model)
    if problem and "min" not in made.node and made.node["max"] != 1:
        made.node.pop("batching_timeout", None)
        made.node["max"] = 1
        made.reading.notes.append(f"max = 1, since batches fail: {_reason(problem, temporary)}")
        made.assumed = [_batch(made.node) if each.key == "max" else each for each in made.assumed]
        _write(made, temporary, files, model)
        answer, problem = _try(made, temporary, model)
    if problem:
        raise ToolError(
            f"{model.path}: does not run as it was read, {made.reading.kind}: {_reason(problem, temporary)}"
        )
    return answer


def _reason(problem: BaseException, temporary: Files) -> str:
    """Why the trial failed, without the folder of its files, which is removed."""
    return first_line(problem).removeprefix(f"{temporary.toml}: ").replace(f"{temporary.toml.parent}/", "")


def _try(made: Made, temporary: Files, model: OnnxModel) -> tuple[str, BaseException | None]:
    """The answer to a picture, or the problem."""
    tables = parse_toml(temporary.toml)
    *_, node = tables.values()
    node["model"] = str(model.path)
    if "labels" in node:
        node["labels"] = str(temporary.labels)
    node.pop("model::cache", None)
    try:
        plan = plan_pipeline(tables)
        with pipe(plan) as run:
            if not made.takes_pictures:
                return "", None
            run(data := {"data": Decoders.of(plan).small_image(*TRIALS[0])})
    except TorchpipeError as error:
        return "", error
    if "result" not in data:
        return "", data.get("error") or ToolError("no result")  # type: ignore[return-value]
    return _shown(data["result"]), None


def _write(made: Made, temporary: Files, files: Files, model: OnnxModel) -> None:
    path = os.path.relpath(model.path.absolute(), files.toml.absolute().parent)
    node = {"backend": made.node["backend"], "model": path}
    if node["backend"] == ENGINE:
        node["model::cache"] = files.engine.name
    node |= {key: value for key, value in made.node.items() if key not in node}
    if made.labels:
        node["labels"] = files.labels.name
    tables = followed_by(made.tables, node) if made.tables else {GLOBAL: {}, "model": node}
    title = f"# {printable(model.path.name)}: {made.reading.kind}"
    notes = "".join(f"# {printable(note)}\n" for note in made.reading.notes)
    temporary.toml.write_text(f"{title}\n{notes}\n{to_toml(tables, OWN_COMMENTS).lstrip()}", encoding="utf-8")


def _shown(result: Any) -> str:
    """A result in a few words."""
    if hasattr(result, "boxes"):
        return counted(len(result), "detection")
    if hasattr(result, "shape"):
        return f"{shown_dims(tuple(result.shape))} of {str(result.dtype).removeprefix('torch.')}"
    if isinstance(result, list) and result and hasattr(result[0], "shape"):
        return ", ".join(map(_shown, result))
    return str(result)[:80]

"""``torchpipe export``: from a model to files that ``torchpipe-serve`` serves."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.model.onnx_graph import note_normalisation
from torchpipe_py.backends.model.postprocess import SoftmaxArgMax, SoftmaxCpu, SoftmaxMax, TopK, read_labels, uses
from torchpipe_py.errors import ConfigError, counted, nearest
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import parse_toml
from torchpipe_py.tools.export.branches import ASSERT, Place, listed_places, places_that_read_values, unresolved_branch
from torchpipe_py.tools.export.config import (
    COMMENTS,
    Files,
    Transform,
    followed_by,
    model_node,
    read_preprocessing,
    to_toml,
)
from torchpipe_py.tools.export.from_onnx import export_onnx
from torchpipe_py.tools.export.models import ModelToExport, find_classifier, find_module, transform_of
from torchpipe_py.tools.export.onnx_file import BATCHES, check_batch, export_checked, noise, quiet
from torchpipe_py.tools.export.outputs import flat, has_names, names_of
from torchpipe_py.tools.report import ToolError

FORMS = "file.py:function, package.module:function, the name of a torchvision classifier or an ONNX file"
POSTPROCESSOR = "SoftmaxMax"
"""Of a classifier of PyTorch."""
SOFTMAXES = (SoftmaxCpu, SoftmaxMax, SoftmaxArgMax, TopK)
SUM_TOLERANCE = 1e-3
NEARLY_ZERO = 1e-4


def run_export(args: argparse.Namespace) -> int:
    """0 once all is written and the ONNX file matches the PyTorch model. Raises ``ToolError`` and ``ConfigError``."""
    if os.path.splitext(args.source)[1] == ".onnx" and ":" not in args.source:
        return export_onnx(args)
    if args.fit is not None:
        raise ToolError("--fit: for an ONNX file; a PyTorch model takes --resize and --crop")
    is_chosen = args.postprocessor is not None
    args.postprocessor = args.postprocessor if is_chosen else POSTPROCESSOR
    args.color = args.color or "rgb"
    for name in ("transforms", "resize", "crop", "interpolation") if args.preprocess else ():
        if getattr(args, name) is not None:
            raise ToolError(f"--{name}: --preprocess {args.preprocess} decodes and resizes")
    postprocessor = registry.default.find_postprocessor(args.postprocessor) if args.postprocessor else ""
    if postprocessor is None:
        valid = nearest(args.postprocessor, registry.default.postprocessor_names())
        raise ToolError(f"--postprocessor {args.postprocessor}: {valid}")
    files = Files(args.out or Path("model"))
    is_given = args.labels is not None and args.labels.exists() and files.labels.exists()
    writes_labels = uses(postprocessor, "labels") and not (is_given and files.labels.samefile(args.labels))
    files.check(args.force, writes_labels)
    source = _source(args)
    transform, origin = _changed(source, args)
    tables, size, pixels = _preprocessing(args, transform, origin)
    places, outputs = zip(*check_batch(source.model, size).items(), strict=True)
    fixed: Sequence[Place] = _refuse_branches(source.model, size)
    classes = int(outputs[0].shape[1]) if len(outputs) == 1 and outputs[0].ndim == 2 else None
    if not is_chosen and classes in (None, 1):
        postprocessor = ""
    if postprocessor in SOFTMAXES and outputs[0].ndim == 2 and _is_softmax(outputs[0]):
        problem = f"{source.name} ends in a softmax, and {args.postprocessor} would apply another one"
        raise ToolError(f"{problem}: leave it out of the model, or give --postprocessor ArgMax")
    labels = _labels(args.labels, source, classes)
    if args.labels is None and not uses(postprocessor, "labels"):
        labels = ()
    kind = "not a classifier" if classes is None else counted(classes, "class")
    title = f"{source.name}, {kind}, {source.weights}"
    names = names_of(places)
    axes = {name: {0: "batch"} for name in ["input", *names]}
    network = flat(source.model) if has_names(places) else source.model
    with tempfile.TemporaryDirectory() as folder:
        made = Files(Path(folder, files.name.name))
        checked = export_checked(network, made.model, size=size, opset=args.opset, axes=axes)
        if labels:
            made.labels.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        node = model_node(made, transform, bool(labels), args.postprocessor if postprocessor else "")
        note_normalisation(str(made.model), node["mean"], node["std"])
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (transform.mean, transform.std))
        text = to_toml(followed_by(tables, node), {**COMMENTS, "mean": f"255 * ({mean})", "std": f"255 * ({std})"})
        made.toml.write_text(f"# {title}\n\n{text}", encoding="utf-8")
        _check_written(made)
        files.take(made)
    shape = "".join(f"x{side}" for side in size)
    megabytes = files.model.stat().st_size / 1e6
    print(f"{files.model}: {title}, input N{shape}, {megabytes:.1f} MB")
    batches = ", ".join(map(str, BATCHES))
    reach = f"which reach {checked.largest:.2g}"
    print(f"  outputs within {checked.difference:.1g} of PyTorch's, {reach}, in batches of {batches}")
    if len(names) > 1 or has_names(places):
        print(f"  outputs {', '.join(names)}")
    if classes == 1 and not is_chosen:
        print("  NOTE: one number; if it is the logit of a class, --postprocessor Sigmoid answers its score")
    if not is_chosen and len(outputs) == 1 and outputs[0].ndim == 4:
        print("  NOTE: the output is answered as it is; --postprocessor ArgMax makes a map of classes of scores")
    if fixed := fixed or (checked.places and _unresolved(source.model, size)):
        print(f"  NOTE: the ONNX file does for all pictures what forward did for the trial at {listed_places(fixed)}")
    if checked.largest < NEARLY_ZERO:
        print("  NOTE: all outputs are nearly 0, so this means little: are these the weights of a trained model?")
    print(f"{files.toml}: {pixels}")
    if uses(postprocessor, "labels"):
        print(f"{files.labels}: {labels[0]} to {labels[-1]}" if labels else "no labels: results are class numbers")
    print(f"torchpipe-serve {shlex.quote(str(files.toml))} serves it")
    return 0


def _preprocessing(
    args: argparse.Namespace, transform: Transform, origin: str
) -> tuple[dict[str, dict[str, Any]], tuple[int, int, int], str]:
    """The tables before the model's, the channels, height and width that it gets, and a description of both."""
    if args.preprocess:
        tables, size = read_preprocessing(args.preprocess)
        pixels = f"preprocessing of {args.preprocess}, {transform.normalisation()} ({origin})"
    else:
        tables = {"decode": {**transform.node(args.color), "instance_num": 2}}
        size = (1 if args.color == "gray" else 3, *transform.size)
        pixels = f"{transform} ({origin})"
    for name, numbers in (("mean", transform.mean), ("std", transform.std)):
        if len(numbers) not in (1, size[0]):
            channels = counted(size[0], "channel")
            raise ToolError(f"--{name}: {len(numbers)} numbers ({transform}); the images have {channels}")
    return tables, size, pixels


def _refuse_branches(model: Any, size: tuple[int, int, int]) -> list[Place]:
    """The assertions on values that the ONNX file will not have; ``ToolError`` for other lines that read values."""
    try:
        places = places_that_read_values(model, *noise(size, (2,))[:1])
    except Exception:  # an operator that takes only Tensors of PyTorch's own class
        return []
    if branches := [place for place in places if not place.code.startswith(ASSERT)]:
        why = "forward reads values of the picture in Python, which the ONNX file would fix at those of the trial"
        raise ToolError(f"{why}: {listed_places(branches)}; torch.where(condition, a, b) decides for each picture")
    return places


def _unresolved(model: Any, size: tuple[int, int, int]) -> list[Place]:
    # PyTorch prints the graph so far.
    with quiet("torch.fx.experimental.symbolic_shapes"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        branch = unresolved_branch(model, *noise(size, (2,))[:1])
    return [branch] if branch else []


def _check_written(made: Files) -> None:
    """Check the TOML with the files made for it, not with files of the same names in the working directory."""
    tables = parse_toml(made.toml)
    *_, model = tables.values()
    for key in ("model", "model::cache", "labels"):
        if key in model:
            model[key] = str(made.toml.with_name(model[key]))
    try:
        plan_pipeline(tables)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{made.toml.parent}/", "")) from error  # which is removed now


def _is_softmax(output: Any) -> bool:
    """Whether these are probabilities, for which another softmax would give wrong scores."""
    sums = output.sum(1)
    return output.shape[1] > 1 and float(output.min()) >= 0 and float((sums - 1).abs().max()) < SUM_TOLERANCE


def _source(args: argparse.Namespace) -> ModelToExport:
    name, suffix = os.path.splitext(args.source)
    if ":" in args.source:
        transform, origin = Transform(), "torchvision's usual values; are they yours?"
        if args.transforms is not None:
            transform, origin = transform_of(args.transforms)
        return find_module(args.source, args.weights, transform, origin)
    if args.source.isidentifier():
        return find_classifier(args.source, args.weights, args.transforms, args.seed)
    hint = f"perhaps {name}:{suffix[1:]} is meant" if suffix else "no such model"
    if suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors"):
        command = f"torchpipe export MODEL --weights {args.source}"
        hint = f"weights need their model: {command}"
    elif os.path.isfile(args.source) and suffix != ".py":
        hint = "a file of another kind"
    elif suffix == ".py":
        hint = f"name the function in it that returns the model: {args.source}:function"
    raise ToolError(f"{args.source}: {hint}; MODEL is {FORMS}")


def _changed(source: ModelToExport, args: argparse.Namespace) -> tuple[Transform, str]:
    """The preprocessing with the options applied, and a description of where the rest comes from.

    With a new ``--resize``, the crop has that size too, or there is none.
    """
    given: dict[str, Any] = {name: getattr(args, name) for name in ("resize", "interpolation", "mean", "std")}
    changes = {name: value for name, value in given.items() if value is not None}
    crop = args.crop if args.crop is not None else args.resize if isinstance(args.resize, int) else None
    if crop is not None:
        changes["crop"] = (crop, crop) if isinstance(crop, int) else crop
    elif args.resize is not None:
        changes["crop"] = None
    parts = {"mean": args.mean, "std": args.std}
    if not args.preprocess:
        parts = {"resize": args.resize, "crop": args.resize if args.crop is None else args.crop, **parts}
    left = [name for name, value in parts.items() if value is None]
    rest = source.origin if len(left) == 4 else f"{', '.join(left)}: {source.origin}"
    return replace(source.transform, **changes), rest if left else "as the options say"


def _labels(path: Path | None, source: ModelToExport, classes: int | None) -> Sequence[str]:
    """Labels from the file or the weights; ``ToolError`` if their number is not that of the classes."""
    if path is None:
        return source.labels if len(source.labels) == classes else ()
    try:
        labels = read_labels(str(path))
    except (OSError, ConfigError) as error:
        raise ToolError(f"--labels {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    if classes is None:
        what = f"{source.name} is no classifier, which has a single output NxC"
        raise ToolError(f"--labels {path}: {what}, so its answers have numbers of classes: leave --labels out")
    if len(labels) != classes:
        lines = counted(len(labels), "line")
        raise ToolError(f"--labels {path}: {lines}, {source.name} has {counted(classes, 'class')}")
    return labels

"""``torchpipe quantize``: calibrates, quantises, compares on other images, and writes the model if it is as good."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchpipe_py.errors import counted, without_warnings
from torchpipe_py.files import output_problem, replace_file
from torchpipe_py.keys import TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools.compare_models.figures import accuracy, agreement
from torchpipe_py.tools.compare_models.images import Pictures, PipeRunner, ResultSource, images_of, read_images
from torchpipe_py.tools.compare_models.report import text_report
from torchpipe_py.tools.compare_models.results import is_tensor, refusal
from torchpipe_py.tools.compare_models.run import compare
from torchpipe_py.tools.quantize.quantiser import Arrays, Quantiser, search
from torchpipe_py.tools.quantize.target import Target, find_target
from torchpipe_py.tools.report import ToolError, aligned, clip, refuse_existing

FEWEST = 8
"""The least number of images to calibrate with, and to check with."""


def divide(paths: Sequence[Path], most: int) -> tuple[list[Path], list[Path]]:
    """Images to calibrate with, ``most`` or half of them, spread over all, and the others, to check with."""
    count = min(most, len(paths) // 2)
    chosen = {index * len(paths) // count for index in range(count)} if count else set()
    return (
        [path for index, path in enumerate(paths) if index in chosen],
        [path for index, path in enumerate(paths) if index not in chosen],
    )


def _planned(config: str | Tables) -> Pipeline:
    """The plan of a file, or of tables made of it, for which ``find_target`` has warned."""
    with without_warnings():
        return plan_pipeline(config)


def model_inputs(tables: Tables, img_dir: str, paths: Sequence[Path]) -> tuple[list[Arrays], list[str]]:
    """The model inputs from ``tables`` for each image, and a line for each image without a result.

    Raises ``ToolError`` for results other than Tensors.
    """
    given: list[Arrays] = []
    refused: list[str] = []
    with ExitStack() as stack:
        runner = PipeRunner(tables.source, _planned(tables), stack)
        for start in range(0, len(paths), runner.batch):
            pictures, unread = read_images(img_dir, paths[start : start + runner.batch])
            refused += [f"{name}: {reason}" for name, reason in unread]
            for picture, item in zip(pictures, runner.run(pictures), strict=True):
                if reason := refusal(item):
                    refused.append(f"{picture.name}: {reason}")
                    continue
                result = item[TASK_RESULT_KEY]
                values: list[Any] = result if isinstance(result, list) else [result]
                if not all(map(is_tensor, values)):
                    kind = type(result).__name__
                    raise ToolError(f"{tables.source}: the model is given a {kind}, expected a Tensor")
                given.append([each.detach().cpu().numpy() for each in values])
    return given, refused


LISTED = 5
"""Images without a result that are listed."""


def run_quantize(args: argparse.Namespace) -> int:
    """0 once the model is written. Raises ``TorchpipeError`` if it cannot be made or loses too much."""
    # The output file is checked before minutes of work.
    if problem := output_problem(args.out, replaces=True):
        hint = f"; for example {args.out}/model.int8.onnx" if os.path.isdir(args.out) else ""
        raise ToolError(f"--out {args.out}: {problem}{hint}")
    refuse_existing([args.out], args.force, "--out FILE.onnx gives another name")
    target = find_target(args.config, args.node)
    if args.out.exists() and args.out.samefile(target.model):
        raise ToolError(f"--out {args.out}: this is the model to quantise; give another name")
    calibration, held_out = divide(images_of(args.img_dir), args.calibrate)
    if len(calibration) < FEWEST:
        few = f"{counted(len(calibration), 'image')} to calibrate with and {len(held_out)} to check with are too few"
        raise ToolError(f"--img_dir {args.img_dir}: {few}: at least {FEWEST} of each, better hundreds")
    with tempfile.TemporaryDirectory() as name:
        candidate = Path(name, args.out.name)
        _quantise(target, args, calibration, candidate)
        _check(target, args, held_out, candidate)
        try:
            replace_file(args.out, candidate.read_bytes())
        except OSError as error:
            raise ToolError(f"--out {args.out}: cannot be written: {error.strerror}") from error
    print(f'\n{args.out}: written, for node {target.node!r}: model = "{args.out}"')
    return 0


def calibrated(target: Target, img_dir: str, paths: Sequence[Path], folder: Path) -> tuple[Quantiser, list[str]]:
    """The quantiser of the model, with its inputs for images, and a line for each image without a result.

    Temporary files lie in ``folder``. Raises ``ToolError`` for a model that cannot be quantised, or too few images.
    """
    quantiser = Quantiser(target.model, folder)
    quantiser.check_names(target.fp32_layers)
    quantiser.write_probe(folder / "probe.onnx")
    inputs, refused = model_inputs(target.up_to_model(folder / "probe.onnx"), img_dir, paths)
    if len(inputs) < FEWEST:
        few = f"{len(inputs)} of {len(paths)} images can be calibrated with, at least {FEWEST} are needed"
        raise ToolError(f"--img_dir {img_dir}: {few}; {', '.join(refused[:1])}")
    quantiser.inputs = inputs
    return quantiser, refused


def _quantise(target: Target, args: argparse.Namespace, paths: Sequence[Path], candidate: Path) -> None:
    """Write the int8 model to ``candidate``; temporary files lie beside it."""
    quantiser, refused = calibrated(target, args.img_dir, paths, candidate.parent)
    kept = [*target.fp32_layers, *search(quantiser, target.fp32_layers, args.keep, args.max_drop)]
    quantiser.write(candidate, fp32=kept)
    rows = [("model", f"{target.model}, of node {target.node!r}")]
    rows.append(("calibrated with", f"{len(quantiser.inputs)} images, as the configuration gives them to the model"))
    rows += [("left out", line) for line in refused[:LISTED]]
    if len(refused) > LISTED:
        rows.append(("left out", f"and {len(refused) - LISTED} more"))
    layers = [layer for layer in quantiser.layers if layer not in kept]
    rows.append(("in int8", f"{len(layers)} of {len(quantiser.layers)} layers"))
    if kept:
        rows.append(("in fp32", ", ".join(kept)))
    print("\n".join(map(clip, aligned(rows, least=16))), end="\n\n", flush=True)


def _check(target: Target, args: argparse.Namespace, paths: Sequence[Path], candidate: Path) -> None:
    """Compare both models on images not used for calibration; ``ToolError`` if too much is lost."""
    name = f"{target.config} with {args.out.name}"
    reference = ResultSource(target.config, _planned(target.config))
    changed = ResultSource(name, _planned(target.with_model(candidate)))
    parity = compare(reference, changed, Pictures(args.img_dir, paths), worst=0)
    agreed, right = agreement(parity.compared), accuracy(parity.compared)
    refused = "".join(f"; {image.name}: {image.a or image.b}" for image in parity.refused[:1])
    if agreed is None:
        why = f"gives {' and '.join(parity.kinds)}" if parity.compared else "has no result for any image"
        raise ToolError(f"{target.config}: {why}{refused}; without classes, as (label, score), nothing can be checked")
    if agreed.total < FEWEST:
        why = f"{agreed.total} of {len(paths)} images have a class, at least {FEWEST} are needed to check with"
        raise ToolError(f"--img_dir {args.img_dir}: {why}{refused}")
    if right is not None:
        parity.judge(max_drop=args.max_drop)
        lost, what = right.drop, f"it loses {right.drop:.2f} points of accuracy"
    else:
        lost = 100 * (1 - agreed.share)
        parity.judge(min_agreement=1 - args.max_drop / 100)
        what = f"{lost:.2f} of 100 images change their class"
    parity.notes.append(f"these {len(paths)} images were not used for calibration")
    if 100 > args.max_drop * agreed.total > 0:
        parity.notes.append(
            f"one image is {100 / agreed.total:.2f} points: {math.ceil(100 / args.max_drop)} images would show "
            f"a loss of {args.max_drop:g}"
        )
    print("\n".join(text_report(parity)))
    print(end="", flush=True)  # it may be closed
    if not all(bar.ok for bar in parity.bars):
        raise ToolError(
            f"{args.out}: not written: {what}, --max-drop {args.max_drop:g} allows less; "
            f"more images (--calibrate), or layers in fp32 (--keep {max(1, 2 * args.keep)}), may help"
        )

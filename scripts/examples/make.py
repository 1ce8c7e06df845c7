"""The pictures and networks of the example pipelines: ``scripts/make_examples.py`` says what is written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import torch
from torch import nn

from examples.demo import OPSET
from examples.drawing import (
    HEIGHT,
    HELD_OUT,
    LINES,
    SCENES,
    TRAIN,
    WIDTH,
    Line,
    Scene,
    draw_line,
    draw_scene,
    draw_set,
    load_digits,
)
from examples.measure import SceneResult, read_line, recall_and_precision, runner, scene_result
from examples.networks import CROP, DIGITS, MEAN, STD, train_classifier, train_detector, train_reader
from examples.shared import postprocess
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.export.onnx_file import BATCH_AXES, Axes, Size, export_checked, max_difference
from torchpipe_py.tools.report import ToolError as ExportError

LINE_AXES: Axes = {"input": {0: "batch", 3: "width"}, "logits": {0: "batch", 1: "steps"}}
TOLERANCE = 1e-4
EPOCHS = {"detector": 5, "digits": 8, "textline": 10}
HELD_OUT_SCENES, HELD_OUT_LINES = 200, 500
KEPT_SCENES, KEPT_LINES = 8, 10  # of the held-out ones, how many are written to disk
ENOUGH = {"recall": 0.97, "precision": 0.97, "digits": 0.97, "lines": 0.9}  # below which the summary warns


@dataclass(frozen=True)
class Drawings:
    """One set, to train on or held out."""

    scenes: list[Scene]
    lines: list[Line]


def draw(seed: int, scenes: tuple[int, int], lines: tuple[int, int]) -> tuple[Drawings, Drawings]:
    """To train on, and held out: so many scenes and so many lines of each."""
    train, held_out = (
        Drawings(
            draw_set(draw_scene, digits, (seed, part, SCENES), scenes[part]),
            draw_set(draw_line, digits, (seed, part, LINES), lines[part]),
        )
        for part, digits in zip((TRAIN, HELD_OUT), load_digits(seed), strict=True)
    )
    return train, held_out


def export(network: nn.Module, path: Path, size: Size, axes: Axes = BATCH_AXES) -> None:
    difference = export_checked(network, path, size=size, opset=OPSET, batches=(1, 5), tolerance=TOLERANCE, axes=axes)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, within {difference:.1g} of PyTorch", flush=True)


def export_reader(network: nn.Module, path: Path) -> None:
    """As ``export``, and compared at a second width."""
    export(network, path, (postprocess.LINE_HEIGHT, 128), LINE_AXES)
    difference, _ = max_difference(network, path, (postprocess.LINE_HEIGHT, 352), (1, 3))
    if not difference <= TOLERANCE:
        raise ExportError(f"{path} differs from PyTorch by {difference:.2g} at another width")


def train_and_export(train: Drawings, seed: int, out: Path) -> None:
    start = time.perf_counter()
    export(train_detector(train.scenes, EPOCHS["detector"], seed), out / "detector.onnx", (HEIGHT, WIDTH))
    detector = time.perf_counter()
    export(train_classifier(train.scenes, EPOCHS["digits"], seed), out / "digits.onnx", CROP)
    classifier = time.perf_counter()
    export_reader(train_reader(train.lines, EPOCHS["textline"], seed), out / "textline.onnx")
    times = f"{detector - start:.0f}, {classifier - detector:.0f} and {time.perf_counter() - classifier:.0f} s"
    print(f"training: {times}", flush=True)


# --- pictures and truth ------------------------------------------------------------------------------------------


def _write_truth(folder: Path, truth: dict[str, object]) -> None:
    rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in truth.items())
    (folder / "truth.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _empty(folder: Path, pattern: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(pattern):
        path.unlink()
    return folder


def first_right(results: Sequence[SceneResult], count: int) -> list[int]:
    """The first ``count`` scenes of which everything is right, at most two with the same number of tiles."""
    chosen: list[int] = []
    for number, result in enumerate(results):
        alike = sum(results[other].drawn == result.drawn for other in chosen)
        if result.is_right and alike < 2 and len(chosen) < count:
            chosen.append(number)
    return chosen


def first_of_each_length(lines: Sequence[Line], texts: Sequence[str], count: int) -> list[int]:
    """The first line read rightly of each length, at most ``count``: lines of different widths."""
    chosen: dict[int, int] = {}
    for number, (line, text) in enumerate(zip(lines, texts, strict=True)):
        if text == line.text and len(chosen) < count:
            chosen.setdefault(len(text), number)
    return list(chosen.values())


def write_scenes(folder: Path, scenes: Sequence[Scene]) -> None:
    """``scene_<nn>.jpg``, and for each its boxes in pixels (left, top, right, bottom) with their labels."""
    _empty(folder, "scene_*.jpg")
    truth: dict[str, object] = {}
    for place, scene in enumerate(scenes):
        name = f"scene_{place:02d}.jpg"
        (folder / name).write_bytes(scene.jpeg)
        pairs = zip(scene.boxes.tolist(), scene.classes.tolist(), strict=True)
        truth[name] = [{"box": box, "label": str(digit)} for box, digit in pairs]
    _write_truth(folder, truth)


def write_lines(folder: Path, lines: Sequence[Line]) -> None:
    """``line_<nn>.png``, and for each its text."""
    _empty(folder, "line_*.png")
    names = [f"line_{place:02d}.png" for place in range(len(lines))]
    for name, line in zip(names, lines, strict=True):
        cv2.imwrite(str(folder / name), line.grey)
    _write_truth(folder, {name: line.text for name, line in zip(names, lines, strict=True)})


# --- report ------------------------------------------------------------------------------------------------------


def report_scenes(results: Sequence[SceneResult], kept: Sequence[int]) -> dict[str, float]:
    """Print and give the held-out figures."""
    recall, precision = recall_and_precision(results)
    matched = sum(result.matched for result in results)
    named = sum(result.named for result in results) / max(matched, 1)
    overlap = sum(result.overlap * result.matched for result in results) / max(matched, 1)
    wrong = [number for number, result in enumerate(results) if not result.is_right]
    print(f"detector: recall {recall:.4f}, precision {precision:.4f} at IoU 0.5, mean IoU {overlap:.3f}")
    print(f"digits:   {named:.4f} of {matched} tiles found")
    print(f"scenes:   {len(wrong)} of {len(results)} with a fault; written: numbers {kept}")
    return {"recall": recall, "precision": precision, "digits": named}


def report_lines(lines: Sequence[Line], texts: Sequence[str], kept: Sequence[int]) -> dict[str, float]:
    """Print and give the held-out figure."""
    right = sum(line.text == text for line, text in zip(lines, texts, strict=True))
    print(f"lines:    {right / len(lines):.4f} read exactly, {len(lines) - right} of {len(lines)} wrong")
    print(f"          written: numbers {kept}")
    return {"lines": right / len(lines)}


def _total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Draw, train and write what the example pipelines need.")
    parser.add_argument("--out", type=Path, default=Path("configs/examples"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of drawings and training (default: %(default)s)")
    parser.add_argument("--scenes", type=int, default=2500, help="to train on (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=12000, help="to train on (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written, 1 when written but below a figure of ``ENOUGH``, 2 with one line on stderr otherwise."""
    args = _parser().parse_args(argv)
    if (postprocess.MEAN, postprocess.STD) != (MEAN, STD):
        print("make_examples: postprocess.py and the training disagree on MEAN and STD", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # NOTE: sums in one order, however many cores; two threads gain little on nets so small
    args.out.mkdir(parents=True, exist_ok=True)
    train, held_out = draw(args.seed, (args.scenes, HELD_OUT_SCENES), (args.lines, HELD_OUT_LINES))
    try:
        train_and_export(train, args.seed, args.out)
    except ExportError as error:
        print(f"make_examples: {error}", file=sys.stderr)
        return 2

    detector, classifier, reader = (runner(args.out / f"{name}.onnx") for name in ("detector", "digits", "textline"))
    results = [scene_result(detector, classifier, scene) for scene in held_out.scenes]
    texts = [read_line(reader, line.mat()) for line in held_out.lines]
    kept_scenes = first_right(results, KEPT_SCENES)
    kept_lines = first_of_each_length(held_out.lines, texts, KEPT_LINES)

    write_scenes(args.out / "scenes", [held_out.scenes[number] for number in kept_scenes])
    write_lines(args.out / "lines", [held_out.lines[number] for number in kept_lines])
    (args.out / "digits.txt").write_text("".join(f"{digit}\n" for digit in range(DIGITS)), encoding="utf-8")

    figures = report_scenes(results, kept_scenes) | report_lines(held_out.lines, texts, kept_lines)
    print(f"folder:   {_total_bytes(args.out) / 1e3:.0f} kB")
    low = [f"{name} below {ENOUGH[name]}" for name, figure in figures.items() if figure < ENOUGH[name]]
    if low:
        print(f"make_examples: {', '.join(low)}: more --scenes or --lines?", file=sys.stderr)
    return 1 if low else 0

"""What ``torchpipe compile`` makes of six configurations, and whether the loss that it states holds.

    python scripts/run.py compiling                        # draws pictures, compiles each file; a table
    python scripts/run.py compiling --repetitions 40       # the loss that is stated, on fresh pictures

The configurations: the classifier of the demo with pictures of 1920×1080, under two tolerances, and of 12 megapixels; a
detector and a segmenter of coloured discs, and an embedding by random weights, with pictures of 1920×1080. Repetitions
choose and certify with pictures of their own as compile does, but with made-up speeds, so that what loses more is
faster: the worst case.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import tomli
import torch
from examples.shapes import HELD_OUT, LABELS, draw_jpeg, draw_picture
from torch import nn

from benchmarks.common import REPOSITORY, progress
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.errors import TorchpipeError
from torchpipe_py.files import replace_file
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools.compare_models.images import Pictures, ResultSource
from torchpipe_py.tools.compare_models.run import compare
from torchpipe_py.tools.compare_models.tolerance import read_tolerance
from torchpipe_py.tools.compile import report as text
from torchpipe_py.tools.compile.changes import ChangeOutcome, Chooser
from torchpipe_py.tools.compile.command import compiled
from torchpipe_py.tools.compile.losses import Halves, Losses, is_within
from torchpipe_py.tools.options import at_least, output_file
from torchpipe_py.tools.report import aligned, write_json
from torchpipe_py.tools.tune import report as tuned
from torchpipe_py.tools.tune.candidates import Candidate, as_served, shapes_of
from torchpipe_py.tools.tune.engine import Bench, Wanted
from torchpipe_py.tools.tune.measure import Goal, Point, Profile
from torchpipe_py.tools.tune.report import Report
from torchpipe_py.tools.tune.search import Budget

DEMO = REPOSITORY / "configs" / "demo"
FULL_HD, TWELVE = (1080, 1920), (3000, 4000)

CLASSIFIER = f"""\
[classifier]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"
resize_h = 64
resize_w = 64
color = "rgb"
model = "{DEMO / "model.onnx"}"
max = 8
batching_timeout = 2
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "SoftmaxMax"
labels = "{DEMO / "labels.txt"}"
"""

DETECTOR = """\
[decode]
backend = "S[DecodeMat,LetterBoxMat,cvtColorMat]"
max_h = 320
max_w = 320
color = "rgb"
next = "detector"

[detector]
backend = "S[Mat2Tensor,OnnxTensor]"
model = "discs.onnx"
max = 4
batching_timeout = 2
mean = "0"
std = "255"
postprocessor = "EndToEndBoxes"
"""

SEGMENTER = """\
[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat]"
resize_h = 256
resize_w = 256
color = "rgb"
next = "segmenter"

[segmenter]
backend = "S[Mat2Tensor,OnnxTensor]"
model = "colours.onnx"
max = 4
batching_timeout = 2
mean = "0"
std = "255"
postprocessor = "ArgMax"
"""

EMBEDDING = """\
[embedding]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"
resize_h = 224
resize_w = 224
color = "rgb"
model = "embedding.onnx"
max = 8
batching_timeout = 2
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "L2Normalize"
"""

CASES: dict[str, tuple[str, tuple[int, int], int, str]] = {
    "classifier, 1080p, tight": (CLASSIFIER, FULL_HD, 900, "top1=0.99, score=0.01"),
    "classifier, 1080p": (CLASSIFIER, FULL_HD, 900, "top1=0.96"),
    "classifier, 12 MP": (CLASSIFIER, TWELVE, 360, "top1=0.95"),
    "detector, 1080p": (DETECTOR, FULL_HD, 500, "missing=0.05, additional=0.05, box=4, images=0.95"),
    "segmenter, 1080p": (SEGMENTER, FULL_HD, 500, "changed=0.02"),
    "embedding, 1080p": (EMBEDDING, FULL_HD, 500, "cosine=0.98, images=0.95"),
}
"""The TOML file, the size of pictures, how many there are, and the tolerance."""


# --- pictures


def draw_shape(number: int, size: tuple[int, int], seed: int = 0) -> bytes:
    """A shape of the demo in a large picture: drawn small, as a photograph has no detail in each pixel."""
    rng = np.random.default_rng([seed, number])
    label = LABELS[number % len(LABELS)]
    return _enlarged(draw_picture(label, rng, (size[0] // 4, size[1] // 4)), size, rng)


def draw_discs(number: int, size: tuple[int, int], seed: int = 0) -> bytes:
    """A red, a green and a blue disc, or two of them, on a pale ground."""
    rng = np.random.default_rng([seed, number])
    height, width = size[0] // 4, size[1] // 4
    coarse = rng.uniform(90, 200, (6, 8, 1)) + rng.uniform(-12, 12, (6, 8, 3))
    picture = cv2.resize(coarse.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC)
    for channel in rng.permutation(3)[: int(rng.integers(2, 4))]:
        radius = int(rng.uniform(0.05, 0.14) * height)
        centre = [int(rng.integers(radius, side - radius)) for side in (width, height)]
        color = rng.uniform(0, 60, 3)
        color[channel] = rng.uniform(180, 250)
        cv2.circle(picture, centre, radius, color.tolist(), -1, cv2.LINE_AA)
    return _enlarged(np.clip(picture, 0, 255).astype(np.uint8), size, rng)


def _enlarged(picture: np.ndarray, size: tuple[int, int], rng: np.random.Generator) -> bytes:
    """A JPEG of the picture in another size, with noise."""
    large = cv2.resize(picture, size[::-1], interpolation=cv2.INTER_CUBIC)
    tile = rng.integers(0, 9, (500, 480, 3), np.uint8)
    noise = np.tile(tile, (-(-size[0] // 500), -(-size[1] // 480), 1))[: size[0], : size[1]]
    return bytes(cv2.imencode(".jpg", cv2.add(large, noise), [cv2.IMWRITE_JPEG_QUALITY, 90])[1])


def _path(folder: Path, number: int) -> Path:
    return folder / f"{LABELS[number % len(LABELS)]}_{number:05d}.jpg"


def _write(draw: Any, folder: Path, number: int) -> None:
    replace_file(_path(folder, number), draw(number))


def write_pictures(draw: Any, folder: Path, count: int) -> None:
    """The pictures that are not there yet, drawn by all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(count) if not _path(folder, number).exists()]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        list(processes.map(partial(_write, draw, folder), missing, chunksize=8))


# --- the models


class Discs(nn.Module):  # type: ignore[misc]
    """N×3×320×320 in 0..1 to N×3×6: place, size and score of what is red, green and blue."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.eye(3) * 1.5 - 0.5 * torch.ones(3, 3) * 1.5
        self.filter = nn.Conv2d(3, 16, 5, padding=2)
        self.mixed = nn.Conv2d(16, 3, 3, padding=1)
        with torch.no_grad():
            self.filter.weight.zero_()
            self.filter.bias.zero_()
            self.mixed.weight.zero_()
            self.filter.weight[:3] = (own / 25)[:, :, None, None]
            self.filter.bias[:3] = -0.12
            self.mixed.weight[:, :3] = (torch.eye(3) / 9)[:, :, None, None]
            self.mixed.bias.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.mixed(self.filter(images).relu())
        mass = found.sum((2, 3)) + 1e-6
        places = torch.arange(320, dtype=torch.float32, device=images.device) + 0.5
        sides = []
        for dim in (2, 3):
            weights = found.sum(dim) / mass[:, :, None]
            middle = (weights * places).sum(2)
            spread = ((weights * places * places).sum(2) - middle * middle).clamp(min=1).sqrt()
            sides.append((middle - 2 * spread, middle + 2 * spread))
        score = 1 - torch.exp(-mass / 40)
        classes = torch.arange(3, dtype=torch.float32).expand(images.shape[0], 3)
        (left, right), (top, bottom) = sides
        return torch.stack([left, top, right, bottom, score, classes], 2)


class Colours(nn.Module):  # type: ignore[misc]
    """N×3×256×256 in 0..1 to N×4×256×256: scores of each pixel for ground, red, green and blue."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(3, 4, 5, padding=2)
        own = torch.eye(3) * 1.5 - 0.5 * torch.ones(3, 3)
        with torch.no_grad():
            self.filter.weight.zero_()
            self.filter.bias.copy_(torch.tensor([0.1, 0.0, 0.0, 0.0]))
            self.filter.weight[1:] = (own / 25)[:, :, None, None]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.filter(images)
        return scores


def embedding_network() -> nn.Module:
    """N×3×224×224 to N×128, with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 4, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(512, 128),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    DETECTOR: (Discs, 320),
    SEGMENTER: (Colours, 256),
    EMBEDDING: (embedding_network, 224),
}
"""The network of each file but the demo's, and the side of its input."""


def write_model(toml: str, folder: Path) -> None:
    """The ONNX file that the configuration names, unless it is the demo's."""
    if toml in MODELS:
        make, side = MODELS[toml]
        # NOTE: TensorRT 8.6 reads no later operator set.
        torch.onnx.export(
            make().eval(), (torch.zeros(1, 3, side, side),), str(folder / _model_of(toml)),
            input_names=["images"], output_names=["found"], opset_version=17, dynamo=False,
            dynamic_axes={"images": {0: "n"}, "found": {0: "n"}},
        )  # fmt: skip


def _model_of(toml: str) -> str:
    name: str = next(table["model"] for table in tomli.loads(toml).values() if "model" in table)
    return name


def on_tensorrt(toml: str, engine: Path) -> str:
    """The file with its model on a GPU, as an fp32 engine that is kept in ``engine``."""
    toml = toml.replace("OnnxTensor", "SyncTensor[TensorrtTensor]")
    return toml.replace("\nmodel =", f'\n"model::cache" = "{engine}"\nprecision = "fp32"\nmodel =')


# --- the table


def compile_all(folder: Path, budget: float, is_busy: bool, cases: Sequence[str], has_engine: bool) -> dict[str, Any]:
    """Compile each case in ``folder``; returns the reports, and prints each and a row of each.

    ``has_engine``: TensorRT runs the models.
    """
    if is_busy:
        tuned.MOST_BY_OTHERS = math.inf
    reports, rows = dict[str, Any](), list[tuple[str, ...]]()
    for name in cases or CASES:
        toml, size, count, tolerance = CASES[name]
        here = folder / name.removesuffix(", tight").replace(", ", "-").replace(" ", "")
        draw = partial(draw_discs if toml in (DETECTOR, SEGMENTER) else draw_shape, size=size)
        write_pictures(draw, here / "pictures", count)
        file = on_tensorrt(toml, here.resolve() / "model.engine") if has_engine else toml
        (here / "file.toml").write_text(file, encoding="utf-8")
        write_model(toml, here)
        try:
            report = compiled(
                str(here / "file.toml"), str(here / "pictures"), read_tolerance(tolerance),
                here / "file.compiled.toml", Wanted(budget=budget),
            )  # fmt: skip
        except TorchpipeError as error:
            rows.append((name, "-", "-", "-", str(error)))
            continue
        reports[name] = report.to_json()
        progress("\n".join([name, *text.lines_of(report), text.verdict_line(report)]))
        used = ", ".join(change.name for change in report.changes if change.outcome is ChangeOutcome.USED)
        search, (low, high) = report.search, report.search.gain_interval
        settings = search.best and search.best.processes
        between = f"{low:.2f} to {high:.2f}"
        rows.append(
            (name, f"{search.gain or math.nan:.2f}", between, text.loss_text(report.loss), f"{used}; {settings}")
        )
    print("\n".join(aligned(rows, ("case", "gain", "95 % interval", "lost (95 % interval, allowed)", "by"))))
    return reports


# --- fresh pictures


class MadeUp:
    """Measures nothing: what loses more is faster."""

    def __init__(self) -> None:
        self.order = ('at_least = "2x"', 'at_least = "1x"', "int8", "nearest interpolation")

    def figure(self, candidate: Candidate, number: int) -> float:
        return 100.0 * math.prod(1.2 + at / 10 for at, name in enumerate(self.order) if name in candidate.alternative)

    def point(self, candidate: Candidate, rate: float, number: int) -> Point:
        raise NotImplementedError

    def busy(self, candidate: Candidate) -> dict[str, float]:
        raise NotImplementedError


class NoService:
    has_gpu = False


def stated_loss_holds(repetitions: int, count: int, pool: int, limits: str) -> bool:
    """Whether the loss that is certified with ``count`` pictures holds on ``pool`` fresh ones, in 95 % of repetitions.

    The bound of each limit is compared with the share of fresh pictures beyond it. Each repetition takes pictures by
    chance from ``pool`` others.
    """
    tolerance, tables, held, certified = read_tolerance(limits), Tables.of(_small_classifier()), 0, 0
    true: dict[str, list[float]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_pictures(partial(_draw_small, seed=1), folder / "pool", pool)
        write_pictures(partial(_draw_small, seed=2), folder / "stock", pool)
        for repetition in range(repetitions):
            (pictures := folder / str(repetition)).mkdir()
            for number in np.random.default_rng(repetition).choice(pool, count, replace=False).tolist():
                path = _path(folder / "stock", number)
                (pictures / path.name).symlink_to(path)
            halves = Halves.of(str(pictures), tolerance)
            made = folder / f"{repetition}-models"
            made.mkdir()
            with closing(Losses(tables, tolerance, halves.img_dir, halves.choosing, math.inf)) as choosing:
                chooser = Chooser(choosing, halves.img_dir, halves.choosing, made)
                shape = chooser(_bench(tables))[0]
            with closing(Losses(tables, tolerance, halves.img_dir, halves.certifying, math.inf)) as certifying:
                comparison = certifying.of(shape, math.inf)
                if not is_within(comparison):
                    shape = chooser.with_fewer(shape, _bench(tables), "") or shapes_of(tables)[0]
                    comparison = certifying.of(shape, math.inf)
            if not is_within(comparison):
                progress(f"{repetition + 1}: {shape.shape}: not certified")
                continue
            certified += 1
            key = f"{shape.alternative}{repetition if 'int8' in shape.alternative else ''}"
            if key not in true:
                fresh = compare(
                    ResultSource("file", tables),
                    ResultSource(shape.shape, shape.config),
                    Pictures(str(folder / "pool")),
                    worst=0,
                )
                losses = [[_loss(limit, each, tolerance) for each in fresh.compared] for limit in tolerance.limits]
                true[key] = [float(np.mean([each for each in row if each is not None])) for row in losses]
            bounds = [finding.high for finding in comparison.findings]
            holds = all(found <= bound for found, bound in zip(true[key], bounds, strict=True))
            held += holds
            progress(
                f"{repetition + 1}: {shape.shape}: states {bounds}, fresh {true[key]}: {'holds' if holds else 'FAILS'}"
            )
    share = held / certified if certified else math.nan
    print(f"{certified} of {repetitions} certified; the stated loss holds in {held}, {share:.1%}; wanted: 95 %")
    return share >= 0.95


def _loss(limit: Any, image: Any, tolerance: Any) -> float | None:
    found: float | None = limit.loss(image.figures, tolerance.names)
    return found


def _small_classifier() -> dict[str, Any]:
    return tomli.loads(CLASSIFIER)


def _draw_small(number: int, seed: int) -> bytes:
    return draw_jpeg(seed, HELD_OUT, number % len(LABELS), number)


def _bench(tables: Tables) -> Bench:
    """A bench that measures nothing, with all the time that the losses take."""
    shapes, clock = shapes_of(tables), Budget(1e9, None)
    clock.ends = {"losses": 0.5, "changes": 0.9, "processes": 1.0}
    known = Profile(as_served(shapes[0], 2, False), 2, False, 0.001, 100.0, 4, 0.3)
    goal = Goal(0.02, None, [0.0, 1.0], 1.0)
    service: Any = NoService()
    report = Report(tables.source, None, None, slo_given=False)
    return Bench(shapes, {}, service, known, goal, MadeUp(), clock, report, [])  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> int:
    """0, or 1 if the stated loss does not hold."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("compiling"), help="for pictures and files (default: %(default)s)")
    add("--budget", type=float, default=240.0, help="seconds for each file (default: %(default)g)")
    add("--case", action="append", choices=CASES, help="default: all")
    add("--busy", action="store_true", help="measure although other programs use the cores")
    add("--tensorrt", action="store_true", help="have TensorRT run the models")
    add("--json", type=output_file, metavar="FILE", help="write the reports")
    add("--repetitions", type=at_least(0), default=0, metavar="N", help="of the choice, to check the stated loss")
    add("--pictures", type=at_least(8), default=400, help="of each repetition (default: %(default)s)")
    pool = "fresh pictures, and as many to take those of repetitions from (default: %(default)s)"
    add("--pool", type=at_least(8), default=4000, help=pool)
    add("--tolerance", default="top1=0.97", help="of repetitions (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.repetitions:
        return int(not stated_loss_holds(args.repetitions, args.pictures, args.pool, args.tolerance))
    reports = compile_all(args.folder, args.budget, args.busy, args.case or (), args.tensorrt)
    if args.json:
        write_json(args.json, reports)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

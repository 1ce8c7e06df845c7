"""Tricks that may make a training faster, each measured on this machine.

    python scripts/run.py tricks
    python scripts/run.py tricks --data DIR --arch resnet50 --sections 3 5 8

Short trainings with the same seed, each with one thing changed, in interleaved rounds; a row compares the medians of
two of them. The sections are those of "what to do about a slow training": hardware, bottleneck, decoding, augmentation,
prefetching, several GPUs, mixed precision, and the rest. A row without a figure says what it needs.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.common import REPOSITORY, machine, progress, python

from recipes.data import Loaders
from recipes.datasets import available_memory, gigabytes, open_dataset, pack
from recipes.experiments.plain import PlainLoader, by_pillow, by_simplejpeg
from recipes.experiments.profile import next_batch, profile, verdict
from recipes.models import SMALL
from recipes.options import Place, make_parser
from recipes.session import Session
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import TorchpipeError, first_line
from torchpipe_py.tools.options import at_least, output_file
from torchpipe_py.training import ImageFolder, TrainingError

SECTIONS = {
    1: "hardware",
    2: "bottleneck",
    3: "decoding",
    4: "augmentation",
    5: "prefetching",
    6: "several GPUs",
    7: "mixed precision",
    8: "the rest",
}
CLASSES = 8  # in the output of scripts/run.py textures
ON_CPU = """
[preprocess]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"
resize_h = 224
resize_w = 224
color = "rgb"
device = "cpu"
instance_num = {instances}
"""
ON_GPU = """
[preprocess]
backend = "S[DecodeTensor,ResizeTensor,SyncTensor]"
resize_h = 224
resize_w = 224
max = 32
instance_num = 2
"""
NO_GPU = "needs a GPU"
FIGURE = re.compile(r"(\d+) images/s")

Measure = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One trick: images/s of the training ``without`` and ``by`` it, and the median of the rounds' ratios.

    A row without these has a ``remark``: another figure, or a missing requirement.
    """

    section: int
    trick: str
    option: str
    without: float | None = None
    by: float | None = None
    ratio: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Trick:
    """``without`` and ``by`` name trainings. ``missing``: a requirement that the machine lacks."""

    section: int
    name: str
    option: str
    without: str
    by: str
    missing: str = ""


# -- the trainings ------------------------------------------------------------------------------------------------


class Bench:
    """Makes short trainings of the same network on the same images. ``trainings`` measures each, by name."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self._folder = args, folder
        self.toml = args.toml or self._written("cpu.toml", ON_CPU.format(instances=usable_cores()))
        self._gpu_toml = self._written("gpu.toml", ON_GPU)
        plain, by = self.plain, self.train
        self.trainings: dict[str, Measure] = {
            "train.py": by,
            "train.py, decoded on the GPU": partial(by, "--toml", self._gpu_toml),
            "train.py, workers decode": partial(by, "--workers-decode"),
            "train.py, no prefetching": partial(by, "--prefetch", 0),
            "train.py, mixed precision": partial(by, "--amp"),
            "train.py, --cudnn-benchmark": partial(by, "--cudnn-benchmark"),
            "train.py, in memory": partial(by, "--in-memory"),
            "train.py, LMDB": lambda: by("--data", self.packed()),
            **{self.with_workers(count): partial(by, "--workers", count) for count in self.workers},
            "DataLoader, Pillow": partial(plain, decode=by_pillow),
            "DataLoader, OpenCV": plain,
            "DataLoader, simplejpeg": partial(plain, decode=by_simplejpeg),
            "DataLoader, batches augmented on the device": partial(plain, raw=True),
            "DataLoader, the same, one batch ahead": partial(plain, raw=True, ahead=True),
            "DataLoader, the same, pageable memory": partial(plain, raw=True, pinned=False),
            "train.py, a process": partial(self.epoch, "--toml", self.toml),
            "train.py, folders by DALI": lambda: self.epoch("--dali", "--decode", "cpu", "--size", 224),
            "train.py, TFRecord by DALI": lambda: self.epoch(
                "--dali", "--decode", "cpu", "--data", self.records(), "--size", 224
            ),
            "train.py, two processes": partial(self.epoch, "--toml", self.toml, "--ddp"),
        }

    @property
    def workers(self) -> list[int]:
        """Numbers of workers to compare."""
        return sorted({0, 1, 2, 4, min(8, usable_cores()), self.args.workers})

    def with_workers(self, count: int) -> str:
        """The name of the training by ``train.py`` with so many workers."""
        return "train.py" if count == self.args.workers else f"train.py, {count} workers"

    def options(self, *changes: object) -> list[str]:
        """The arguments of a training."""
        args = self.args
        usual = ["--data", args.data, "--toml", self.toml, "--arch", args.arch, "--batch-size", args.batch_size]
        return list(map(str, [*usual, "--workers", args.workers, "--seed", 0, *self._device, *changes]))

    def parsed(self, *changes: object) -> argparse.Namespace:
        """The options, parsed by ``train.py``."""
        return make_parser().parse_args(self.options(*changes))

    def train(self, *changes: object) -> float:
        """Images per second of ``train.py`` with these options."""
        args = self.parsed(*changes)
        with redirect_stdout(io.StringIO()), Loaders(args, Place.of(args)) as loaders:
            return self.speed(Session(args, Place.of(args), loaders), iter(partial(next_batch, loaders.train), None))

    def plain(self, **changes: Any) -> float:
        """Images per second of a training with a ``PlainLoader``."""
        args, files = self.parsed(), open_dataset(self.args.data, "train")
        if not isinstance(files, ImageFolder):
            raise TrainingError(f"needs a folder of files: {self.args.data / 'train'}")
        device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        loader = PlainLoader(files, device, args.batch_size, args.workers, **changes)
        # NOTE: a session needs only these of its loaders if it neither validates nor saves.
        loaders: Any = SimpleNamespace(train=loader, classes=files.classes)
        session = Session(args, Place.of(args), loaders)
        with closing(loader.batches()) as batches:
            return self.speed(session, batches)

    def speed(self, session: Session, batches: Iterator[Any]) -> float:
        """Images per second of ``args.steps`` steps after ``args.warmup``."""
        session.model.train()
        for batch in islice(batches, self.args.warmup):
            session.step(batch)
        self._synchronise()
        began, images = perf_counter(), 0
        for batch in islice(batches, self.args.steps):
            session.step(batch)
            images += len(batch.mask)
        self._synchronise()
        return images / (perf_counter() - began)

    def epoch(self, *changes: object) -> float:
        """Images per second of the second epoch of a training in separate processes."""
        command = [str(REPOSITORY / "scripts" / "train.py"), *self.options("--epochs", 2, *changes)]
        if "--ddp" in changes:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *command]
        if "--dali" in changes:
            place = command.index("--toml")
            del command[place : place + 2]
        return float(FIGURE.findall(self._output(command))[-1])

    def packed(self) -> Path:
        """The images as LMDB databases."""
        target = self._folder / "lmdb"
        if not target.exists():
            with redirect_stdout(io.StringIO()):
                pack(self.args.data, target)
        return target

    def records(self) -> Path:
        """The images as TFRecord files."""
        target = self._folder / "tfrecord"
        if not target.exists():
            script = str(REPOSITORY / "scripts" / "run.py")
            self._output([script, "tfrecord", "--data", str(self.args.data), "--out", str(target)])
        return target

    @property
    def on_gpu(self) -> bool:
        """Whether trainings run on a GPU."""
        return bool(torch.cuda.is_available()) and self.args.device != "cpu"

    @property
    def _device(self) -> list[object]:
        return ["--device", "cpu"] if self.args.device == "cpu" else []

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _written(self, name: str, content: str) -> Path:
        (self._folder / name).write_text(content, encoding="utf-8")
        return self._folder / name

    def _output(self, command: list[str]) -> str:
        """The output of a process of this Python; if it fails, ``TrainingError`` with its last line on stderr."""
        process = python(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stdout, stderr = process.communicate()
        if process.returncode:
            raise TrainingError((stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1])
        return stdout


# -- the tricks ---------------------------------------------------------------------------------------------------


def tricks(bench: Bench) -> list[Trick]:
    """Every trick that compares two trainings, in the order of the sections."""
    gpu = "" if bench.on_gpu else NO_GPU
    several = "" if bench.on_gpu and torch.cuda.device_count() > 1 else "needs two GPUs"
    default, alone, by_dali = "train.py", "train.py, a process", "train.py, folders by DALI"
    no_dali = _lacks("nvidia.dali", "nvidia-dali-cuda130")
    pillow, opencv, raw = "DataLoader, Pillow", "DataLoader, OpenCV", "DataLoader, batches augmented on the device"
    one_ahead, pageable = "DataLoader, the same, one batch ahead", "DataLoader, the same, pageable memory"
    loader = "in the dataset of a DataLoader"
    return [
        Trick(3, "OpenCV for Pillow", f"cv2.imdecode {loader}", pillow, opencv),
        Trick(3, "TurboJPEG for Pillow", f"simplejpeg {loader}", pillow, "DataLoader, simplejpeg"),
        Trick(3, "a pipe for Pillow", "wrap_dataloader_torchpipe, train.py", pillow, default),
        Trick(3, "decode on the GPU", "configs/preprocess_gpu.toml", default, "train.py, decoded on the GPU", gpu),
        Trick(3, "workers that decode", "--workers-decode", default, "train.py, workers decode"),
        Trick(4, "augment batches on the device", "transforms_batch", opencv, raw),
        Trick(4, "NVIDIA DALI for a pipe, both on the CPU", "train.py --dali", alone, by_dali, no_dali),
        Trick(5, "background thread, 2 batches ahead", "--prefetch 2", "train.py, no prefetching", default),
        Trick(5, "copies on a CUDA stream", "CudaPrefetcher(loader)", raw, one_ahead, gpu),
        Trick(6, "two processes", "torchrun … train.py --ddp", alone, "train.py, two processes", several),
        Trick(7, "bfloat16", "--amp", default, "train.py, mixed precision"),
        Trick(8, "pinned memory, non_blocking", "pin_memory=True; always in a pipe's loader", pageable, raw, gpu),
        Trick(8, "cuDNN tries its algorithms", "--cudnn-benchmark", default, "train.py, --cudnn-benchmark", gpu),
        *(
            Trick(8, f"workers: {count} for 0", f"--workers {count}", bench.with_workers(0), bench.with_workers(count))
            for count in bench.workers[1:]
        ),
        Trick(8, "files in memory", "--in-memory", default, "train.py, in memory"),
        Trick(8, "LMDB", "scripts/run.py lmdb", default, "train.py, LMDB", _lacks("lmdb", "lmdb")),
        Trick(8, "TFRecord", "run.py tfrecord", by_dali, "train.py, TFRecord by DALI", no_dali),
    ]


def _lacks(module: str, package: str) -> str:
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        is_there = False
    return "" if is_there else f"needs {package} (pip install {package})"


def measured(bench: Bench, chosen: Sequence[Trick], rounds: int) -> list[Row]:
    """A row for each trick. A round has every training once; one that fails is a remark, and is not tried again."""
    names = dict.fromkeys(name for trick in chosen if not trick.missing for name in (trick.without, trick.by))
    figures: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in names:
            if name not in failed:
                try:
                    figures[name].append(bench.trainings[name]())
                    progress(f"round {number + 1} of {rounds}: {name}: {figures[name][-1]:.0f} images/s")
                except (Exception, SystemExit) as error:  # a parser ends the program
                    failed[name] = first_line(error) if isinstance(error, TorchpipeError) else _said(error)
                    progress(f"{name}: not measured: {failed[name]}")
    return [_row(trick, figures, failed) for trick in chosen]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _row(trick: Trick, figures: Mapping[str, Sequence[float]], failed: Mapping[str, str]) -> Row:
    problem = trick.missing or next((failed[name] for name in (trick.without, trick.by) if name in failed), "")
    if problem:
        return Row(trick.section, trick.name, trick.option, remark=problem)
    without, by = figures[trick.without], figures[trick.by]
    ratio = median(one / other for one, other in zip(by, without, strict=True))
    return Row(trick.section, trick.name, trick.option, median(without), median(by), ratio)


def hardware() -> Row:
    """The machine's hardware, and commands that show its use."""
    memory = available_memory()
    has = [f"{usable_cores()} cores", f"{gigabytes(memory)} of memory available" if memory is not None else ""]
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    has += names or ["no GPU"]
    commands = "htop, iostat -x 1, nvidia-smi dmon; of a service: torchpipe load, /metrics"
    return Row(1, ", ".join(filter(None, has)), "torchpipe doctor", remark=commands)


def bottleneck(bench: Bench) -> Row:
    """The share of waiting, and the option that helps."""
    more = {"steps": bench.args.steps, "warmup": bench.args.warmup, "trace": None}
    try:
        with redirect_stdout(io.StringIO()):
            remark = verdict(profile(argparse.Namespace(**vars(bench.parsed()), **more)))
    except Exception as error:
        remark = f"not measured: {_said(error)}"
    return Row(2, "where the time goes", "scripts/run.py profile", remark=remark)


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each row, under the heads of the columns."""
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("trick", "option")]
    widths[1] = max(widths[1], len("command or option"))
    names = f"{'§':2} {'trick':{widths[0]}}  {'command or option':{widths[1]}}"
    lines = [f"{names}  {'without':>8}  {'with':>8}  {'ratio':>5}"]
    for row in rows:
        line = f"{row.section:<2} {row.trick:{widths[0]}}  {row.option:{widths[1]}}"
        figures = "" if row.ratio is None else f"{row.without:8.0f}  {row.by:8.0f}  {row.ratio:5.2f}"
        lines.append(f"{line}  {figures}{row.remark}")
    return lines


# -- the command --------------------------------------------------------------------------------------------------


@contextmanager
def images(args: argparse.Namespace) -> Iterator[Path]:
    """A folder for generated files; without ``--data``, ``args.data`` is set to a set of textures in it."""
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            args.data = Path(folder, "textures")
            per_class = -(-args.batch_size * (args.warmup + args.steps) // CLASSES)  # an epoch lasts until the end
            script = str(REPOSITORY / "scripts" / "run.py")
            command = [script, "textures", "--out", str(args.data), "--train", str(per_class), "--val", "4"]
            if python(*command, stdout=subprocess.DEVNULL).wait():
                raise TrainingError(f"the set of textures could not be drawn in {args.data}")
        yield Path(folder)


def report(args: argparse.Namespace) -> list[Row]:
    """All rows of the chosen sections; raises ``TorchpipeError``."""
    with images(args) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes", UserWarning)
        bench = Bench(args, folder)
        open_dataset(args.data, "train")
        rows = [hardware()] if 1 in args.sections else []
        rows += [bottleneck(bench)] if 2 in args.sections else []
        chosen = [trick for trick in tricks(bench) if trick.section in args.sections]
        return [*rows, *measured(bench, chosen, args.rounds)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when measured, 1 when no training runs, 2 with one line on stderr otherwise."""
    on_gpu = torch.cuda.is_available()
    parser = ArgumentParser(description="Measure what makes a training faster, trick by trick.")
    option = parser.add_argument
    option("--data", type=Path, help="a folder with train/ and val/, each of class folders (default: drawn textures)")
    option("--toml", type=Path, help="preprocessing to 224×224 (default: DecodeMat with an instance for each core)")
    arch = "resnet18" if on_gpu and find_spec("torchvision") else SMALL
    option("--arch", default=arch, help="'small' or a torchvision classifier (default: %(default)s)")
    option("--batch-size", type=at_least(1), default=64 if on_gpu else 16, help="(default: %(default)s)")
    option("--workers", type=at_least(0), default=min(8, usable_cores()), help="(default: %(default)s)")
    option(
        "--steps",
        type=at_least(1),
        default=20 if on_gpu else 12,
        help="of a training that are timed (default: %(default)s)",
    )
    option("--warmup", type=at_least(1), default=5 if on_gpu else 3, help="steps before these (default: %(default)s)")
    option("--rounds", type=at_least(1), default=3, help="trainings whose median is shown (default: %(default)s)")
    kinds = ", ".join(f"{number} {name}" for number, name in SECTIONS.items())
    option("--sections", nargs="+", type=int, choices=SECTIONS, default=list(SECTIONS), help=f"{kinds} (default: all)")
    option("--device", choices=("cpu",), help="train on the CPU (default: on a GPU where there is one)")
    option("--json", type=output_file, metavar="FILE", help="write all rows there as well")
    args = parser.parse_args(argv)
    here = machine()
    where = torch.cuda.get_device_name() if on_gpu and args.device != "cpu" else "no GPU used"
    print(f"{here['cpu']}, {here['cores']} cores, {where}, Python {here['python']}, PyTorch {torch.__version__}")
    what = f"--arch {args.arch}, batches of {args.batch_size}, {args.workers} workers, {args.steps} steps"
    print(f"images/s with {what}; medians of {args.rounds} rounds", flush=True)
    try:
        rows = report(args)
    except (TorchpipeError, OSError) as error:
        print(f"tricks: {first_line(error)}", file=sys.stderr)
        return 2
    print(*table(rows), sep="\n", flush=True)
    if args.json is not None:
        content = {"machine": here, "command": sys.argv, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if any(row.ratio is not None for row in rows) or not set(args.sections) - {1, 2} else 1

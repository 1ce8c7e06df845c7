"""Loaders of a training compared: an epoch of training and of validation with each, and each alone at its best.

    python scripts/run.py loaders [--data DIR] [--plots FOLDER] [--json FILE]

Without ``--data`` it draws labelled JPEGs of 500×375 pixels. First each loader trains the same network, with the first
batch size and each number of workers (threads of DALI), and with the other batch sizes and the last number of workers:
an epoch to warm up, then one that is timed, and a validation that is timed apart. An epoch has each image so often that
the batches which a loader makes ahead count for little; times are those of each image once. Then each loader runs
without a network, as fast as it can, and the best of each library again in turns. A loader that fails, or whose library
or GPU is missing, is a remark.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
from benchmarks.common import Load, Report, Subject, add_options, numbers, progress, run
from benchmarks.gpu.usage import GpuSample, GpuUsage
from examples.shapes import write_set
from torch import nn

from recipes.augmentation import AUGMENTS
from recipes.experiments.loaders import SUBJECTS, Epoch, Loaders, Setting, device_of
from recipes.experiments.plots import plot_all
from recipes.models import make_model
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.options import at_least
from torchpipe_py.training import TrainingError
from torchpipe_py.training.errors import library

PICTURE = (375, 500)  # height and width of the drawn JPEGs in pixels
LEAST = 3  # fewest batches for the warm-up, and for the measurement
LONG_EPOCH = 50_000  # images: short epochs would measure their beginnings and ends
LEAST_BATCHES = 12  # in a timed epoch, since DALI has two ready when it begins
EPOCHS_SHARE = 0.55  # the epochs' share of the time for both parts
TURNS_SHARE = 0.2  # the share of the whole time that is kept for the best of each library, in turns
LONGEST = 4.0  # longest measurement of a slow loader, as a multiple of the seconds set


class Comparison:
    """The measurements of one command. ``usage``: by row of ``epochs`` the samples of the GPU's use, for the plots."""

    def __init__(self, args: argparse.Namespace, device: Any) -> None:
        self._args, self._device = args, device
        self._end = monotonic() + args.most_seconds
        self._usable = list(args.only)
        self.reports: dict[str, Report] = {}
        self.usage: dict[str, list[GpuSample]] = {}

    def epochs(self) -> Report:
        """Training and validation with each loader, in each of ``_settings``."""
        args = self._args
        title = f"epochs: {args.arch} on {_named(self._device)}, {_counted(args.data)}, {_shown(args.augment)}"
        report = self.reports["epochs"] = Report(title, "images/s")
        share = EPOCHS_SHARE if args.name == "all" else 1.0
        report.until = monotonic() + share * (self._end - monotonic())
        for batch_size, workers in _settings(args.batch_sizes, args.workers):
            for name in self._usable:
                setting = self._setting(batch_size, workers, tuple(args.augment), LEAST_BATCHES * batch_size)
                measure = partial(self._epoch, report, name, setting)
                self._attempt(report, name, _row(name, batch_size).format(workers), measure)
        if not report.loads:
            report.require("loaders that were measured", 0, low=1)
        return report

    def _attempt(self, report: Report, name: str, what: str, measure: Callable[[], object]) -> None:
        """Measure; a loader that does not work at all, for want of a library or a GPU, is not tried again."""
        is_new = not any(row.startswith(f"{name},") for report in self.reports.values() for row, _ in report.loads)
        if not report.attempt(what, measure) and is_new and monotonic() < report.until:
            self._usable = [other for other in self._usable if other != name]

    def _epoch(self, report: Report, name: str, setting: Setting) -> None:
        load, usage = trained(name, setting, self._args)
        row = _row(name, setting.batch_size)
        if usage is not None and usage.missing and usage.missing not in report.remarks:
            report.remarks.append(usage.missing)
        report.add(row, setting.workers, load)
        self.usage[row.format(setting.workers)] = [] if usage is None else usage.samples
        progress(f"{row.format(setting.workers)}: {load.qps:.0f} images/s")

    def throughput(self) -> Report:
        """Measure each loader without a network: images flipped and normalised. Remarks name its best setting."""
        args = self._args
        report = Report(f"throughput: loaders alone, flipped and normalised, on {_named(self._device)}", "images/s")
        self.reports["throughput"] = report
        report.until = self._end - TURNS_SHARE * args.most_seconds
        batch_size = max(args.batch_sizes)

        def load(name: str, workers: int, seconds: float) -> Load:
            setting = self._setting(batch_size, workers, (), LONG_EPOCH)
            with SUBJECTS[name](setting) as loaders:
                return Load(images_per_second(loaders, setting, seconds))

        subjects = {name: Subject(_row(name, batch_size), partial(load, name)) for name in self._usable}
        for workers in args.workers:
            for name in self._usable:
                measure = partial(report.measure, [subjects[name]], (workers,), args.seconds, 1)
                self._attempt(report, name, subjects[name].name.format(workers), measure)
        if not report.loads:
            report.require("loaders that were measured", 0, low=1)
        report.until = self._end
        report.attempt("the best of each library in turns", partial(self._compare_best, report, subjects))
        return report

    def _compare_best(self, report: Report, subjects: Mapping[str, Subject]) -> None:
        """Measure the best setting of each library again, in turns; remarks with ratios."""
        best: dict[str, tuple[float, str, int]] = {}
        for (row, workers), loads in report.loads.items():
            name = row.partition(",")[0]
            library = name.partition("-")[0]
            best[library] = max((loads[0].qps, name, workers), best.get(library, (0.0, "", 0)))
        if "ours" not in best or len(best) < 2:
            return
        rounds = Report("the best of each library")
        counted = 0
        while counted < self._args.rounds and (counted == 0 or monotonic() < report.until):
            for library, (_, name, workers) in best.items():
                rounds.add(library, workers, subjects[name].load(workers, self._args.seconds))
            counted += 1
        described = {
            library: f"{name} with {workers} workers, {rounds.median(library, workers).qps:.0f} images/s"
            for library, (_, name, workers) in best.items()
        }
        for library in best:
            if library != "ours":
                ratio = rounds.ratio(("ours", best["ours"][2]), (library, best[library][2]))
                what = f"ours over {library}, each at its best, in {counted} rounds: {ratio:.2f}"
                report.remarks.append(f"{what} ({described['ours']}; {described[library]})")

    def _setting(self, batch_size: int, workers: int, augments: tuple[str, ...], least: int) -> Setting:
        return Setting(self._args.data, self._args.size, batch_size, workers, self._device, augments, least)


def trained(name: str, setting: Setting, args: argparse.Namespace) -> tuple[Load, GpuUsage | None]:
    """One loader's figures, and the GPU's use.

    ``qps``: images a second of the timed epoch of training. ``more``: seconds of training on each image once
    (``train s``), of the validation (``val s``), the accuracy in it, and of the whole GPU its use in percent and the
    most MiB in use meanwhile, of earlier rows too where their libraries keep it.
    """
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    classes = sum(path.is_dir() for path in (setting.data / "train").iterdir())
    network = Network(args.arch, setting.device, args.seed, classes)
    usage = GpuUsage(setting.device) if on_gpu else None
    with SUBJECTS[name](setting) as loaders:
        if not network.train(loaders.train()):
            raise TrainingError(f"{setting.data / 'train'} has no batch of {setting.batch_size}")
        network.accuracy(loaders.val())
        with usage or nullcontext():
            began = perf_counter()
            images = network.train(loaders.train())
            between = perf_counter()
            accuracy, seen = network.accuracy(loaders.val())
            over = perf_counter()
    train, val = (_files(setting.data / split) for split in ("train", "val"))
    more = {"train s": (between - began) * train / images, "val s": (over - between) * val / max(seen, 1)}
    more |= {"accuracy": accuracy}
    if usage is not None and usage.samples:
        more |= {"GPU %": usage.busy, "GPU MiB": usage.memory}
    return Load(images / (between - began), more=more), usage


class Network:
    """A classifier, and how it learns; in bf16 and channels-last on a GPU."""

    def __init__(self, arch: str, device: Any, seed: int, classes: int) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._model = make_model(arch, classes, seed).to(device)
        if self._on_gpu:
            self._model = self._model.to(memory_format=torch.channels_last)
        self._optimiser = torch.optim.SGD(self._model.parameters(), lr=0.02, momentum=0.9)

    def train(self, batches: Iterable[tuple[Any, Any]]) -> int:
        """An epoch; how many images it had, once the device is done with them."""
        self._model.train()
        images = 0
        for inputs, labels in batches:
            with self._autocast():
                loss = nn.functional.cross_entropy(self._model(inputs), labels)
            self._optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self._optimiser.step()
            images += len(inputs)
        _synchronise(self._device)
        return images

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def accuracy(self, batches: Iterable[tuple[Any, Any]]) -> tuple[float, int]:
        """The share of images named rightly, and how many there were."""
        self._model.eval()
        hits, seen = torch.zeros((), dtype=torch.int64, device=self._device), 0
        for inputs, labels in batches:
            with self._autocast():
                hits += (self._model(inputs).argmax(dim=1) == labels).sum()
            seen += len(inputs)
        return float(hits) / max(1, seen), seen

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._on_gpu)


# -- loaders alone ------------------------------------------------------------------------------------------------


def images_per_second(loaders: Loaders, setting: Setting, seconds: float) -> float:
    """Images per second, from the end of one batch to that of another, after a warm-up.

    Workers finish their batches at about the same time, so warm-up and measurement have at least one of each.
    """
    enough = max(LEAST, setting.workers + 1)
    batches = _endless(loaders.train)
    for _, (batch, _) in zip(range(enough), batches, strict=False):
        if tuple(batch.shape) != (setting.batch_size, 3, setting.size, setting.size) or batch.dtype != torch.float32:
            raise TrainingError(f"a batch of {tuple(batch.shape)}, {batch.dtype}")
    _synchronise(setting.device)
    images = 0
    began = perf_counter()
    for made, (batch, _) in enumerate(batches, 1):
        images += len(batch)
        elapsed = perf_counter() - began
        if (elapsed >= seconds and made >= enough) or elapsed >= LONGEST * seconds:
            break
    _synchronise(setting.device)
    return images / (perf_counter() - began)


def _endless(epoch: Epoch) -> Iterable[tuple[Any, Any]]:
    while True:
        yield from epoch()


def _synchronise(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the command --------------------------------------------------------------------------------------------------


def _named(device: Any) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _row(name: str, batch_size: int) -> str:
    """The name of a row in a report; ``{}`` is for the number of workers."""
    return f"{name}, batches of {batch_size}, {{}} workers"


def _files(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def _counted(data: Path) -> str:
    return f"{_files(data / 'train')} images to train on, {_files(data / 'val')} to validate with"


def _settings(batch_sizes: Sequence[int], workers: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of batch size and number of workers: the first size with each number, every further size with the last."""
    return [(batch_sizes[0], count) for count in workers] + [(size, workers[-1]) for size in batch_sizes[1:]]


def _shown(augments: Sequence[str]) -> str:
    return f"augmented by {', '.join(augments)} and flip" if augments else "flipped"


def _parser() -> ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("name", nargs="?", choices=["epochs", "throughput", "all"], default="all", help="(default: all)")
    add_options(parser)
    parser.set_defaults(rounds=3, seconds=1.5)
    option("--data", type=Path, help="a folder with train/ and val/, of class folders with JPEGs (default: drawn)")
    count = 125 if on_gpu else 24
    option(
        "--train", type=at_least(1), default=count, help="images of each of 8 classes to draw (default: %(default)s)"
    )
    option("--val", type=at_least(1), default=count // 3, help="the same to validate with (default: %(default)s)")
    option("--size", type=at_least(8), default=224, help="of the network's input, in pixels (default: %(default)s)")
    option("--arch", default="resnet18" if on_gpu else "small", help="(default: %(default)s)")
    option("--seed", type=int, default=0, help="of the network (default: %(default)s)")
    batches, workers = ((64, 256), (4, 8)) if on_gpu else ((16, 32), (1, 2))
    option("--batch-sizes", type=numbers, default=batches, help=f"(default: {','.join(map(str, batches))})")
    option("--workers", type=numbers, default=workers, help=f"(default: {','.join(map(str, workers))})")
    option(
        "--augment", nargs="*", choices=AUGMENTS, default=["crop", "color", "gridmask"], help="(default: %(default)s)"
    )
    option("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="loaders to measure (default: all)")
    option("--device", help="'cpu' or a CUDA device (default: a GPU where there is one)")
    option("--plots", type=Path, metavar="FOLDER", help="write the document's plots there, as SVG")
    longest = 480 if on_gpu else 300
    option(
        "--most-seconds", type=float, default=longest, metavar="S", help="start nothing after (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when measured, 1 when no loader works."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = device_of(args.device)
    if args.plots is not None:
        try:
            library("matplotlib.pyplot", "matplotlib", "--plots")
        except TrainingError as error:
            parser.error(str(error))
    with ExitStack() as stack:
        if args.data is None:
            args.data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_set(args.data, args.train, args.val, PICTURE)
        for split in ("train", "val"):
            if not (args.data / split).is_dir():
                parser.error(f"--data {args.data}: there is no folder {args.data / split}")
        comparison = Comparison(args, device)
        status = run({"epochs": comparison.epochs, "throughput": comparison.throughput}, args)
    if args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        for path in plot_all(comparison.reports, comparison.usage, args.plots):
            print(path)
    return status

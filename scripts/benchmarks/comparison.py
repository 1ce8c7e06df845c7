"""The pipe's service against the usual recipe with the same IDL: throughput, latency, CPU, GPU, memory, accuracy.

``against_baseline`` runs on a CPU, where ONNX Runtime replaces TensorRT on both sides.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple

import psutil
from thriftpy2.rpc import make_client

from benchmarks.bare import MEAN, STD
from benchmarks.common import REPOSITORY, Load, Report, aligned, cores, image_folder, progress
from benchmarks.services import MIB, Tables, client_report, load_in, pss_mib, serving_process, started
from torchpipe_py import parse_toml
from torchpipe_py.idl import load_idl
from torchpipe_py.tools.load.arrivals import load_images
from torchpipe_py.tools.options import at_least

CLIENTS = (1, 5, 10)
DEMO = REPOSITORY / "configs" / "demo" / "model.onnx"
DEMO_SIDE, SIDE = 64, 224
ASKED_AT_ONCE = 4
ANSWER_MS = 60_000
IDL = load_idl()

Answer = tuple[str | None, float]
"""A label, None for an image that cannot be decoded, and its score."""

Service = AbstractContextManager[tuple[int, int]]
"""A service, to be started; its value is its port and process id."""


# -- the report ---------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table of the documents: a column for each of ``head``, text in every cell."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self) -> str:
        """The table in Markdown, with aligned columns."""
        return f"{self.title}\n{aligned([self.head, *self.rows])}"


@dataclass(frozen=True)
class Accuracy:
    """A service's answers for a folder of images; ``right`` is None if no label is known.

    ``agreeing`` images have the same label as with the table's first service; scores differ by at most ``apart``.
    """

    name: str
    images: int
    labelled: int
    right: int | None
    agreeing: int
    apart: float


@dataclass
class Comparison(Report):
    """A report that begins with the documents' tables."""

    tables: list[Table] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)

    def show(self) -> None:
        """Print the tables, then the usual report."""
        for table in self.tables:
            print(f"\n{table.text()}")
        super().show()

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON."""
        tables = [table._asdict() for table in self.tables]
        return {**super().figures(), "tables": tables, "accuracy": list(map(asdict, self.accuracies))}

    def add_methods(self, title: str, names: Sequence[str], clients: Sequence[int]) -> None:
        """The table of throughput, response time and resource utilization, with a row for each that was measured."""
        head = ("Methods", "clients", "QPS", "TP50 ms", "TP99 ms", "GPU utilization", "CPU utilization", "Memory")
        rows = []
        for count in clients:
            for name in names:
                if (name, count) in self.loads:
                    load = self.median(name, count)
                    gpu = f"{load.more['GPU %']:.0f}%" if "GPU %" in load.more else "-"
                    use = (gpu, f"{100 * load.more['CPU cores']:.0f}%", f"{load.more['memory %']:.1f}%")
                    rows.append((name, str(count), f"{load.qps:.1f}", f"{load.p50:.2f}", f"{load.p99:.2f}", *use))
        self.tables.append(Table(title, head, rows))

    def add_accuracies(self, title: str, accuracies: Sequence[Accuracy]) -> None:
        """The table of accuracy, and of agreement with the first of them."""
        head = ("Methods", "images", "accuracy", "same label as the first", "largest difference of scores")
        rows = []
        for one in accuracies:
            right = "-" if one.right is None else f"{100 * one.right / one.labelled:.2f}%"
            rows.append(
                (one.name, str(one.images), right, f"{100 * one.agreeing / one.images:.2f}%", f"{one.apart:.2g}")
            )
        self.accuracies += accuracies
        self.tables.append(Table(title, head, rows))


# -- services -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A started service: its name in the tables, its port, and the process whose descendants belong to it."""

    name: str
    port: int
    pid: int

    def load(self, images: Path, clients: int, seconds: float) -> Load:
        """The load tester's figures, with the use of CPU and GPU during the run and the memory after it."""
        report = client_report(self.port, images, clients, seconds, ["--server_pid", str(self.pid)])
        more = {"avg ms": report["latency_ms"]["mean"], "CPU cores": (report["server_cpu_percent"] or 0.0) / 100}
        use = [gpu["utilization_mean"] for gpu in report["gpus"] or () if gpu["utilization_mean"] is not None]
        if use:
            more["GPU %"] = use[0]
        more["memory %"] = 100 * pss_mib(self.pid) * MIB / psutil.virtual_memory().total
        return replace(load_in(report), more=more)

    def answers(self, images: Sequence[bytes]) -> list[Answer]:
        """Label and score of each; no label where it cannot be decoded."""

        def ask(first: int) -> list[Answer]:
            with closing(make_client(IDL.InferenceService, "127.0.0.1", self.port, timeout=ANSWER_MS)) as client:
                return [answer(client, str(index), images[index]) for index in range(first, len(images), ASKED_AT_ONCE)]

        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            shares = list(threads.map(ask, range(ASKED_AT_ONCE)))
        return [shares[index % ASKED_AT_ONCE][index // ASKED_AT_ONCE] for index in range(len(images))]


def answer(client: Any, uuid: str, image: bytes) -> Answer:
    """The answer of a service to one image; its other errors are raised."""
    try:
        result = client.infer_batch(IDL.InferenceParams(uuid=uuid, data=image))
    except IDL.InferenceError as error:
        if error.code != "decode_error":
            raise
        return None, 0.0
    return result.label, result.score


def locked(model: Sequence[str], side: int) -> Service:
    """The baseline; ``model`` are the options of its server that name the model."""
    script = str(REPOSITORY / "scripts" / "baseline_server.py")
    return started([script, "--port", "0", "--size", str(side), *model])


def as_documented(side: int, **model: Any) -> Tables:
    """The three nodes of ``configs/resnet50.toml`` with another model; keys that are None are left out."""
    tables = parse_toml(REPOSITORY / "configs" / "resnet50.toml")
    tables["cpu_posdecoder"] |= {"resize_h": side, "resize_w": side}
    node = {**tables["resnet50"], "postprocessor": "SoftmaxMax", **model}
    tables["resnet50"] = {key: value for key, value in node.items() if value is not None}
    return tables


def start(report: Report, stack: ExitStack, services: Mapping[str, Service]) -> list[Running]:
    """Start services, until ``stack`` ends; one that fails becomes a remark."""
    running: list[Running] = []

    def enter(name: str, service: Service) -> None:
        running.append(Running(name, *stack.enter_context(service)))
        progress(f"{name}: started")

    for name, service in services.items():
        report.attempt(name, partial(enter, name, service))
    return running


def measure(
    report: Report, services: Sequence[Running], images: Path, clients: Sequence[int], seconds: float, rounds: int
) -> None:
    """Load one service after the other; a round has all of them. One that fails is a remark, and left out then."""

    def add(service: Running, count: int) -> None:
        report.add(service.name, count, service.load(images, count, seconds))

    working = list(services)
    for _ in range(rounds):
        for count in clients:
            working = [
                one for one in working if report.attempt(f"{one.name}, {count} clients", partial(add, one, count))
            ]


@contextmanager
def on_cores(chosen: Collection[int]) -> Iterator[None]:
    """Run this thread, and the processes and threads it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- accuracy -----------------------------------------------------------------------------------------------------


class Labelled(NamedTuple):
    """Encoded images, and the index of each one's class as text, None if unknown."""

    title: str
    images: list[bytes]
    classes: list[str | None]


def labelled_images(folder: Path | None, names: Path | None, is_demo: bool) -> Labelled:
    """The images of a folder, by default the demo's, which have no class for another model than the demo's.

    The class of an image is the name of its folder, or begins its own name. Its index is that of its line in ``names``,
    else among the sorted classes. Raises ``ToolError`` or ``OSError`` for what cannot be read.
    """
    payload = load_images(folder or DEMO.parent / "images", labelled=True)
    if is_demo:
        names = names or DEMO.parent / "labels.txt"
    if names is None:
        known = sorted({label for label in payload.labels if label is not None})
    else:
        known = names.read_text(encoding="utf-8").splitlines()
    if len(known) < 2 or (folder is None and not is_demo):  # the names say nothing of a class
        known = []
    classes = [str(known.index(label)) if label in known else None for label in payload.labels]
    return Labelled(f"{len(classes)} images of {folder or 'the demo'}", payload.bodies, classes)


def compare_answers(report: Comparison, services: Sequence[Running], labelled: Labelled) -> None:
    """Ask each service for every image; the first is the baseline."""
    baseline: list[Answer] = []
    accuracies = []
    for service in services:
        answers = service.answers(labelled.images)
        baseline = baseline or answers
        pairs = [(one[0], truth) for one, truth in zip(answers, labelled.classes, strict=True) if truth is not None]
        same = [one[0] == other[0] for one, other in zip(answers, baseline, strict=True)]
        apart = max(abs(one[1] - other[1]) for one, other in zip(answers, baseline, strict=True))
        right = sum(label == truth for label, truth in pairs) if pairs else None
        accuracies.append(Accuracy(service.name, len(answers), len(pairs), right, sum(same), apart))
    report.add_accuracies(f"Accuracy on {labelled.title}", accuracies)


# -- on a CPU -----------------------------------------------------------------------------------------------------


def add_folder_options(parser: argparse._ActionsContainer) -> None:
    """The user's images and the classes of the user's model."""
    folder = "images to load the services with and to compare answers on, in class folders or named CLASS_*.jpg"
    parser.add_argument(
        "--img_dir", type=_folder, metavar="DIR", help=f"{folder} (default: one drawn image, the demo's)"
    )
    names = "the model's classes, one a line (default: the sorted names of the folders)"
    parser.add_argument("--labels", type=Path, metavar="FILE", help=names)
    side = "height and width of the input of --model FILE (default: %(default)s)"
    parser.add_argument("--size", type=at_least(1), default=SIDE, help=side)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def against_baseline(args: argparse.Namespace) -> Comparison:
    """ONNX Runtime behind a lock, one image at a time, against the pipe's service with the same model."""
    report = Comparison(f"baseline: over Thrift, ONNX Runtime in TensorRT's place, {cores()} cores for all")
    report.until = monotonic() + args.most_seconds
    with TemporaryDirectory() as folder, image_folder() as drawn:
        images = args.img_dir or drawn
        if args.model == "demo":
            report.attempt("the demo's model", partial(_compare, report, args, DEMO, DEMO_SIDE, images))
            report.attempt("ResNet-18", partial(_compare_resnet18, report, args, Path(folder), images))
        else:
            report.attempt(args.model, partial(_compare, report, args, Path(args.model), args.size, images))
    report.is_open = not (report.loads and report.accuracies)
    return report


def _compare_resnet18(report: Comparison, args: argparse.Namespace, folder: Path, images: Path) -> None:
    """Compare services of a ResNet-18 with random weights, which do not change the time; needs torchvision."""
    import torch
    import torchvision

    from torchpipe_py.tools.export.onnx_file import save_onnx

    torch.manual_seed(0)
    path = folder / "resnet18_random.onnx"
    save_onnx(torchvision.models.resnet18(weights=None), path, SIDE)
    _compare(report, args, path, SIDE, images)


def _compare(report: Comparison, args: argparse.Namespace, model: Path, side: int, images: Path) -> None:
    """Three services with this model: loaded, and where its classes are known asked for labels."""
    what = "demo" if model == DEMO else model.stem
    node: dict[str, Any] = {"model": str(model), "mean": ", ".join(map(str, MEAN)), "std": ", ".join(map(str, STD))}
    nodes = as_documented(side, **node, backend="SyncTensor[OnnxTensor]", **{"model::cache": None})
    one_node = parse_toml(REPOSITORY / "configs" / "demo.toml")
    del one_node["classifier"]["labels"]  # the baseline gives the index of a class
    one_node["classifier"] |= {**node, "resize_h": side, "resize_w": side, "max": 4}
    services = {
        f"{what}: locked ONNX Runtime": locked(["--onnx", str(model)], side),
        f"{what}: torchpipe_py, three nodes": serving_process(nodes),
        f"{what}: torchpipe_py, one node": serving_process(one_node),
    }
    with ExitStack() as stack:
        running = start(report, stack, services)
        measure(report, running, images, CLIENTS, args.seconds, args.rounds)
        report.add_methods(f"Model: {what}, {side}x{side}", list(services), CLIENTS)
        if model == DEMO or args.model != "demo":  # random weights have no accuracy
            report.attempt(
                f"{what}: accuracy",
                lambda: compare_answers(report, running, labelled_images(args.img_dir, args.labels, model == DEMO)),
            )

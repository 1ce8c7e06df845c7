"""Ray Data over many images: what it costs beside a bare loop over the same pipe, and what it does with what fails."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np
import psutil

from benchmarks.common import REPOSITORY, Report, Row
from benchmarks.ray.cluster import is_missing
from benchmarks.ray.images import EACH, write_images
from torchpipe_py import pipe
from torchpipe_py.ray.data import PipeMapper

IMAGES, FEW, BATCH = 10_000, 256, 256
CONFIG = "configs/demo.toml"
STORE_BYTES = 400 << 20
TAKEN = "::MapWorker"  # in the title of the process of an actor

Batch = dict[str, np.ndarray]
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Rate:
    """So many images in so many seconds, and CPU seconds of all processes."""

    images: int
    wall: float
    cpu: float

    def __sub__(self, other: Rate) -> Rate:
        """What is left without the start, which ``other`` has too."""
        return Rate(self.images - other.images, self.wall - other.wall, self.cpu - other.cpu)

    def row(self, what: str) -> Row:
        return Row(what, self.images / self.wall, note=f"{self.per_core:.0f} for each CPU second")

    @property
    def per_core(self) -> float:
        return self.images / self.cpu


def ray_data(seconds: float, rounds: int) -> Report | list[Report]:
    """Loops for ``rounds`` times ``seconds`` each; Ray Data once over all images."""
    outcomes = Report(f"ray_data: {IMAGES} images, one in {EACH} bad")
    if is_missing(outcomes):
        return outcomes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images, few = folder / "images", folder / "few"
        for place, count in ((images, IMAGES), (few, FEW)):
            place.mkdir()
            write_images(place, count)
        # What a node has: nothing but its configuration and model, in a folder of its own.
        shutil.copytree(REPOSITORY / "configs" / "demo", folder / "work" / "configs" / "demo")
        shutil.copy(REPOSITORY / CONFIG, folder / "work" / CONFIG)
        speed, loop = _loops(images, seconds, rounds)
        names = [path.name for path in sorted(images.iterdir())]
        with _cluster(folder / "work"):
            _rate(_labelled(few))  # the first actor imports what the operating system has to read
            start, _ = _rate(_labelled(few))
            for what, calls, policy in (("1 actor", 1, "mask"), ("1 actor, 2 calls at a time", 2, "skip")):
                whole, rows = _rate(_labelled(images, calls, bad_samples=policy))
                speed.rows.append((whole - start).row(f"Ray Data, {what}"))
                part = (whole - start).per_core / loop.per_core
                speed.require(f"Ray Data, {what}: for each CPU second, of the bare loop's", part, low=0.4)
                _bad_rows(outcomes, policy, names, rows)
            speed.remarks.append(f"{start.wall:.1f} s and {start.cpu:.1f} CPU seconds for {FEW} images are left out")
            _bad_rows_raise(outcomes, images)
            killed = _collected(_killing(_labelled(images, mapper=Placed)))
            _expect(outcomes, "an actor killed", names, killed)
            outcomes.require("an actor killed: processes that labelled", len(set(killed["process"])), low=2)
        with _cluster(folder / "work", nodes=2):
            rows = _collected(_labelled(images, actors=2, mapper=Placed))
        _expect(outcomes, "two nodes", names, rows)
        shares = sorted(Counter(rows["node"]).values())
        outcomes.require("two nodes: nodes that labelled", len(shares), low=2)
        outcomes.remarks.append(f"two nodes labelled {' and '.join(map(str, shares))} images")
    return [speed, outcomes]


# --- without Ray


def _loops(images: Path, seconds: float, rounds: int) -> tuple[Report, Rate]:
    """The loops' rows, and the rate of the one over the pipe."""
    report = Report(f"ray_data: JPEGs of about 25 KB, labelled by {CONFIG}")
    encoded = [path.read_bytes() for path in sorted(images.iterdir())[: 8 * BATCH]]
    batches = [encoded[start : start + BATCH] for start in range(0, len(encoded), BATCH)]
    os.chdir(REPOSITORY)
    mapper = PipeMapper(CONFIG)
    with pipe(CONFIG) as run:
        subjects: dict[str, Callable[[list[bytes]], object]] = {
            "cv2 and ONNX Runtime, one by one": _Plain(),
            f"bare loop over the pipe, {BATCH} at a time": lambda batch: run([{"data": each} for each in batch]),
            "PipeMapper without Ray": lambda batch: mapper({"bytes": _objects(batch)}),
        }
        rates: dict[str, list[Rate]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, subject in subjects.items():
                rates[name].append(_loop_rate(subject, batches, seconds))
    mapper.close()
    medians = [sorted(each, key=lambda rate: rate.per_core)[len(each) // 2] for each in rates.values()]
    for name, rate in zip(rates, medians, strict=True):
        report.rows.append(rate.row(name))
    return report, medians[1]


class _Plain:
    """Labels by hand: what one writes without a pipe."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession("configs/demo/model.onnx", options)
        self._input = self._session.get_inputs()[0].name
        self._mean = np.array((123.675, 116.28, 103.53), np.float32)
        self._std = np.array((58.395, 57.12, 57.375), np.float32)

    def __call__(self, batch: Sequence[bytes]) -> list[int]:
        return [self._label(each) for each in batch]

    def _label(self, encoded: bytes) -> int:
        mat = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR) if encoded else None
        if mat is None:
            return -1
        rgb = cv2.cvtColor(cv2.resize(mat, (64, 64)), cv2.COLOR_BGR2RGB)
        pixels = ((rgb - self._mean) / self._std).transpose(2, 0, 1)[None]
        (logits,) = self._session.run(None, {self._input: np.ascontiguousarray(pixels, np.float32)})
        return int(logits[0].argmax())


def _loop_rate(subject: Callable[[list[bytes]], object], batches: Sequence[list[bytes]], seconds: float) -> Rate:
    images, began, cpu = 0, perf_counter(), process_time()
    while not images or perf_counter() - began < seconds:
        batch = batches[images // BATCH % len(batches)]
        subject(batch)
        images += len(batch)
    return Rate(images, perf_counter() - began, process_time() - cpu)


def _objects(values: Sequence[bytes]) -> np.ndarray:
    column = np.empty(len(values), object)
    column[:] = values
    return column


# --- with Ray


@contextmanager
def _cluster(work: Path, nodes: int = 1) -> Iterator[None]:
    """A cluster on this machine whose workers have ``work``; each node has two CPUs and a store of its own."""
    import ray
    from ray.cluster_utils import Cluster

    local = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    # NOTE: with a working_dir Ray does not tell the workers where the driver finds its modules.
    environment = {"working_dir": str(work), "env_vars": {"PYTHONPATH": str(REPOSITORY / "scripts")}}
    settings: dict[str, Any] = {"runtime_env": environment, "log_to_driver": False, "logging_level": "ERROR"}
    cluster = Cluster(initialize_head=True, head_node_args=local) if nodes > 1 else None
    try:
        for _ in range(nodes - 1):
            assert cluster is not None
            cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        ray.init(**settings, **({"address": cluster.address} if cluster else {"address": "local", **local}))
        context = ray.data.DataContext.get_current()
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True  # otherwise blocks come as they are done
        yield
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


class Placed(PipeMapper):
    """Says on which node it ran, and in which process."""

    def __call__(self, batch: Batch) -> Batch:
        import ray

        made = super().__call__(batch)
        rows = len(made["path"])
        node = ray.get_runtime_context().get_node_id()
        return {**made, "node": np.full(rows, node), "process": np.full(rows, os.getpid())}


def _labelled(
    images: Path, calls: int = 1, actors: int = 1, mapper: type[PipeMapper] = PipeMapper, **options: Any
) -> Iterator[Batch]:
    """Batches of the images with their labels, as they come."""
    import ray
    from ray.data import ActorPoolStrategy

    compute = ActorPoolStrategy(
        size=actors, max_concurrent_calls_per_actor=calls, enable_true_multi_threading=calls > 1
    )
    read = ray.data.read_binary_files(str(images), include_paths=True, override_num_blocks=40)
    labelled = read.map_batches(
        mapper,
        fn_constructor_args=(CONFIG,),
        fn_constructor_kwargs=options,
        batch_size=BATCH,
        num_cpus=1,
        compute=compute,
    )
    yield from labelled.iter_batches(batch_size=BATCH)


def _rate(batches: Iterator[Batch]) -> tuple[Rate, Columns]:
    """All batches, and what they took."""
    with _CpuOfChildren() as children:
        began, cpu = perf_counter(), process_time()
        rows = _collected(batches)
        wall, cpu = perf_counter() - began, process_time() - cpu
    return Rate(len(rows["path"]), wall, cpu + children.seconds), rows


class _CpuOfChildren:
    """CPU seconds of this process' descendants meanwhile, also of those that end: looked at ten times a second."""

    def __enter__(self) -> _CpuOfChildren:
        self._first = self._last = self._clocks()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._last = {**self._last, **self._clocks()}

    @property
    def seconds(self) -> float:
        return sum(seconds - self._first.get(process, 0.0) for process, seconds in self._last.items())

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            self._last = {**self._last, **self._clocks()}

    def _clocks(self) -> dict[int, float]:
        clocks = {}
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            clocks[process.pid] = times.user + times.system
        return clocks


# --- what happens


def _bad_rows(report: Report, policy: str, names: Sequence[str], rows: Columns) -> None:
    if policy == "skip":
        names = [name for number, name in enumerate(names) if number % EACH != EACH // 2]
    else:
        errors = [error for error in rows["error"] if error]
        kinds = dict(Counter(error.partition(":")[0] for error in errors))
        report.remarks.append(f"mask: {len(errors)} rows with an error, {kinds}; {errors[0]}")
    _expect(report, policy, names, rows)


def _bad_rows_raise(report: Report, images: Path) -> None:
    try:
        _collected(_labelled(images, bad_samples="raise"))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "BadSample: " in line]
        report.remarks.append(f"raise: {lines[-1].strip()}")
    else:
        report.require("raise: datasets that end with an error", 0, low=1)


def _expect(report: Report, what: str, names: Sequence[str], rows: Columns) -> None:
    """All of ``names``, in their order, each with a label or an error."""
    given = [Path(path).name for path in rows["path"]]
    right = sum(
        name == expected and bool(label) != bool(error)
        for name, expected, label, error in zip(
            given, names, rows["label"], rows.get("error", [""] * len(given)), strict=False
        )
    )
    report.rows.append(Row(what, float(len(given)), note="rows"))
    report.require(f"{what}: share of the rows that are in place", right / len(names), low=1.0)


def _collected(batches: Iterator[Batch]) -> Columns:
    columns: Columns = {}
    for batch in batches:
        for name, column in batch.items():
            columns.setdefault(name, []).extend(column.tolist())
    return columns


def _killing(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Kill the actors' processes after the first batch: the others are still to be made."""
    for number, batch in enumerate(batches):
        if number == 0:
            for process in psutil.Process().children(recursive=True):
                if any(TAKEN in part for part in process.cmdline()):
                    process.send_signal(signal.SIGKILL)
        yield batch

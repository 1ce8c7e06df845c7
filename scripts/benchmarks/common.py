"""The benchmark runner: subjects under several loads, in interleaved rounds, as a table of medians.

A benchmark makes a ``Report``, lets it ``measure`` its subjects, and holds the figures against its targets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.options import output_file

REPOSITORY = Path(__file__).resolve().parents[2]

Call = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """The figures of one run: calls per second, latencies in milliseconds.

    ``cpu_ms`` is the processor time of a call, 0 where it was not measured.
    """

    qps: float
    p50: float = 0.0
    p99: float = 0.0
    cpu_ms: float = 0.0
    note: str = ""
    more: dict[str, float] = field(default_factory=dict)


class Subject(NamedTuple):
    """Something to measure. ``load`` takes the number of clients and the seconds.

    ``clients`` replaces the numbers of clients of the benchmark: a limit is often measured with one number only. In the
    table the number replaces ``{}`` in the name, if it has that.
    """

    name: str
    load: Callable[[int, float], Load]
    clients: tuple[int, ...] = ()


class Target(NamedTuple):
    """A bar, and whether the measured value reaches it."""

    name: str
    measured: float
    bar: str
    met: bool


@dataclass
class Report:
    """The outcome of a benchmark: ``loads`` has the rounds by name of the subject and number of clients.

    ``unit`` heads the column of ``Load.qps``.
    """

    title: str
    unit: str = "QPS"
    loads: dict[tuple[str, int], list[Load]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    is_open: bool = False
    until: float = float("inf")

    def measure(self, subjects: Sequence[Subject], clients: Sequence[int], seconds: float, rounds: int) -> None:
        """Load each subject with each number of clients, all in each round, so that a drift of the machine hits all."""
        counts = dict.fromkeys([*clients, *(count for subject in subjects for count in subject.clients)])
        for _ in range(rounds):
            for count in counts:
                for subject in subjects:
                    if count in (subject.clients or clients):
                        self.add(subject.name, count, subject.load(count, seconds))

    def add(self, name: str, clients: int, load: Load) -> None:
        """Keep the figures of a round."""
        self.loads.setdefault((name, clients), []).append(load)

    def median(self, name: str, clients: int) -> Load:
        """The median of each figure on its own, with the last note."""
        rounds = self.loads[name, clients]
        names = ("qps", "p50", "p99", "cpu_ms")
        figures = {name: statistics.median(getattr(load, name) for load in rounds) for name in names}
        more = {
            name: statistics.median(load.more[name] for load in rounds if name in load.more) for name in rounds[-1].more
        }
        return Load(**figures, note=rounds[-1].note, more=more)

    def ratio(self, ours: tuple[str, int], theirs: tuple[str, int]) -> float:
        """Ratio of calls per second: the median of the rounds' ratios, since a busy machine varies between rounds."""
        pairs = zip(self.loads[ours], self.loads[theirs], strict=True)
        return statistics.median(one.qps / other.qps for one, other in pairs)

    def require(self, name: str, measured: float, low: float | None = None, high: float | None = None) -> None:
        """Record a target: ``measured`` must be at least ``low`` or less than ``high``."""
        met = (low is None or measured >= low) and (high is None or measured < high)
        self.targets.append(Target(name, measured, f">= {low:g}" if low is not None else f"< {high:g}", met))

    def attempt(self, what: str, action: Call) -> bool:
        """Run a part of the benchmark; returns whether it was measured.

        If it fails, or ``until`` is past, the report gets a remark.
        """
        problem = "no time is left"
        if monotonic() < self.until:
            try:
                action()
                return True
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self.remarks.append(f"{what}: not measured: {problem}")
        progress(self.remarks[-1])
        return False

    def leave_open(self, remark: str) -> None:
        """Record that a target was not decided, and why."""
        self.remarks.append(remark)
        self.is_open = True

    def show(self) -> None:
        """Print the table, whether each target is met, and the remarks.

        Figures in ``Load.more`` are columns where all rows have the same ones and no note, else a note.
        """
        print(f"\n{self.title}")
        names = {key: labelled(*key) for key in self.loads}
        medians = {key: self.median(*key) for key in self.loads}
        width = max(map(len, names.values()), default=0)
        has_latency = any(load.p50 or load.p99 for load in medians.values()) or not medians
        kinds = {tuple(load.more) for load in medians.values()}
        has_notes = any(load.note for load in medians.values())
        columns = kinds.pop() if len(kinds) == 1 and not has_notes else ()
        heads = [f"{self.unit:>9}", *(["  p50 ms", "  p99 ms"] if has_latency else []), *columns]
        print(f"  {'':{width}}  {'  '.join(heads)}".rstrip())
        for key, name in names.items():
            load = medians[key]
            cells = [f"{load.qps:9.0f}"]
            if has_latency:
                cells += [f"{value:8.2f}" if value else " " * 8 for value in (load.p50, load.p99)]
            cells += [f"{load.more[head]:{max(len(head), 4)}.4g}" for head in columns]
            note = load.note or (
                "" if columns else ", ".join(f"{name} {value:.3g}" for name, value in load.more.items())
            )
            cells.append(note or (f"{load.cpu_ms:.2f} ms CPU" if load.cpu_ms else ""))
            print(f"  {name:{width}}  {'  '.join(cells)}".rstrip())
        for target in self.targets:
            print(f"  {'ok    ' if target.met else 'MISSED'} {target.name}: {target.measured:.2f} ({target.bar})")
        print(*(f"  {remark}" for remark in self.remarks), sep="\n", end="\n" if self.remarks else "", flush=True)

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows = [
            {"name": name, "clients": clients, **asdict(self.median(name, clients)), "rounds": [*map(asdict, rounds)]}
            for (name, clients), rounds in self.loads.items()
        ]
        targets = [target._asdict() for target in self.targets]
        return {"title": self.title, "rows": rows, "targets": targets, "remarks": self.remarks}


def labelled(name: str, clients: int) -> str:
    """A subject and its number of clients in one line."""
    return name.format(clients) if "{}" in name else f"{name}, {clients} client{'s' * (clients != 1)}"


# -- the command --------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, names: Sequence[str] = ()) -> None:
    """The options of every benchmark, and if there are several its name."""
    if names:
        parser.add_argument("name", choices=[*names, "all"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements whose median is shown (default: 5)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything there as well")


def numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    """Numbers of at least 1 with commas between them."""
    values = tuple(map(int, text.split(separator)))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of at least 1")
    return values


def run(benchmarks: Mapping[str, Callable[[], Report]], args: argparse.Namespace, where: str = "") -> int:
    """Run ``args.name``, or all. 0 when every target is met, 1 when one is missed, else 3 when one was not decided."""
    here = machine()
    on = f"{here['cpu']}, {here['cores']} cores, Python {here['python']}"
    print(f"{where}{on}; medians of {args.rounds} x {args.seconds:g} s", flush=True)
    reports = []
    for name in benchmarks if args.name == "all" else [args.name]:
        reports.append(benchmarks[name]())
        reports[-1].show()
    if args.json:
        content = {"machine": here, "command": sys.argv, "reports": [report.figures() for report in reports]}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not all(target.met for report in reports for target in report.targets):
        return 1
    return 3 if any(report.is_open for report in reports) else 0


def machine() -> dict[str, Any]:
    """The processor, its usable cores, Python and the system."""
    return {"cpu": cpu_model(), "cores": cores(), "python": platform.python_version(), "system": platform.platform()}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def keep_to(cores: str) -> None:
    """Run this thread, and threads and processes that it starts, on these cores: ``0,1``. Empty: no change."""
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))


def progress(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown with columns of equal width; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *rows = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *rows])


# -- load ---------------------------------------------------------------------------------------------------------


def in_threads(call: Call, images: int = 1) -> Callable[[int, float], Load]:
    """A subject's ``load``: threads in a closed loop, at least one call each. A call is so many images.

    It raises the error of a call.
    """

    def load(clients: int, seconds: float) -> Load:
        latencies: list[list[float]] = [[] for _ in range(clients)]
        errors: list[Exception] = []
        stop = threading.Event()
        barrier = threading.Barrier(clients + 1)

        def client(mine: list[float]) -> None:
            barrier.wait()
            try:
                while not (mine and stop.is_set()):
                    start = perf_counter()
                    call()
                    mine.append(perf_counter() - start)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = perf_counter()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return load_of([value for mine in latencies for value in mine], perf_counter() - start, images)

    return load


def load_of(latencies: Sequence[float], wall: float, images: int = 1) -> Load:
    """The figures of calls with these latencies in seconds, measured within ``wall`` seconds."""
    p50, p99 = (1000 * quantile(latencies, share) for share in (0.5, 0.99))
    return Load(images * len(latencies) / wall, p50, p99)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile at ``share``; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def python(*args: str, environment: Mapping[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[str]:
    """Start this interpreter in a new process, with the packages and scripts of the checkout importable."""
    env = {**os.environ, **(environment or {})}
    paths = [str(REPOSITORY), str(REPOSITORY / "server"), str(REPOSITORY / "scripts"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.Popen([sys.executable, *args], env=env, text=True, **kwargs)


# -- images -------------------------------------------------------------------------------------------------------


def picture(width: int = 500, height: int = 375, suffix: str = ".jpg", quality: int = 90, seed: int = 7) -> bytes:
    """A file with the same content in any size and format; by default the 66 KB image of the documented figures."""
    import cv2
    import numpy as np

    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    image = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    image += rng.normal(0, 7.5, image.shape).astype(np.int16)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if suffix == ".jpg" else []
    encoded: Any = cv2.imencode(suffix, np.clip(image, 0, 255).astype(np.uint8), options)[1]
    return bytes(encoded)


@contextmanager
def image_folder(*images: bytes) -> Iterator[Path]:
    """A folder with these images, by default with ``picture()``."""
    with tempfile.TemporaryDirectory() as folder:
        for index, image in enumerate(images or [picture()]):
            Path(folder, f"{index:02}.jpg").write_bytes(image)
        yield Path(folder)

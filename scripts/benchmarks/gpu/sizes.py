"""Other images and numbers of clients than those of the targets: one engine process for all workers against none."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple

from benchmarks.common import Attempts, Load, Report, Row, median_load, picture, test_jpeg
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.in_process import cores
from benchmarks.gpu.sharing import CPU, Choice, services_of
from benchmarks.service.servers import client_report, load_in, serving
from benchmarks.service.sharing import Service, told
from torchpipe_py.tools.export.config import to_toml

CLIENTS = (7, 63, 200)
LOW = 0.95
CORRUPT = "1 % corrupt"
_STATUSES = (0, 2)  # of the load tester: with 2 some images have no result


class Case(NamedTuple):
    """Images, and how many clients ask for them."""

    images: str
    clients: int


class Measured(NamedTuple):
    """A round of a service: its load, and how many of a hundred images had no result."""

    load: Load
    failed: float


def sizes(engines: Engines, choice: Choice, seconds: float, rounds: int) -> Report:
    """Both services run all the time and are asked in turn, so that a drift of the machine hits both."""
    report = Report(f"sizes: {choice.decode} decode over Thrift, client processes on the same {cores()} cores")
    attempt = Attempts(report, choice.most_seconds)
    what = f"{choice.decode} decode"
    services = [
        services_of(engines, choice, what, choice.separate, False)[0],
        services_of(engines, choice, what, choice.shared, True)[0],
    ]
    found: dict[Case, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))

    def measure(case: Case, order: Iterable[Service]) -> None:
        measured = {
            service.name: _measure(ports[service.name], folders[case.images], case.clients, seconds)
            for service in order
        }
        told(f"{case.images}, {case.clients} clients: {measured}")
        for name, one in measured.items():
            found[case][name].append(one)

    with ExitStack() as stack:
        folders = stack.enter_context(image_sets())
        ports = {service.name: stack.enter_context(_serving(service)) for service in services}
        for number in range(rounds):
            order = services if number % 2 else services[::-1]
            for case in (Case(name, clients) for name in folders for clients in CLIENTS):
                attempt(f"{case.images}, {case.clients} clients, round {number + 1}", partial(measure, case, order))
    judge(report, services, found)
    return report


def judge(report: Report, services: Sequence[Service], found: Mapping[Case, Mapping[str, Sequence[Measured]]]) -> None:
    """A row for each case and service; the rate of the shared one against the other's, as the median of the rounds."""
    separate, shared = (service.name for service in services)
    for case, of_service in found.items():
        what = f"{case.images}, {case.clients} clients"
        for name, rounds in of_service.items():
            failed = statistics.median(one.failed for one in rounds)
            load = median_load([one.load for one in rounds])
            most = 2.0 if case.images == CORRUPT else 0.01
            if failed >= most:
                report.require(f"{what}, {name}: % without result", failed, high=most)
            report.rows.append(Row(f"{what}, {name}", load.qps, load.p50, load.p99, f"{failed:.1f} % without result"))
        pairs = zip(of_service[shared], of_service[separate], strict=True)
        ratio = statistics.median(ours.load.qps / theirs.load.qps for ours, theirs in pairs)
        report.require(f"{what}: QPS of {shared} against {separate}", ratio, low=LOW)


@contextmanager
def image_sets() -> Iterator[dict[str, Path]]:
    """Folders of images by what is in them."""
    usual = test_jpeg()
    sets = {
        "640x480": [picture(640, 480, ".jpg", 95)],
        "1920x1080": [picture(1920, 1080, ".jpg", 90)],
        "one PNG of 8": [*[usual] * 7, picture(500, 375, ".png")],
        CORRUPT: [*[usual] * 99, usual[:300]],
    }
    with TemporaryDirectory() as folder:
        for name, contents in sets.items():
            (Path(folder) / name).mkdir()
            for index, content in enumerate(contents):
                (Path(folder) / name / f"{index:02}.jpg").write_bytes(content)
        yield {name: Path(folder, name) for name in sets}


def config_of(service: Service) -> dict[str, dict[str, Any]]:
    """Its configuration, with a node for what nvJPEG does not take where the GPU decodes."""
    if service.name.startswith(CPU):
        return service.config
    model = {key: value for key, value in service.config["model"].items() if key != "DecodeTensor::max"}
    backend = "SyncTensor[S[DecodeMat,ResizeMat,cvtColorMat,TensorrtTensor]]"
    fallback = {**model, "backend": backend, "color": "rgb", "filter": "or"}
    return {**service.config, "model": {**service.config["model"], "next": "fallback"}, "fallback": fallback}


@contextmanager
def _serving(service: Service) -> Iterator[int]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "service.toml")
        path.write_text(to_toml(config_of(service)), encoding="utf-8")
        began = monotonic()
        with serving(str(path), service.options) as port:
            told(f"{service.name}: ready after {monotonic() - began:.1f} s")
            yield port


def _measure(port: int, images: Path, clients: int, seconds: float) -> Measured:
    report = client_report(port, images, clients, seconds, statuses=_STATUSES)
    return Measured(load_in(report), 100 * report["images_failed"] / report["images_sent"])

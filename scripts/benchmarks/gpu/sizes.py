"""Other images and numbers of clients than those of the targets: one engine process for all workers against none."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from functools import partial
from time import monotonic

from benchmarks.common import Load, Report, image_folder, picture, progress
from benchmarks.gpu.engines import Engines, cores
from benchmarks.gpu.sharing import services_of
from benchmarks.services import client_report, load_in

LOW = 0.95
CORRUPT = "1 % corrupt"
_STATUSES = (0, 2)  # of the load tester: with 2 some images have no result


def image_sets() -> dict[str, list[bytes]]:
    """Images by what they are."""
    usual = picture()
    return {
        "640x480": [picture(640, 480, ".jpg", 95)],
        "1920x1080": [picture(1920, 1080, ".jpg", 90)],
        "one PNG of 8": [*[usual] * 7, picture(500, 375, ".png")],
        CORRUPT: [*[usual] * 99, usual[:300]],
    }


def sizes(engines: Engines, args: argparse.Namespace) -> Report:
    """Both services run all the time and are asked in turn, so that a drift of the machine hits both."""
    what = f"{args.decode.upper()} decode"
    report = Report(f"sizes: {what} over Thrift, client processes on the same {cores()} cores")
    report.until = monotonic() + args.most_seconds
    separate = services_of(engines, args, what, args.separate, False)[0]
    shared = services_of(engines, args, what, args.shared, True)[0]
    with ExitStack() as stack:
        chosen = {name: images for name, images in image_sets().items() if re.search(args.only, name)}
        folders = {name: stack.enter_context(image_folder(*images)) for name, images in chosen.items()}
        ports = {service.name: stack.enter_context(service.started()) for service in (separate, shared)}

        def measure(images: str, clients: int, number: int) -> None:
            loads: dict[str, Load] = {}
            for service in (separate, shared) if number % 2 else (shared, separate):
                found = client_report(ports[service.name], folders[images], clients, args.seconds, statuses=_STATUSES)
                loads[service.name] = load_in(found)
            for name, load in loads.items():  # together, so that each round has both
                report.add(f"{images}, {name}", clients, load)
            progress(f"{images}, {clients} clients: {loads}")

        for number in range(args.rounds):
            for images in folders:
                for clients in args.clients:
                    what = f"{images}, {clients} clients, round {number + 1}"
                    report.attempt(what, partial(measure, images, clients, number))
    judge(report, separate.name, shared.name)
    return report


def judge(report: Report, separate: str, shared: str) -> None:
    """The shared service's rate against the other's, and that only corrupt images have no result."""
    for name, clients in report.loads:
        failed, most = report.median(name, clients).failed, 2.0 if name.startswith(CORRUPT) else 0.01
        if failed >= most:
            report.require(f"{name}, {clients} clients: % without result", failed, high=most)
        images = name.removesuffix(f", {shared}")
        if images != name:
            ratio = report.ratio((name, clients), (f"{images}, {separate}", clients))
            report.require(f"{images}, {clients} clients: QPS of {shared} against {separate}", ratio, low=LOW)

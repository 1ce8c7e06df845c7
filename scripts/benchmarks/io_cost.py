"""What a request of a pipe that does nothing costs: processor time of the service and of the load tester."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from benchmarks.common import Load, Report, Subject, image_folder, picture
from benchmarks.services import client_report, load_in, serving

TRANSPORTS = ("buffered", "framed", "http")
CLIENTS = (1, 10, 40)
_BACKEND = """\
from torchpipe_py import ItemBackend, register_backend

class NoOp(ItemBackend):
    def forward_item(self, item):
        item["result"] = "ring", 0.9954

register_backend(NoOp, "NoOp")
"""


def io_cost(args: argparse.Namespace) -> Report:
    """Requests per second with client and service on the same cores, and the microseconds of each for a request."""
    report = Report("io_cost: a node that does nothing, 2 KB JPEG, one worker, client processes on the same cores")
    with (
        image_folder(picture(64, 48, quality=70)) as images,
        serving({"no_op": {"backend": "NoOp"}}, code=_BACKEND) as port,
    ):

        def load(transport: str, clients: int, seconds: float) -> Load:
            result = client_report(port, images, clients, seconds, ["--transport", transport])
            cost = 1e6 / (result["calls_per_s"] or float("inf"))
            service = (result["server_cpu_percent"] or 0.0) / 100 * cost
            client = result["tester_cpu_us_per_call"]
            note = f"{service:.0f} µs service, {client:.0f} µs client ({client / (service or 1):.2f})"
            return replace(load_in(result), note=note)

        subjects = [Subject(transport, partial(load, transport)) for transport in TRANSPORTS]
        report.measure(subjects, CLIENTS, args.seconds, args.rounds)
    report.remarks.append("a client limits on shared cores where it costs more than half of the service")
    return report

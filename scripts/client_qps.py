#!/usr/bin/env python3
"""Load tester of the inference service: closed loop, one process per client.

    python scripts/client_qps.py --img_dir DIR --port 8888 --request_client 20 --request_batch 1 --total_number 10000

Exit status: 0 every image has a result; 2 some have not (or the arguments are wrong); 1 it could not run;
130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loadtest.arrivals import ClosedLoop
from loadtest.connection import Endpoint, probe
from loadtest.coordinator import Coordinator
from loadtest.cost import cpu_fields, cpu_rows, tester_cost
from loadtest.server import find_server, is_local
from loadtest.wire import encode_body, load_idl

from torchpipe_py.loadtest.cpu import CpuMeter, CpuUse
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.images import load_images
from torchpipe_py.loadtest.ledger import Outcome
from torchpipe_py.loadtest.options import add_options, at_least
from torchpipe_py.loadtest.plans import make_plans
from torchpipe_py.loadtest.progress import progress_bar
from torchpipe_py.loadtest.report import check_output, describe_run, format_table, make_report, print_report, write_json

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED_REQUESTS, EXIT_INTERRUPTED = 0, 1, 2, 130


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 seconds")
    return seconds


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; wrong ones end the process with status 2."""
    parser = argparse.ArgumentParser(prog="client_qps.py", description="Load tester of the inference service.")
    add_options(parser, clients="client processes")
    option = parser.add_argument
    option("--host", default="127.0.0.1")
    option("--port", type=at_least(1, 65535), default=8888)
    option("--transport", choices=("buffered", "framed"), default="buffered")
    option("--timeout", type=_seconds, default=10.0, help="seconds for a call, and for a connection")
    option("--server_pid", type=at_least(1), help="whose CPU use is reported; default: who listens on the port here")
    return parser.parse_args(arguments)


def _measure(coordinator: Coordinator, options: argparse.Namespace, server: list[int]) -> tuple[Outcome, CpuUse]:
    """The run proper."""
    try:
        coordinator.wait_ready()
        meter = CpuMeter(server, coordinator.pids)
        with progress_bar(options.total_number, options.progress) as progress:
            meter.start()
            outcome = coordinator.run(progress)
            return outcome, meter.stop()
    finally:
        coordinator.stop()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and returns the report; `CannotRunError` when that is not possible."""
    check_output(options.json)
    idl = load_idl()
    endpoint = Endpoint(options.host, options.port, options.transport == "framed", options.timeout)
    images = load_images(options.img_dir, options.labels_from_names)
    payload = replace(images, bodies=[encode_body(idl, body) for body in images.bodies])
    probe(idl, endpoint)
    server = find_server(options.host, options.port, options.server_pid)
    about = describe_run(vars(options), payload, ["thriftpy2"])
    about |= {"host_is_local": is_local(options.host), "server_pids": server}
    count = len(payload.bodies)
    plans = make_plans(options.request_client, options.request_batch, options.total_number, count, options.warmup)
    outcome, use = _measure(Coordinator(plans, endpoint, idl, payload, ClosedLoop), options, server)
    cost = tester_cost(outcome, use)
    return make_report(outcome, about, cpu_fields(cost, use), cost.limits, options.labels_from_names)


def _table(report: dict[str, Any]) -> str:
    settings = report["settings"]
    server = f"{settings['host']}:{settings['port']} ({settings['transport']})"
    return format_table(report, [("server", server)], cpu_rows(report))


def _exit_status(report: dict[str, Any]) -> int:
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_FAILED_REQUESTS if report["errors"] else EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does
    try:
        report = run(options)
    except CannotRunError as error:
        print(f"client_qps.py: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("client_qps.py: interrupted before there was anything to report", file=sys.stderr)
        return EXIT_INTERRUPTED
    print_report(report, _table(report))
    if options.json is not None:
        write_json(report, options.json)
    return _exit_status(report)


if __name__ == "__main__":
    sys.exit(main())

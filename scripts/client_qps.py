#!/usr/bin/env python3
"""Load tester of the inference service: closed loop, one process per client.

    python scripts/client_qps.py --img_dir DIR --port 8888 --request_client 20 --request_batch 1 --total_number 10000

Exit status: 0 every image has a result; 2 some have not (or the arguments are wrong); 1 it could not run;
130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from loadtest.arrivals import ClosedLoop
from loadtest.clients import Payload
from loadtest.connection import Endpoint, probe
from loadtest.coordinator import Coordinator, Outcome, make_plans
from loadtest.cpu import CpuMeter, CpuUse, find_server, is_local
from loadtest.errors import CannotRunError
from loadtest.images import find_images, label_from_name, read_image
from loadtest.progress import progress_bar
from loadtest.report import make_report, print_report
from loadtest.wire import encode_body, load_idl

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED_REQUESTS, EXIT_INTERRUPTED = 0, 1, 2, 130


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an integer option."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            between = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{number}: must be {between}")
        return number

    parse.__name__ = "integer"
    return parse


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 seconds")
    return seconds


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; wrong ones end the process with status 2."""
    parser = argparse.ArgumentParser(prog="client_qps.py", description="Load tester of the inference service.")
    option = parser.add_argument
    option("--img_dir", type=Path, required=True, help="images are searched in it and below")
    option("--host", default="127.0.0.1")
    option("--port", type=_at_least(1, 65535), default=8888)
    option("--request_client", type=_at_least(1, 10_000), default=20, help="client processes")
    option("--request_batch", type=_at_least(1), default=1, help="images per call; 1: infer_batch, more: infer_many")
    option("--total_number", type=_at_least(1), default=10_000, help="images to send in all")
    option("--transport", choices=("buffered", "framed"), default="buffered")
    option("--timeout", type=_seconds, default=10.0, help="seconds for a call, and for a connection")
    option("--warmup", type=_at_least(0), help="calls per client, not counted; default 5 %%, 1 to 50")
    option("--server_pid", type=_at_least(1), help="whose CPU use is reported; default: who listens on the port here")
    option("--labels_from_names", action="store_true", help="circle_03.jpg should get the label circle")
    option("--json", type=Path, metavar="FILE", help="write the whole report to FILE")
    option("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return parser.parse_args(arguments)


def _check_output(path: Path | None) -> None:
    """Refuses a report file that could not be written, before the run rather than after it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise CannotRunError(f"--json {path}: cannot be written")


def _load_payload(options: argparse.Namespace, idl: ModuleType) -> Payload:
    paths = find_images(options.img_dir)
    labels = [label_from_name(path) if options.labels_from_names else None for path in paths]
    return Payload([encode_body(idl, read_image(path)) for path in paths], labels)


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


def _describe(options: argparse.Namespace, payload: Payload, server: list[int]) -> dict[str, Any]:
    """What was run: the report's first part."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {
        "command": [sys.executable, *sys.argv],
        "started_at": datetime.now(timezone.utc).isoformat(),
        "settings": settings,
        "image_files": len(payload.bodies),
        "image_bytes_mean": sum(map(len, payload.bodies)) / len(payload.bodies),
        "host_is_local": is_local(options.host),
        "server_pids": server,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and returns the report; `CannotRunError` when that is not possible."""
    _check_output(options.json)
    idl = load_idl()
    endpoint = Endpoint(options.host, options.port, options.transport == "framed", options.timeout)
    payload = _load_payload(options, idl)
    probe(idl, endpoint)
    server = find_server(options.host, options.port, options.server_pid)
    about = _describe(options, payload, server)
    plans = make_plans(
        endpoint,
        options.request_client,
        options.request_batch,
        options.total_number,
        len(payload.bodies),
        options.warmup,
    )
    outcome, use = _measure(Coordinator(plans, idl, payload, ClosedLoop), options, server)
    return make_report(outcome, use, about, options.labels_from_names)


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
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return _exit_status(report)


if __name__ == "__main__":
    sys.exit(main())

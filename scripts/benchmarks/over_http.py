"""The service over Thrift and HTTP against the same work in bare threads, mosec and LitServe, with the same images.

All services have the same workers, each of which decodes a batch and runs the model on it. Beside them there is the
configuration as a user serves it, with as many workers as the service chooses.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial

from benchmarks.bare import Processes, classifier
from benchmarks.common import REPOSITORY, Report, Subject, image_folder
from benchmarks.peers import is_installed, serving_module
from benchmarks.services import Tables, run_clients, serving
from torchpipe_py import parse_toml

CLIENTS = (1, 10, 40)
DEMO = REPOSITORY / "configs" / "demo.toml"
THRIFT, HTTP = "Thrift", "HTTP"
OPTIONS: dict[str, list[str]] = {THRIFT: [], HTTP: ["--transport", "http"]}


def over_http(args: argparse.Namespace) -> Report:
    """QPS, latency and the processor time that all processes of a service take for a request."""
    report = Report(f"over_http: {args.model} model, 66 KB JPEG, client processes on the same cores")
    with ExitStack() as stack:
        images = stack.enter_context(image_folder())
        config, model, size = configuration(args.model)
        node = config["classifier"]
        batch, wait_ms = int(node["max"]), int(node["batching_timeout"])
        bare = Processes(1, classifier, model, size)
        stack.callback(bare.close)
        report.remarks += [bare.remark, "ms CPU: of all processes of a service, for a request"]
        limit = Subject("limit: bare threads at their best, {} process", bare.load, (1,))
        ours, as_it_is = f"{args.workers} workers, batch {batch}", "as it is"
        same = stack.enter_context(serving(config, ["--workers", str(args.workers)]))
        subjects = [limit]
        for name, port in ((ours, same), (as_it_is, stack.enter_context(serving(config)))):
            for transport, options in OPTIONS.items():
                load = partial(run_clients, port, images, options=options)
                subjects.append(Subject(f"torchpipe-serve, {name}, {transport}", load))
        peers = [name for name in ("mosec", "litserve") if is_installed(name, report)]
        settings = {"MODEL": model, "SIZE": size, "WORKERS": args.workers, "BATCH": batch, "WAIT_MS": wait_ms}
        for name in peers:
            peer = stack.enter_context(serving_module(name, f"benchmarks.peers.{name}_service", settings))
            subjects.append(Subject(f"{name}, {ours}", partial(peer.load, images)))
        report.measure(subjects, CLIENTS, args.seconds, args.rounds)
    thrift = f"torchpipe-serve, {as_it_is}, {THRIFT}"
    best = max(CLIENTS, key=lambda count: report.median(thrift, count).qps)
    low = 0.75 if args.model == "demo" else 0.95
    report.require("Thrift, as it is, against bare threads", report.ratio((thrift, best), (limit.name, 1)), low=low)
    for count in CLIENTS:
        for name in (ours, as_it_is):
            http, thrift = (f"torchpipe-serve, {name}, {transport}" for transport in (HTTP, THRIFT))
            ratio = report.ratio((http, count), (thrift, count))
            report.require(f"{name}, HTTP against Thrift, {count} clients", ratio, low=0.85)
        for name in peers:
            ratio = report.ratio((f"torchpipe-serve, {ours}, {HTTP}", count), (f"{name}, {ours}", count))
            report.require(f"HTTP against {name}, {count} clients", ratio, low=1.0)
    return report


def configuration(model: str) -> tuple[Tables, str, int]:
    """The demo, or that with a ResNet-18 as ``torchpipe export`` writes it; its model, and the side of its input."""
    tables = parse_toml(DEMO)
    if model == "demo":
        return tables, str(DEMO.parent / "demo" / "model.onnx"), 64
    del tables["classifier"]["labels"]
    tables["classifier"] |= {"model": model, "max": 4, "batching_timeout": 5, "resize_h": 224, "resize_w": 224}
    return tables, model, 224

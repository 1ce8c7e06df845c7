"""One run: a load on the server, and the report of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from torchpipe_py.idl import load_idl
from torchpipe_py.loadtest.arrivals import make_load
from torchpipe_py.loadtest.client.connection import Endpoint, probe
from torchpipe_py.loadtest.client.http_wire import HttpWire
from torchpipe_py.loadtest.client.processes import ClientProcesses
from torchpipe_py.loadtest.client.wire import ThriftWire, Wire
from torchpipe_py.loadtest.measure.cpu import CpuMeter, cpu_fields, find_server, is_local, tester_cost
from torchpipe_py.loadtest.measure.gpu import GpuMeter
from torchpipe_py.loadtest.measure.service import ServiceMeter
from torchpipe_py.loadtest.measure.verdict import judge, judge_lateness
from torchpipe_py.loadtest.plans import load_images
from torchpipe_py.loadtest.progress import progress_bar
from torchpipe_py.loadtest.records import collect
from torchpipe_py.loadtest.report.summary import describe_run, make_report, open_loop_fields, plot_fields


class LoadRunner:
    """Runs loads on one server, one after the other; owns what they have in common: the images and where they go."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the images and probes the server; `CannotRunError` when either is not there."""
        self._wire: Wire
        if options.transport == "http":
            self._wire = HttpWire(f"{options.host}:{options.port}", options.path)
        else:
            self._wire = ThriftWire(load_idl(), options.transport == "framed", options.request_batch)
        self._endpoint = Endpoint(options.host, options.port, options.timeout)
        images = load_images(options.img_dir, options.labels_from_names)
        self._payload = replace(images, bodies=[self._wire.body(body) for body in images.bodies])
        probe(self._wire, self._endpoint)
        self._is_local = is_local(options.host)
        self._service = ServiceMeter(options.host, options.http_port, self._is_local)
        self._service.start()  # who does not answer is told before anything is sent

    def run(self, options: argparse.Namespace) -> dict[str, Any]:
        """One run and its report; `CannotRunError` when that is not possible."""
        server = find_server(options.host, options.port, options.server_pid)
        about = describe_run(vars(options), self._payload, ["thriftpy2"])
        about |= {"host_is_local": self._is_local, "server_pids": server}
        load = make_load(options, len(self._payload.bodies))
        gpu = GpuMeter(wanted=self._is_local)
        clients = ClientProcesses(load, self._endpoint, self._wire, self._payload)
        cpu = CpuMeter(server, clients.pids)
        try:
            clients.wait_ready()
            gpu.start()
            self._service.start()
            with progress_bar(load.total, options.progress) as show:
                cpu.start()
                outcome = clients.run(show)
                use, gpus, figures = cpu.stop(), gpu.stop(), self._service.stop()
        finally:
            gpu.stop()
            clients.stop()
        records = collect(outcome.logs, load.plans, outcome.released)
        cost = tester_cost(outcome, use)
        lateness = judge_lateness(records) if load.is_open else None
        limits = cost.limits + (lateness.limits if lateness else [])
        report = make_report(outcome, records, about, cpu_fields(cost, use), limits, options.labels_from_names)
        report["tester_limited"] = bool(limits)
        if lateness is not None:
            report |= open_loop_fields(records, report, lateness, load)
        report |= plot_fields(records, load)
        return judge(report, options.slo_p99) | {"gpus": gpus, "service": figures}

"""What a request costs a worker's Python over each protocol, part by part: no sockets, no time in the pipe."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torchpipe_server.front.journal import Journal
from torchpipe_server.front.services import HttpService, Routes, Service, ThriftService, limits_of
from torchpipe_server.methods.http import HttpHandler
from torchpipe_server.methods.thrift import InferenceHandler
from torchpipe_server.options import Options

from benchmarks.common import Load, Report, picture
from torchpipe_py.idl import load_idl
from torchpipe_py.runtime.deadlines import Deadlines
from torchpipe_py.tools.load.wire import encode_call

PARTS = ("bytes to request", "journal", "route, arguments", "start", "outcome to result", "result to bytes")
_HEADS = {
    "2 fields": "",
    "7 fields": "Accept: */*\r\nAccept-Encoding: gzip, deflate, br, zstd\r\nConnection: keep-alive\r\n"
    "User-Agent: python-httpx/0.28.1\r\nContent-Type: image/jpeg\r\n",
}


class _Pipe:
    """Keeps what would finish the request."""

    finish: Callable[[dict[str, Any], BaseException | None], None]

    def dispatch(self, data: dict[str, Any], finish: Any, *_: object, **__: object) -> None:
        self.finish = finish

    def stats(self) -> dict[str, Any]:
        return {"max_inflight": 1000, "nodes": {"node": {"instances": 1, "max": 8}}}

    def check_delay(self, seconds: float | None, node_name: str | None = None) -> None:
        """Nothing waits here."""


def io_cost(args: argparse.Namespace) -> Report:
    """Microseconds of each part: medians over 200 requests in each round, whatever ``--seconds`` is."""
    jpeg = picture()
    run: Any = _Pipe()
    services = _services(run, jpeg)
    entry = Journal(1).entry(0)
    spent: dict[str, list[list[float]]] = {name: [] for name in services}
    for _ in range(200 * args.rounds):
        for name, (service, data) in services.items():
            spent[name].append(_times(service, data, run, entry))
    report = Report(f"io_cost: {len(jpeg) / 1000:.0f} KB JPEG, microseconds: {', '.join(PARTS)}")
    for name, times in spent.items():
        parts = [1e6 * statistics.median(part) for part in zip(*times, strict=True)]
        note = f"{' + '.join(f'{part:.1f}' for part in parts)} = {sum(parts):.1f}"
        report.add(name, 1, Load(1e6 / sum(parts), note=note))
    return report


def _services(run: Any, jpeg: bytes) -> dict[str, tuple[Service, bytes]]:
    options, idl, deadlines = Options(config="", host="", port=0), load_idl(), Deadlines(run)
    handler = InferenceHandler(run, idl, deadlines)
    routes = Routes(HttpHandler(run, deadlines, options.max_text_bytes, options.max_reply_bytes).routes)
    params = idl.InferenceParams(uuid="0001-00000001-0000", data=jpeg)
    services: dict[str, tuple[Service, bytes]] = {
        "Thrift": (
            ThriftService(handler.methods, limits_of(options)),
            encode_call(idl, "infer_batch", {"params": params}),
        )
    }
    for name, fields in _HEADS.items():
        head = f"POST /infer HTTP/1.1\r\nHost: 127.0.0.1:8888\r\n{fields}Content-Length: {len(jpeg)}\r\n\r\n"
        service = HttpService(routes, options.max_message_bytes, options.max_reply_bytes)
        services[f"HTTP, {name}"] = service, head.encode() + jpeg
    return services


def _times(service: Service, data: bytes, run: _Pipe, entry: Any) -> list[float]:
    reader = service.reader()
    results: list[Any] = []
    times = [perf_counter()]
    (message,) = reader.feed(data)
    times.append(perf_counter())
    entry.begin(message)
    times.append(perf_counter())
    method, args = service.decode(message)
    times.append(perf_counter())
    method.start(args, results.append)
    times.append(perf_counter())
    run.finish({"result": ("ring", 0.9954093098640442)}, None)
    times.append(perf_counter())
    service.reply(message.without_body(), results[0])
    times.append(perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]

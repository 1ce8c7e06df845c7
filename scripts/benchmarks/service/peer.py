"""mosec, which the service is measured against: the same work over HTTP, and the clients that load it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic, perf_counter, sleep

from benchmarks.common import Load, Report, load_of, python, test_jpeg
from benchmarks.service.servers import free_port

CLIENTS = 10
SAME_BATCH = 8  # of configs/demo.toml, with its timeout
SAME_TIMEOUT_MS = 2


def mosec_subjects(
    stack: ExitStack, settings: Mapping[str, str], body: bytes, seconds: float, report: Report
) -> dict[str, Callable[[], Load]]:
    """mosec without and with batches, for many clients and for one; nothing but a remark where it is not installed."""
    if importlib.util.find_spec("mosec") is None:
        report.remarks.append("no mosec: not installed (extra 'bench')")
        return {}
    subjects: dict[str, Callable[[], Load]] = {}
    for batch in (1, SAME_BATCH):
        port = stack.enter_context(mosec(settings, batch))
        for clients in (CLIENTS, 1):
            name = f"mosec, 2 workers, batch {batch}, {clients} clients"
            subjects[name] = partial(run_http_clients, port, body, clients, seconds)
    return subjects


@contextmanager
def mosec(work: Mapping[str, str], batch: int) -> Iterator[int]:
    """mosec with two workers; ``work`` is what ``mosec_service.py`` is to do. The port it listens on."""
    port = free_port()
    settings = {**work, "BENCH_BATCH": str(batch), "BENCH_WAIT_MS": str(SAME_TIMEOUT_MS), "BENCH_WORKERS": "2"}
    options = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    command = ["-m", "benchmarks.service.mosec_service", *options]
    process = python(*command, environment=settings, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _wait_for(port: int) -> None:
    end = monotonic() + 60
    while monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                break
        except OSError:
            sleep(0.2)
    else:
        raise RuntimeError("mosec did not start")
    run_http_clients(port, test_jpeg(), 1, 0.1)


def run_http_clients(port: int, body: bytes, clients: int, seconds: float) -> Load:
    """Closed-loop client processes, each with one keep-alive connection, for about ``seconds``: the load tester's twin.

    They POST ``body`` to /inference; every answer must be a 200.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(clients + 1)
    pipes = [context.Pipe(duplex=False) for _ in range(clients)]
    processes = [
        context.Process(target=_client, args=(port, body, seconds, barrier, send), daemon=True) for _, send in pipes
    ]
    for process in processes:
        process.start()
    barrier.wait(timeout=30)
    start = perf_counter()
    latencies = [value for receive, _ in pipes for value in receive.recv()]
    wall = perf_counter() - start
    for process in processes:
        process.join()
    return load_of(latencies, wall)


def _client(port: int, body: bytes, seconds: float, barrier: object, send: Connection) -> None:
    head = f"POST /inference HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    latencies = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            _exchange(sock, request)
        barrier.wait()  # type: ignore[attr-defined]
        end = perf_counter() + seconds
        while (start := perf_counter()) < end:
            _exchange(sock, request)
            latencies.append(perf_counter() - start)
    send.send(latencies)


def _exchange(sock: socket.socket, request: bytes) -> None:
    sock.sendall(request)
    reply = sock.recv(65536)
    while b"\r\n\r\n" not in reply:
        reply += sock.recv(65536)
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"mosec answered {reply[:200]!r}")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += sock.recv(65536)

"""Closed-loop HTTP clients, a process each with one keep-alive connection: the load tester's twin for mosec."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from time import perf_counter

from benchmarks.common import Load, load_of


def run(port: int, body: bytes, clients: int, seconds: float) -> Load:
    """POST ``body`` to /inference for about ``seconds``; every answer must be a 200."""
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

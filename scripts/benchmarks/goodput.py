"""Goodput: requests that a service answers in time under overload.

A backend of 20 ms with two instances takes 100 requests/s. Requests come by an open loop, whatever the service does:
the latency of an answer counts from when its request was due, that of a refusal from when it was sent. A client leaves
at its deadline, three times what a request takes alone, and three in ten of those without an answer in time try once
more.

``python -m benchmarks.goodput`` is a front that refuses everything at once: the limit of clients and machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from time import perf_counter
from typing import Any, NamedTuple

from torchpipe_server.front.loop import new_loop

from benchmarks.common import Load, Report, keep_to, load_of, progress, quantile
from benchmarks.peers import PATHS, is_installed, serving_module
from benchmarks.services import free_port, serving, started, stats
from torchpipe_py.tools.load.arrivals import poisson_times

COMPUTE_S, INSTANCES = 0.02, 2
CAPACITY = INSTANCES / COMPUTE_S
OFFERED = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)  # loads, as multiples of the capacity
DEADLINES = 3  # a client's deadline, as a multiple of the time of a lone request
AGAIN = 0.3  # share of the clients without an answer in time that retry once
BURST_CV = 4.0
STEP = (0.5, 2.0), (2.0, 3.0), (0.5, 3.0)  # (load as a multiple of the capacity, seconds)
WASTED, REFUSALS_P99, NORMAL = "wasted %", "refusals' p99 ms", "s until normal"
OURS, FRONT = "torchpipe-serve", "refusing front"
SERVICES = (FRONT, OURS, "mosec", "litserve", "triton")
BODY = bytes(200)
HEAD = (
    "HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
    # The next field tells Triton that the body is the tensor.
    f"Inference-Header-Content-Length: 0\r\nContent-Length: {len(BODY)}\r\n\r\n"
)
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
BACKEND = """
import time
from torchpipe_py import register_backend

@register_backend
class Sleep:
    def forward(self, items):
        time.sleep({seconds})
        for item in items:
            item["result"] = 1
"""


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Service(NamedTuple):
    """A service to send requests to; ``computed`` counts requests that its backend began, if it reports them."""

    port: int
    path: str
    computed: Callable[[], int] | None = None


@dataclass
class Outcomes:
    """The outcomes of one run's requests, in seconds. ``missed`` are the due times of requests not answered in time."""

    good: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    sent_late: list[float] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    left: int = 0
    broken: int = 0


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Due times of independent requests."""
    return takewhile(lambda due: due < seconds, poisson_times(rate, rng.randrange(2**32)))


def bursts(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Due times with gaps of a gamma distribution that vary ``BURST_CV`` times as much as their mean."""
    shape = 1 / BURST_CV**2
    due = 0.0
    while (due := due + rng.gammavariate(shape, 1 / (shape * rate))) < seconds:
        yield due


ARRIVALS = {"Poisson": poisson, "bursts": bursts}


def goodput(args: argparse.Namespace) -> Report:
    """Goodput at each load of each service, its wasted computation, and its recovery time after a step."""
    report = Report(
        f"goodput: {COMPUTE_S * 1000:.0f} ms x {INSTANCES} instances take {CAPACITY:.0f} requests/s; QPS are answers "
        f"within {DEADLINES} x a lone request's time, open loop"
    )
    with ExitStack() as stack:
        keep_to(args.service_cores)
        services = dict(_services(stack, report, args))
        keep_to(args.tester_cores)
        for number in range(args.rounds):
            for name, arrive in ARRIVALS.items():
                for offered in OFFERED:
                    send_times = list(arrive(offered * CAPACITY, args.seconds, random.Random(number)))
                    for service, where in services.items():
                        load, _ = _measured(where, send_times, args.seconds)
                        report.add(f"{service}, {name}, {{}} % of capacity", round(100 * offered), load)
            for service, where in services.items():
                report.add(f"{service}, 50 %, {{}} %, 50 % of capacity", 200, _step(where, number))
            progress(f"round {number + 1} of {args.rounds}")
    if OURS in services:
        _hold(report)
    return report


def _services(stack: ExitStack, report: Report, args: argparse.Namespace) -> Iterator[tuple[str, Service]]:
    wanted = args.services.split(",")
    if FRONT in wanted:
        yield FRONT, Service(stack.enter_context(started(["-m", "benchmarks.goodput"]))[0], "/")
    if OURS in wanted:
        http, config = free_port(), {"sleep": {"backend": "Sleep", "instance_num": INSTANCES}}
        options = ["--workers", "1", "--http-port", str(http)]
        port = stack.enter_context(serving(config, options, BACKEND.format(seconds=COMPUTE_S)))
        yield OURS, Service(port, "/infer", lambda: sum(node["requests"] for node in stats(http)["nodes"].values()))
    # Their best settings: they wait no longer than clients, if that can be set.
    settings = {"SLEEP_MS": 1000 * COMPUTE_S, "WORKERS": INSTANCES, "BATCH": 1, "WAIT_MS": 0, "TIMEOUT_S": 0.04}
    for name, options in {"mosec": ["--timeout", "60", "--capacity", "3"], "litserve": []}.items():
        if name in wanted and is_installed(name, report):
            peer = stack.enter_context(serving_module(name, f"benchmarks.peers.{name}_service", settings, options))
            yield name, Service(peer.port, PATHS[name])
    if "triton" in wanted:
        yield "Triton", Service(args.triton, "/v2/models/sleep/infer")


def _measured(service: Service, send_times: Sequence[float], seconds: float) -> tuple[Load, Outcomes]:
    """Send a request at each due time; return goodput, latency of answers in time, and wasted computation."""
    loop, free, outcomes = new_loop(), list[Streams](), Outcomes()
    times = [perf_counter()]
    for _ in range(6):
        loop.run_until_complete(_exchange(service, free))
        times.append(perf_counter())
    lone = statistics.median(end - start for start, end in pairwise(times))
    before = service.computed() if service.computed else 0
    loop.run_until_complete(_send(service, send_times, DEADLINES * max(COMPUTE_S, lone), free, outcomes))
    loop.close()
    good, refused = outcomes.good, outcomes.refused
    more: dict[str, float] = {"left": outcomes.left, "refused": len(refused), "broken": outcomes.broken}
    more[REFUSALS_P99] = 1000 * quantile(refused, 0.99)
    more["sent late, p99 ms"] = 1000 * quantile(outcomes.sent_late, 0.99)
    if service.computed:
        computed = service.computed() - before
        more[WASTED] = 100 * max(0, computed - len(good)) / max(1, computed)
    return replace(load_of(good, seconds), more=more), outcomes


async def _send(
    service: Service, send_times: Sequence[float], deadline: float, free: list[Streams], outcomes: Outcomes
) -> None:
    rng, tasks = random.Random(0), []
    start = perf_counter() + 0.05

    async def request(offset: float) -> None:
        """Send a request, and perhaps retry it."""
        due = start + offset
        for _ in range(2):
            sent = perf_counter()
            outcomes.sent_late.append(sent - due)
            try:
                status = await asyncio.wait_for(_exchange(service, free), due + deadline - sent)
                now = perf_counter()
                if status == 200:
                    outcomes.good.append(now - due)
                    return
                outcomes.refused.append(now - sent)
            except asyncio.TimeoutError:
                outcomes.left += 1
            except (OSError, EOFError):
                outcomes.broken += 1
            if rng.random() > AGAIN:
                break
            due = perf_counter()
        outcomes.missed.append(offset)

    for due in send_times:
        if (wait := start + due - perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(request(due)))
    await asyncio.gather(*tasks)
    for _, writer in free:
        writer.close()


async def _exchange(service: Service, free: list[Streams]) -> int:
    """The status of an answer, on a connection that is used again, or closed by a client that waits no longer."""
    reader, writer = free.pop() if free else await asyncio.open_connection("127.0.0.1", service.port)
    try:
        writer.write(f"POST {service.path} {HEAD}".encode() + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split()[0]))
    except BaseException:
        writer.close()
        raise
    free.append((reader, writer))
    return int(answer.split()[1])


def _step(service: Service, number: int) -> Load:
    """Overload between two times of half the load; from when on at most 1 % are not answered in time after it."""
    rng, send_times, start = random.Random(number), [], 0.0
    for offered, seconds in STEP:
        send_times += [start + due for due in poisson(offered * CAPACITY, seconds, rng)]
        start += seconds
    load, outcomes = _measured(service, send_times, start)
    normal = start - STEP[-1][1]
    allowed = sum(1 for due in send_times if due >= normal) // 100
    late = sorted((due - normal for due in outcomes.missed if due >= normal), reverse=True)
    load.more[NORMAL] = late[allowed] if len(late) > allowed else 0.0
    return load


def _hold(report: Report) -> None:
    for arrivals in ARRIVALS:
        name = f"{OURS}, {arrivals}, {{}} % of capacity"
        loads = [report.median(name, round(100 * offered)) for offered in OFFERED]
        best = max(load.qps for load in loads)
        report.require(f"{arrivals}, {OFFERED[-1]:g} x capacity against the best", loads[-1].qps / best, low=0.95)
        for figure, high in ((WASTED, 5.0), (REFUSALS_P99, 5.0)):
            worst = max(load.more[figure] for load in loads)
            report.require(f"{arrivals}, {figure}, at the worst load", worst, high=high)
    normal = report.median(f"{OURS}, 50 %, {{}} %, 50 % of capacity", 200).more[NORMAL]
    report.require(f"{NORMAL} after the step", normal, high=1.0)


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(REFUSAL)


if __name__ == "__main__":
    front, listener = new_loop(), socket.create_server(("127.0.0.1", 0), backlog=1024)
    front.run_until_complete(front.create_server(_Refusing, sock=listener))
    print(f"refuses on 127.0.0.1:{listener.getsockname()[1]} everything", flush=True)
    front.run_forever()

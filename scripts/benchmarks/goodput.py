"""What a service still answers in time when more comes than it can take: its goodput.

A backend of 20 ms with two instances takes 100 requests/s. Requests come by an open loop, whatever the service does:
their latency counts from when they were due. A client leaves at its deadline, three times what a request takes alone,
and three in ten of those that got no answer in time try once more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from benchmarks.common import Load, Report, progress
from benchmarks.peers import PATHS, is_installed, serving_module
from benchmarks.services import free_port, serving, stats

COMPUTE_S, INSTANCES = 0.02, 2
CAPACITY = INSTANCES / COMPUTE_S
OFFERED = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
"""Times the capacity."""
DEADLINES = 3
"""A client waits so many times as long as a request takes alone."""
AGAIN = 0.3
"""The share of those without an answer in time who try once more."""
BURST_CV = 4.0
WASTED, REFUSALS_P99 = "wasted %", "refusals' p99 ms"
BODY = bytes(200)
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


class Service(NamedTuple):
    """Where requests go; ``computed`` counts those that its backend has begun, as far as it says."""

    port: int
    path: str
    computed: Callable[[], int] | None = None


@dataclass
class Outcomes:
    """What became of the requests of one run; seconds."""

    good: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    left: int = 0
    broken: int = 0


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Due times of independent requests."""
    due = rng.expovariate(rate)
    while due < seconds:
        yield due
        due += rng.expovariate(rate)


def bursts(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Due times with gaps of a gamma distribution that vary ``BURST_CV`` times as much as their mean."""
    shape = 1 / BURST_CV**2
    due = 0.0
    while (due := due + rng.gammavariate(shape, 1 / (shape * rate))) < seconds:
        yield due


ARRIVALS = {"Poisson": poisson, "bursts": bursts}


def goodput(args: argparse.Namespace) -> Report:
    """Goodput at each load of each service, as a share of the capacity, and what it computed for nobody."""
    report = Report(
        f"goodput: {COMPUTE_S * 1000:.0f} ms x {INSTANCES} instances take {CAPACITY:.0f} requests/s; QPS are answers "
        f"within {DEADLINES} x a lone request's time, open loop"
    )
    with ExitStack() as stack:
        services = dict(_services(stack, report, args))
        for name, arrive in ARRIVALS.items():
            for number in range(args.rounds):
                for offered in OFFERED:
                    dues = list(arrive(offered * CAPACITY, args.seconds, random.Random(number)))
                    for service, where in services.items():
                        load = asyncio.run(_run(where, dues, args.seconds))
                        report.add(f"{service}, {name}, {{}} % of capacity", round(100 * offered), load)
                progress(f"{name}: round {number + 1} of {args.rounds}")
        for service, where in services.items():
            _step(report, service, where, args)
    for service in services:
        if service.startswith("torchpipe"):
            _hold(report, service)
    return report


def _services(stack: ExitStack, report: Report, args: argparse.Namespace) -> Iterator[tuple[str, Service]]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "sleep.py").write_text(BACKEND.format(seconds=COMPUTE_S), encoding="utf-8")
    config = folder / "sleep.toml"
    config.write_text(f'[sleep]\nbackend = "Sleep"\ninstance_num = {INSTANCES}\n', encoding="utf-8")
    ours = ["--import", str(folder / "sleep.py"), "--workers", "1"]
    for name, options in {"torchpipe-serve": (), **dict(_variants(args))}.items():
        http = free_port()
        port = stack.enter_context(serving(str(config), [*ours, "--http-port", str(http), *options]))
        yield name, Service(port, "/infer", partial(_computed, http))
    settings = {"BENCH_SLEEP_MS": 1000 * COMPUTE_S, "BENCH_WORKERS": INSTANCES, "BENCH_BATCH": 1, "BENCH_WAIT_MS": 0}
    environment = {key: f"{value:g}" for key, value in settings.items()}
    for name in ("mosec", "litserve"):
        if is_installed(name, report):
            peer = stack.enter_context(serving_module(name, f"benchmarks.{name}_service", environment))
            yield name, Service(peer.port, PATHS[name])
    if args.triton:
        yield "Triton", Service(args.triton, "/v2/models/sleep/infer")


def _variants(args: argparse.Namespace) -> Iterator[tuple[str, Sequence[str]]]:
    """The service with options of its own, each of ``--serve OPTIONS``."""
    for options in args.serve or ():
        yield f"torchpipe-serve {options}", options.split()


def _computed(http: int) -> int:
    return sum(int(node["requests"]) for node in stats(http)["nodes"].values())


async def _run(service: Service, dues: Sequence[float], seconds: float) -> Load:
    """Send a request at each due time; goodput, latency of what was answered in time, and what went to waste."""
    lone = [await _lone(service) for _ in range(5)]
    deadline = DEADLINES * statistics.median(lone)
    before = service.computed() if service.computed else 0
    outcomes = Outcomes()
    await _send(service, dues, deadline, outcomes)
    good, refused = outcomes.good, outcomes.refused
    more: dict[str, float] = {"left": outcomes.left, "refused": len(refused), "broken": outcomes.broken}
    more[REFUSALS_P99] = 1000 * _quantile(refused, 0.99)
    if service.computed:
        computed = service.computed() - before
        more[WASTED] = 100 * max(0, computed - len(good)) / max(1, computed)
    p50, p99 = (1000 * _quantile(good, share) for share in (0.5, 0.99))
    return Load(len(good) / seconds, p50, p99, more=more)


async def _send(service: Service, dues: Sequence[float], deadline: float, outcomes: Outcomes) -> None:
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    rng = random.Random(0)
    start = perf_counter() + 0.05
    tasks = []
    for due in dues:
        if (wait := start + due - perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_request(service, free, start + due, deadline, outcomes, rng)))
    await asyncio.gather(*tasks)
    for _, writer in free:
        writer.close()


async def _request(
    service: Service,
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    due: float,
    deadline: float,
    outcomes: Outcomes,
    rng: random.Random,
) -> None:
    """One request, and perhaps another one."""
    for _ in range(2):
        try:
            status = await asyncio.wait_for(_exchange(service, free), due + deadline - perf_counter())
            took = perf_counter() - due
            if status == 200:
                outcomes.good.append(took)
                return
            outcomes.refused.append(took)
        except asyncio.TimeoutError:
            outcomes.left += 1
        except (OSError, asyncio.IncompleteReadError):
            outcomes.broken += 1
        if rng.random() > AGAIN:
            return
        due = perf_counter()


async def _exchange(service: Service, free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    """A request on a connection of its own, which is used again afterwards, or closed by who waits no longer."""
    reader, writer = free.pop() if free else await asyncio.open_connection("127.0.0.1", service.port)
    try:
        status = await _ask(reader, writer, service.path)
    except BaseException:
        writer.close()
        raise
    free.append((reader, writer))
    return status


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> int:
    """The status of the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(BODY)}"
    writer.write(f"{head}\r\n\r\n".encode() + BODY)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return int(answer.split()[1])


async def _lone(service: Service) -> float:
    """Seconds that a request takes alone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    await _ask(reader, writer, service.path)
    start = perf_counter()
    await _ask(reader, writer, service.path)
    took = perf_counter() - start
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return took


def _step(report: Report, name: str, service: Service, args: argparse.Namespace) -> None:
    """Half the capacity, and then twice of it: the goodput of the second after the step, and of those that follow."""
    for number in range(args.rounds):
        rng = random.Random(number)
        dues = [*poisson(0.5 * CAPACITY, 2.0, rng), *(2.0 + due for due in poisson(2 * CAPACITY, 3.0, rng))]
        report.add(f"{name}, 50 % of capacity, then {{}} %", 200, asyncio.run(_run(service, dues, 5.0)))


def _hold(report: Report, service: str) -> None:
    for arrivals in ARRIVALS:
        name = f"{service}, {arrivals}, {{}} % of capacity"
        loads = [report.median(name, round(100 * offered)) for offered in OFFERED]
        rates = [load.qps for load in loads]
        report.require(
            f"{service}, {arrivals}, {OFFERED[-1]:g} x capacity against the best", rates[-1] / max(rates), low=0.95
        )
        for figure, high in ((WASTED, 5.0), (REFUSALS_P99, 5.0)):
            worst = max(load.more[figure] for load in loads)
            report.require(f"{service}, {arrivals}, {figure}, at the worst load", worst, high=high)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0

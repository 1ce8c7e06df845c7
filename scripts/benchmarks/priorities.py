"""Single requests beside a flood of low priority: the throughput of each, relative to running alone."""

from __future__ import annotations

import argparse
from time import perf_counter, sleep

from torchpipe_client import Client

from benchmarks.bare import child
from benchmarks.common import Load, Report, in_threads, keep_to, load_of, picture
from benchmarks.services import serving

CONNECTIONS, IMAGES = 4, 64
EVERY_S = 0.05
ALONE, BESIDE = "a client, an image every 50 ms, {}", "a flood of 4 x 64 images, {}"


def priorities(args: argparse.Namespace) -> Report:
    """The demo as it is: a client and a flood, each alone and both together."""
    report = Report("priorities: configs/demo.toml, Thrift; QPS are images")
    keep_to(args.service_cores)
    with serving("configs/demo.toml") as port, child() as other:
        keep_to(args.tester_cores)
        other.submit(flood, port, 0.0, 1).result()  # it has started
        for _ in range(args.rounds):
            report.add(ALONE.format("alone"), 1, one_client(port, args.seconds))
            report.add(BESIDE.format("alone"), CONNECTIONS, other.submit(flood, port, args.seconds, 1).result())
            for priority in (1, 0):
                name = f"beside the other, priority {priority} of the flood"
                flooded = other.submit(flood, port, args.seconds, priority)
                report.add(ALONE.format(name), 1, one_client(port, 0.8 * args.seconds))
                report.add(BESIDE.format(name), CONNECTIONS, flooded.result())
    name = "beside the other, priority 1 of the flood"
    report.require("p99 of the client, ms", report.median(ALONE.format(name), 1).p99, high=30)
    share = report.ratio((BESIDE.format(name), CONNECTIONS), (BESIDE.format("alone"), CONNECTIONS))
    report.require("the flood beside the client against alone", share, low=0.85)
    return report


def one_client(port: int, seconds: float) -> Load:
    """An image every ``EVERY_S`` seconds."""
    image, latencies = picture(), []
    with Client(f"127.0.0.1:{port}") as client:
        end = perf_counter() + seconds
        while (start := perf_counter()) < end:
            client.infer_batch(image)
            latencies.append(perf_counter() - start)
            sleep(max(0.0, start + EVERY_S - perf_counter()))
    return load_of(latencies, seconds)


def flood(port: int, seconds: float, priority: int) -> Load:
    """Images per second of ``CONNECTIONS``, each of which sends one call of ``IMAGES`` after the other."""
    images = [picture()] * IMAGES
    with Client(f"127.0.0.1:{port}", timeout=60) as client:
        return in_threads(lambda: client.infer_many(images, priority=priority), IMAGES)(CONNECTIONS, seconds)

"""Single requests beside a flood of low priority: what each has left of what it does alone.

``python -m benchmarks.priorities flood PORT SECONDS`` is the flood: four connections, each one call of 64 images after
the other; it prints how many images a second came back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from time import perf_counter, sleep

from torchpipe_client import Client

from benchmarks.common import Load, Report, load_of, picture, python
from benchmarks.services import serving

CONNECTIONS, IMAGES = 4, 64
EVERY_S = 0.05
ALONE, BESIDE = "a client, an image every 50 ms, {}", "a flood of 4 x 64 images, {}"


def priorities(args: argparse.Namespace) -> Report:
    """The demo as it is: a client and a flood, each alone and both together."""
    report = Report("priorities: configs/demo.toml, Thrift; QPS are images")
    with serving("configs/demo.toml") as port:
        for _ in range(args.rounds):
            report.add(ALONE.format("alone"), 1, one_client(port, args.seconds))
            report.add(BESIDE.format("alone"), CONNECTIONS, _flooded(port, args.seconds)[0])
            for priority in (1, 0):
                name = f"beside the other, priority {priority} of the flood"
                flood, client = _flooded(port, args.seconds, priority, with_client=True)
                report.add(BESIDE.format(name), CONNECTIONS, flood)
                report.add(ALONE.format(name), 1, client)
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


def _flooded(port: int, seconds: float, priority: int = 1, with_client: bool = False) -> tuple[Load, Load]:
    """The flood in a process of its own; and the client, if it is to run meanwhile."""
    command = ["-m", "benchmarks.priorities", "flood", str(port), str(seconds), str(priority)]
    process = python(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it begins
    client = one_client(port, 0.8 * seconds) if with_client else Load(0.0)
    rate = float(process.stdout.readline())
    process.wait()
    process.stdout.close()
    return Load(rate), client


def flood(port: int, seconds: float, priority: int) -> None:
    """Print a line when it begins, and the images per second at the end."""
    images, counts = [picture()] * IMAGES, [0] * CONNECTIONS

    def call(index: int) -> None:
        with Client(f"127.0.0.1:{port}", timeout=60) as client:
            while perf_counter() < end:
                client.infer_many(images, priority=priority)
                counts[index] += IMAGES

    start = perf_counter()
    end = start + seconds
    threads = [threading.Thread(target=call, args=(index,)) for index in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    print("begins", flush=True)
    for thread in threads:
        thread.join()
    print(sum(counts) / (perf_counter() - start), flush=True)


if __name__ == "__main__":
    flood(int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))

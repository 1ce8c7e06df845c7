"""HTTP load in a process of its own: ``python -m benchmarks.ray.http_load PORT FILE CLIENTS SECONDS RATE``.

A closed loop of clients; with a rate, requests so many in a second at random times, whatever the answers do.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter, time
from typing import Any


class Load:
    """Requests on kept connections; ``outcomes`` has when each ended, its seconds, and its status or what broke it."""

    def __init__(self, port: int, body: bytes) -> None:
        head = f"POST /infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._port, self._message = port, head.encode() + body
        self._idle: list[Any] = []
        self.outcomes: list[tuple[float, float, str]] = []

    async def request(self) -> None:
        """One, on an idle connection or a new one."""
        began = perf_counter()
        try:
            streams = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
            status, is_kept = await self._exchange(*streams)
            if is_kept:
                self._idle.append(streams)
            else:
                streams[1].close()
        except (OSError, EOFError, ValueError) as error:
            status = type(error).__name__
        self.outcomes.append((time(), perf_counter() - began, status))

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool]:
        writer.write(self._message)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            await reader.readexactly(int(fields[b"content-length"]))
        else:  # Serve's own answers come in chunks
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        return head[9:12].decode(), fields.get(b"connection") != b"close"

    async def closed_loop(self, clients: int, seconds: float) -> None:
        """Each client asks again once it has its answer."""
        until = perf_counter() + seconds

        async def client() -> None:
            while perf_counter() < until:
                await self.request()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def at_rate(self, rate: float, seconds: float) -> None:
        """Poisson arrivals, the same in each run."""
        gaps, tasks, due = random.Random(7), [], perf_counter()
        until = due + seconds
        while (due := due + gaps.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, due - perf_counter()))
            tasks.append(asyncio.create_task(self.request()))
        await asyncio.gather(*tasks)


def main() -> None:
    """Print ``latencies`` in seconds of what was answered 200, ``statuses``, and when which failed."""
    port, file, clients, seconds, rate = sys.argv[1:]
    load = Load(int(port), Path(file).read_bytes())
    running = (
        load.at_rate(float(rate), float(seconds)) if float(rate) else load.closed_loop(int(clients), float(seconds))
    )
    asyncio.run(running)
    outcomes = load.outcomes
    result = {
        "latencies": [latency for _, latency, status in outcomes if status == "200"],
        "statuses": dict(Counter(status for _, _, status in outcomes)),
        "failed_at": [round(at, 3) for at, _, status in outcomes if status != "200"],
        "longest": max(latency for _, latency, _ in outcomes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

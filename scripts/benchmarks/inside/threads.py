"""The threads of a service's engine processes under load: the processor time of each, and where it was seen."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.inside.sitecustomize import STEP, address

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_SECONDS_TO_ANSWER = 30.0
_PLACES = 25  # of a thread, in a profile
_LEAST_US = 0.5
_RATE = 500  # looks of py-spy in a second


class Thread(NamedTuple):
    """The name that the kernel knows, and the processor time so far in seconds."""

    name: str
    seconds: float


class Engines(NamedTuple):
    """What the engine processes have done so far: the requests of all, and the threads by process and number."""

    requests: int
    threads: Mapping[int, Mapping[int, Thread]]


def environment() -> dict[str, str]:
    """For a service that is to be asked."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def engines(stats: Mapping[str, Any]) -> Engines:
    """Of a service that answers ``/stats`` so."""
    pids = [engine["pid"] for engine in stats.get("engines", ()) if engine["pid"]]
    return Engines(stats.get("hand_over", {}).get("requests", 0), {pid: threads_of(pid) for pid in pids})


def threads_of(pid: int) -> dict[int, Thread]:
    """The threads of a process that are there."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it ended
            head, _, tail = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            fields = tail.split()
            found[int(path.parent.name)] = Thread(head.partition("(")[2], (int(fields[11]) + int(fields[12])) * _TICK)
    return found


def ask(pid: int, seconds: float = 0.0) -> dict[str, Any]:
    """What ``tell`` says there."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(seconds + _SECONDS_TO_ANSWER)
        sock.connect(address(pid))
        with sock.makefile("rw") as stream:
            stream.write(f"{seconds}\n")
            stream.flush()
            told: dict[str, Any] = json.load(stream)
    return told


def table(before: Engines, after: Engines) -> Iterator[str]:
    """A line for each engine process and for each of its threads that did something, the busiest first."""
    requests = after.requests - before.requests
    for pid in (after.threads.keys() & before.threads.keys()) if requests else ():
        names = _names(pid)
        spent = {}
        for number, (name, seconds) in after.threads[pid].items():
            earlier = before.threads[pid].get(number)
            spent[number] = (
                names.get(str(number), name),
                1e6 * (seconds - (earlier.seconds if earlier else 0)) / requests,
            )
        yield f"engine process {pid}: {sum(us for _, us in spent.values()):.0f} us of processor time a request, of that"
        for name, us in sorted(spent.values(), key=lambda one: -one[1]):
            if us >= _LEAST_US:
                yield f"  {us:7.1f} us  {name}"


def _names(pid: int) -> dict[str, str]:
    with suppress(OSError):
        names: dict[str, str] = ask(pid)["names"]
        return names
    return {}


def profile(pid: int, seconds: float) -> Iterator[str]:
    """Where each thread of a process was seen most in so many seconds, and where py-spy saw Python's lock held."""
    # NOTE: a look needs Python's lock, and gets it where another thread gives it up: such calls are seen too often.
    seen: dict[str, dict[str, int]] = ask(pid, seconds)["seen"]
    for name, places in seen.items():
        total = sum(places.values())
        yield f"process {pid}, {name}: seen {total} times, every {1000 * STEP:g} ms"
        yield from _most(places, total)
    program = shutil.which("py-spy")
    if program is None:
        yield "py-spy, which looks from outside and needs no lock, is not installed"
        return
    with tempfile.NamedTemporaryFile() as file:
        rate = ["--rate", str(_RATE), "--duration", f"{max(1, round(seconds))}"]
        how = ["--gil", "--nonblocking", "--format", "raw", "--output", file.name]
        command = [program, "record", "--pid", str(pid), *how, *rate]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 30)
        lines = Path(file.name).read_text(encoding="utf-8").splitlines()
    if done.returncode:
        yield f"py-spy exited with {done.returncode}: {done.stderr.strip()[-300:]}"
    total = _RATE * max(1, round(seconds))
    holders = holding(lines)
    yield f"process {pid}: Python's lock is held in {sum(holders.values()) / total:.0%} of {total} looks of py-spy, in"
    yield from _most(holders, total)


def holding(lines: Iterable[str]) -> dict[str, int]:
    """How often each place, the last of its stack, stands in py-spy's raw output."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        found[stack.rpartition(";")[2]] += int(count)
    return found


def _most(places: Mapping[str, int], total: int) -> Iterator[str]:
    for place, count in sorted(places.items(), key=lambda one: -one[1])[:_PLACES]:
        yield f"  {100 * count / total:5.1f} %  {place}"

"""Python imports this where its folder is on ``PYTHONPATH``: processes that it forks then report on their threads.

A socket without a name in the file system takes a number of seconds, and answers with JSON: for each thread its name,
the cores it kept busy, and how often it was seen at which place in these seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from time import perf_counter, sleep
from types import FrameType
from typing import Any

STEP = 0.005  # seconds between two looks
TICK = 1 / os.sysconf("SC_CLK_TCK")


def address(pid: int) -> str:
    """The name of the socket of a process."""
    return f"\0torchpipe-benchmark-{pid}"


def report(seconds: float) -> list[dict[str, Any]]:
    """The threads; those that are not Python's have the kernel's name and no places."""
    own = threading.get_ident()
    seen: dict[int, Counter[str]] = {}
    before, start = processor_times(), perf_counter()
    while perf_counter() < start + seconds:
        sleep(STEP)
        for ident, frame in sys._current_frames().items():
            if ident != own:
                seen.setdefault(ident, Counter())[place(frame)] += 1
    after, wall = processor_times(), perf_counter() - start
    # NOTE: a fork leaves the main thread with its old number, and a thread that is about to start has none yet.
    main = threading.main_thread()
    known = {os.getpid() if thread is main else thread.native_id: thread for thread in threading.enumerate()}
    threads = []
    for number, (name, spent) in after.items():
        thread = known.get(number)
        places = seen.get(thread.ident or 0, Counter()) if thread else Counter()
        cores = (spent - before.get(number, ("", 0.0))[1]) / wall
        threads.append({"name": thread.name if thread else name, "cores": cores, "places": places})
    return threads


def processor_times() -> dict[int, tuple[str, float]]:
    """The kernel's name and the processor time in seconds of each thread of this process."""
    found = {}
    for number in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{number}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
            fields = tail.split()
            found[int(number)] = head.partition("(")[2], (int(fields[11]) + int(fields[12])) * TICK
    return found


def place(frame: FrameType) -> str:
    """File, line and function of a frame."""
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}"


def _listen() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(os.getpid()))
        listener.listen()
        while True:
            sock, _ = listener.accept()
            with sock, sock.makefile("rw") as stream:
                json.dump(report(float(stream.readline())), stream)


def _start() -> None:
    threading.Thread(target=_listen, name="benchmark", daemon=True).start()


if __name__ == "sitecustomize":
    os.register_at_fork(after_in_child=_start)

"""Python imports this where its folder is on ``PYTHONPATH``: processes that it forks then tell of their threads.

``benchmarks.inside.threads`` asks them, through a socket without a name in the file system.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import Counter
from time import perf_counter, sleep
from types import FrameType

STEP = 0.005  # seconds between two looks


def address(pid: int) -> str:
    """Where the process is asked."""
    return f"\0torchpipe-benchmark-{pid}"


def tell(seconds: float) -> dict[str, object]:
    """Names of the Python threads by their native number, and how often each was seen where in so many seconds."""
    own, main = threading.get_ident(), threading.main_thread()
    seen: dict[str, Counter[str]] = {}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    until = perf_counter() + seconds
    while perf_counter() < until or (seconds and not seen):
        sleep(STEP)
        for ident, frame in sys._current_frames().items():
            if ident != own:
                seen.setdefault(names.get(ident, str(ident)), Counter())[place(frame)] += 1
    # NOTE: a fork leaves the main thread with its old number, and a thread that is about to start has none yet.
    others = {thread.native_id: thread.name for thread in threading.enumerate() if thread is not main}
    return {
        "names": {number: name for number, name in others.items() if number} | {os.getpid(): main.name},
        "seen": seen,
    }


def place(frame: FrameType) -> str:
    """Where a thread is: file, line and function."""
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}"


def _listen() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(os.getpid()))
        listener.listen()
        while True:
            sock, _ = listener.accept()
            with sock, sock.makefile("rw") as stream:
                json.dump(tell(float(stream.readline())), stream)


def _start() -> None:
    threading.Thread(target=_listen, name="benchmark", daemon=True).start()


if __name__ == "sitecustomize":
    os.register_at_fork(after_in_child=_start)

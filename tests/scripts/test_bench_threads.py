"""What the benchmarks tell of the threads of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from benchmarks.inside import threads
from benchmarks.inside.threads import Engines, Thread
from service import eventually

_FORKS = """
import os, sys, threading
child = os.fork()
if child:
    print(child, flush=True)
    os.waitpid(child, 0)
else:
    threading.Thread(target=sys.stdin.read, name="reader", daemon=True).start()
    threading.Event().wait()
"""


def test_a_forked_process_tells_names_and_places_of_its_threads() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKS],
        env={**os.environ, **threads.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            eventually(lambda: _asked(pid, "reader"))
            names = threads.ask(pid)["names"]
            assert {int(number) for number in names} == threads.threads_of(pid).keys()
            lines = list(threads.profile(pid, 0.05))
        finally:
            os.kill(pid, 9)
    heads = [line for line in lines if line.startswith(f"process {pid}, ")]
    assert {line.split(", ")[1].split(":")[0] for line in heads} == {"MainThread", "reader"}
    assert any("threading.py:" in line and line.endswith(" wait") for line in lines)


def _asked(pid: int, name: str) -> bool:
    try:
        return name in threads.ask(pid)["names"].values()
    except OSError:
        return False  # it does not listen yet


def test_the_time_of_a_thread_counts_for_a_request() -> None:
    before = Engines(100, {1: {1: Thread("python3", 1.0), 2: Thread("cuda", 0.5)}, 2: {2: Thread("gone", 1.0)}})
    after = Engines(300, {1: {1: Thread("python3", 1.01), 2: Thread("cuda", 0.5), 3: Thread("new", 0.02)}})
    assert list(threads.table(before, after)) == [
        "engine process 1: 150 us of processor time a request, of that",
        "    100.0 us  new",
        "     50.0 us  python3",
    ]
    assert list(threads.table(before, before)) == []


def test_a_process_without_engines_has_no_table() -> None:
    nothing = threads.engines({"hand_over": {"requests": 0}})
    assert nothing == Engines(0, {})


def test_this_process_has_this_thread() -> None:
    assert threading.get_native_id() in threads.threads_of(os.getpid())
    assert threads.threads_of(2**30) == {}


@pytest.mark.parametrize("line", ["a (x.py:1);b (y.py:2) 3", "b (y.py:2) 3"])
def test_the_lock_is_held_by_the_last_of_a_stack(line: str) -> None:
    assert threads.holding([line, "c (z.py:3) 1", "d (q.py:4);c (z.py:3) 1"]) == {"b (y.py:2)": 3, "c (z.py:3)": 2}

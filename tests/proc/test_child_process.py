"""``ChildProcess``: its start, its messages, and its end in each way."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.leftovers import nothing_left  # noqa: F401
from kit.waits import WAIT, eventually, is_alive

from torchpipe_py import WorkerDied
from torchpipe_py.proc import child as module
from torchpipe_py.proc.child import ChildProcess, Joined, describe_ending

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the tests' process has threads


def echo(channel: Connection) -> None:
    """Send back each message; a function is called instead."""
    while True:
        message = channel.recv()
        channel.send(message() if callable(message) else message)


def main(descriptor: int, parent: int) -> None:
    """The module's main function, for ``spawn``."""
    assert parent == os.getppid()
    echo(Connection(descriptor))


def start_sleep() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def sleeping() -> ChildProcess:
    return ChildProcess("sleeper", subprocess.Popen(["sleep", "600"]))


def spawned(leads_session: bool = False) -> ChildProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.syspath_prepend(str(Path(__file__).parent.parent))
        return ChildProcess.spawn("echo", "test_child_process", leads_session)


@pytest.fixture(params=["fork", "spawn"])
def child(request: pytest.FixtureRequest) -> Iterator[ChildProcess]:
    made = spawned() if request.param == "spawn" else ChildProcess.fork("echo", echo)
    yield made
    made.end()


def test_sends_messages_both_ways(child: ChildProcess) -> None:
    for message in (1, {"a": bytes(2**17)}):
        child.send(message)
        assert child.receive(WAIT) == message
    assert not child.has_ended()


def test_receive_times_out_and_leaves_the_process_alone(child: ChildProcess) -> None:
    with pytest.raises(TimeoutError, match=rf"echo {child.pid} has not answered for 0\.01 s"):
        child.receive(0.01)
    child.send("late")
    assert child.receive(WAIT) == "late"


@pytest.mark.parametrize("system", ["pidfd", "no pidfd"])
def test_receive_and_send_report_how_the_process_ended(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "no pidfd":
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.close(-errno.ENOSYS))
    child = ChildProcess.fork("echo", echo)
    assert not child.has_ended()
    os.kill(child.pid, signal.SIGKILL)
    for use in (child.receive, lambda: child.send(1)):
        with pytest.raises(WorkerDied, match=rf"^echo {child.pid} died: killed by signal 9 \(SIGKILL\)$"):
            use()
    assert child.has_ended()
    assert child.end() == child.end() == -signal.SIGKILL


def test_end_is_noticed_while_another_process_holds_the_channel_open() -> None:
    child = spawned()
    child.send(start_sleep)
    other = psutil.Process(child.receive(WAIT))
    try:
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            child.receive(WAIT)
        child.end()
    finally:
        other.kill()
    eventually(lambda: not is_alive(other))


def test_session_ends_with_its_leader() -> None:
    child = spawned(leads_session=True)
    child.send(start_sleep)
    other = psutil.Process(child.receive(WAIT))
    assert child.end() == -signal.SIGKILL
    eventually(lambda: not is_alive(other))


def test_end_waits_for_the_grace_period_then_kills() -> None:
    ending = ChildProcess("sleeper", subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    assert ending.end(WAIT) == 3
    assert sleeping().end(0.01) == -signal.SIGKILL


def test_its_descriptor_reports_the_end() -> None:
    child = sleeping()
    poller = select.poll()
    poller.register(child.fileno(), select.POLLIN)
    assert not poller.poll(0)
    child.kill()
    assert poller.poll(1000 * WAIT)
    assert child.exit_status() == -signal.SIGKILL
    child.release()
    assert child.is_released


LEADER_EXITS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_process_is_ending_before_its_end_is_reported() -> None:
    """Its first thread has ended, another one has not: so it is while the system closes its descriptors."""
    child = ChildProcess("sleeper", subprocess.Popen([sys.executable, "-c", LEADER_EXITS]))
    eventually(child.is_ending)
    assert not child.has_ended()
    child.end()
    assert child.is_ending()
    other = sleeping()
    assert not other.is_ending()
    other.end()


def test_kill_and_describe_gives_the_reason_or_how_it_ended() -> None:
    child = sleeping()
    assert str(child.kill_and_describe("took longer than 1 s")) == (
        f"sleeper {child.pid} took longer than 1 s and was ended"
    )
    assert str(child.kill_and_describe()) == f"sleeper {child.pid} died: killed by signal 9 (SIGKILL)"


def test_process_without_a_descriptor_left_for_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_none(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    monkeypatch.setattr(os, "pidfd_open", open_none)
    process = subprocess.Popen(["sleep", "600"])
    with pytest.raises(OSError, match="no descriptor is left"):
        ChildProcess("sleeper", process)
    assert process.returncode == -signal.SIGKILL


def test_start_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise OSError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="no process is left"):
        spawned()
    assert psutil.Process().num_fds() == before


def test_process_of_multiprocessing_has_its_exit_status() -> None:
    process: Any = get_context("fork").Process(target=sys.exit, args=(5,))
    process.start()
    child = ChildProcess("exiting", Joined(process))
    assert child.wait(WAIT)
    assert child.end() == 5


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit status 0"), (-9, "killed by signal 9 (SIGKILL)"), (None, "its exit status is unknown"),
     (-64, "killed by signal 64 (SIGRTMAX)"), (-99, "killed by signal 99 (unknown)")],
)  # fmt: skip
def test_ending_is_described(status: int | None, text: str) -> None:
    assert describe_ending(status) == text

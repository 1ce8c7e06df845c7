"""Whoever reads the log, or does not, keeps nobody waiting, and nothing is raised."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import WAIT
from service import ROOT, eventually
from torchpipe_server.logs import handler as module
from torchpipe_server.logs.formats import TextFormatter
from torchpipe_server.logs.handler import REQUESTS, QueuedHandler


def record(text: str, *args: Any, name: str = REQUESTS, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.INFO, "", 0, text, args, None)
    vars(made).update(extra)
    return made


class Pipe:
    """A pipe that is full."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        self.filling = os.write(self.writer, b"." * 4096)

    def read(self) -> list[str]:
        """Everything until its writers are gone."""
        with open(self.reader, "rb") as file:
            return file.read()[self.filling :].decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield Pipe()
    for thread in threading.enumerate():
        if thread.name == "torchpipe-log":
            thread.join(WAIT)


def test_a_reader_that_has_stopped_stops_nobody(pipe: Pipe, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_BYTES", 100_000)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.01)
    log = QueuedHandler(pipe.writer, TextFormatter())
    for index in range(10_000):
        log.handle(record("line %d", index))
    log.flush()  # does not wait for the reader
    assert 0 < log.dropped < 10_000
    dropped = log.dropped
    log.close()
    lines = pipe.read()
    # While its thread still writes into the pipe, a line may find room behind others that found none.
    numbers = [int(line.rpartition(" ")[2]) for line in lines[:-1]]
    assert len(numbers) == 10_000 - dropped
    assert numbers == sorted(set(numbers))
    assert lines[-1].endswith(f": dropped {dropped} log lines: nobody took them")
    assert " WARNING torchpipe_server[" in lines[-1]


def test_it_goes_on_when_the_reader_does(pipe: Pipe, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_BYTES", 1000)
    monkeypatch.setattr(module, "_REPORT_SECONDS", 0.01)
    log = QueuedHandler(pipe.writer, TextFormatter())
    for _ in range(1000):
        log.handle(record("early"))
    lines = []
    with open(pipe.reader, "rb") as file:
        file.read(pipe.filling)
        while "dropped" not in (line := file.readline().decode()):
            assert line.endswith(": early\n")
        assert f"dropped {log.dropped} log lines" in line
        log.handle(record("late"))
        lines.append(file.readline().decode())
        log.close()
        lines.append(file.read().decode())
    assert [line.partition(": ")[2] for line in lines] == ["late\n", ""]


def descriptor(kind: str) -> int:
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    if kind == "read only":
        os.close(writer)
        return os.open(os.devnull, os.O_RDONLY)
    return writer  # nobody reads


@pytest.mark.parametrize("kind", ["full disk", "read only", "nobody reads"])
def test_a_descriptor_that_takes_nothing_is_no_error(kind: str, pipe: Pipe, capfd):
    os.close(pipe.reader)
    os.close(pipe.writer)
    log = QueuedHandler(descriptor(kind), TextFormatter())
    for index in range(100):
        log.handle(record("line %d", index))
    log.flush()
    assert log.dropped == 100
    log.handle(record("line"))
    log.flush()
    assert log.dropped == 101
    log.close()
    assert capfd.readouterr() == ("", "")


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe):
    os.set_blocking(pipe.writer, False)
    log = QueuedHandler(pipe.writer, TextFormatter())
    for index in range(200):
        log.handle(record("line %d", index))
    log.close()
    assert [line.split(": ")[1] for line in pipe.read()] == [f"line {index}" for index in range(200)]
    assert log.dropped == 0


def test_half_a_line_is_ended(monkeypatch):
    """A disk that is full takes half a line; what comes once there is room again is a line of its own."""
    disk, room = io.BytesIO(), [5]

    def write(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        taken = bytes(data[: room[0]])
        room[0] -= len(taken)
        return disk.write(taken)

    monkeypatch.setattr(module, "os", SimpleNamespace(write=write, getpid=os.getpid, close=lambda fd: None))
    log = QueuedHandler(1000, TextFormatter())
    log.handle(record("lost"))
    log.flush()
    room[0] = 10**6
    log.handle(record("found"))
    log.flush()
    log.close()
    half, *lines = disk.getvalue().decode().splitlines()
    assert len(half) == 5
    assert [line.partition(": ")[2] for line in lines] == ["dropped 1 log lines: nobody took them", "found"] or [
        line.partition(": ")[2] for line in lines
    ] == ["found", "dropped 1 log lines: nobody took them"]
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "torchpipe-log"])


def test_lines_of_several_writers_do_not_mix(pipe: Pipe):
    """What one write takes is a pipe's atomic size at most."""
    logs = [QueuedHandler(os.dup(pipe.writer), TextFormatter()) for _ in range(3)]
    os.close(pipe.writer)

    def write(log: QueuedHandler, letter: str) -> None:
        for index in range(300):
            log.handle(record(letter * (index * 37 % 5000)))
        log.close()

    threads = [threading.Thread(target=write, args=pair) for pair in zip(logs, "abc", strict=True)]
    for thread in threads:
        thread.start()
    lines = pipe.read()
    for thread in threads:
        thread.join()
    assert len(lines) == 900
    for line in lines:
        assert len(set(line.partition(": ")[2]) & set("abc") - set("[... characters ...]")) <= 1


def test_a_record_that_cannot_be_written_is_counted(pipe: Pipe, capfd):
    from torchpipe_server.logs.formats import JsonFormatter

    log = QueuedHandler(pipe.writer, JsonFormatter())
    log.handle(record("x", fields={"odd": object()}))
    assert log.dropped == 1
    log.close()
    pipe.read()
    assert capfd.readouterr().err == ""


def test_what_was_held_back_is_told(pipe: Pipe):
    log = QueuedHandler(pipe.writer, TextFormatter())
    for _ in range(1000):
        log.handle(record("again", name="x"))
    log.handle(record("once", name="y"))
    log.close()
    texts = [line.partition(": ")[2] for line in pipe.read()]
    assert texts.count("again") == len(texts) - 2
    assert f"again (repeated {1000 - texts.count('again')} times)" in texts
    assert "once" in texts
    assert log.dropped == 0


FORKED = """
import logging, os, warnings
warnings.simplefilter("ignore")
from torchpipe_server.logs import set_up_logging
from torchpipe_server.options import Options
set_up_logging(Options("x"))
logging.warning("parent")
if os.fork() == 0:
    logging.warning("child")
    logging.shutdown()
    os._exit(0)
os.wait()
"""


def test_a_process_that_was_forked_logs_as_well():
    done = subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": ")[2] for line in done.stderr.splitlines()) == ["child", "parent"]

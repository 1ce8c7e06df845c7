"""What libraries and tracebacks write on stderr becomes log records."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from service import ROOT
from torchpipe_server.logs import stderr as module
from torchpipe_server.logs.stderr import KEPT_LINES, LINES_A_SECOND, REST_BYTES, StderrLines, take_over_stderr


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"stderr"}
    found = [record.getMessage() for record in caplog.records]
    assert all(message.startswith(("| ", "[... ")) for message in found), "no record of the service begins like that"
    return [message.removeprefix("| ") for message in found]


def test_each_line_is_a_record(caplog):
    lines = StderrLines(process=7)
    for piece in (b"one\ntw", b"o\r\n\n", b"50 %\r100 %\r", b"\xff\xc3\xa9 %s\nhal"):
        lines.feed(piece)
    assert messages(caplog) == ["one", "two", "50 %", "100 %", "\\xffé %s"]
    assert {(record.process, record.levelname) for record in caplog.records} == {(7, "WARNING")}
    lines.end()
    assert messages(caplog)[-1] == "hal"
    assert lines.recent() == ["two", "50 %", "100 %", "\\xffé %s", "hal"]


def test_a_line_without_end_takes_bounded_memory(caplog):
    lines = StderrLines()
    for _ in range(100):
        lines.feed(b"x" * (REST_BYTES // 2))
    assert sum(map(len, messages(caplog))) >= 95 * REST_BYTES // 2
    assert max(map(len, messages(caplog))) <= 2 * REST_BYTES


def test_of_a_flood_the_first_lines_are_records_and_the_rest_is_counted(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    lines = StderrLines()
    for index in range(10_000):
        lines.feed(b"%d\n" % index)
    assert messages(caplog) == [str(index) for index in range(LINES_A_SECOND)]
    assert lines.recent() == [str(index) for index in range(9995, 10_000)]
    now[0] += 1.0
    lines.feed(b"later\n")
    assert messages(caplog)[LINES_A_SECOND:] == [f"[... {10_000 - LINES_A_SECOND} lines ...]", "later"]
    lines.feed(b"x\n" * 1000)
    lines.end()
    assert messages(caplog)[-1] == f"[... {1001 - LINES_A_SECOND} lines ...]"


def test_the_last_lines_are_kept_at_every_level(caplog):
    caplog.set_level("ERROR")
    lines = StderrLines()
    for index in range(100):
        lines.feed(b"%d\n" % index)
    assert (caplog.records, lines.recent()) == ([], [str(index) for index in range(100 - KEPT_LINES, 100)])


def test_a_print_is_a_record_and_a_handler_that_prints_does_no_harm(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    take_over_stderr()
    assert sys.stderr.fileno() == 2
    echo: Any = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(echo)
    try:
        print("here\ud800\x1b", "and there", file=sys.stderr, flush=True)
        logging.getLogger("stderr").warning("| own")
    finally:
        logging.getLogger().removeHandler(echo)
    assert messages(caplog)[0] == "here\\ud800\x1b and there"


CLOSED = """
import os, sys
os.closerange(0, 3)
from torchpipe_server.logs.stderr import open_standard_streams
open_standard_streams()
null = os.stat(os.devnull)
found = [os.path.samestat(os.fstat(fd), null) and os.get_inheritable(fd) for fd in range(3)]
os._exit(0 if all(found) and os.dup(0) > 2 else 1)
"""


def test_a_socket_never_becomes_stderr():
    assert subprocess.run([sys.executable, "-c", CLOSED], cwd=ROOT, timeout=60).returncode == 0


def test_with_stderr_closed_a_wrong_command_line_still_ends():
    code = "from torchpipe_server.cli import main; main(['--nonsense'])"
    command = f'exec {sys.executable} -c "{code}" 2>&- >&-'
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=60, env=dict(os.environ)).returncode == 2

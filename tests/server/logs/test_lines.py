"""Log lines: no text forges one, no reader blocks them, no flood fills them; lines of others on stderr."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kit.services import ROOT
from kit.waits import WAIT, run
from torchpipe_server.logs import handler as module
from torchpipe_server.logs import repeats
from torchpipe_server.logs.formats import LINE_BYTES, JsonFormatter, LineFormatter, TextFormatter
from torchpipe_server.logs.handler import REQUESTS, LogWriter
from torchpipe_server.logs.repeats import BURST, LINES_PER_SECOND, TRACEBACK_LINES, RepeatFilter
from torchpipe_server.logs.stderr import KEPT_LINES, StderrLines

from torchpipe_py import BackendError

# -- the content of a line -------------------------------------------------------------------------------------------

FORGED = "2026-11-22 07:00:00,000 CRITICAL torchpipe_server[1]: forged"
EVIL = [
    f"\n{FORGED}",
    f"\r\n{FORGED}",
    *(f"a{mark}{FORGED}" for mark in "\v\f\x1c\x1d\x1e\x85\u2028\u2029"),
    '\n{"level":"critical"}\n',
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m \x7f \x00 \b",
    "\u202e\u2066\u200f\ufeff\u200b",
    "\ud800 \udc80",
    "\U000e0001",
]
BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR ")

both = pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("of __str__")


def record(message: Any, *args: Any, error: BaseException | None = None, name: str = "x") -> logging.LogRecord:
    info: Any = None
    if error is not None:
        try:
            raise error from ValueError(str(error.args))
        except BaseException:
            info = sys.exc_info()
    return logging.LogRecord(name, logging.ERROR, "", 0, message, args, info)


def check(formatter: LineFormatter, made: logging.LogRecord) -> str:
    text = formatter.format(made)
    assert len(text.encode("utf-8", "backslashreplace")) < LINE_BYTES
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines == text.splitlines()
    if isinstance(formatter, JsonFormatter):
        (line,) = lines
        assert json.loads(line)["level"] == "error"
    else:
        assert BEGINNING.match(lines[0])
        assert all(line.startswith("  | ") for line in lines[1:])
    return text


@both
@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_no_text_begins_another_record(formatter: LineFormatter, evil: str) -> None:
    check(formatter, record("%s", evil))
    check(formatter, record("x", name=evil))
    check(formatter, record("x %s", {"key": evil}, error=OSError(2, evil, evil)))
    if isinstance(formatter, JsonFormatter):
        assert json.loads(formatter.format(record(evil)))["message"] == evil


@both
def test_message_that_cannot_be_formatted_is_still_a_line(formatter: LineFormatter) -> None:
    for made in (record("two %s %s", 1), record("%s", Unspeakable()), record(Unspeakable())):
        check(formatter, made)
    line = check(formatter, record("here: %d", "x"))
    assert "here: %d" in line
    assert "TypeError" in line


@both
@pytest.mark.parametrize("letter", ["x", "é", "\n", "\u202e", "\U0001f600", "\\"], ids=ascii)
def test_long_line_keeps_its_beginning_and_end(formatter: LineFormatter, letter: str) -> None:
    for size in (3000, LINE_BYTES, 10**5):
        text = check(formatter, record("begin %s end", letter * size))
        assert "begin" in text
        assert " end" in text
        check(formatter, record(letter * size, error=RuntimeError(letter * size)))
    assert "characters ..." in text


# -- the reader -------------------------------------------------------------------------------------------------


def info(text: str, *args: Any, name: str = REQUESTS, **extra: Any) -> logging.LogRecord:
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
        """Everything until its writers are gone, without time and logger."""
        with open(self.reader, "rb") as file:
            lines = file.read()[self.filling :].decode().splitlines()
        return [line.partition(": ")[2] for line in lines]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield Pipe()
    for thread in threading.enumerate():
        if thread.name == "log-lines":
            thread.join(WAIT)


def test_stopped_reader_blocks_no_logging_thread(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_LINES", 500)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.01)
    log = LogWriter(pipe.writer, TextFormatter())
    for index in range(10_000):
        log.handle(info("%d", index))
    log.flush()  # does not wait for the reader
    dropped = log.dropped
    log.close()
    *lines, last = pipe.read()
    # While its thread still writes into the pipe, a line may find room behind others that found none.
    assert list(map(int, lines)) == sorted({*map(int, lines)})
    assert (len(lines), 0 < dropped < 10_000) == (10_000 - dropped, True)
    assert last == f"dropped {dropped} log lines: the reader is too slow"


def descriptor(kind: str) -> int:
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "read only":
        return os.open(os.devnull, os.O_RDONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("kind", ["full disk", "read only", "nobody reads"])
def test_counts_lines_that_the_descriptor_does_not_take(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(descriptor(kind), TextFormatter())
    for count in (100, 1):
        for index in range(count):
            log.handle(info("line %d", index))
        log.flush()
    assert log.dropped == 101
    log.close()
    assert capfd.readouterr() == ("", "")


def test_waits_for_a_full_non_blocking_descriptor(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    log = LogWriter(pipe.writer, TextFormatter())
    for index in range(200):
        log.handle(info("%d", index))
    log.close()
    assert (pipe.read(), log.dropped) == (list(map(str, range(200))), 0)


def test_counts_records_that_cannot_be_formatted(pipe: Pipe, capfd: pytest.CaptureFixture[str]) -> None:
    log = LogWriter(pipe.writer, JsonFormatter())
    log.handle(info("x", fields={"odd": object()}))
    assert log.dropped == 1
    log.close()
    pipe.read()
    assert capfd.readouterr().err == ""


def test_reports_left_out_lines_at_the_end(pipe: Pipe) -> None:
    log = LogWriter(pipe.writer, TextFormatter())
    for _ in range(1000):
        log.handle(info("again", name="x"))
    log.handle(info("once", name="y"))
    log.close()
    texts = pipe.read()
    assert texts.count("again") == len(texts) - 2
    assert f"again (repeated {1000 - texts.count('again')} times)" in texts
    assert ("once" in texts, log.dropped) == (True, 0)


FORK = """
import logging, os
from torchpipe_server.logs import handler
from torchpipe_server.logs.formats import TextFormatter
handler.FLUSH_SECONDS = 60.0
log = handler.LogWriter(os.dup(2), TextFormatter())
logger = logging.getLogger("x")
logger.addHandler(log)
logger.error("parent")
log.flush()
pid = os.fork()
if not pid:
    logger.error("child")
    log.flush()
    os._exit(0)
os.waitpid(pid, 0)
logger.error("parent again")
"""


def test_forked_process_writes_its_lines() -> None:
    lines = run(sys.executable, "-W", "ignore", "-c", FORK, cwd=ROOT).stderr.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["parent", "child", "parent again"]


CLOSED = """
import os, sys
from torchpipe_server.logs.stderr import open_standard_streams  # first: libffi may keep a descriptor open
os.closerange(0, 3)
open_standard_streams()
null = os.stat(os.devnull)
found = [os.path.samestat(os.fstat(fd), null) and os.get_inheritable(fd) for fd in range(3)]
os._exit(0 if all(found) and os.dup(0) > 2 else 1)
"""


def test_opens_closed_standard_streams_and_refuses_a_wrong_command_line() -> None:
    assert run(sys.executable, "-c", CLOSED, cwd=ROOT).returncode == 0
    code = "from torchpipe_server.cli import main; main(['--nonsense'])"
    command = f'exec {sys.executable} -c "{code}" 2>&- >&-'
    assert run("bash", "-c", command, cwd=ROOT).returncode == 2


# -- floods ---------------------------------------------------------------------------------------------------------


class Log:
    """A `RepeatFilter` with a clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.repeats = RepeatFilter("asked for", lambda: self.now)

    def admits(self, text: str = "closed: %s", *args: object, line: int = 1, level: int = logging.INFO) -> bool:
        return self.repeats.filter(logging.LogRecord("x", level, "here.py", line, text, args, None))

    def admits_defect(self, cause: Exception) -> bool:
        error = BackendError("node 'a'")
        error.__cause__ = cause
        raised = (type(error), error, None)
        return self.repeats.filter(logging.LogRecord("x", logging.ERROR, "here.py", 1, "failed", (), raised))

    def summaries(self) -> list[str]:
        return [record.getMessage() for record in self.repeats.summaries()]


def test_writes_a_burst_and_counts_the_rest() -> None:
    """Lines are the same if they come from the same place in the code, whatever text a client puts into them."""
    log = Log()
    assert sum(log.admits("%s", f"client {index}") for index in range(10 * BURST)) == BURST
    assert log.summaries() == [f"client {BURST} (repeated {9 * BURST} times)"]
    assert log.admits("another place", line=2)
    log.now += 2.5 / LINES_PER_SECOND
    assert [log.admits() for _ in range(3)] == [True, True, False], "so many a second"


def test_traceback_counts_as_several_lines_and_hides_no_other_exception() -> None:
    log = Log()
    assert sum(log.admits_defect(KeyError(index)) for index in range(32)) == BURST / TRACEBACK_LINES
    log.now += TRACEBACK_LINES / LINES_PER_SECOND
    assert [log.admits_defect(KeyError("x")) for _ in range(2)] == [True, False]
    assert log.admits_defect(MemoryError())


def test_number_of_remembered_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MAX_PLACES", 20)
    log = Log()
    written = sum(log.admits(line=line) for line in range(100) for _ in range(BURST + 1))
    assert written <= BURST * 21
    assert sum(int(text.split("repeated ")[1].split()[0]) for text in log.summaries()) >= 20
    assert sum(log.admits(line=-1) for _ in range(BURST)) == BURST, "there is room again"


# -- lines of others on stderr ------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"stderr"}
    found = [record.getMessage() for record in caplog.records]
    assert all(message.startswith("| ") for message in found), "no record of the service begins like that"
    return [message.removeprefix("| ") for message in found]


def test_each_line_on_stderr_becomes_a_record_and_the_last_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    lines = StderrLines(process=7)
    for piece in (b"one\ntw", b"o\r\n\n", b"50 %\r100 %\r", b"\xff\xc3\xa9 %s\nhal", b"f\n"):
        lines.feed(piece)
    wanted = ["one", "two", "50 %", "100 %", "\\xffé %s", "half"]
    assert (messages(caplog), lines.recent()) == (wanted, wanted[-KEPT_LINES:])
    assert {(record.process, record.levelname) for record in caplog.records} == {(7, "WARNING")}
    caplog.set_level("ERROR")
    lines.feed(b"more\n")
    assert (len(caplog.records), lines.recent()[-1]) == (6, "more")

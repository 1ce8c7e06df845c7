"""Which of many lines are written."""

from __future__ import annotations

import logging

from torchpipe_server.logs import repeats as module
from torchpipe_server.logs.repeats import BURST, LINES_PER_SECOND, TRACEBACK_LINES, Repeats

from torchpipe_py import BackendError


class Log:
    """`Repeats` with a clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.repeats = Repeats("asked for", lambda: self.now)

    def admits(self, text: str = "closed: %s", *args: object, line: int = 1, level: int = logging.INFO) -> bool:
        return self.repeats.filter(logging.LogRecord("x", level, "here.py", line, text, args, None))

    def admits_defect(self, cause: Exception) -> bool:
        error = BackendError("node 'a'")
        error.__cause__ = cause
        raised = (type(error), error, None)
        return self.repeats.filter(logging.LogRecord("x", logging.ERROR, "here.py", 1, "failed", (), raised))

    def told(self) -> list[str]:
        return [record.getMessage() for record in self.repeats.told()]


def test_a_burst_is_written_and_the_rest_counted():
    log = Log()
    assert [log.admits("closed: %s", index) for index in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert log.told() == [f"closed: {BURST} (repeated 2 times)"]
    assert log.told() == []


def test_a_flood_is_written_at_a_steady_rate():
    log = Log()
    written = 0
    for _ in range(1000):
        written += sum(log.admits() for _ in range(10))
        log.now += 0.1
    assert BURST <= written <= BURST + 100 * LINES_PER_SECOND + 1
    log.now += 1.5 / LINES_PER_SECOND
    assert log.admits()


def test_a_text_that_a_client_changes_is_the_same_line():
    """It goes by the place in the code."""
    log = Log()
    assert sum(log.admits(f"client {index}") for index in range(10 * BURST)) == BURST
    assert log.admits("another place", line=2)


def test_a_traceback_counts_as_several_lines():
    log = Log()
    assert sum(log.admits_defect(KeyError(index)) for index in range(32)) == BURST / TRACEBACK_LINES
    log.now += TRACEBACK_LINES / LINES_PER_SECOND
    assert [log.admits_defect(KeyError("x")) for _ in range(2)] == [True, False]


def test_a_defect_that_comes_all_the_time_hides_no_other_one():
    log = Log()
    while log.admits_defect(KeyError("x")):
        pass
    assert log.admits_defect(MemoryError())


def test_what_the_operator_asked_for_is_all_written():
    log = Log()
    assert all(log.admits(level=logging.DEBUG) for _ in range(10 * BURST))
    asked = logging.LogRecord("asked for", logging.INFO, "here.py", 1, "x", (), None)
    assert all(log.repeats.filter(asked) for _ in range(10 * BURST))


def test_places_without_end_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_PLACES", 20)
    log = Log()
    written = sum(log.admits(line=line) for line in range(100) for _ in range(BURST + 1))
    assert written <= BURST * 21
    assert sum(int(text.split("repeated ")[1].split()[0]) for text in log.told()) >= 20
    assert sum(log.admits(line=-1) for _ in range(BURST)) == BURST, "there is room again"


def test_what_is_held_back_keeps_nothing_alive():
    log = Log()
    for _ in range(BURST):
        log.admits()
    log.admits("%s", "x" * 10**6)
    (text,) = log.told()
    assert len(text) < 1000

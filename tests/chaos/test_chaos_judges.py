"""What the judges of the reliability table say to figures that are made up."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos import judges, wire
from chaos.tally import Tally, percentile

SERVED = {"sent": 10, "codes": Counter(ok=10), "longest": 0.5}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"sent": 12, "codes": Counter(ok=10, worker_died=1), "closed": [(1.0, 1.1)]}, ""),
        ({"sent": 11}, "the fate of 10"),
        ({"sent": 11, "lost": 1}, "1 requests without an answer"),
        ({"sent": 11, "crossed": 1}, "another request's"),
        ({"codes": Counter(worker_died=10)}, "no request was served"),
        ({"sent": 11, "codes": Counter(ok=10, internal=1)}, "internal"),
        ({"refused": 1}, "refused"),
        ({"longest": 1.5}, "1.50 s"),
    ],
)
def test_answered(changes, word):
    found = judges.answered(Tally(**{**SERVED, **changes}), 1.0, ("ok", "worker_died"))
    assert len(found) == bool(word)
    assert word in "".join(found)


@pytest.mark.parametrize(
    ("closed", "is_fine"),
    [
        ([], True),
        ([(9.0, 10.5)], True),
        ([(11.0, 99.0)], True),  # noticed late
        ([(9.0, 9.9)], False),
        ([(9.0, 10.5), (13.1, 14.0)], False),
    ],
)
def test_closed_by_kills(closed, is_fine):
    assert (judges.closed_by_kills(closed, [(10.0, 13.0)]) == []) == is_fine


@pytest.mark.parametrize(
    ("goodput", "rejected", "hint", "is_fine"),
    [(90, 0.009, 5, True), (89, 0.009, 5, False), (95, 0.02, 5, False), (95, 0.001, None, False), (95, 0, 5, False)],
)
def test_overloaded(goodput, rejected, hint, is_fine):
    codes = Counter(overloaded=100 * bool(rejected))
    tally = Tally(sent=100, codes=codes, seconds={"overloaded": [rejected] * 100})
    assert (judges.overloaded(100, goodput, tally, 0.01, [hint]) == []) == is_fine


@pytest.mark.parametrize(
    ("samples", "is_fine"),
    [
        ([100] * 40, True),
        ([*range(20), *[20] * 20], True),  # a warm-up
        ([*[0] * 20, *range(0, 40, 2)], False),
        ([0, 1], False),
    ],
)
def test_grew(samples, is_fine):
    assert (judges.grew(samples, 10) == []) == is_fine


def test_a_reply_in_pieces_and_two_in_one():
    result = b"\x0c\0\0" + b"\x0b\0\1\0\0\0\3cat" + b"\4\0\2" + b"\x3f\xf0" + b"\0" * 6 + b"\0\0"
    reply = wire.pack_call("infer_batch", result, 7).replace(b"\x80\1\0\1", b"\x80\1\0\2")
    for end in range(len(reply)):
        with pytest.raises((wire.struct.error, IndexError)):
            wire._read_reply(reply[:end])
    assert wire._read_reply(reply * 2) == (wire.Reply(7, "ok", [("cat", 1.0)]), len(reply))


def test_percentile():
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert percentile([], 0.5) == 0

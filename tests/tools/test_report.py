"""What the tools' reports share: charts whose ticks and marks stay in their frame, aligned and clipped text."""

from __future__ import annotations

import pytest

from torchpipe_py.tools.report import Axis, Bars, Line, aligned, chart, clip, linear_axis, log_axis, table, value_axis


@pytest.mark.parametrize(
    "axis",
    [
        linear_axis("x", 0, 0, least_step=1),
        linear_axis("x", 0, 7, exact=True, least_step=1),
        log_axis("x", 0.3, 5000),
        log_axis("x", 2, 3),
        value_axis("x", [1, 1, 1, 1000]),
        value_axis("x", []),
    ],
    ids=lambda axis: str([text for _, text in axis.ticks]),
)
def test_ticks_are_on_their_axis(axis: Axis) -> None:
    places = [axis.place(value) for value, _ in axis.ticks]
    assert len(places) >= 2
    assert places == sorted(places)
    assert len({text for _, text in axis.ticks}) == len(set(places)) == len(places)


def test_charts_escape_names_and_stay_in_their_frame() -> None:
    x, y = linear_axis("<x>", 0, 10), linear_axis("y", 0, 10)
    line = Line("<b>", [(0, 1), None, (20, 50)], "blue", labels=["one", "", "two"])
    text = chart("a & b", x, y, [line, Bars("n", [(0, 1, 5), (1, 2, 0)], "teal")], ("limit", 500))
    assert "<b>" not in text
    assert "a &amp; b" in text
    assert "limit" in text
    assert text.count("<polyline") == text.count("<circle") == 2  # points without a neighbour; the limit is above
    assert "<title>0 to 1: 5</title>" in text
    assert text.count("<rect") == 1
    assert chart("", x, y, [], ("limit", 5)).count("<polyline") == 1


def test_text_is_aligned_and_clipped_in_its_middle() -> None:
    assert aligned([("a", "1", "x"), ("bcd", "22", "yy")], ("", "n", "")) == ["      n", "a     1  x", "bcd  22  yy"]
    assert aligned([("a", "b")], least=4) == ["a     b"]
    assert aligned([]) == []
    assert clip("abc", 3) == "abc"
    assert clip("abcdefgh", 5) == "ab…gh"
    assert [len(clip("x" * 50, width)) for width in (2, 7, 49)] == [2, 7, 49]


def test_tables_are_escaped() -> None:
    text = table(("<h>", "n"), [("a&b", "<1>")], "<t>", numbers=(1,))
    assert "<h2>&lt;t&gt;</h2>" in text
    assert '<td>a&amp;b</td><td class="n">&lt;1&gt;</td>' in text
    assert "<th>name</th>" in table((), [("name", "value")])
    assert table((), []) == ""

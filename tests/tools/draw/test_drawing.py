"""Pictures of pipelines: no box is hit, every text is there and harmless, and the same picture is drawn the same."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchpipe_py import Backend, register_backend
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.tools.draw.layout import Layout, Rect, lay_out
from torchpipe_py.tools.draw.picture import LINE_COLUMNS, Arrow, Box, Picture, clean, columns, depict, wrap
from torchpipe_py.tools.draw.render import mermaid, quoted, svg

HOSTILE = (
    'a "quoted" name',
    "</svg><script>alert(1)</script>",
    "]]>&amp;<!--",
    "a|b[c]{d}(e)#35;",
    "style:#35;",
    "%%{init: {}}%% end --> x",
    "line\nbreak\ttab",
    "\x00\x1b\ud800\uffff",
    "漢字" * 20,
    "x" * 200,
    "`code` *bold* __dunder__ $$x$$ fa:fa-car",
    "1. list",
    " ",
    "",
)
SLACK = 1e-6
LABELS = st.sampled_from(["", "result:data", "data:image, result:boxes, score:score, more:more", *HOSTILE])


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    """Graphs whose forward arrows lead from a box to a later one; jumps lead from anywhere to a root."""
    size = draw(st.integers(1, 14))
    pool = [*HOSTILE, *(f"node{index}" for index in range(size))]
    names = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size, unique=True))
    texts = st.sampled_from(
        ["", "2", "1..8", "SubGraphSkip", "S[DecodeMat,ResizeMat,cvtColorMat,SyncTensor]", *HOSTILE]
    )
    boxes = tuple(
        Box(name, *(draw(texts) for _ in range(5)), *(draw(st.booleans()) for _ in range(3)))
        for name in draw(st.permutations(names))
    )
    arrows, jumps = [], []
    for _ in range(draw(st.integers(0, 2 * size))):
        start, end = sorted((draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))))
        kind = draw(st.sampled_from(["next", "next", "map", "skip", "jump"]))
        if kind == "jump":
            jumps.append((names[start], draw(LABELS)))
            continue
        if kind == "skip" and names[end] == "":
            continue
        elif start == end:
            if kind == "skip":
                arrows.append(Arrow(names[start], "", "skip", draw(LABELS)))
            continue
        arrows.append(Arrow(names[start], names[end], kind, draw(LABELS)))
    entered = {arrow.end for arrow in arrows if arrow.end or arrow.kind != "skip"}  # a skip to "" ends the request
    roots = [name for name in names if name not in entered]
    for start_name, label in jumps:
        arrows.append(Arrow(start_name, draw(st.sampled_from(roots)), "jump", label))
    return Picture(draw(LABELS), boxes, tuple(arrows))


def overlap(a: Rect, b: Rect) -> bool:
    """Whether boxes overlap by more than rounding; a line, without width or height, counts, too."""
    beside = a.x + SLACK < b.right and b.x + SLACK < a.right
    return beside and a.y + SLACK < b.bottom and b.y + SLACK < a.bottom


def spans(layout: Layout) -> list[Rect]:
    """The extent of each step of each route; an S-curve stays between its two points."""
    return [
        Rect(min(a[0], b[0]), min(a[1], b[1]), abs(a[0] - b[0]), abs(a[1] - b[1]))
        for route in layout.routes
        for a, b in pairwise(route.points)
    ]


@given(pictures())
@settings(max_examples=40)
def test_nothing_hides_a_box_and_arrows_lead_to_later_columns(picture: Picture) -> None:
    layout = lay_out(picture)
    shapes = [*(placed.rect for placed in layout.boxes), *layout.ends]
    assert not any(overlap(a, b) for a, b in combinations(shapes, 2))
    assert not any(overlap(box, span) for box in shapes for span in spans(layout))
    labels = [route.label for route in layout.routes if route.label]
    assert not any(overlap(box, label) for box in shapes for label in labels)
    assert not any(overlap(a, b) for a, b in combinations(labels, 2))
    assert not any(overlap(a, b) for (_, a), (_, b) in combinations(layout.frames, 2))
    for rect in [*shapes, *labels, *spans(layout)]:
        assert rect.x >= 0
        assert rect.y >= 0
        assert rect.right <= layout.width
        assert rect.bottom <= layout.height
    placed = {box.box.name: box for box in layout.boxes}
    assert sorted(map(repr, picture.arrows)) == sorted(repr(route.arrow) for route in layout.routes)
    for route in layout.routes:
        (x, y), (to_x, to_y) = route.points[0], route.points[-1]
        start = placed[route.arrow.start].rect
        ends = layout.ends if route.arrow.to_end else [placed[route.arrow.end].rect]
        assert x == pytest.approx(start.right)
        assert start.y - SLACK <= y <= start.bottom + SLACK
        assert any(to_x == pytest.approx(end.x) and end.y - SLACK <= to_y <= end.bottom + SLACK for end in ends)
        if route.arrow.kind == "jump":
            assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(route.points))
        else:
            assert all(a[0] < b[0] for a, b in pairwise(route.points))
        if route.arrow.kind != "jump" and not route.arrow.to_end:
            before, after = placed[route.arrow.start], placed[route.arrow.end]
            assert before.graph == after.graph
            assert before.column < after.column


@given(pictures())
@settings(max_examples=15)
def test_texts_are_complete_and_escaped(picture: Picture) -> None:
    drawing = svg(picture)
    root = ElementTree.fromstring(drawing)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        *("svg", "style", "defs", "marker", "rect", "path", "circle", "g", "title", "text"),
    }
    assert root.get("aria-label") == clean(picture.title)
    boxes = [element for element in root.iter() if element.tag.endswith("}g") and len(element) > 3]
    for box, element in zip((placed.box for placed in lay_out(picture).boxes), boxes, strict=True):
        shown = squeezed("".join(element.itertext()))
        assert element.get("data-node") == clean(box.name)
        for text in (box.name, box.alias_of, box.backend, box.instances, box.range, box.filter):
            assert squeezed(clean(text)) in shown
        assert ("shared" in shown) >= box.shared
    words = squeezed("".join(root.itertext()))
    assert all(squeezed(clean(arrow.label)) in words for arrow in picture.arrows)


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("text", HOSTILE)
def test_mermaid_texts_can_be_read_back(text: str) -> None:
    """By the rules of Mermaid's lexer: nothing ends the quotes, and ``#…;`` is always a code point."""
    written = quoted(text)
    assert not re.search(r'["<>&`$%;\\]', re.sub(r"#\d+;", "", written))
    assert not re.search(r"style|classDef|:fa", written)
    assert re.sub(r"#(\d+);", lambda match: chr(int(match[1])), written) == clean(text)


def test_mermaid_of_two_graphs() -> None:
    picture = Picture(
        "crops",
        (Box("all", "MapReduce", "1", "1..1"), Box("rec", "R", "2", "1..8"), Box("rec.2", "R", "2", "1..8", "", "rec")),
        (
            Arrow("all", "rec", "jump", 'split "crops"'),
            Arrow("rec", "rec.2", "next"),
            Arrow("rec", "", "skip"),
        ),
    )
    assert mermaid(picture) == (
        "flowchart LR\n"
        '  subgraph g0["root all"]\n'
        '    n0["<b>all</b><br/>MapReduce<br/>x1 1..1"]\n'
        "  end\n"
        '  subgraph g1["root rec"]\n'
        '    n1["<b>rec</b><br/>R<br/>x2 1..8"]\n'
        '    n2["<b>rec.2</b><br/>= rec<br/>R<br/>x2 1..8"]\n'
        '    e1(("end"))\n'
        "    n1 --> n2\n"
        "    n1 -.-o e1\n"
        "  end\n"
        '  n0 ==>|"split #34;crops#34;"| n1\n'
        "  linkStyle 1 stroke-dasharray:2 5\n"
        "  classDef logical stroke-dasharray:5 3\n"
        "  class n2 logical\n"
    )


@given(st.text())
def test_wrapping_loses_nothing(text: str) -> None:
    lines = wrap(text)
    assert all(columns(line) <= LINE_COLUMNS for line in lines)
    assert squeezed("".join(lines)) == squeezed(clean(text))


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"backend": "Identity"}, "1..1"),
        ({"backend": "S[DecodeMat,Mat2Tensor]"}, "1..1"),
        ({"backend": "Range[Identity]", "range": "2,9"}, "2..9"),
        ({"backend": "DecodeTensor&S[DecodeMat,Mat2Tensor]", "max": "4&1"}, "1..4"),
        ({"backend": "FirstAvailable[DecodeTensor,DecodeMat]", "max": 8, "color": "rgb"}, "1..8"),
        ({"backend": "Process[Halves]"}, ""),
        ({"backend": "S[Identity,Ranged]"}, ""),
    ],
)
@pytest.mark.usefixtures("register")
def test_boxes_say_the_range_of_batches_as_far_as_it_is_known(config: dict[str, object], limits: str) -> None:
    register_backend(type("Halves", (), {"max": 2, "forward": lambda self, items: None}), "Halves")
    register_backend(type("Ranged", (Backend,), {"max": lambda self: 2}), "Ranged")
    assert [box.range for box in depict(plan_pipeline(config)).boxes] == [limits]

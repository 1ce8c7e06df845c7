"""Renders a picture as SVG for light and dark, as Mermaid text, and as a self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from torchpipe_py.plan.build import Pipeline
from torchpipe_py.tools import report
from torchpipe_py.tools.draw import picture as drawn
from torchpipe_py.tools.draw.layout import Layout, PlacedBox, Point, Rect, Route, lay_out
from torchpipe_py.tools.draw.picture import Arrow, Box, Kind, Picture, clean, depict, markup, split

KINDS: dict[Kind, str] = {
    "next": "next: the request goes on",
    "map": "map: keys are copied",
    "jump": "jump: runs another graph",
    "skip": "skip: what a filter may skip",
}
# A narrow page shrinks the drawing to this scale, then scrolls.
LEAST_SCALE = 0.75
LEGEND_LEAST, LEGEND_SAMPLE, LEGEND_LINE = 330.0, 40.0, 24.0


def live_svg(pipeline: Pipeline) -> str:
    """The picture of a plan as SVG, with room for figures in each node."""
    return svg(depict(pipeline, live=True))


def svg(picture: Picture) -> str:
    """Well-formed XML, for a page or a separate file.

    A box is ``<g data-node="name">``; in a live one, ``<rect class="live">`` is the room for figures.
    """
    layout = lay_out(picture)
    kinds = [kind for kind in KINDS if any(route.arrow.kind == kind for route in layout.routes)]
    legend, below = _legend(kinds, layout)
    width = max(layout.width, LEGEND_LEAST) if kinds else layout.width
    height = layout.height + below
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{markup(picture.title)}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        f' style="max-width: 100%; min-width: {width * LEAST_SCALE:.0f}px; height: auto">',
        f"<style>{report.palette('svg.drawing')}{report.style('drawing')}</style>",
        f"<defs>{''.join(map(_head, kinds))}</defs>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        *(f'<rect class="frame" {_place(rect)} rx="10"/>' for _, rect in layout.frames),
        *(_text("soft", rect.x + drawn.PAD_X, rect.y + 20.0, heading) for heading, rect in layout.frames),
        *map(_arrow, layout.routes),
        *map(_box, layout.boxes),
        *map(_end, layout.ends),
        *(_label(route, route.label) for route in layout.routes if route.label),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _head(kind: Kind) -> str:
    return (
        f'<marker id="drawing-{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10"'
        f' markerUnits="userSpaceOnUse" orient="auto"><path class="head {kind}" d="M0 .8 L10 5 L0 9.2 z"/></marker>'
    )


def _place(rect: Rect) -> str:
    return f'x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}"'


def _text(kind: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _arrow(route: Route) -> str:
    kind = route.arrow.kind
    straight = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in route.points)
    path = straight if kind == "jump" else _curves(route.points)
    text = f"{route.arrow.start} → {route.arrow.end or 'end'} ({kind})" + (f": {route.arrow.label}" * bool(route.label))
    title = f"<title>{markup(text)}</title>"
    return f'<path class="arrow {kind}" marker-end="url(#drawing-{kind})" d="{path}">{title}</path>'


def _curves(points: Sequence[Point]) -> str:
    (x, y), parts = points[0], [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for to_x, to_y in points[1:]:
        middle = (x + to_x) / 2
        curve = f"C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        parts.append(f"L{to_x:.1f} {to_y:.1f}" if abs(y - to_y) < 0.5 else curve)
        x, y = to_x, to_y
    return " ".join(parts)


def _box(placed: PlacedBox) -> str:
    box, face, rect = placed.box, placed.face, placed.rect
    logical = " logical" if box.alias_of else ""
    parts = [f'<g data-node="{markup(box.name)}"><title>{markup(f"{box.name}: {box.backend}")}</title>']
    parts.append(f'<rect class="box{logical}" {_place(rect)} rx="7"/>')
    if box.is_root:
        inner = Rect(rect.x, rect.y + 8.0, 3.5, rect.height - 16.0)
        parts.append(f'<rect class="root" {_place(inner)} rx="1.5"/>')
    top = rect.y + (rect.height - face.height) / 2
    x, y = rect.x + drawn.PAD_X, top + drawn.PAD_Y
    for kind, line in face.texts:
        y += drawn.LINES[kind]
        parts.append(_text(kind, x, y - 4.0, line))
    if box.live:
        foot = top + face.height - drawn.PAD_Y - drawn.LIVE_HEIGHT
        room = Rect(x, foot, rect.width - 2 * drawn.PAD_X, drawn.LIVE_HEIGHT)
        parts.append(f'<rect class="live" {_place(room)}/>')
    return "".join([*parts, "</g>"])


def _end(rect: Rect) -> str:
    radius = rect.width / 2
    place = f'cx="{rect.x + radius:.1f}" cy="{rect.middle:.1f}"'
    ring, dot = (
        f'<circle class="{name}" {place} r="{r:.1f}"/>' for name, r in (("end", radius - 1), ("end-dot", radius / 2))
    )
    return f"<g><title>end</title>{ring}{dot}</g>"


def _label(route: Route, place: Rect) -> str:
    kind, y = f"label {route.arrow.kind}", place.y - 3.0
    return "".join(
        _text(kind, place.right, y + drawn.SMALL_LINE * row, line, ' text-anchor="end"')
        for row, line in enumerate(route.lines, start=1)
    )


def _legend(kinds: Sequence[Kind], layout: Layout) -> tuple[list[str], float]:
    """A legend of the kinds of arrows that occur, wrapped, and its height."""
    parts: list[str] = []
    room, x, y = max(layout.width, LEGEND_LEAST), 12.0, layout.height + LEGEND_LINE
    for kind in kinds:
        width = LEGEND_SAMPLE + 8.0 + drawn.text_width(KINDS[kind], drawn.SMALL_SIZE) + 22.0
        if parts and x + width > room:
            x, y = 12.0, y + LEGEND_LINE
        line = f"M{x:.1f} {y:.1f} L{x + LEGEND_SAMPLE:.1f} {y:.1f}"
        parts.append(f'<path class="arrow {kind}" marker-end="url(#drawing-{kind})" d="{line}"/>')
        parts.append(_text("soft", x + LEGEND_SAMPLE + 8.0, y + 4.0, KINDS[kind]))
        x += width
    return parts, y - layout.height + LEGEND_LINE if kinds else 0.0


LINKS = {"next": "-->", "map": "-.->", "jump": "==>", "skip": "-.-o"}

# Inside quotes most characters are safe. NOTE: Mermaid looks for "%%{", icons ("fa:fa-x") and "style…:…#…;" all over
# a line, quotes or not, and interprets the rest as HTML and Markdown. "$$x$$" in a node is always a formula.
_UNSAFE = re.compile(r"[^\w \-.,:()\[\]{}|/+=!?']|:(?=fa)|s(?=tyle)|c(?=lassDef)|^[\d\-+]|(?<!\w)_|_(?!\w)")


def mermaid(picture: Picture) -> str:
    """A flowchart from left to right; several graphs are subgraphs. Nodes are ``n0``, ``n1``, … in file order."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    ids = {box.name: f"n{index}" for index, box in enumerate(picture.boxes)}
    graphs = split(picture)
    links: list[Arrow] = []
    yield "flowchart LR"
    for index, graph in enumerate(graphs):
        several = len(graphs) > 1
        indent = "    " if several else "  "
        if several:
            yield f'  subgraph g{index}["{quoted(graph.heading)}"]'
        for box in graph.boxes:
            yield f"{indent}{_node(ids[box.name], box)}"
        if graph.has_end:
            yield f'{indent}e{index}(("end"))'
        for arrow in graph.arrows:
            links.append(arrow)
            yield indent + _link(arrow, ids[arrow.start], f"e{index}" if arrow.to_end else ids[arrow.end])
        if several:
            yield "  end"
    for arrow in picture.arrows:
        if arrow.kind == "jump":
            links.append(arrow)
            yield "  " + _link(arrow, ids[arrow.start], ids[arrow.end])
    skips = ",".join(str(index) for index, arrow in enumerate(links) if arrow.kind == "skip")
    if skips:
        yield f"  linkStyle {skips} stroke-dasharray:2 5"
    logical = ",".join(ids[box.name] for box in picture.boxes if box.alias_of)
    if logical:
        yield "  classDef logical stroke-dasharray:5 3"
        yield f"  class {logical} logical"


def quoted(text: str) -> str:
    """Escape text for Mermaid's double quotes: special characters become code points, as ``#35;``."""
    return _UNSAFE.sub(lambda match: f"#{ord(match[0])};", clean(text))


def _node(name: str, box: Box) -> str:
    lines = [f"<b>{quoted(box.name)}</b>"]
    lines += [f"= {quoted(box.alias_of)}"] if box.alias_of else []
    lines += [quoted(box.backend), quoted(f"x{box.instances} {box.range}".strip())]
    lines += ["shared"] if box.shared else []
    lines += [f"filter {quoted(box.filter)}"] if box.filter else []
    text = "<br/>".join(lines)
    return f'{name}(["{text}"])' if box.is_root else f'{name}["{text}"]'


def _link(arrow: Arrow, start: str, end: str) -> str:
    label = f'|"{quoted(arrow.label)}"|' if arrow.label.strip() else ""
    return f"{start} {LINKS[arrow.kind]}{label} {end}"


HEADS = ("name", "backend", "instances", "range", "shared", "filter", "next", "map")


def page(picture: Picture) -> str:
    """A self-contained HTML file: the drawing, a table of the nodes, the Mermaid text."""
    rows = [list(map(clean, _cells(picture, box))) for box in picture.boxes]
    parts = [
        f'<div class="picture">\n{svg(picture)}</div>',
        report.table(HEADS, rows, f"Nodes ({len(rows)})"),
        f"<details><summary>Mermaid text</summary>\n<pre>{escape(mermaid(picture))}</pre>\n</details>",
    ]
    return report.page(clean(picture.title), parts)


def _cells(picture: Picture, box: Box) -> Sequence[str]:
    name = f"{box.name} (= {box.alias_of})" if box.alias_of else box.name
    following = ", ".join(arrow.end for arrow in picture.arrows if arrow.kind == "next" and arrow.start == box.name)
    mapped = [arrow for arrow in picture.arrows if arrow.kind == "map" and arrow.end == box.name]
    sources = ", ".join(f"{arrow.start}[{arrow.label}]" if arrow.label else arrow.start for arrow in mapped)
    shared = "yes" if box.shared else ""
    return name, box.backend, box.instances, box.range, shared, box.filter, following, sources

"""A picture as one self-contained HTML file: the drawing, a table of the nodes, the Mermaid text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torchpipe_py.drawing.mermaid import mermaid
from torchpipe_py.drawing.picture import Box, Picture
from torchpipe_py.drawing.svg import svg
from torchpipe_py.drawing.text import clean, markup
from torchpipe_py.html import document, table

HEADS = ("name", "backend", "instances", "range", "shared", "filter", "next", "map")

STYLE = """body { max-width: 100rem; } .picture { overflow-x: auto; } .picture svg { display: block; }
table { width: 100%; } td.code { overflow-wrap: anywhere; min-width: 14rem;
  font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .85rem; }
summary { margin-top: 2.2rem; color: var(--soft); } pre { overflow-x: auto; }
"""


def page(picture: Picture) -> str:
    """The whole file; names, labels and expressions are escaped."""
    body = [
        f"<h1>{markup(picture.title)}</h1>",
        f'<div class="picture">\n{svg(picture)}</div>',
        f"<h2>Nodes ({len(picture.boxes)})</h2>",
        table(HEADS, (list(map(clean, _cells(picture, box))) for box in picture.boxes), ("", "code")),
        f"<details><summary>Mermaid text</summary>\n<pre>{escape(mermaid(picture))}</pre>\n</details>",
    ]
    return document(clean(picture.title), "\n".join(body), STYLE)


def _cells(picture: Picture, box: Box) -> Sequence[str]:
    name = f"{box.name} (= {box.alias_of})" if box.alias_of else box.name
    following = ", ".join(arrow.end for arrow in picture.arrows if arrow.kind == "next" and arrow.start == box.name)
    mapped = [arrow for arrow in picture.arrows if arrow.kind == "map" and arrow.end == box.name]
    sources = ", ".join(f"{arrow.start}[{arrow.label}]" if arrow.label else arrow.start for arrow in mapped)
    shared = "yes" if box.shared else ""
    return name, box.backend, box.instances, box.range, shared, box.filter, following, sources

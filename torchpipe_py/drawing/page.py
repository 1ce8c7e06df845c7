"""A picture as one self-contained HTML file: the drawing, a table of the nodes, the Mermaid text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torchpipe_py.drawing.mermaid import mermaid
from torchpipe_py.drawing.picture import Box, Picture
from torchpipe_py.drawing.svg import svg
from torchpipe_py.drawing.text import markup

HEADS = ("name", "backend", "instances", "range", "filter", "next", "map")

STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5a6675; --line: #d6dbe1; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ed; --soft: #9aa6b4; --line: #39424d; --paper: #14181d; }
}
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 100rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.picture { overflow-x: auto; } .picture svg { display: block; }
.nodes { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } td.code { overflow-wrap: anywhere; min-width: 14rem; }
td.code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .85rem; }
summary { cursor: pointer; margin-top: 2.2rem; color: var(--soft); } pre { overflow-x: auto; }
"""


def page(picture: Picture) -> str:
    """The whole file; names, labels and expressions are escaped."""
    drawing = svg(picture)
    title = markup(picture.title)
    body = "\n".join(
        [
            f"<h1>{title}</h1>",
            f'<div class="picture">\n{drawing}</div>',
            f"<h2>Nodes ({len(picture.boxes)})</h2>",
            _table(picture),
            f"<details><summary>Mermaid text</summary>\n<pre>{escape(mermaid(picture))}</pre>\n</details>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(picture: Picture) -> str:
    lines = [_row("th", HEADS)]
    lines += [_row("td", _cells(picture, box)) for box in picture.boxes]
    return '<div class="nodes"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(tag: str, texts: Iterable[str]) -> str:
    def cell(head: str, text: str) -> str:
        kind = ' class="code"' if tag == "td" and head == "backend" else ""
        return f"<{tag}{kind}>{markup(text)}</{tag}>"

    return f"<tr>{''.join(map(cell, HEADS, texts))}</tr>"


def _cells(picture: Picture, box: Box) -> Sequence[str]:
    name = f"{box.name} (= {box.alias_of})" if box.alias_of else box.name
    following = ", ".join(arrow.end for arrow in picture.arrows if arrow.kind == "next" and arrow.start == box.name)
    mapped = [arrow for arrow in picture.arrows if arrow.kind == "map" and arrow.end == box.name]
    sources = ", ".join(f"{arrow.start}[{arrow.label}]" if arrow.label else arrow.start for arrow in mapped)
    return name, box.backend, box.instances, box.range, box.filter, following, sources

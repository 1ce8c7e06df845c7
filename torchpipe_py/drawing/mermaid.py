"""A picture as Mermaid text, for READMEs and everything else that renders it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchpipe_py.drawing.picture import Arrow, Box, Picture, split
from torchpipe_py.drawing.text import clean

LINKS = {"next": "-->", "map": "-.->", "jump": "==>", "skip": "-.-o"}

# Inside quotes most characters are safe. NOTE: Mermaid looks for "%%{", icons ("fa:fa-x") and "style…:…#…;" all over
# a line, quotes or not, and takes what is left for HTML and Markdown. "$$x$$" in a node is a formula, however written.
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
    """To stand between double quotes; what Mermaid might take for its own is written as ``#35;``, the code point."""
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

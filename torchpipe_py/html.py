"""HTML pages that need nothing but themselves: one skeleton, one palette for light and dark, one kind of table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# For light and for dark. "line" separates, "stroke" is drawn, "card" stands out from the paper.
PALETTE = {
    "ink": ("#1c2530", "#e4e8ed"),
    "soft": ("#5a6675", "#9aa6b4"),
    "line": ("#d6dbe1", "#39424d"),
    "stroke": ("#8a97a6", "#66727f"),
    "paper": ("#fff", "#14181d"),
    "card": ("#f5f7f9", "#1c2229"),
    "blue": ("#2468b4", "#6aa9ec"),
    "orange": ("#b8620b", "#f0a04b"),
    "green": ("#1d7a3d", "#6cc07c"),
    "purple": ("#7b4bb3", "#b794e6"),
    "red": ("#b3261e", "#ff8a80"),
    "teal": ("#12858a", "#56c4c8"),
}


def palette(selector: str) -> str:
    """Style rules that give ``var(--ink)`` and so on in ``selector`` the colors of light or dark."""
    light, dark = (" ".join(f"--{name}: {pair[at]};" for name, pair in PALETTE.items()) for at in (0, 1))
    return (
        f"{selector} {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}\n"
    )


STYLE = """body { margin: 2rem auto; padding: 0 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
th { font-weight: 600; } figure { margin: 0; } summary { cursor: pointer; }
code, pre { font: .85rem ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
"""


def document(title: str, body: str, style: str) -> str:
    """The whole file; ``title`` is escaped, ``body`` is HTML, and ``style`` adds to what all pages share."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{palette(':root')}{STYLE}{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = (), kind: str = "") -> str:
    """A table of escaped texts, of class ``kind``; ``classes`` are those of the columns, as far as they have any.

    Without heads the first column names the rows.
    """

    def line(tag: str, first: str, texts: Sequence[str]) -> str:
        cells = []
        for index, text in enumerate(texts):
            name, of_class = tag if index else first, classes[index] if index < len(classes) else ""
            cells.append(f"<{name}{of_class and f' class={of_class!r}'}>{escape(text)}</{name}>")
        return f"<tr>{''.join(cells)}</tr>"

    lines = [line("th", "th", heads)] if any(heads) else []
    lines += [line("td", "td" if lines else "th", row) for row in rows]
    return f'<div class="scroll"><table class="{kind}">\n' + "\n".join(lines) + "\n</table></div>"

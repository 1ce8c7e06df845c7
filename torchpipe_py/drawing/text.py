"""Texts for drawings: made harmless, wrapped, and measured without a font."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from html import escape

from torchpipe_py.drawing.picture import Box

NAME_SIZE, CODE_SIZE, SMALL_SIZE = 14.0, 11.5, 12.0
NAME_LINE, CODE_LINE, SMALL_LINE = 18.0, 15.0, 16.0
LINE_COLUMNS, BADGE_COLUMNS = 28, 24
PAD_X, PAD_Y, BADGE_PAD = 12.0, 9.0, 6.0
LEAST_WIDTH = 110.0
LIVE_WIDTH, LIVE_HEIGHT = 156.0, 42.0

# What no XML document may contain, not even escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BREAKS = frozenset(",[&|;/ ")
_NARROW, _WIDE = frozenset("ijlft.,:;|!'`()[]{}/\\ I"), frozenset("mwMW@%#")


def clean(text: str) -> str:
    """One line without control characters."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def markup(text: str) -> str:
    """Safe between tags and in attributes, of HTML as of XML."""
    return escape(clean(text), quote=True)


def columns(text: str) -> int:
    """Widths of one letter of a fixed-width font; ideographs take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def wrap(text: str, limit: int = LINE_COLUMNS) -> tuple[str, ...]:
    """Lines of at most ``limit`` columns, broken after a comma or bracket where there is one; never empty."""
    rest, lines = clean(text), []
    while columns(rest) > limit:
        fits = 1
        while columns(rest[: fits + 1]) <= limit:
            fits += 1
        good = max((at + 1 for at in range(fits) if rest[at] in _BREAKS), default=0)
        at = good if good > fits // 3 else fits
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return (*lines, rest) if rest or not lines else tuple(lines)


def text_width(text: str, size: float) -> float:
    """Pixels of a proportional font, rather too many than too few."""
    return size * sum(map(_em, text))


def code_width(text: str, size: float) -> float:
    """Pixels of a fixed-width font."""
    return 0.61 * size * columns(text)


def _em(char: str) -> float:
    if char in _NARROW:
        return 0.4
    if char in _WIDE:
        return 0.95
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.72 if char.isupper() else 0.63


@dataclass(frozen=True)
class Face:
    """The lines that stand in a box, from top to bottom, and the size they need in pixels."""

    name: tuple[str, ...]
    alias: tuple[str, ...]
    backend: tuple[str, ...]
    facts: tuple[str, ...]
    badge: tuple[str, ...]
    width: float
    height: float

    @property
    def badge_width(self) -> float:
        return max(text_width(line, SMALL_SIZE - 1) for line in self.badge) + 2 * BADGE_PAD if self.badge else 0.0


def face(box: Box) -> Face:
    """Instances and range share a line with the filter's badge; below it is the room for live figures."""
    name = wrap(box.name)
    alias = wrap(f"= {box.alias_of}") if box.alias_of else ()
    backend = wrap(box.backend)
    facts = wrap(f"x{box.instances}") if not box.range else _facts(box)
    facts += ("shared",) if box.shared else ()
    badge = wrap(box.filter, BADGE_COLUMNS) if box.filter else ()
    bare = Face(name, alias, backend, facts, badge, 0.0, 0.0)
    facts_width = max(text_width(line, SMALL_SIZE) for line in facts)
    widths = [
        *(text_width(line, NAME_SIZE) * 1.06 for line in name),
        *(text_width(line, SMALL_SIZE) for line in alias),
        *(code_width(line, CODE_SIZE) for line in backend),
        facts_width + (12.0 + bare.badge_width if badge else 0.0),
    ]
    height = len(name) * NAME_LINE + len(alias) * SMALL_LINE + len(backend) * CODE_LINE + 4.0
    height += max(len(facts), len(badge)) * SMALL_LINE + 2 * PAD_Y + (LIVE_HEIGHT if box.live else 0.0)
    least = LIVE_WIDTH if box.live else LEAST_WIDTH
    return Face(name, alias, backend, facts, badge, max(least, max(widths) + 2 * PAD_X), height)


def _facts(box: Box) -> tuple[str, ...]:
    line = f"x{clean(box.instances)}  {clean(box.range)}"
    return (line,) if columns(line) <= LINE_COLUMNS else (*wrap(f"x{box.instances}"), *wrap(box.range))

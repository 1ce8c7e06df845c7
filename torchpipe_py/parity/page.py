"""A comparison as one self-contained HTML file: tables, a histogram, the worst images side by side."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import counted
from torchpipe_py.html import document, table
from torchpipe_py.parity.compare import AMPLIFICATION, disagreeing, histogram
from torchpipe_py.parity.record import Compared, Parity, ParityError, Refused, View
from torchpipe_py.parity.report import bar_text, facts, figure_rows, figure_text, model_rows, reason_text

CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_BASE = 640, 200, 44, 164

STYLE = """body { max-width: 62rem; } table { width: 100%; } th, td { overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; }
.ok { color: var(--green); } .missed { color: var(--red); font-weight: 600; }
section.pair { margin: 1.6rem 0; border-top: 1px solid var(--line); padding-top: .6rem; }
section.pair h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
section.pair p, .hint { margin: .1rem 0 .6rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.views { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: .8rem; align-items: start; }
figcaption { color: var(--soft); font-size: .85rem; }
figure img { display: block; width: 100%; max-height: 26rem; object-fit: contain; object-position: left top;
  image-rendering: pixelated; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; } svg rect { fill: var(--blue); }
svg line { stroke: var(--line); }
"""


def html_report(parity: Parity) -> str:
    """The whole file; names, labels and reasons are escaped, pictures are inlined."""
    return document("torchpipe parity", "\n".join(part for part in _parts(parity) if part), STYLE)


def _parts(parity: Parity) -> Iterator[str]:
    yield "<h1>torchpipe parity</h1>"
    yield table([], [*facts(parity), *model_rows(parity)])
    yield "\n".join(f'<p class="{"ok" if bar.ok else "missed"}">{escape(bar_text(bar))}</p>' for bar in parity.bars)
    rows = figure_rows(parity)
    if rows:
        yield "<h2>Differences per image, on the 0..255 scale</h2>"
        yield table(["", "median", "mean", "worst", "worst image"], rows, ("", "n", "n", "n"))
        yield "<h2>Mean absolute difference: how many images</h2>"
        yield _chart([image.difference.mean for image in parity.compared if image.difference is not None])
    yield from _pairs(parity)
    yield from _lists(parity)


def _pairs(parity: Parity) -> Iterator[str]:
    if not parity.views:
        return
    yield f"<h2>Worst images, by mean absolute difference ({len(parity.views)})</h2>"
    yield (
        f'<p class="hint">The third picture is the absolute difference, {AMPLIFICATION} times as strong. Large results'
        " are shown smaller: of the difference each block keeps its largest value.</p>"
    )
    compared = {image.name: image for image in parity.worst}
    for view in parity.views:
        yield _pair(view, compared[view.name])


def _pair(view: View, image: Compared) -> str:
    figures = ("mean", "max", "share", "shift")
    words = {"mean": "mean {}", "max": "largest {}", "share": "{} more than 1 apart", "shift": "B - A {}"}
    assert image.difference is not None  # it is one of the worst
    said = [words[key].format(figure_text(key, getattr(image.difference, key))) for key in figures]
    said += [f"A says {image.a}, B says {image.b}"] if image.a and image.b else []
    captions = ("A", "B", f"|B - A| × {AMPLIFICATION}")
    pictures = zip((view.a, view.b, view.amplified), captions, strict=True)
    shown = "".join(_figure(picture, caption, view.name) for picture, caption in pictures)
    head = f"<h3>{escape(view.name)}</h3><p>{escape(', '.join(said))}</p>"
    return f'<section class="pair">{head}<div class="views">{shown}</div></section>'


def _figure(picture: np.ndarray, caption: str, name: str) -> str:
    alt = escape(f"{name}: {caption}", quote=True)
    return f'<figure><img src="{_data_url(picture)}" alt="{alt}"><figcaption>{escape(caption)}</figcaption></figure>'


def _data_url(picture: np.ndarray) -> str:
    """A PNG, since what is judged is single values."""
    import cv2

    done, encoded = cv2.imencode(".png", np.ascontiguousarray(picture[:, :, ::-1]))
    if not done:
        raise ParityError("OpenCV cannot encode a PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.tobytes()).decode("ascii")


def _lists(parity: Parity) -> Iterator[str]:
    classes = [(name, str(a), str(b)) for name, a, b in disagreeing(parity.compared)]
    shapes = [(image.name, shown_dims(image.a), shown_dims(image.b)) for image in parity.shapes_differ]
    yield _listed("Different classes", classes)
    yield _listed("Refused", _reasons(parity.refused))
    yield _listed("Without a class", _reasons(parity.unclassified))
    yield _listed("Of different shapes, H×W×C", shapes)


def _reasons(refused: Iterable[Refused]) -> list[tuple[str, str, str]]:
    return [(image.name, reason_text(image.a), reason_text(image.b)) for image in refused]


def _listed(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    return f"<h2>{escape(title)} ({len(rows)})</h2>\n{table(['image', 'A', 'B'], rows)}"


def _chart(means: Sequence[float]) -> str:
    """A histogram as inline SVG; each bar says its range and count when pointed at."""
    counts, top = histogram(means)
    if top == 0:
        zero = f"0 for {counted(len(means), 'image')}."
        return f'<p class="hint">{zero}</p>'
    step, most = (CHART_WIDTH - CHART_LEFT) / len(counts), max(counts)
    parts = [_bar(index, count, most, step, top / len(counts)) for index, count in enumerate(counts) if count]
    parts.append(f'<line x1="{CHART_LEFT}" y1="{CHART_BASE}" x2="{CHART_WIDTH}" y2="{CHART_BASE}"></line>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = CHART_LEFT + share * (CHART_WIDTH - CHART_LEFT)
        parts.append(f'<text x="{x:.0f}" y="{CHART_BASE + 18}" text-anchor="{anchor}">{top * share:.3g}</text>')
    parts.append(f'<text x="{CHART_LEFT - 8}" y="20" text-anchor="end">{most}</text>')
    parts.append(f'<text x="{CHART_LEFT - 8}" y="{CHART_BASE}" text-anchor="end">0</text>')
    label = f"histogram of the mean absolute difference of {counted(len(means), 'image')}, 0 to {top:.3g}"
    size = f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" width="{CHART_WIDTH}" height="{CHART_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _bar(index: int, count: int, most: int, step: float, width: float) -> str:
    height = max(1.0, (CHART_BASE - 12) * count / most)
    place = f'x="{CHART_LEFT + index * step + 1:.1f}" y="{CHART_BASE - height:.1f}"'
    title = f"<title>{index * width:.3g} to {(index + 1) * width:.3g}: {counted(count, 'image')}</title>"
    return f'<rect {place} width="{step - 2:.1f}" height="{height:.1f}">{title}</rect>'

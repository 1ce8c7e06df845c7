"""The use of a GPU during a training, from the events of a torch.profiler trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]  # from, to; µs on the trace's clock
Event = Mapping[str, Any]

WAIT, STEP = "next(loader)", "training step"
"""The annotations around the two parts of the loop: all of the time is in one of them."""


@dataclass(frozen=True)
class Copies:
    """Copies from one kind of host memory to the device: number, bytes, and milliseconds on the copy engine."""

    count: int
    bytes: int
    milliseconds: float


@dataclass(frozen=True)
class GpuUse:
    """Shares of the wall time. Copies do not count as work: while only they run, the GPU counts as idle.

    ``busy``: some kernel runs. ``model`` and ``loader``: sums of kernel times on the streams that the training step
    uses and on all others; together more than ``busy`` where they overlap. ``starved``: no kernel runs, and the loop is
    inside ``next``. ``copies``: by kind, "Pinned" or "Pageable".
    """

    busy: float
    model: float
    loader: float
    starved: float
    copies: Mapping[str, Copies]


def gpu_use(events: Sequence[Event]) -> GpuUse | None:
    """The GPU's use between the first and last annotation of a trace's ``traceEvents``; ``None`` without any kernel.

    Raises ``ValueError`` without annotations.
    """
    waits, steps = (_annotated(events, name) for name in (WAIT, STEP))
    if not waits or not steps:
        raise ValueError(f"the trace has no annotations {WAIT!r} and {STEP!r}")
    window = (min(waits[0][0], steps[0][0]), max(waits[-1][1], steps[-1][1]))
    wall = window[1] - window[0]
    kernels = [event for event in events if event.get("cat") == "kernel" and _inside(event, window)]
    if not kernels:
        return None
    ours = _streams_of_the_step(events, kernels, steps)
    running = merged(_clipped(event, window) for event in kernels)
    sums = [
        _total(_clipped(kernel, window) for kernel in kernels if (_stream(kernel) in ours) is mine)
        for mine in (True, False)
    ]
    return GpuUse(
        busy=_total(running) / wall,
        model=sums[0] / wall,
        loader=sums[1] / wall,
        starved=(_total(waits) - overlap(waits, running)) / wall,
        copies=_copies(events, window),
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans as sorted spans that do not touch."""
    apart: list[Span] = []
    for start, end in sorted(spans):
        if apart and start <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((start, end))
    return apart


def overlap(left: Sequence[Span], right: Sequence[Span]) -> float:
    """µs that lie in both; each is ``merged``."""
    total, first, second = 0.0, 0, 0
    while first < len(left) and second < len(right):
        total += max(0.0, min(left[first][1], right[second][1]) - max(left[first][0], right[second][0]))
        if left[first][1] <= right[second][1]:
            first += 1
        else:
            second += 1
    return total


def _span(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _clipped(event: Event, window: Span) -> Span:
    start, end = _span(event)
    return max(start, window[0]), min(end, window[1])


def _inside(event: Event, window: Span) -> bool:
    start, end = _span(event)
    return start < window[1] and end > window[0]


def _total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _annotated(events: Iterable[Event], name: str) -> list[Span]:
    # NOTE: the profiler draws each annotation on the GPU as well, as "gpu_user_annotation"
    return merged(_span(event) for event in events if event.get("cat") == "user_annotation" and event["name"] == name)


def _stream(event: Event) -> tuple[Any, Any]:
    return event["args"].get("device"), event["args"].get("stream")


def _streams_of_the_step(events: Sequence[Event], kernels: Sequence[Event], steps: Sequence[Span]) -> set[Any]:
    """Streams with kernels that the training thread launched during a step, without those of the pipe's threads."""
    threads = {event["tid"] for event in events if event.get("cat") == "user_annotation" and event["name"] == STEP}
    launched = {
        event["args"].get("correlation")
        for event in events
        if str(event.get("cat", "")).startswith("cuda_")
        and event["tid"] in threads
        and any(start <= event["ts"] <= end for start, end in steps)
    }
    return {_stream(kernel) for kernel in kernels if kernel["args"].get("correlation") in launched}


def _copies(events: Iterable[Event], window: Span) -> dict[str, Copies]:
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and _inside(event, window):
            by_kind.setdefault("Pinned" if "Pinned" in event["name"] else "Pageable", []).append(event)
    return {
        kind: Copies(
            len(some),
            sum(int(event["args"].get("bytes", 0)) for event in some),
            _total(map(_span, some)) / 1e3,
        )
        for kind, some in sorted(by_kind.items())
    }

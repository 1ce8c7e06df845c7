"""Counters, gauges and histograms of custom backends, as ``prometheus_client`` has them.

A backend declares them in its ``init`` or ``setup``, and changes them from any thread::

    from torchpipe_py.metrics import Counter

    class Faces:
        def init(self, config):
            self.found = Counter("faces_found", "Faces found", ["camera"])

        def forward(self, items):
            ...
            self.found.labels(item["camera"]).inc(len(faces))

``pipe.stats()["metrics"]`` has the sums over its instances, the service's ``/metrics`` those over its processes.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from torchpipe_py.errors import logger

MOST_METRICS = 100
"""Maximum number of metrics of a pipe."""

MOST_LABEL_SETS = 256
"""Maximum number of label sets of a metric; the values of further ones are those of the label set ``OTHER``."""

OTHER = "other"

MOST_LABELS, MOST_BUCKETS, MOST_CHARACTERS, MOST_TEXT = 10, 64, 200, 1000
MOST_VALUE = 2.0**61

DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds of a histogram's buckets, for seconds; those of ``prometheus_client``."""

RESERVED = "torchpipe_"
"""The beginning of the names of the service's own metrics."""

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*"

Family = dict[str, Any]
"""A metric in ``pipe.stats()``: ``kind``, ``help``, the names of its ``labels``, and its ``samples``.

A sample has ``labels``, by name, and a ``value``; of a histogram ``counts`` and the ``sum``. A histogram has
``bounds``: the inclusive upper bounds of the counts, of which the last has none.
"""


class Metric:
    """A metric of the pipe that sets up the backend which declares it; all its instances share one of a name.

    ``documentation`` is its help. A metric with ``labelnames`` is changed through ``labels``.
    Raises ``ValueError`` for an invalid or reserved name, for one that the pipe has with other labels or another kind,
    and beyond ``MOST_METRICS``; ``RuntimeError`` where no pipe sets up a backend.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, documentation: str, labelnames: Sequence[str] = ()) -> None:
        self._declare(name, documentation, labelnames, ())

    def _declare(self, name: str, documentation: str, labelnames: Sequence[str], bounds: Sequence[float]) -> None:
        metrics, self._source = _CURRENT.get()
        if metrics is None:
            raise RuntimeError(f"the metric {name!r} is to be declared in `init` or `setup` of a backend or filter")
        self._series = metrics.declare(self.kind, name, documentation, labelnames, bounds)
        self._key: tuple[str, ...] | None = None if labelnames else ()

    def labels(self, *values: object, **named: object) -> Any:
        """The metric with these label values, in the order of ``labelnames`` or by name. Raises ``ValueError``."""
        names = self._series.labels
        if named and not values and named.keys() == set(names):
            values = tuple(named[name] for name in names)
        elif named or len(values) != len(names) or not names:
            raise ValueError(f"the labels of metric {self._series.name!r} are: {', '.join(names) or 'none'}")
        made = object.__new__(type(self))
        made._series, made._source, made._key = self._series, self._source, tuple(map(_text, values))
        return made

    def _change(self, amount: float) -> tuple[tuple[str, ...], float] | None:
        """The key and the amount as a number; ``None``, and logged once, for one that is no finite number."""
        if self._key is None:
            raise ValueError(
                f"metric {self._series.name!r} has labels ({', '.join(self._series.labels)}): use .labels()"
            )
        amount = float(amount)
        if not abs(amount) < MOST_VALUE:
            self._series.warn("values", f"ignores {amount}")
            return None
        return self._key, amount


class Counter(Metric):
    """A number that only grows. ``/metrics`` adds ``_total`` to its name. See ``Metric``."""

    kind = "counter"

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``. Raises ``ValueError`` if it is negative."""
        if amount < 0:
            raise ValueError("a counter only grows")
        if (change := self._change(amount)) is not None:
            self._series.add(*change)


class Gauge(Metric):
    """A number that goes up and down, of each instance: the sum over those that are alive is shown. See ``Metric``."""

    kind = "gauge"

    def set(self, value: float) -> None:
        """Set the instance's part of the sum to ``value``."""
        if (change := self._change(value)) is not None:
            self._series.put(*change, self._source)

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``."""
        if (change := self._change(amount)) is not None:
            self._series.add(*change, self._source)

    def dec(self, amount: float = 1.0) -> None:
        """Subtract ``amount``."""
        self.inc(-amount)


class Histogram(Metric):
    """Counts of values up to each of the ``buckets``' upper bounds, and their sum. See ``Metric``."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        buckets: Sequence[float] = DEFAULT_BUCKETS,
    ) -> None:
        bounds = [float(bound) for bound in buckets]
        if bounds and bounds[-1] == math.inf:
            bounds.pop()
        are_finite = all(abs(bound) < MOST_VALUE for bound in bounds)
        if not 1 <= len(bounds) <= MOST_BUCKETS or not are_finite or bounds != sorted(set(bounds)):
            raise ValueError(f"metric {name!r}: buckets are 1 to {MOST_BUCKETS} numbers in ascending order")
        self._declare(name, documentation, labelnames, bounds)

    def observe(self, value: float) -> None:
        """Count ``value``."""
        if (change := self._change(value)) is not None:
            self._series.observe(*change)


class Series:
    """The values of a metric by label values, for any thread: numbers, or the counts and the sum of a histogram.

    A gauge has a number for each source: an instance of a node, or a process that one has started.
    """

    def __init__(self, kind: str, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.kind, self.name, self.text = kind, name, text
        self.labels, self.bounds = tuple(labels), list(bounds)
        self._values = self._start()
        self._lock = threading.Lock()
        self._is_changed = True
        self._warned: set[str] = set()

    def _start(self) -> dict[tuple[str, ...], Any]:
        return {} if self.labels else {(): self._nothing()}

    def _nothing(self) -> Any:
        if self.kind == "histogram":
            return [[0] * (len(self.bounds) + 1), 0.0]
        return {} if self.kind == "gauge" else 0.0

    def _place(self, key: tuple[str, ...]) -> tuple[str, ...]:
        """The key under which the values of ``key`` are kept, which is there."""
        self._is_changed = True
        if key not in self._values:
            if len(self._values) >= MOST_LABEL_SETS:
                self.warn("labels", f"has more than {MOST_LABEL_SETS} label sets: further ones count as {OTHER!r}")
                key = (OTHER,) * len(key)
            self._values.setdefault(key, self._nothing())
        return key

    def add(self, key: tuple[str, ...], amount: float, source: Hashable = None) -> None:
        """Add to a number; ``source`` is for gauges."""
        with self._lock:
            key = self._place(key)
            if self.kind == "gauge":
                parts = self._values[key]
                parts[source] = _bounded(parts.get(source, 0.0) + amount)
            else:
                self._values[key] = _bounded(self._values[key] + amount)

    def put(self, key: tuple[str, ...], value: float, source: Hashable) -> None:
        """Set the number of a gauge's source."""
        with self._lock:
            self._values[self._place(key)][source] = value

    def forget(self, source: Hashable) -> None:
        """Drop what a source has set of a gauge, and labels that no other one has set."""
        if self.kind != "gauge":
            return
        with self._lock:
            for key, parts in [*self._values.items()]:
                if parts.pop(source, None) is not None:
                    self._is_changed = True
                    if self.labels and not parts:
                        del self._values[key]

    def observe(self, key: tuple[str, ...], value: float) -> None:
        """Count a value of a histogram."""
        with self._lock:
            counted = self._values[self._place(key)]
            counted[0][bisect_left(self.bounds, value)] += 1
            counted[1] = _bounded(counted[1] + value)

    def warn(self, about: str, text: str) -> None:
        """Log one line about this."""
        if about not in self._warned:
            self._warned.add(about)
            logger.warning("metric %r %s", self.name, text)

    def stats(self) -> Family:
        """The part of ``pipe.stats()`` about metrics."""
        with self._lock:
            return self._family()

    def _family(self) -> Family:
        samples = []
        for key, value in self._values.items():
            labels = dict(zip(self.labels, key, strict=True))
            if self.kind == "histogram":
                samples.append({"labels": labels, "counts": list(value[0]), "sum": value[1]})
            elif self.kind == "gauge":
                samples.append({"labels": labels, "value": _bounded(sum(value.values()))})
            else:
                samples.append({"labels": labels, "value": value})
        family = {"kind": self.kind, "help": self.text, "labels": list(self.labels), "samples": samples}
        return {**family, "bounds": self.bounds} if self.kind == "histogram" else family

    def take_changes(self) -> Family | None:
        """Counts since the last call, and the values of a gauge; ``None`` if nothing has changed."""
        with self._lock:
            if not self._is_changed:
                return None
            family, self._is_changed = self._family(), False
            if self.kind != "gauge":
                self._values = self._start()
            return family

    def merge(self, changes: Family, source: Hashable) -> None:
        """Take over the changes of another process, which is the ``source``."""
        if self.kind == "gauge":
            self.forget(source)  # its changes have all values of a gauge
        with self._lock:
            for sample in changes["samples"]:
                key = self._place(tuple(sample["labels"].values()))
                if self.kind == "gauge":
                    parts = self._values[key]  # beyond the limit of labels, of several keys of the source
                    parts[source] = _bounded(parts.get(source, 0.0) + sample["value"])
                elif self.kind == "counter":
                    self._values[key] = _bounded(self._values[key] + sample["value"])
                else:
                    counts, total = self._values[key]
                    added = [one + other for one, other in zip(counts, sample["counts"], strict=True)]
                    self._values[key] = [added, _bounded(total + sample["sum"])]


class Metrics:
    """The metrics of a pipe, by name.

    Processes of its nodes ``enter`` and ``leave``: only those in between have gauges, whenever their changes arrive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[Hashable] = set()
        self._series: dict[str, Series] = {}

    def declare(self, kind: str, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> Series:
        """The series of this name, which is new or was declared alike. Raises ``ValueError``, see ``Metric``."""
        if kind == "counter":
            name = name.removesuffix("_total")
        place = f"metric {str(name)[:MOST_CHARACTERS]!r}"
        if not re.fullmatch(NAME, name) or name.startswith(RESERVED) or len(name) > MOST_CHARACTERS:
            what = f"letters, digits, _ and : (at most {MOST_CHARACTERS}), not {RESERVED} in front"
            raise ValueError(f"{place}: a name has {what}")
        if isinstance(labels, str) or len({*labels}) < len(labels) or len(labels) > MOST_LABELS:
            raise ValueError(f"{place}: labelnames are a list of at most {MOST_LABELS} different names")
        for label in labels:
            if not re.fullmatch(LABEL, label) or label == "le" or len(label) > MOST_CHARACTERS:
                raise ValueError(f"{place}: no label can be named {label[:MOST_CHARACTERS]!r}")
        with self._lock:
            known = self._series.get(name)
            if known is None:
                if len(self._series) >= MOST_METRICS:
                    raise ValueError(f"{place}: a pipe has at most {MOST_METRICS} metrics")
                for other in self._series.values():
                    if not _exposed(kind, name).isdisjoint(_exposed(other.kind, other.name)):
                        raise ValueError(f"{place}: /metrics would have the same names for {other.name!r}")
                known = self._series[name] = Series(kind, name, _text(text, MOST_TEXT), labels, bounds)
        if (known.kind, known.labels, known.bounds) != (kind, tuple(labels), list(bounds)):
            labelled = ", ".join(known.labels) or "none"
            raise ValueError(
                f"{place} is declared already, as a {known.kind} with other buckets or labels ({labelled})"
            )
        return known

    def stats(self) -> dict[str, Family]:
        """All metrics, by name."""
        return {name: series.stats() for name, series in list(self._series.items())}

    def take_changes(self) -> dict[str, Family]:
        """Changes since the last call, for ``merge`` in another process."""
        changes = {name: series.take_changes() for name, series in list(self._series.items())}
        return {name: family for name, family in changes.items() if family is not None}

    def enter(self, process: Hashable) -> None:
        """Let the gauges of a process count from now on."""
        with self._lock:
            self._processes.add(process)

    def leave(self, process: Hashable) -> None:
        """Let the gauges of a process count no longer: it has ended."""
        with self._lock:
            self._processes.discard(process)
            for series in self._series.values():
                series.forget(process)

    def merge(self, changes: Mapping[str, Family], process: Hashable) -> None:
        """Take over the changes of another process; logs what is declared differently here."""
        for name, family in changes.items():
            try:
                declared = family["kind"], name, family["help"], family["labels"], family.get("bounds", ())
                series = self.declare(*declared)
            except ValueError as error:
                logger.warning("%s", error)
                continue
            with self._lock:
                if series.kind != "gauge" or process in self._processes:
                    series.merge(family, process)


_CURRENT: ContextVar[tuple[Metrics | None, Hashable]] = ContextVar("torchpipe_py.metrics", default=(None, None))


def current() -> Metrics | None:
    """The metrics of the pipe that the calling thread sets up a backend of."""
    return _CURRENT.get()[0]


def collect_in(metrics: Metrics | None, source: Hashable = None) -> None:
    """From now on, what backends on this thread declare belongs to ``metrics``; ``source`` sets the gauges."""
    _CURRENT.set((metrics, source))


def summed(parts: Iterable[Mapping[str, Family]]) -> dict[str, Family]:
    """The sums of metrics of several pipes or processes. Of one that they declare differently, the last counts."""
    sums: dict[str, Family] = {}
    for part in parts:
        for name, family in part.items():
            known = sums.get(name)
            if known is None and len(sums) >= MOST_METRICS:
                continue
            is_same = known is not None and _declaration(known) == _declaration(family)
            before = known["samples"] if known is not None and is_same else ()
            sums[name] = {**family, "samples": _added(before, family["samples"])}
    taken: set[str] = set()
    for name, family in list(sums.items()):
        exposed = _exposed(family["kind"], name)
        if taken.isdisjoint(exposed):
            taken |= exposed
        else:
            del sums[name]
    return sums


def _exposed(kind: str, name: str) -> set[str]:
    """The names of a metric in ``/metrics``."""
    ends = {"counter": ("", "_total"), "gauge": ("",), "histogram": ("", "_bucket", "_count", "_sum")}
    return {name + end for end in ends[kind]}


def totals(metrics: Mapping[str, Family]) -> dict[str, Family]:
    """The metrics of a process that has ended: all but gauges."""
    return {name: family for name, family in metrics.items() if family["kind"] != "gauge"}


def _declaration(family: Family) -> tuple[Any, ...]:
    return family["kind"], family["labels"], family.get("bounds")


def _added(some: Iterable[dict[str, Any]], more: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples of both, added where their labels are the same; not of more label sets than a pipe has."""
    added = {tuple(sample["labels"].items()): sample for sample in some}
    for sample in more:
        key = tuple(sample["labels"].items())
        if key not in added and len(added) >= MOST_LABEL_SETS:
            sample = {**sample, "labels": dict.fromkeys(sample["labels"], OTHER)}
            key = tuple(sample["labels"].items())
        known = added.get(key)
        if known is None:
            added[key] = sample
        elif "value" in sample:
            added[key] = {**sample, "value": _bounded(known["value"] + sample["value"])}
        else:
            counts = [one + other for one, other in zip(known["counts"], sample["counts"], strict=True)]
            added[key] = {**sample, "counts": counts, "sum": _bounded(known["sum"] + sample["sum"])}
    return list(added.values())


def _bounded(value: float) -> float:
    return max(-MOST_VALUE, min(value, MOST_VALUE))


def _text(value: object, most: int = MOST_CHARACTERS) -> str:
    """As text that UTF-8 can encode."""
    return str(value)[:most].encode("utf-8", "replace").decode()

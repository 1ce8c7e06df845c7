"""Backends of one batch range made of backends of others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torchpipe_py.backends.base import Backend, BatchRange, Data, close_all, run_padded
from torchpipe_py.backends.control.basic import Wrapper
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import ConfigError
from torchpipe_py.values import Value, to_int, to_list

LAUNCH = 1
"""What starting a run costs, in items computed: a larger one that is not quite full may be cheaper than several."""


def to_range(value: Value) -> BatchRange:
    """``"8,19"`` as (8, 19); ``ValueError`` unless 1 <= first <= second."""
    problem = f'expected "min,max" with 1 <= min <= max, got {value!r}'
    try:
        parts = [to_int(part) for part in to_list(value)]
    except ValueError:
        raise ValueError(problem) from None
    if len(parts) != 2 or not 1 <= parts[0] <= parts[1]:
        raise ValueError(problem)
    return parts[0], parts[1]


class Range(Wrapper):
    """The backend in its brackets with another batch range: batches are cut into pieces that it allows.

    The first pieces are the largest. A range with a size that no sum of allowed pieces gives is refused.
    """

    limits = Param(to_range, key="range", doc='"min,max" of the batches taken')

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        limits: BatchRange = params["limits"]
        return limits

    def setup(self) -> None:
        super().setup()
        low, high = self.inner.min(), self.inner.max()
        for size in range(self.limits[0], self.limits[1] + 1):
            if not _is_sum(size, low, high):
                label = self.inner.config.label
                raise ConfigError(f"range: {label} takes {low}..{high}, into which a batch of {size} cannot be cut")

    def forward(self, items: list[Data]) -> None:
        for start, end in _cuts(len(items), self.inner.min(), self.inner.max()):
            self.inner.forward(items[start:end])

    def max(self) -> int:
        return int(self.limits[1])

    def min(self) -> int:
        return int(self.limits[0])


def _is_sum(size: int, low: int, high: int) -> bool:
    """Whether ``size`` is a sum of numbers from ``low`` to ``high``: with as few of them as possible, or not at all."""
    return low * -(-size // high) <= size


def _cuts(size: int, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Where to cut ``size`` into pieces of ``low`` to ``high``, the largest first; start and end of each."""
    start = 0
    while start < size:
        left = size - start
        others = -(-left // high) - 1
        end = start + min(high, left - low * others)
        yield start, end
        start = end


class Composed(Backend):
    """Several backends as one, ``a&b``: what one takes is cut into runs of those whose ranges suit it best.

    Its range is the union of theirs. A run that is too small for its backend is filled up with copies, the outcome of
    which is dropped.
    """

    children = (1, None)

    def setup(self) -> None:
        for child in self.config.children:
            child.setup()
        self._runs = _best_runs([(child.min(), child.max()) for child in self.config.children])

    def forward(self, items: list[Data]) -> None:
        start = 0
        while start < len(items):
            which, count = self._runs[len(items) - start]
            run_padded(self.config.children[which], items[start : start + count])
            start += count

    def close(self) -> None:
        close_all(reversed(self.config.children))

    def max(self) -> int:
        return max(child.max() for child in self.config.children)

    def min(self) -> int:
        return min(child.min() for child in self.config.children)

    def any_thread(self) -> bool:
        return all(child.any_thread() for child in self.config.children)

    def signature(self) -> Signature:
        return self.config.children[0].signature()

    def batch_key(self, item: Data) -> Hashable:
        return self.config.children[0].batch_key(item)


def _best_runs(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each number of items, up to the largest: which backend to run first, and with how many of them.

    The runs of all of them together compute the fewest items, padding included, and ``LAUNCH`` more for each run.
    """
    costs, runs = [0], [(0, 0)]
    for size in range(1, max(high for _, high in ranges) + 1):
        cost, _, run = min(
            (max(count, low) + LAUNCH + costs[size - count], -count, (which, count))
            for which, (low, high) in enumerate(ranges)
            for count in range(1, min(size, high) + 1)
        )
        costs.append(cost)
        runs.append(run)
    return runs

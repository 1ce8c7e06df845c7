"""The histograms of `pipe.stats()`: what is counted where."""

from __future__ import annotations

from conftest import Register

from torchpipe_py import ItemBackend, pipe
from torchpipe_py.runtime.statistics import BOUNDS_MS, COUNTS, Record, summed


def counted(seconds: float) -> int:
    """Which of the counters a time is counted by."""
    record = Record("node", 0)
    record.computed(seconds)
    counts: list[int] = summed([record])["histograms"]["compute"]
    assert len(counts) == COUNTS
    return counts.index(1)


def test_a_counter_is_bounded_by_powers_of_two_of_a_microsecond():
    assert [counted(us / 1e6) for us in (0.2, 1.5, 2.5, 3.5, 4.5, 1000.5)] == [0, 1, 2, 2, 3, 10]
    for seconds in (0.3e-6, 5e-6, 0.02, 60.0):
        place = counted(seconds)
        assert seconds * 1000 < BOUNDS_MS[place]
        assert place == 0 or seconds * 1000 >= BOUNDS_MS[place - 1]


def test_times_beyond_every_bound_and_below_zero():
    assert counted(1e9) == COUNTS - 1 == len(BOUNDS_MS)
    assert 0 <= counted(-1e-9) < COUNTS


class Twice(ItemBackend):
    def forward_item(self, item):
        item["result"] = item["data"] * 2


def test_singles_count_once_each(register: Register):
    with pipe({"backend": register(Twice)}) as run:
        for _ in range(7):
            run({"data": 1})
        run([{"data": 1} for _ in range(5)], timeout=60)
        node = run.stats()["nodes"]["node"]
    assert [sum(node["histograms"][name]) for name in ("queue", "compute")] == [12, 12]
    assert len(node["instance_compute_ms"]) == node["instances"]
    assert sum(node["instance_compute_ms"]) == node["compute_ms"]


def test_batches_count_their_requests_and_themselves(register: Register):
    class Batched(Twice):
        def max(self):
            return 4

    with pipe({"backend": register(Batched), "instance_num": 2, "batching_timeout": 5}) as run:
        run([{"data": 1} for _ in range(50)])
        node = run.stats()["nodes"]["node"]
    histograms = node["histograms"]
    assert sum(histograms["queue"]) == sum(histograms["batch_wait"]) == 50
    assert sum(histograms["compute"]) == node["batches"]

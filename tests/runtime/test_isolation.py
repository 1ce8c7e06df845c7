"""One bad item fails alone, each request has its own answer once, and no more are in flight than allowed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
from conftest import Register, encode, picture
from kit.backends import EchoFour, Gate
from kit.cells import check_each
from kit.waits import WAIT, error_of, in_threads, outcome, wait_queued

from torchpipe_py import Backend, BackendError, DecodeError, ItemBackend, Overloaded, PipeClosed, pipe
from torchpipe_py.errors import NoResult

# -- one pipe ---------------------------------------------------------------------------------------------------------


Data = dict[str, Any]


class Count(ItemBackend):
    """One more in ``count``; data moves into result."""

    def forward_item(self, item: Data) -> None:
        item["count"] = item.get("count", 0) + 1
        item["result"] = item.pop("data")


class Eight(Backend):
    """Eight at once; writes every result before it gives up because of the bad one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sizes: list[int] = []

    def forward(self, items: list[Data]) -> None:
        self.sizes.append(len(items))
        for item in items:
            item["count"] = item.get("count", 0) + 1
            item["result"] = f"{item['data']} x{item['count']}"
        if any(item["data"] == "bad" for item in items):
            raise ValueError(f"a bad item after {self.sizes}")

    def max(self) -> int:
        return 8


def errors_of_one_batch(register: Register, config: dict[str, Any], items: list[Data]) -> list[BaseException | None]:
    """Run ``items`` as one batch: queued while the instance is busy with another request."""
    gate = Gate(blocks=lambda data: data == "first")
    config = {**config, "backend": f"S[{register(gate.backend)},{config['backend']}]", "instance_num": 1}
    with pipe(config) as p, gate:
        first = gate.hold(p, {"data": "first"})
        futures = [p.submit(item) for item in items]
        wait_queued(p, len(items))
        gate.open()
        error_of(first)
        errors = [error_of(future) for future in futures]
        assert p.stats()["nodes"]["node"]["batch_sizes"] == {1: 1, len(items): 1}
    return errors


@pytest.mark.parametrize("earlier", ["", "{count},"])
@pytest.mark.parametrize("position", range(4))
def test_bad_item_of_a_batch_fails_alone(register: Register, earlier: str, position: int) -> None:
    items: list[Data] = [{"data": f"good {number}", "mine": number} for number in range(3)]
    items.insert(position, {"data": "bad"})
    backend = earlier.format(count=register(Count)) + register(Eight)
    errors = errors_of_one_batch(register, {"backend": backend}, items)
    assert [error is not None for error in errors] == [index == position for index in range(4)]
    bad = errors[position]
    assert isinstance(bad, BackendError)
    assert "a bad item after [1, 4, " in str(bad.__cause__)
    del items[position]
    times = 2 if earlier else 1
    for number, item in enumerate(items):
        assert item == {
            "data": f"good {number}",
            "mine": number,
            "count": times,
            "result": f"good {number} x{times}",
        }


class Alone(Eight):
    """Fails for more than one item."""

    def forward(self, items: list[Data]) -> None:
        if len(items) > 1:
            raise ValueError(f"{len(items)} items")
        super().forward(items)


def test_backend_without_batches_is_logged_once(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    items: list[Data] = [{"data": number} for number in range(4)]
    assert errors_of_one_batch(register, {"backend": register(Alone)}, items) == [None] * 4
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "a batch of 4 failed, and each of its items ran alone: ValueError: 4 items" in record.getMessage()


@pytest.mark.parametrize("middle", ["close", "cancel"])
def test_every_request_completes_exactly_once(register: Register, middle: str) -> None:
    """Good, bad, late, cancelled ones, and a close in the middle of them: one call back each."""

    calls: Counter[int] = Counter()
    lock = threading.Lock()
    started = threading.Barrier(5)

    def done(number: int, data: Data, error: BaseException | None) -> None:
        with lock:
            calls[number] += 1

    def work(index: int) -> None:
        random_ = random.Random(index)
        for number in range(index * 200, index * 200 + 200):
            timeout = random_.choice([None, None, 0.0, WAIT])
            data = {"data": number if random_.random() < 0.9 else ValueError("bad")}
            if number % 200 == 100:
                started.wait(WAIT)
            try:
                ticket = p.dispatch(data, partial(done, number), timeout)
            except RuntimeError:
                refused.add(number)
                continue
            if random_.random() < 0.2:
                ticket.cancel()

    refused: set[int] = set()
    name = register(EchoFour)
    config = {"a": {"backend": name, "instance_num": 2, "next": "b"}, "b": {"backend": name, "batching_timeout": 1}}
    with pipe(config) as p:
        workers = threading.Thread(target=in_threads, args=(4, work))
        workers.start()
        started.wait(WAIT)
        if middle == "close":
            p.close()
        workers.join()
        p.close()
        assert p.stats()["inflight"] == 0
    assert set(calls.values()) == {1}
    assert calls.keys() | refused == set(range(800))
    assert not calls.keys() & refused
    assert (middle == "close") or not refused


def test_list_is_admitted_whole_or_not_at_all(register: Register) -> None:
    gate = Gate()
    with pipe({"max_inflight": 3, "a": {"backend": register(gate.backend)}}) as p, gate:
        first = p.submit([{"data": 1}, {"data": 2}])
        with pytest.raises(Overloaded, match="2 requests in flight, 2 more would pass max_inflight = 3"):
            p([{"data": 3}, {"data": 4}])
        second = p.submit({"data": 5})
        gate.open()
        outcome(first)
        outcome(second)
    assert sorted(data for batch in gate.batches for data in batch) == [1, 2, 5]


@pytest.mark.parametrize("is_closed", [False, True])
def test_refused_call_leaves_the_dict_unchanged(is_closed: bool, register: Register) -> None:
    gate = Gate()
    before = {"data": 2, "result": "old", "error": "old"}
    calls: dict[str, Callable[[pipe, Data], object]] = {
        "call": lambda p, data: p(data),
        "call with a timeout": lambda p, data: p(data, WAIT),
        "call of a list": lambda p, data: p([data, {"data": 3}]),
        "submit": lambda p, data: p.submit(data).result(WAIT),
        "acall": lambda p, data: asyncio.run(p.acall(data)),
        "map": lambda p, data: next(p.map([data])),
        "dispatch": dispatched,
    }

    def check(name: str) -> None:
        data = dict(before)
        with pytest.raises(PipeClosed if is_closed else Overloaded):
            calls[name](p, data)
        assert data == before

    with pipe({"max_inflight": 1, "a": {"backend": register(gate.backend)}}) as p, gate:
        held = gate.hold(p, {"data": 1})
        if is_closed:
            gate.open()
            p.close()
        check_each(calls, check)
        gate.open()
        outcome(held)


def dispatched(p: pipe, data: Data, timeout: float | None = None) -> Data:
    outcomes: SimpleQueue[tuple[Data, BaseException | None]] = SimpleQueue()
    p.dispatch(data, lambda *outcome: outcomes.put(outcome), timeout)
    data, error = outcomes.get(timeout=WAIT)
    if error is not None:
        raise error
    return data


@pytest.mark.parametrize("timeout", [None, WAIT])
@pytest.mark.parametrize("call", [lambda p, data, timeout: p(data, timeout), dispatched])
def test_accepted_request_does_not_show_an_earlier_outcome(call: Callable[..., Data], timeout: float | None) -> None:
    with pipe({"a": {"backend": "Identity", "filter": "break"}}) as p:
        data = call(p, {"data": 1, "result": "old", "error": "old"}, timeout)
    assert "result" not in data
    assert isinstance(data["error"], NoResult)


# -- many threads, good and bad images, answers known beforehand ------------------------------------------------------


THREADS, CALLS = 32, 60


def test_no_answer_is_ever_lost_or_mistaken(classifier: str) -> None:
    config: dict[str, Any] = {
        "decode": {"backend": "DecodeMat", "instance_num": 2, "next": "prepare"},
        "prepare": {"backend": "S[ResizeMat,cvtColorMat,Mat2Tensor]", "resize_h": 8, "resize_w": 8, "color": "rgb"},
        "model": {"backend": "OnnxTensor", "model": classifier, "max": 8, "postprocessor": "SoftmaxMax"},
    }
    config["prepare"]["next"] = "model"
    config["model"] |= {"mean": 127, "std": 64, "instance_num": 2, "batching_timeout": 50}
    good = [encode(picture(20, 16 + seed, seed)) for seed in range(24)]
    bad = [b"", b"no image", b"\xff\xd8\xff\xe0 no jpeg", good[0][:40]]
    answers: dict[bytes, Any] = {}

    def work(index: int) -> None:
        random_ = random.Random(index)
        for _ in range(CALLS):
            image = random_.choice(bad if random_.random() < 0.1 else good)
            data: dict[str, Any] = {"data": image}
            p(data)
            if image in bad:
                assert "result" not in data
                assert type(data["error"]) is answers[image]
            else:
                label, score = data["result"]
                assert label == answers[image][0]
                assert abs(score - answers[image][1]) < 1e-5

    with pipe(config) as p:
        for image in good + bad:
            data: dict[str, Any] = {"data": image}
            p(data)
            answers[image] = data["result"] if "result" in data else type(data["error"])
        in_threads(THREADS, work)
        stats = p.stats()
    assert {answers[image] for image in bad} == {DecodeError}
    assert len({answers[image] for image in good}) == len(good)
    assert (stats["inflight"], stats["admitted"]) == (0, THREADS * CALLS + len(good) + len(bad))
    assert max(stats["nodes"]["model"]["batch_sizes"]) == 8

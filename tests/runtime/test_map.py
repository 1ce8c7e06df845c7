"""``pipe.map`` and ``ordered_by``: in order, bounded, errors raised or as values, one request of a key at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import Any, ClassVar

import pytest
from conftest import Register
from kit.backends import Gate
from kit.engines import workers_of
from kit.inside import node_of
from kit.waits import WAIT, wait_queued

from torchpipe_py import (
    Backend,
    BackendError,
    ConfigError,
    DeadlineExceeded,
    DecodeError,
    InvalidRequest,
    ItemBackend,
    Overloaded,
    PipeClosed,
    pipe,
)
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc.engine import EngineServer
from torchpipe_py.runtime import mapping
from torchpipe_py.runtime.mapping import in_order
from torchpipe_py.runtime.nodes.ordering import Order
from torchpipe_py.runtime.request import Request, ignore_outcome

# -- map --------------------------------------------------------------------------------------------------------------


class Double(ItemBackend):
    """Twice the number; the later ones sooner."""

    def forward_item(self, item: dict[str, Any]) -> None:
        if item["data"] == "bad":
            raise ValueError("a bad item")
        threading.Event().wait(0.01 * (3 - item["data"] % 4))
        item["result"] = 2 * item["data"]


@pytest.fixture
def run(register: Register) -> Iterator[pipe]:
    with pipe({"backend": register(Double), "instance_num": 4}) as built:
        yield built


def items(*values: Any) -> Iterator[dict[str, Any]]:
    return ({"data": value} for value in values)


def test_map_yields_in_order_and_reads_at_most_ahead(run: pipe) -> None:
    taken = []

    def source() -> Iterator[dict[str, Any]]:
        for index in range(10):
            taken.append(index)
            yield {"data": index}

    results = run.map(source(), ahead=3)
    for index in range(10):
        assert next(results)["result"] == 2 * index
        assert len(taken) <= index + 4
    assert next(results, None) is None


def test_map_raises_error_in_its_place_and_cancels_the_rest(run: pipe) -> None:
    results = run.map(items(0, "bad", 2, 3))
    assert next(results)["result"] == 0
    with pytest.raises(BackendError, match="a bad item"):
        next(results)
    assert next(results, None) is None


def test_map_returns_errors_as_values(run: pipe) -> None:
    done = list(run.map([{"data": 0}, {"data": "bad"}, {"nodata": 1}, {"data": 3}], return_errors=True))
    assert [item.get("result") for item in done] == [0, None, None, 6]
    assert [type(item.get("error")) for item in done] == [type(None), BackendError, InvalidRequest, type(None)]
    with pipe({"backend": "DecodeMat"}) as decode:  # what has no result is a value either way
        assert [type(item["error"]) for item in decode.map(items(b"no image"))] == [DecodeError]


def test_map_keeps_only_newest_waiting_item(register: Register) -> None:
    gate = Gate(blocks=lambda data: data == 0)

    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 0}
        gate.wait_entered()
        yield from items(*range(1, 10))
        gate.open()

    with pipe({"backend": register(gate.backend)}) as run, gate:
        assert [done["result"] for done in run.map(source(), ahead=1, newest=True)] == [0, 9]


def test_map_raises_error_of_iterable(run: pipe) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 0}
        raise OSError("no more")

    for newest in (False, True):
        with pytest.raises(OSError, match="no more"):
            list(run.map(source(), newest=newest))


@pytest.mark.parametrize("newest", [False, True])
def test_map_yields_result_before_it_reads_the_next_item(run: pipe, newest: bool) -> None:
    taken = threading.Event()

    def source() -> Iterator[dict[str, Any]]:
        yield {"data": 3}
        if newest:
            assert taken.wait(WAIT), "the result is not given while the next item is awaited"
        yield {"data": 7}

    results = run.map(source(), newest=newest)
    assert next(results)["result"] == 6
    taken.set()
    assert [done["result"] for done in results] == [14]


def test_map_reads_nothing_before_first_result_is_requested(run: pipe) -> None:
    read: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        read.append(1)
        yield {"data": 1}

    del_me = run.map(source(), newest=True)
    del del_me
    assert read == []


def test_map_refuses_ahead_below_one(run: pipe) -> None:
    with pytest.raises(ValueError, match="ahead must be at least 1, not 0"):
        run.map(items(1), ahead=0)


# -- ordered_by -------------------------------------------------------------------------------------------------------


class Count(Backend):
    """The result is how many requests of the camera came before, and their data; 3 of each 10 fail."""

    at_once: ClassVar[Counter[str]] = Counter()
    most = 0

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            self.at_once[item["camera"]] += 1
            type(self).most = max(self.most, self.at_once[item["camera"]])
        try:
            for item in items:
                state = item["state"]
                state["before"] = state.get("before", 0) + 1
                state["last"] = (*state.get("last", ()), item["data"])
                if item["data"] % 10 in (2, 3, 7):
                    raise ValueError("bad")
                item["result"] = state["last"]
        finally:
            for item in items:
                self.at_once[item["camera"]] -= 1

    def max(self) -> int:
        return 4


NODES = {
    "batches": {"instance_num": 3},
    "single": {"max": 1, "instance_num": 3},
    "with a timeout": {"batching_timeout": 5, "instance_num": 2},
}


def check_order(ask: Any, keys: list[str]) -> None:
    """Each answer has what came before it, without what failed."""
    futures = [(key, number, ask({"data": number, "camera": key})) for number in range(40) for key in keys]
    for key, number, future in futures:
        if number % 10 in (2, 3, 7):
            assert future.exception(WAIT) is not None
        else:
            data = future.result(WAIT)
            good = tuple(before for before in range(number + 1) if before % 10 not in (2, 3, 7))
            assert (data["camera"], data["result"]) == (key, good)
            assert "state" not in data


@pytest.mark.parametrize("name", NODES)
def test_requests_of_a_key_run_in_order_with_its_state(name: str, register: Register) -> None:
    keys = dict(NODES[name])

    class Counted(Count):
        most = 0

        def max(self) -> int:
            return int(keys.get("max", 4))

    config = {"backend": register(Counted), "ordered_by": "camera", **keys}
    config.pop("max", None)
    with pipe({"first": {"next": "count"}, "count": {**config, "map": "first[result:data,camera:camera]"}}) as run:
        check_order(run.submit, ["a", "b", "c"])
        assert run.stats()["nodes"]["count"]["queued"] == 0
    assert Counted.most == 1


def test_engine_process_keeps_order_across_workers(register: Register) -> None:
    config = {"count": {"backend": register(Count), "ordered_by": "camera", "shared": True}}
    with workers_of(config, 2) as workers:
        check_order(workers[0].pipe.submit, ["a", "b"])
        data = workers[1].pipe({"data": 90, "camera": "a"})
        assert len(data["result"]) == 29


def test_cancelled_request_does_not_block_its_key(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend), "ordered_by": "camera", "instance_num": 2}) as run, gate:
        first = run.submit({"data": 0, "camera": 1}, timeout=30)
        gate.wait_entered()
        waiting = [run.submit({"data": number, "camera": 1}) for number in range(1, 4)]
        waiting[0].cancel()
        with pytest.raises(DeadlineExceeded):
            run({"data": 9, "camera": 1}, timeout=0.01)
        assert gate.batches == [[0]], "an instance is idle, but it is not their turn"
        gate.open()
        assert [future.result(WAIT)["result"] for future in (first, *waiting[1:])] == [0, 2, 3]
        assert run({"data": 7, "camera": 1})["result"] == 7, "on the thread of its caller as well"


def test_flood_of_one_key_does_not_delay_other_keys(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend), "ordered_by": "camera", "instance_num": 2}) as run, gate:
        run.limit_delays(None)
        flood = [run.submit({"data": number, "camera": 1}) for number in range(50)]
        gate.wait_entered()
        node_of(run).times.add(1, 10.0, perf_counter())
        wait_queued(run, 49)
        run.check_delay(1.0)  # of a request of another camera, say, for which an instance is idle
        gate.open()
        for future in flood:
            assert future.exception(WAIT) is None or isinstance(future.exception(), Overloaded)


def test_map_of_the_newest_stops_reading_once_closed() -> None:
    may_read, is_over = threading.Semaphore(1), threading.Event()

    def frames() -> Iterator[dict[str, Any]]:
        try:
            while may_read.acquire(timeout=WAIT):
                yield {"data": 1}
        finally:
            is_over.set()

    with pipe({"backend": "Identity"}) as run:
        results = run.map(frames(), newest=True)
        may_read.release()
        assert next(results)["result"] == 1
        results.close()  # type: ignore[attr-defined]
        may_read.release()
        assert is_over.wait(WAIT)


def test_request_abandoned_at_the_node_lets_the_next_of_its_key_in(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend), "ordered_by": "camera"}) as run, gate:
        held = gate.hold(run, {"data": 0, "camera": 1})
        abandoned = run.submit({"data": 1, "camera": 2})
        wait_queued(run, 1)
        following = run.submit({"data": 2, "camera": 2})
        wait_queued(run, 2)
        assert abandoned.cancel()
        gate.open()
        assert [each.result(WAIT)["result"] for each in (held, following)] == [0, 2]


def test_state_is_unchanged_by_a_batch_that_failed(register: Register) -> None:
    gate = Gate(most=2, blocks=lambda data: data == "first")

    class Alone(gate.backend):  # type: ignore[misc,name-defined]
        """Counts visits in place, and raises for two at once; the result is the count."""

        def forward(self, items: list[dict[str, Any]]) -> None:
            super().forward(items)
            for item in items:
                item["state"].setdefault("visits", []).append(1)
                item["result"] = len(item["state"]["visits"])
            if len(items) > 1:
                raise ValueError("one at a time")

    with pipe({"backend": register(Alone), "ordered_by": "camera"}) as run, gate:
        held = gate.hold(run, {"data": "first", "camera": 0})
        both = [run.submit({"data": number, "camera": number}) for number in (1, 2)]
        wait_queued(run, 2)
        gate.open()
        assert [each.result(WAIT)["result"] for each in (held, *both)] == [1, 1, 1]
    assert [len(batch) for batch in gate.batches] == [1, 2, 1, 1]


def test_close_fails_requests_that_wait_for_their_key(register: Register) -> None:
    gate = Gate()
    run = pipe({"backend": register(gate.backend), "ordered_by": "camera"})
    with gate:
        first = gate.hold(run, {"data": 0, "camera": 1})
        waiting = [run.submit({"data": number, "camera": 1}) for number in range(2000)]
        wait_queued(run, 2000)
        closing = threading.Thread(target=run.close)
        closing.start()
        assert {type(future.exception(WAIT)) for future in waiting} == {PipeClosed}
        gate.open()
        assert first.result(WAIT)["result"] == 0
    closing.join(WAIT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "node 'node' is ordered by 'camera': .* the request has none"),
        ({"camera": [1]}, r"expected a text of at most 256 characters or an integer, got \[1\]"),
        ({"camera": "x" * 257}, "expected a text of at most 256 characters"),
        ({"camera": True}, "got True"),
        ({"camera": 2**64}, "or an integer"),
    ],
)
def test_refuses_request_without_valid_key(given: dict[str, Any], message: str, register: Register) -> None:
    with pipe({"backend": "Identity", "ordered_by": "camera"}) as run, pytest.raises(InvalidRequest, match=message):
        run({"data": 1, **given})


def test_key_states_are_bounded_and_expire() -> None:
    entered: list[Request] = []
    errors: list[BaseException] = []

    now = [100.0]

    def order(seconds: float) -> Order:
        def fail(request: Request, error: BaseException) -> None:
            errors.append(error)

        return Order("track", "camera", seconds, entered.append, fail, most=2, clock=lambda: now[0])

    def visit(kept: Order, camera: str) -> Any:
        kept.put(request := Request({"data": 1, "camera": camera}, ignore_outcome))
        state = request.data["state"].setdefault("visits", 0)
        request.data["state"]["visits"] += 1
        kept.delivering(lambda request: None)(request)
        return state

    lasting = order(60.0)
    assert [visit(lasting, camera) for camera in "abab"] == [0, 0, 1, 1]
    lasting.put(Request({"data": 1, "camera": "c"}, ignore_outcome))
    assert [type(error) for error in errors] == [Overloaded]
    assert "keeps the states of 2 different 'camera' (ordered_by)" in str(errors[0])
    now[0] += 60.0
    assert [visit(lasting, camera) for camera in "cac"] == [0, 0, 1], "idle keys are forgotten"


@pytest.mark.parametrize(
    ("keys", "processes", "message"),
    [
        ({"ordered_by": "camera"}, 2, "key 'ordered_by': works in one process only, not in 2: set shared = "),
        ({"state_seconds": 3}, 1, "key 'state_seconds': needs ordered_by"),
        ({"ordered_by": "camera", "state_seconds": -1}, 1, "key 'state_seconds': expected at least 0"),
        ({"ordered_by": "camera", "decode_isolation": "process"}, 1, "runs its backend in a separate process"),
        ({"orderd_by": "camera"}, 1, "'ordered_by'"),
    ],
)
def test_refuses_invalid_ordered_by_when_built(keys: dict[str, Any], processes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_pipeline({"track": {"backend": "DecodeMat", **keys}}, processes=processes)


def test_several_engine_processes_are_refused() -> None:
    plan = plan_pipeline({"track": {"ordered_by": "camera", "shared": True}}, processes=2)
    with pytest.raises(ConfigError, match="works with one engine process only"):
        EngineServer(plan)


def test_interrupted_map_cancels_the_request_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[Future[Any]] = []

    class Interrupted(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise KeyboardInterrupt

    def start(data: Any, future: Future[Any]) -> None:
        futures.append(future)

    monkeypatch.setattr(mapping, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(in_order(start, ({"data": number} for number in range(5)), ahead=3, newest=False, return_errors=False))
    assert [future.cancelled() for future in futures] == [True] * 3

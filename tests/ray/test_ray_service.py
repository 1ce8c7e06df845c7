"""A replica without Ray: requests over HTTP and by a handle, health, the exchange of its pipe, its metrics."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import encode, picture
from kit.backends import Gate, returns
from kit.compressed import PIECES, inflating_held_back
from kit.contract import HAS_GRPC, Asked, as_rpc
from kit.inside import pipes_of
from kit.kept_spans import KeptSpans
from kit.waits import WAIT, eventually
from opentelemetry import trace

from torchpipe_py import DecodeError, InvalidRequest, PipeClosed, parse_toml, pipe
from torchpipe_py.methods import http
from torchpipe_py.methods.oip.core import UNKNOWN_MODEL
from torchpipe_py.ray import service
from torchpipe_py.ray.arguments import Arguments
from torchpipe_py.ray.metrics import FIGURE, Metrics, QueueTime, request_ms
from torchpipe_py.ray.service import PipeReplica, UnhealthyError
from torchpipe_py.runtime.record import spans, statistics
from torchpipe_py.wire.http import HttpAnswer, HttpRequest
from torchpipe_py.wire.parameters import MOST_HEADERS
from torchpipe_py.wire.pictures import Picture

ROOT = Path(__file__).parents[2]
IDENTITY = {"backend": "Identity"}
LIMITS: dict[str, Any] = {"drain_seconds": 30.0, "max_message_bytes": 200, "max_text_bytes": 200}


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica changes the working directory."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def gate(register: Any) -> Iterator[tuple[Gate, dict[str, Any]]]:
    """A gate and the configuration of a pipe that waits at it."""
    with Gate() as opened:
        yield opened, {"backend": register(opened.backend)}


def served(use: Callable[[PipeReplica], Awaitable[Any]], config: Any = IDENTITY, **arguments: Any) -> Any:
    """The result of ``use`` for a replica of the pipe, which is closed afterwards."""

    async def run() -> Any:
        given = Arguments("configs/demo.toml", **{**LIMITS, **arguments})
        replica = PipeReplica(given, config, str(ROOT))
        try:
            return await use(replica)
        finally:
            await replica.end()

    return asyncio.run(run())


def ask(replica: PipeReplica, name: str, body: bytes = b"", query: str = "", **fields: str) -> Awaitable[HttpAnswer]:
    """``name`` is a method and a path."""

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:7]
        yield body[7:]

    request = HttpRequest.named(name)
    request.query, request.fields = query, {name.replace("_", "-"): value for name, value in fields.items()}
    return replica.answer(request, pieces())


INFER = "POST /infer"
JSON = {"content_type": "application/json"}


def test_answers_bytes() -> None:
    """``test_contract`` has the same for JSON."""
    got: HttpAnswer = served(lambda replica: ask(replica, INFER, b"bytes of any kind"))
    assert (got.status, json.loads(got.body)) == (200, {"result": {"b64": "Ynl0ZXMgb2YgYW55IGtpbmQ="}})
    assert got.headers == {}


@pytest.mark.parametrize("size", [100, 150_000])
def test_inflates_bodies_and_compresses_answers(size: int) -> None:
    fields = {"content_type": "application/json", "content_encoding": "gzip", "accept_encoding": "gzip"}
    body = json.dumps({"inputs": {"data": {"dtype": "uint8", "shape": [size], "data": [7] * size}}}).encode()
    limits = {"max_message_bytes": 10**6}
    plain: HttpAnswer = served(lambda replica: ask(replica, INFER, body, **JSON), **limits)
    answer: HttpAnswer = served(lambda replica: ask(replica, INFER, gzip.compress(body), **fields), **limits)
    assert (answer.status, answer.headers.get("Content-Encoding")) == (200, "gzip" if size > 1400 else None)
    assert (gzip.decompress(answer.body) if size > 1400 else answer.body) == plain.body
    assert [each.headers.get("Vary") for each in (plain, answer)] == ["Accept-Encoding" if size > 1400 else None] * 2


BOMB = gzip.compress(bytes(1000), mtime=0)
TENSOR = b'{"inputs": [{"name": "data", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]}]}'


@pytest.mark.parametrize(
    ("name", "body", "status", "code", "text"),
    [
        (INFER, b"x" * 201, 413, "too_large", "a body of more than 200 bytes (max_message_bytes)"),
        (INFER, b"{", 400, "invalid_request", ""),
        (
            "POST /v2/models/demo/infer",
            TENSOR,
            400,
            "invalid_request",
            "input 'data': a batch of 3; the limit is 2 (max_batch)",
        ),
        ("GET /v2/models/dem", b"", 404, "unknown_node", f"{UNKNOWN_MODEL}: 'dem' is not found; did you mean 'demo'?"),
        ("GET /v2/modls", b"", 404, "not_found", "no /v2/modls; did you mean '/v2/models/…'?"),
        ("GET /infer", b"", 405, "method_not_allowed", "/infer takes POST, not GET"),
    ],
)
def test_answers_errors(name: str, body: bytes, status: int, code: str, text: str) -> None:
    answer: HttpAnswer = served(lambda replica: ask(replica, name, body, **JSON), max_batch=2)
    told = json.loads(answer.body)
    assert (answer.status, told["code"]) == (status, code)
    assert told["error"] == text or not text
    assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize(
    ("body", "coding", "status", "said"),
    [
        (BOMB, "gzip", 413, "the body inflates to more than 200 bytes (max_message_bytes)"),
        (b"plain", "deflate", 400, "the body is not deflate: incorrect header check"),
        (b"plain", "br", 415, "Content-Encoding 'br'; expected gzip, deflate or none"),
    ],
)
def test_refuses_wrong_compressed_bodies(body: bytes, coding: str, status: int, said: str) -> None:
    answer: HttpAnswer = served(lambda replica: ask(replica, INFER, body, content_encoding=coding))
    assert (answer.status, json.loads(answer.body)["error"]) == (status, said)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("GET /v2", {"name": "torchpipe_py"}),
        ("GET /v2/health/live", {"live": True}),
        ("GET /v2/health/ready", {"ready": True}),
        ("GET /v2/models/demo/ready", {"name": "demo", "ready": True}),
        ("GET /v2/models/demo/versions/1", {"name": "demo", "versions": ["1"]}),
        ("GET /openapi.json", {"openapi": "3.1.0"}),
    ],
)
def test_answers_metadata_and_readiness(name: str, part: dict[str, Any]) -> None:
    answer: HttpAnswer = served(lambda replica: ask(replica, name))
    assert answer.status == 200
    assert part.items() <= json.loads(answer.body).items()


def test_reports_time_of_each_part() -> None:
    answer: HttpAnswer = served(lambda replica: ask(replica, INFER, b"x", "timing=1"))
    assert "node.compute" in answer.headers["Server-Timing"]


def test_makes_spans_if_process_exports_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Ray's tracing, say."""
    kept = KeptSpans()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: kept.provider)
    monkeypatch.setattr(spans, "CLOSE_SECONDS", WAIT)

    async def use(replica: PipeReplica) -> None:
        await ask(replica, INFER, b"1", traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
        await ask(replica, INFER, b"2")
        await replica.infer(b"3")
        with kept.tracer.start_as_current_span("Ray's"):
            await replica.infer(b"4")

    served(use)
    found = [line for line in kept.tree() if "compute" not in line]
    assert found == ["POST /infer > pipe node", "Ray's > pipe node", "remote > POST /infer", "root > Ray's"]
    assert [span.instrumentation_scope.name for span in kept.named("POST /infer")] == ["torchpipe_py.ray"]


@pytest.mark.parametrize(
    ("given", "target"), [({}, None), ({"queue_target_ms": 0}, 0.0), ({"queue_target_ms": 80}, 0.08)]
)
def test_limits_the_queue_time_of_each_pipe(monkeypatch: pytest.MonkeyPatch, given: Any, target: float | None) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(pipe, "limit_delays", lambda run, seconds=None: limits.append(seconds))
    served(
        lambda replica: replica.reconfigure({"classifier.instance_num": 2}), parse_toml("configs/demo.toml"), **given
    )
    assert limits == [target, target]


def test_handle_gets_result_dict_or_error() -> None:
    async def use(replica: PipeReplica) -> tuple[Any, Any]:
        return await replica.infer(b"1"), await replica.infer({"data": b"2", "id": 7})

    assert served(use) == (b"1", {"data": b"2", "id": 7, "result": b"2"})
    with pytest.raises(DecodeError, match=r"^8 bytes: not a JPEG"):
        served(lambda replica: replica.infer(b"no image"), {"backend": "DecodeMat"})
    with pytest.raises(InvalidRequest, match="a request needs the key 'data'"):
        served(lambda replica: replica.infer({"dat": 1}))


def test_drops_a_cancelled_request_from_its_queue(gate: tuple[Gate, dict[str, Any]]) -> None:
    async def use(replica: PipeReplica) -> Any:
        first = asyncio.create_task(replica.infer(b"1"))
        await asyncio.to_thread(gate[0].wait_entered)
        second = asyncio.create_task(replica.infer(b"2"))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate[0].open()
        return await first

    assert served(use, gate[1]) == b"1"
    assert gate[0].batches == [[b"1"]]


LONG_JSON = json.dumps({"inputs": {"data": {"dtype": "uint8", "shape": [2**16], "data": [7] * 2**16}}}).encode()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """An event that says that a long body is being read, and one that lets it be read to its end."""
    begun, goes_on = threading.Event(), threading.Event()
    read_request = http.read_request

    def read(body: bytes, *more: Any) -> Any:
        if body == LONG_JSON:
            begun.set()
            assert goes_on.wait(WAIT)
        return read_request(body, *more)

    monkeypatch.setattr(http, "read_request", read)
    yield begun, goes_on
    goes_on.set()


def test_answers_others_while_long_json_is_read(reading: tuple[threading.Event, threading.Event]) -> None:
    async def use(replica: PipeReplica) -> Any:
        long = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON))
        await asyncio.to_thread(reading[0].wait, WAIT)
        assert (await ask(replica, INFER, b"x")).status == 200
        assert not long.done()
        reading[1].set()
        return (await long).status

    assert served(use, max_message_bytes=10**6) == 200


def test_drops_a_request_that_is_cancelled_while_it_is_read(
    gate: tuple[Gate, dict[str, Any]], reading: tuple[threading.Event, threading.Event]
) -> None:
    async def use(replica: PipeReplica) -> Any:
        first = asyncio.create_task(replica.infer(b"1"))
        await asyncio.to_thread(gate[0].wait_entered)
        long = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON))
        await asyncio.to_thread(reading[0].wait, WAIT)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        reading[1].set()
        await ask(replica, INFER, LONG_JSON, **JSON, query="deadline_ms=1")  # the reader has only one thread
        gate[0].open()
        return await first

    assert served(use, gate[1], max_message_bytes=10**6) == b"1"
    assert gate[0].batches == [[b"1"]]


LONG = gzip.compress(PIECES[:500_000], 1)
LARGE_LIMITS = {"max_message_bytes": 2**23}


def test_deadline_counts_from_the_arrival_of_a_compressed_body() -> None:
    async def use(replica: PipeReplica) -> Any:
        late = asyncio.create_task(ask(replica, INFER, LONG, content_encoding="gzip", x_deadline_ms="1"))
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        held = perf_counter()
        while perf_counter() <= held + 0.001:
            await asyncio.sleep(0)
        may_go_on.set()
        return await late

    with inflating_held_back() as (begun, may_go_on):
        answer = served(use, **LARGE_LIMITS)
    assert (answer.status, json.loads(answer.body)["code"]) == (504, "deadline_exceeded")


def test_bodies_are_inflated_one_at_a_time() -> None:
    async def use(replica: PipeReplica) -> Any:
        long = [asyncio.create_task(ask(replica, INFER, LONG, content_encoding="gzip")) for _ in range(3)]
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        assert (await ask(replica, INFER, gzip.compress(b"small"), content_encoding="gzip")).status == 200
        assert not begun.acquire(blocking=False)
        may_go_on.set()
        return [answer.status for answer in await asyncio.gather(*long)]

    with inflating_held_back() as (begun, may_go_on):
        assert served(use, **LARGE_LIMITS) == [200, 200, 200]


def test_no_further_piece_is_inflated_for_a_request_that_is_cancelled() -> None:
    async def use(replica: PipeReplica) -> Any:
        left = asyncio.create_task(ask(replica, INFER, gzip.compress(PIECES, 1), content_encoding="gzip"))
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        may_go_on.set()
        answer = await ask(replica, INFER, LONG, content_encoding="gzip")
        assert begun.acquire(blocking=False)
        assert not begun.acquire(blocking=False)
        return answer.status

    with inflating_held_back() as (begun, may_go_on):
        assert served(use, **LARGE_LIMITS) == 200


SIZE = 200 * 150 * 3


def test_bounds_images_that_wait_to_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``front/test_long_answers``: in bytes and by the deadline; those of clients that left are not encoded."""
    begun, go_on, encode_now = threading.Semaphore(0), threading.Event(), Picture.encode

    def encode_later(*args: Any) -> bytes:
        begun.release()
        assert go_on.wait(WAIT)
        return encode_now(*args)

    async def use(replica: PipeReplica) -> list[int]:
        def start(**fields: str) -> Any:
            return asyncio.create_task(ask(replica, INFER, encode(picture(200, 150)), accept="image/png", **fields))

        first = start()
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        late = await start(x_deadline_ms="500")
        leaver = start()
        refused = await start()  # the node decodes in order
        assert b"more than" in refused.body
        assert b"bytes of unanswered messages (max_held_bytes)" in refused.body
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        last = start()  # there is room again
        go_on.set()
        return [answer.status for answer in (late, refused, await first, await last)]

    monkeypatch.setattr(Picture, "encode", encode_later)
    limits = {"max_message_bytes": 10**6, "max_held_bytes": 3 * SIZE}
    assert served(use, {"backend": "DecodeMat"}, **limits) == [504, 429, 200, 200]
    assert begun.acquire(blocking=False)
    assert not begun.acquire(blocking=False), "an image was encoded in vain"


def test_bounds_bodies_that_wait_to_be_read(reading: tuple[threading.Event, threading.Event], register: Any) -> None:
    async def use(replica: PipeReplica) -> list[int]:
        first = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON))
        await asyncio.to_thread(reading[0].wait, WAIT)
        late = await ask(replica, INFER, LONG_JSON, **JSON, x_deadline_ms="1")
        waiting = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON, x_deadline_ms="60000"))
        await asyncio.sleep(0)
        refused = await ask(replica, INFER, LONG_JSON, **JSON)
        compressed = await ask(replica, INFER, gzip.compress(LONG_JSON), **JSON, content_encoding="gzip")
        reading[1].set()
        return [answer.status for answer in (late, refused, compressed, await first, await waiting)]

    limits = {"max_message_bytes": 10**6, "max_held_bytes": 2 * len(LONG_JSON) + 10_000}
    short = {"backend": register(returns("short"))}  # a long answer is held, too
    assert served(use, short, **limits) == [504, 429, 429, 200, 200]


def closed(answers: Sequence[HttpAnswer]) -> bool:
    """Whether each says that the pipe was closed, and when to come again."""
    told = {(each.status, json.loads(each.body)["code"], each.headers.get("Retry-After")) for each in answers}
    return told == {(503, "closed", "1")}


def test_refuses_bodies_that_wait_at_the_end_of_the_drain(reading: tuple[threading.Event, threading.Event]) -> None:
    async def use(replica: PipeReplica) -> None:
        read = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON))
        await asyncio.to_thread(reading[0].wait, WAIT)
        to_read = asyncio.create_task(ask(replica, INFER, LONG_JSON, **JSON, x_deadline_ms="600000"))
        to_inflate = asyncio.create_task(ask(replica, INFER, LONG, content_encoding="gzip"))
        await asyncio.sleep(0)
        await replica.end()
        assert closed(await asyncio.wait_for(asyncio.gather(read, to_read, to_inflate), WAIT))
        assert closed([await asyncio.wait_for(ask(replica, INFER, body, **JSON), WAIT) for body in (b"{}", LONG_JSON)])
        with pytest.raises(PipeClosed):
            await replica.infer(b"late")

    served(use, max_message_bytes=2**23, drain_seconds=0)


def test_refuses_answers_that_wait_at_the_end_of_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, encode_now = threading.Semaphore(0), threading.Event(), Picture.encode

    def encode_later(*args: Any) -> bytes:
        begun.release()
        assert go_on.wait(WAIT)
        return encode_now(*args)

    async def use(replica: PipeReplica) -> None:
        body = encode(picture(200, 150))
        made = [asyncio.create_task(ask(replica, INFER, body, accept="image/png")) for _ in range(2)]
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        await asyncio.to_thread(eventually, lambda: replica._writer._work_queue.qsize() == 1)
        await replica.end()
        assert closed(await asyncio.wait_for(asyncio.gather(*made), WAIT))
        go_on.set()

    monkeypatch.setattr(Picture, "encode", encode_later)
    served(use, {"backend": "DecodeMat"}, max_message_bytes=10**6, drain_seconds=0)


class Told:
    """The result is the parameters of the request, as JSON."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for data in items:
            data["result"] = json.dumps(data.get("parameters"))


def test_forwards_headers_and_metadata(register: Any) -> None:
    config = {"backend": f"Python[{register(Told)}]"}
    fields = {"x_user_id": "7", "x_other": "no"}

    async def over_http(replica: PipeReplica) -> Any:
        return json.loads((await ask(replica, INFER, b"x", **fields)).body)["result"]

    assert json.loads(served(over_http, config, forward_headers="x-user-*")) == {"x-user-id": "7"}
    assert json.loads(served(over_http, config)) is None
    if HAS_GRPC:

        async def over_grpc(replica: PipeReplica) -> Any:
            path = "/inference.GRPCInferenceService/ModelInfer"
            asked = as_rpc(Asked(b"x"), "demo").SerializeToString()
            return await replica.rpc(path, asked, {"x-user-id": "7", "x-other": "no"})

        answer = served(over_grpc, config, forward_headers="x-user-*")
        assert b'{"x-user-id": "7"}' in answer.data, answer


def test_refuses_too_many_headers_to_forward(restored: Any) -> None:
    fields = {f"x_user_{number}": "a" for number in range(MOST_HEADERS + 1)}
    answer = served(lambda replica: ask(replica, INFER, b"x", **fields), forward_headers="x-user-*")
    assert (answer.status, json.loads(answer.body)["code"]) == (413, "too_large")


def test_reports_a_batch_that_does_not_end_and_a_dead_instance(gate: tuple[Gate, dict[str, Any]]) -> None:
    async def use(replica: PipeReplica) -> Any:
        replica.check()
        first = asyncio.create_task(replica.infer(b"1"))
        await asyncio.to_thread(gate[0].wait_entered)
        while not (await replica.stats())["nodes"]["node"]["oldest_batch_s"] > 1e-6:
            await asyncio.sleep(0)
        with pytest.raises(UnhealthyError, match=r"^node 'node': a batch runs for \d+ s, more than hang_seconds = "):
            replica.check()
        gate[0].open()
        await first
        await asyncio.to_thread(pipes[0].close)
        with pytest.raises(UnhealthyError, match=r"^node 'node': 1 of 1 instances are dead$"):
            replica.check()

    with pipes_of(service) as pipes:
        served(use, gate[1], hang_seconds=1e-6)


def test_exchanges_the_pipe_without_losing_a_request(gate: tuple[Gate, dict[str, Any]], tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[node]\nbackend = "Identity"\n', encoding="utf-8")

    async def use(replica: PipeReplica) -> tuple[Any, Any]:
        first = asyncio.create_task(replica.infer(b"old"))
        await asyncio.to_thread(gate[0].wait_entered)
        exchange = asyncio.create_task(replica.reconfigure({"config": str(other), "node.instance_num": 2}))
        while (await replica.stats())["nodes"]["node"]["instances"] != 2:
            await asyncio.sleep(0)
        new = await replica.infer(b"new")
        assert not first.done()
        assert not exchange.done()
        gate[0].open()
        await exchange
        with pytest.raises(PipeClosed):
            pipes[0]({"data": b"late"})
        await replica.reconfigure({"config": str(other), "node.instance_num": 2})
        assert len(pipes) == 2, "nothing has changed"
        return await first, new

    with pipes_of(service) as pipes:
        assert served(use, gate[1]) == (b"old", b"new")


def test_exchange_waits_for_bodies_that_are_inflated() -> None:
    async def use(replica: PipeReplica) -> int:
        long = asyncio.create_task(ask(replica, INFER, LONG, content_encoding="gzip"))
        await asyncio.to_thread(begun.acquire, timeout=WAIT)
        exchange = asyncio.create_task(replica.reconfigure({"classifier.instance_num": 2}))
        while (await replica.stats())["nodes"]["classifier"]["instances"] != 2:
            await asyncio.sleep(0)
        await asyncio.wait({exchange}, timeout=0.2)
        assert not exchange.done(), "a request that has begun is not lost"
        may_go_on.set()
        await exchange
        return (await long).status

    with inflating_held_back() as (begun, may_go_on):
        assert served(use, {"classifier": IDENTITY}, **LARGE_LIMITS) == 200


def test_keeps_pipe_if_new_one_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    async def use(replica: PipeReplica) -> Any:
        with pytest.raises(ValueError, match="no backend 'Identiti'"):  # which keeps a replica from starting
            await replica.reconfigure({"classifier.backend": "Identiti"})
        replica.check()  # at work from now on
        await replica.reconfigure({"classifier.backend": "Identiti"})
        return await replica.infer(b"1")

    assert served(use) == b"1"
    assert "the configuration cannot be exchanged; the previous one stays" in caplog.text
    assert "no backend 'Identiti'" in caplog.text


# -- metrics and scaling ----------------------------------------------------------------------------------------------


class Library:
    """Replaces ``ray.serve.metrics``: ``values`` holds the value of each metric."""

    def __init__(self) -> None:
        self.values: Counter[Any] = Counter()
        self.names: set[str] = set()

    def _metric(self, name: str, **options: Any) -> Any:
        values = self.values
        self.names.add(name)

        def add(value: float, tags: dict[str, str]) -> None:
            values[name, tags["node"]] += value  # type: ignore[assignment]

        def put(value: float, tags: dict[str, str]) -> None:
            values[name, tags["node"]] = value  # type: ignore[assignment]

        def observe(value: float, tags: dict[str, str]) -> None:
            values[name, tags["node"], value] += 1

        return SimpleNamespace(inc=add, set=put, observe=observe)

    Counter = Gauge = Histogram = _metric


def test_metrics_have_the_names_of_the_service() -> None:
    library = Library()
    Metrics(library)
    families = (*statistics.NODE_COUNTERS, *statistics.NODE_GAUGES, *statistics.NODE_TIMES)
    assert library.names == {name for _, name, _ in families} | {"torchpipe_node_batch_size"}


def test_metrics_count_each_request_once() -> None:
    library = Library()
    metrics = Metrics(library)
    with pipe({"a": {"next": "b"}, "b": {}}) as p:
        for data in ([{"data": 1}, {"data": 2}], [], [{"data": 3}]):
            p(data)
            metrics.update(p)
        seconds = p.stats()["nodes"]["a"]["compute_ms"] / 1000
    assert library.values["torchpipe_node_requests", "b"] == 3
    assert library.values["torchpipe_node_batch_size", "a", 1] == 3
    assert library.values["torchpipe_node_compute_seconds", "a"] == pytest.approx(seconds)
    assert library.values["torchpipe_node_pending", "a"] == 0
    with pipe({"b": {}}) as p:  # an exchanged pipe counts on
        p([{"data": 1}, {"data": 2}])
        metrics.update(p)
    assert library.values["torchpipe_node_requests", "b"] == 5


def test_request_ms_is_that_of_the_slowest_node() -> None:
    fast = {"compute_ms": 10.0, "requests": 10, "instances": 1}
    slow = {"compute_ms": 80.0, "requests": 10, "instances": 2}
    idle = {"compute_ms": 0.0, "requests": 0, "instances": 1}
    assert request_ms({"nodes": {"a": fast, "b": slow, "c": idle}}) == 4.0
    assert request_ms({"nodes": {"c": idle}}) == 0.0


@pytest.mark.parametrize(
    ("figures", "replicas"),
    [
        # 100 requests of 4 ms each are 400 ms of work, which eight replicas do in 50 ms.
        ({"a": 3.0, "b": 5.0, "new": 0.0}, 8.0),
        ({"new": 0.0}, 3),  # nothing is known yet
    ],
)
def test_scales_to_a_queue_time(figures: dict[str, float], replicas: float) -> None:
    context = SimpleNamespace(total_num_requests=100.0, target_num_replicas=3, aggregated_metrics={FIGURE: figures})
    assert QueueTime(target_ms=50.0)(context) == (replicas, {})

"""Compressed requests and answers, at each path over HTTP and over gRPC."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from kit import http2
from kit.clients import HttpClient, Response, ask, connect, fetch
from kit.compressed import PIECES, inflating_held_back
from kit.contract import HAS_GRPC
from kit.services import LocalServer, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from torchpipe_server.methods.custom import CustomHandler, Handler

from torchpipe_py import pipe
from torchpipe_py.methods.routes import Routes, Served
from torchpipe_py.wire import compression
from torchpipe_py.wire.http import SMALL_BYTES

INFER, OIP, INDEX = "/infer", "/v2/models/test/infer", "/v2/repository/index"
PACKS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACKS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
JSON = {"Content_Type": "application/json"}
LARGE = b"large".ljust(500_000, b".")

every_coding = pytest.mark.parametrize("coding", PACKS)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("Identity") as server:
        yield server


def plain(answer: Response) -> bytes:
    coding = answer.fields.get("content-encoding")
    return UNPACKS[coding](answer.body) if coding else answer.body


def numbers(count: int) -> list[float]:
    return (np.arange(count, dtype=np.float32) % 251 / 251).tolist()


def as_infer(values: list[float]) -> tuple[str, bytes, dict[str, str]]:
    array = {"dtype": "float32", "shape": [1, len(values)], "data": values}
    return INFER, json.dumps({"inputs": {"data": array}}).encode(), JSON


def as_oip(values: list[float]) -> tuple[str, bytes, dict[str, str]]:
    tensor = {"name": "data", "datatype": "FP32", "shape": [1, len(values)], "data": values}
    return OIP, json.dumps({"inputs": [tensor]}).encode(), JSON


def as_binary(values: list[float]) -> tuple[str, bytes, dict[str, str]]:
    raw = np.array(values, np.float32).tobytes()
    tensor = {"name": "data", "datatype": "FP32", "shape": [1, len(values)]}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return OIP, head + raw, {"Inference_Header_Content_Length": str(len(head))}


# -- requests ---------------------------------------------------------------------------------------------------------


@every_coding
@pytest.mark.parametrize("count", [3, 3_000, 100_000])
@pytest.mark.parametrize("form", [as_infer, as_oip, as_binary])
def test_compressed_request_and_answer_are_those_of_the_plain_one(
    server: LocalServer, form: Any, count: int, coding: str
) -> None:
    path, body, fields = form(numbers(count))
    expected = fetch(server.port, path, "POST", body, **fields)
    assert expected.status == 200
    more = {"Content_Encoding": coding, "Accept_Encoding": coding}
    answer = fetch(server.port, path, "POST", PACKS[coding](body), **fields, **more)
    assert (answer.status, plain(answer)) == (200, expected.body)
    assert answer.fields["content-type"] == expected.fields["content-type"]
    head = "inference-header-content-length"
    assert answer.fields.get(head) == expected.fields.get(head), "of the plain answer"
    assert ("content-encoding" in answer.fields) == (count > 3)


@every_coding
def test_every_kind_of_body_is_inflated(coding: str) -> None:
    pack = PACKS[coding]
    form = b'--x\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\nfile\r\n--x--\r\n'
    with steered() as server:
        for body, kind in ((b"file", "image/jpeg"), (form, "multipart/form-data; boundary=x")):
            answer = ask(server.port, pack(body), Content_Encoding=coding, Content_Type=kind)
            assert answer == (200, {"label": "file", "score": 4.0})
        assert ask(server.port, pack(b'{"ready": true}'), INDEX, Content_Encoding=coding)[0] == 200
        assert ask(server.port, pack(b"null"), INDEX, Content_Encoding=coding)[0] == 400


class Echo(Handler):
    routes = {"POST /echo": "echo", "GET /echo": "echo"}  # noqa: RUF012

    async def echo(self, request: Any) -> Any:
        return {"body": request.body.decode(), "coding": request.fields.get("content-encoding")}


@every_coding
def test_routes_of_a_handler_get_inflated_bodies(coding: str) -> None:
    with pipe({"backend": "Identity"}) as run:
        handler = CustomHandler(Echo, run)
        with LocalServer(run, make_served=lambda loop: Served({}, Routes(handler.routes))) as server:
            answer = ask(server.port, PACKS[coding](b"text"), "/echo", Content_Encoding=coding)
            assert answer == (200, {"body": "text", "coding": None})
            assert ask(server.port, b"", "/echo", "GET", Content_Encoding=coding)[0] == 200


BOMB = gzip.compress(bytes(2**21))
WRONG: dict[str, tuple[bytes, str, int, str, str]] = {
    "unknown": (b"x", "br", 415, "unsupported_encoding", "Content-Encoding 'br'; expected gzip, deflate or none"),
    "two": (b"x", "gzip, gzip", 415, "unsupported_encoding", "2 codings"),
    "empty": (b"", "gzip", 400, "invalid_request", "the gzip stream is cut short after 0 bytes"),
    "plain": (b"plain", "gzip", 400, "invalid_request", "the body is not gzip: incorrect header check"),
    "other": (gzip.compress(b"x"), "deflate", 400, "invalid_request", "the body is not deflate: incorrect header"),
    "cut": (gzip.compress(LARGE)[:-1], "gzip", 400, "invalid_request", "the gzip stream is cut short after"),
    "followed": (gzip.compress(LARGE) + b"x", "gzip", 400, "invalid_request", "1 bytes after the end of the gzip"),
    "large": (gzip.compress(bytes(700_000)), "gzip", 413, "too_large", "more than 600000 bytes (--max-message-bytes)"),
    "bomb": (BOMB, "gzip", 413, "too_large", "more than 600000 bytes (--max-message-bytes)"),
}


@pytest.mark.parametrize("path", [INFER, OIP, INDEX])
@pytest.mark.parametrize("name", WRONG)
def test_refuses_wrong_compressed_bodies(name: str, path: str) -> None:
    body, coding, status, code, said = WRONG[name]
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
    with steered(max_message_bytes=600_000) as server, HttpClient(server.port) as client:
        client.send(head.encode() + body)
        answer = client.read()
        told = json.loads(answer.body)
        assert (answer.status, told["code"]) == (status, code)
        assert said in told["error"]
        assert answer.fields.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
        assert client.infer_batch(b"next") == ("next", 4.0), "the connection goes on"


def test_ratio_is_limited() -> None:
    with steered() as server:
        status, answer = ask(server.port, BOMB, Content_Encoding="gzip")
        assert (status, answer["code"]) == (413, "too_large")
        assert answer["error"].endswith(f"more than 200 times its {len(BOMB)} bytes: send it uncompressed")


def send_large(client: HttpClient, *lines: str, body: bytes = LARGE) -> None:
    body = gzip.compress(body, 1)
    own = (*lines, f"Content-Length: {len(body)}", "Content-Encoding: gzip")
    client.send("\r\n".join(["POST /infer HTTP/1.1", "Host: a", *own, "", ""]).encode() + body)


def test_others_are_answered_while_a_long_body_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), steered() as server, HttpClient(server.port) as client:
        send_large(client)
        assert begun.acquire(timeout=WAIT)
        assert ask(server.port, gzip.compress(b"small"), Content_Encoding="gzip")[0] == 200
        may_go_on.set()
        assert json.loads(client.read().body)["score"] == len(LARGE)
        assert client.infer_batch(b"next") == ("next", 4.0)


def test_body_of_a_client_that_left_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), steered() as server:
        with HttpClient(server.port) as client:
            send_large(client)
            assert begun.acquire(timeout=WAIT)
        eventually(lambda: not server.server.connections)
        may_go_on.set()
        assert ask(server.port, gzip.compress(LARGE), Content_Encoding="gzip")[0] == 200
        assert len(Steered.seen) == 1


def test_deadline_counts_from_the_arrival_of_the_compressed_body(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), steered() as server, HttpClient(server.port) as client:
        send_large(client, "X-Deadline-Ms: 1")
        assert begun.acquire(timeout=WAIT)
        held = perf_counter()
        eventually(lambda: perf_counter() > held + 0.001)
        may_go_on.set()
        answer = client.read()
        assert (answer.status, json.loads(answer.body)["code"]) == (504, "deadline_exceeded")
        assert not Steered.seen


def test_no_further_piece_is_inflated_for_a_client_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), steered(max_message_bytes=2**23) as server:
        with HttpClient(server.port) as client:
            send_large(client, body=PIECES)
            assert begun.acquire(timeout=WAIT)
        eventually(lambda: not server.server.connections)
        may_go_on.set()
        assert ask(server.port, gzip.compress(LARGE), Content_Encoding="gzip")[0] == 200
        assert begun.acquire(timeout=WAIT), "of the second"
        assert not begun.acquire(blocking=False)


def test_a_body_is_inflated_no_further_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        inflating_held_back() as (begun, may_go_on),
        steered(max_message_bytes=2**23, max_held_bytes=2**21) as server,
        HttpClient(server.port) as client,
    ):
        may_go_on.set()
        send_large(client, body=PIECES)
        answer = client.read()
        assert (answer.status, json.loads(answer.body)["code"]) == (429, "overloaded")
        assert sum(iter(lambda: begun.acquire(blocking=False), False)) < len(PIECES) // 2**20
        assert client.infer_batch(b"next") == ("next", 4.0)


def test_drain_answers_what_is_being_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), steered() as server, HttpClient(server.port) as client:
        send_large(client)
        assert begun.acquire(timeout=WAIT)
        server.stop()
        may_go_on.set()
        assert client.read().status == 200


def test_inflated_bodies_count_as_held() -> None:
    with steered(max_held_bytes=1_200_000) as server, HttpClient(server.port) as one, HttpClient(server.port) as other:
        blocking = gzip.compress(b"block".ljust(700_000, b" "))
        head = f"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: {len(blocking)}\r\n\r\n"
        one.send(head.encode() + blocking)
        assert Steered.entered.acquire(timeout=WAIT)
        other.send(head.encode() + blocking)
        answer = other.read()
        reason = "more than 1200000 bytes of unanswered messages (--max-held-bytes)"
        assert (answer.status, json.loads(answer.body)["error"]) == (429, reason)
        Steered.opened.set()
        assert one.read().status == 200
        assert ask(server.port, gzip.compress(LARGE), Content_Encoding="gzip")[0] == 200


# -- answers ----------------------------------------------------------------------------------------------------------

RESULTS: dict[str, Any] = {"short": "x" * 100, "text": "x" * 10_000, "long": "x" * 1_000_000}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("verb", ["POST", "HEAD"])
@pytest.mark.parametrize("accepted", ["gzip", "br, deflate;q=0.5", "identity", "gzip;q=0"])
def test_answers_are_compressed_where_it_is_asked_for_and_pays(name: str, verb: str, accepted: str) -> None:
    path = INFER if verb == "POST" else "/openapi.json"
    with steered() as server, HttpClient(server.port) as client:
        Steered.values = {"it": RESULTS[name]}
        size = 8 if verb == "POST" else 0
        head = f"{verb} {path} HTTP/1.1\r\nHost: a\r\nAccept-Encoding: {accepted}\r\nContent-Length: {size}\r\n\r\n"
        client.send(head.encode() + b"value it"[:size])
        answer = client.read(verb == "HEAD")
        is_short = verb == "POST" and name == "short"
        coding = {"gzip": "gzip", "br, deflate;q=0.5": "deflate"}.get(accepted)
        assert answer.fields.get("content-encoding") == (None if is_short else coding)
        assert answer.fields.get("vary") == (None if is_short else "Accept-Encoding")
        if verb == "POST":
            assert json.loads(plain(answer)) == {"result": RESULTS[name]}


def test_bound_of_answers_is_of_the_uncompressed() -> None:
    with steered(max_reply_bytes=100_000) as server:
        Steered.values = {"it": "x" * 100_000}
        status, answer = ask(server.port, b"value it", Accept_Encoding="gzip")
        assert (status, answer["code"]) == (413, "too_large")


def test_others_are_answered_while_a_long_answer_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on, compress = threading.Semaphore(0), threading.Event(), compression.compress

    def compress_slowly(body: bytes, coding: str) -> bytes | None:
        if len(body) > SMALL_BYTES:
            begun.release()
            assert may_go_on.wait(WAIT)
        return compress(body, coding)

    monkeypatch.setattr(compression, "compress", compress_slowly)
    with steered() as server, HttpClient(server.port) as client:
        Steered.values = {"it": RESULTS["long"], "other": RESULTS["text"]}
        client.send(b"POST /infer HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\nContent-Length: 8\r\n\r\nvalue it")
        assert begun.acquire(timeout=WAIT)
        answer = fetch(server.port, INFER, "POST", b"value other", Accept_Encoding="gzip")
        assert json.loads(plain(answer)) == {"result": RESULTS["text"]}
        may_go_on.set()
        assert json.loads(plain(client.read())) == {"result": RESULTS["long"]}


# -- gRPC -------------------------------------------------------------------------------------------------------------

if HAS_GRPC:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    SERVICE = "/inference.GRPCInferenceService"
    Request, Reply = message("inference.ModelInferRequest"), message("inference.ModelInferResponse")
    CHANNEL = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    StreamReply = message("inference.ModelStreamInferResponse")

needs_grpc = pytest.mark.skipif(not HAS_GRPC, reason="grpcio is not installed")


def rpc_request(raw: bytes, id: str = "", **parameters: Any) -> bytes:
    given = {"name": "data", "datatype": "UINT8", "shape": [1, len(raw)]}
    asked = Request(model_name="test", id=id, inputs=[given], raw_input_contents=[raw], parameters=parameters)
    return asked.SerializeToString()


def infer_on(on: Any, data: bytes, **options: Any) -> Any:
    return on.unary_unary(f"{SERVICE}/ModelInfer").with_call(data, timeout=WAIT, **options)


def rpc_channel(server: LocalServer) -> Any:
    return grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=CHANNEL)


@contextmanager
def rpc_server(**options: Any) -> Iterator[tuple[LocalServer, Any]]:
    with serving("Identity", grpc_port=0, **options) as server, rpc_channel(server) as on:
        yield server, on


@needs_grpc
@pytest.mark.parametrize("size", [3, 5_000, 100_000, 900_000])
def test_compressed_message_is_answered_like_a_plain_one(size: int) -> None:
    with rpc_server() as (server, on):
        raw = bytes(range(250)) * (size // 250 + 1)
        data = rpc_request(raw)
        answers = [infer_on(on, data, compression=coding)[0] for coding in (None, grpc.Compression.Gzip)]
        assert answers[0] == answers[1]
        assert Reply.FromString(answers[1]).raw_output_contents == [raw]
        assert server.by_method["gRPC ModelInfer"] == {"ok": 2}


@needs_grpc
@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(
    ("size", "is_packed", "is_compressed"),
    [(1000, True, False), (10_000, True, True), (10_000, False, False), (100_000, True, False)],
)
def test_answers_to_compressed_messages_are_compressed(
    size: int, is_packed: bool, is_compressed: bool, path: str
) -> None:
    data = rpc_request(bytes(size))
    with serving("Identity", grpc_port=0) as server, connect(server.grpc_port) as sock:
        asked = gzip.compress(data) if is_packed else data
        answer = http2.ask(sock, f"{SERVICE}/{path}", asked, "gzip", is_packed)
    assert answer.is_compressed == is_compressed
    assert bytes(size) in (gzip.decompress(answer.data) if is_compressed else answer.data)


RPC_WRONG: dict[str, tuple[bytes, str, str]] = {
    "bomb": (gzip.compress(bytes(2**26)), "too_large", "the body inflates to more than 600000 bytes (--max-message-"),
    "ratio": (gzip.compress(bytes(2**21)), "too_large", "the body inflates to more than 600000 bytes (--max-message-"),
    "cut": (gzip.compress(rpc_request(b"x") if HAS_GRPC else b"")[:-1], "invalid_request", "stream is cut short"),
    "followed": (gzip.compress(b"") + b"x", "invalid_request", "1 bytes after the end of the gzip stream"),
    "damaged": (gzip.compress(b"")[:-5] + b"xxxxx", "invalid_request", "the body is not gzip: "),
    "no message": (gzip.compress(b"\xff\xff no message"), "invalid_request", "not a inference.ModelInferRequest"),
}


@needs_grpc
@pytest.mark.parametrize("name", RPC_WRONG)
def test_refuses_wrong_compressed_messages(name: str) -> None:
    data, code, said = RPC_WRONG[name]
    with rpc_server(max_message_bytes=600_000) as (server, on):
        with pytest.raises(grpc.RpcError) as raised:
            infer_on(on, data)
        assert dict(raised.value.trailing_metadata())["error-code"] == code
        assert (raised.value.code().name, said in raised.value.details()) == ("INVALID_ARGUMENT", True)
        assert infer_on(on, rpc_request(b"next"), compression=grpc.Compression.Gzip)
        eventually(lambda: server.rpc.limits.held_bytes == 0)


@needs_grpc
@pytest.mark.parametrize(
    ("coding", "said"),
    [("deflate", b"Compression algorithm 'deflate' is disabled"), ("br", b"Error parsing 'grpc-encoding'"),
     ("gzip, gzip", b"Error parsing 'grpc-encoding'"), ("", b"Compression bit set but no encoding")],
)  # fmt: skip
def test_grpc_refuses_other_codings_itself(coding: str, said: bytes) -> None:
    with serving("Identity", grpc_port=0) as server:
        with connect(server.grpc_port) as sock:
            answer = http2.ask(sock, f"{SERVICE}/ModelInfer", zlib.compress(rpc_request(b"x")), coding)
        assert (answer.data, said in answer.trailers) == (b"", True)
        with rpc_channel(server) as on:
            assert infer_on(on, rpc_request(b"next"))


@needs_grpc
def test_requests_of_a_stream_are_compressed_one_by_one() -> None:
    sizes = [3, 20_000, 100_000, 3, 20_000, 900_000]
    with rpc_server() as (_, on):
        stream = on.stream_stream(f"{SERVICE}/ModelStreamInfer")
        asked = (rpc_request(bytes(size), str(size)) for size in sizes)
        replies = list(map(StreamReply.FromString, stream(asked, timeout=WAIT, compression=grpc.Compression.Gzip)))
        assert [reply.infer_response.id for reply in replies] == list(map(str, sizes))
        assert [len(reply.infer_response.raw_output_contents[0]) for reply in replies] == sizes


@needs_grpc
def test_others_are_answered_while_a_long_message_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), rpc_server() as (server, on):
        long = on.unary_unary(f"{SERVICE}/ModelInfer").future(
            rpc_request(bytes(500_000)), timeout=WAIT, compression=grpc.Compression.Gzip
        )
        assert begun.acquire(timeout=WAIT)
        assert infer_on(on, rpc_request(b"small"))
        may_go_on.set()
        assert len(long.result()) > 500_000
        eventually(lambda: server.rpc.limits.held_bytes == 0)


@needs_grpc
def test_inflated_message_of_a_client_that_left_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), rpc_server() as (server, on):
        long = on.unary_unary(f"{SERVICE}/ModelInfer").future(
            rpc_request(bytes(500_000)), timeout=WAIT, compression=grpc.Compression.Gzip
        )
        assert begun.acquire(timeout=WAIT)
        long.cancel()
        eventually(lambda: len(server.rpc.limits.calls) == 0)
        may_go_on.set()
        assert infer_on(on, rpc_request(b"next"))
        eventually(lambda: server.rpc.limits.held_bytes == 0)
        assert server.by_method["gRPC ModelInfer"] == {"ok": 1}


def infer_later(on: Any, data: bytes, path: str = "ModelInfer") -> Any:
    """A call whose message is compressed; in a stream the only one."""
    if path == "ModelInfer":
        return on.unary_unary(f"{SERVICE}/{path}").future(data, timeout=WAIT, compression=grpc.Compression.Gzip)
    return on.stream_stream(f"{SERVICE}/{path}")(iter([data]), timeout=WAIT, compression=grpc.Compression.Gzip)


@needs_grpc
@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer"])
def test_no_further_piece_is_inflated_of_a_message_whose_client_left(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with inflating_held_back() as (begun, may_go_on), rpc_server() as (server, on):
        left = infer_later(on, rpc_request(PIECES), path)
        assert begun.acquire(timeout=WAIT)
        left.cancel()
        eventually(lambda: len(server.rpc.limits.calls) == 0)
        assert server.rpc.limits.held_bytes == 0
        may_go_on.set()
        assert infer_on(on, rpc_request(LARGE), compression=grpc.Compression.Gzip)
        assert begun.acquire(timeout=WAIT), "of the second"
        assert not begun.acquire(blocking=False)


@needs_grpc
def test_messages_are_inflated_one_at_a_time_and_counted_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), rpc_server() as (server, on):
        first = infer_later(on, rpc_request(PIECES))
        assert begun.acquire(timeout=WAIT)
        size = server.rpc.limits.held_bytes
        others = [infer_later(on, rpc_request(PIECES)) for _ in range(3)]
        eventually(lambda: server.rpc.limits.held_bytes >= 4 * size)
        assert not begun.acquire(blocking=False)
        may_go_on.set()
        assert all(len(each.result()) > len(PIECES) for each in (first, *others))
        eventually(lambda: server.rpc.limits.held_bytes == 0)


@needs_grpc
def test_a_message_is_inflated_no_further_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        inflating_held_back() as (begun, may_go_on),
        rpc_server(max_message_bytes=2**23, max_held_bytes=2**21) as (server, on),
    ):
        may_go_on.set()
        with pytest.raises(grpc.RpcError) as raised:
            infer_later(on, rpc_request(PIECES)).result()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert sum(iter(lambda: begun.acquire(blocking=False), False)) < len(PIECES) // 2**20
        eventually(lambda: server.rpc.limits.held_bytes == 0)


@needs_grpc
def test_deadline_counts_from_the_arrival_of_the_compressed_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with inflating_held_back() as (begun, may_go_on), rpc_server() as (server, on):
        late = infer_later(on, rpc_request(LARGE, deadline_ms={"double_param": 1.0}))
        assert begun.acquire(timeout=WAIT)
        held = perf_counter()
        eventually(lambda: perf_counter() > held + 0.001)
        may_go_on.set()
        assert late.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.by_method["gRPC ModelInfer"] == {"deadline_exceeded": 1}

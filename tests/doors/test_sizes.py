"""Large requests and answers, through every door."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from kit.clients import IDL, Client, HttpClient, ask, fetch
from kit.contract import HAS_GRPC
from kit.services import LocalServer, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually

from torchpipe_py import DecodeError
from torchpipe_py.wire import infer as infer_requests

JSON = {"Content_Type": "application/json"}
INFER, OIP = "/infer", "/v2/models/test/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("Identity") as server:
        yield server


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (1, 150_528), (1, 224, 224, 3)])
@pytest.mark.parametrize("is_nested", [False, True])
def test_tensors_of_images_pass_as_json(server: LocalServer, shape: tuple[int, ...], is_nested: bool) -> None:
    array = (np.arange(150_528) % 255 / 255).astype(np.float32).reshape(shape)
    data = (array if is_nested else array.ravel()).tolist()
    asked = {"inputs": [{"name": "data", "datatype": "FP32", "shape": shape, "data": data}]}
    status, answer = ask(server.port, json.dumps(asked).encode(), OIP)
    assert (status, answer["outputs"][0]["data"]) == (200, array.ravel().tolist())
    given = {"dtype": "float32", "shape": shape, "data": data}
    status, answer = ask(server.port, json.dumps({"inputs": {"data": given}}).encode(), INFER, **JSON)
    assert (status, answer["result"]["data"]) == (200, array.ravel().tolist())


def test_photos_pass_as_base64() -> None:
    photo = b"length".ljust(1_400_000, b".")
    text = {"b64": base64.b64encode(photo).decode()}
    with steered() as server:
        tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "data": [text]}
        assert ask(server.port, json.dumps({"inputs": [tensor]}).encode(), OIP)[0] == 200
        assert ask(server.port, json.dumps({"inputs": {"data": text}}).encode(), INFER, **JSON)[0] == 200
        assert [bytes(data) for data in Steered.seen] == [photo] * 2


@pytest.mark.parametrize("path", [INFER, OIP])
def test_any_body_has_the_same_limit(path: str) -> None:
    with serving("Identity", max_message_bytes=100_000) as server:
        for kind in JSON["Content_Type"], "application/octet-stream":
            assert fetch(server.port, path, "POST", b"{".ljust(100_000), Content_Type=kind).status != 413
            status, answer = ask(server.port, b"{".ljust(100_001), path, Content_Type=kind)
            assert (status, answer["code"]) == (413, "too_large")


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """A large body is being read, since the first, until the second is set."""
    begun, may_end = threading.Semaphore(0), threading.Event()
    parse = infer_requests.parse_json

    def parse_slowly(body: bytes) -> Any:
        begun.release()
        assert may_end.wait(WAIT)
        return parse(body)

    monkeypatch.setattr(infer_requests, "parse_json", parse_slowly)
    yield begun, may_end
    may_end.set()


LARGE = json.dumps({"inputs": {"data": {"b64": base64.b64encode(b"large".ljust(100_000, b".")).decode()}}}).encode()


def send_large(client: HttpClient, *lines: str) -> None:
    own = (*lines, f"Content-Length: {len(LARGE)}", "Content-Type: application/json")
    head = "\r\n".join(["POST /infer HTTP/1.1", "Host: a", *own, "", ""])
    client.send(head.encode() + LARGE)


def test_others_are_answered_while_a_large_body_is_read(reading: Any) -> None:
    begun, may_end = reading
    with steered() as server, HttpClient(server.port) as client:
        send_large(client)
        assert begun.acquire(timeout=WAIT)
        assert ask(server.port, b"small", INFER)[0] == 200
        may_end.set()
        assert json.loads(client.read().body)["score"] == 100_000
        client.send(b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
        assert client.read().status == 200, "the connection goes on"


def test_a_large_body_of_a_client_that_left_is_not_computed(reading: Any) -> None:
    begun, may_end = reading
    with steered() as server:
        with HttpClient(server.port) as client, HttpClient(server.port) as waiting:
            send_large(client)
            assert begun.acquire(timeout=WAIT)
            send_large(waiting)
            eventually(lambda: server.server.held_bytes >= 2 * len(LARGE))
        eventually(lambda: not server.server.connections)
        may_end.set()
        assert ask(server.port, LARGE, INFER, **JSON)[0] == 200
        # NOTE: the first one may have been computed: it was read, and was cancelled afterwards.
        assert len(Steered.seen) <= 2


def test_the_deadline_of_a_large_body_counts_from_its_arrival(reading: Any) -> None:
    begun, may_end = reading
    with steered() as server, HttpClient(server.port) as first, HttpClient(server.port) as second:
        send_large(first)
        assert begun.acquire(timeout=WAIT)
        send_large(second, "X-Deadline-Ms: 1")
        eventually(lambda: server.server.held_bytes >= 2 * len(LARGE))
        held = perf_counter()
        eventually(lambda: perf_counter() > held + 0.001)
        may_end.set()
        assert first.read().status == 200
        answer = second.read()
        assert (answer.status, json.loads(answer.body)["code"]) == (504, "deadline_exceeded")
        assert len(Steered.seen) == 1


def test_a_large_body_that_is_wrong_is_refused(server: LocalServer) -> None:
    for path in (INFER, OIP):
        status, answer = ask(server.port, b'{"inputs": [' + b"1," * 50_000 + b"]}", path, **JSON)
        assert (status, answer["code"]) == (400, "invalid_request"), answer
        assert len(answer["error"]) < 400


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_query_means_the_same_to_a_large_body(server: LocalServer, size: int) -> None:
    """The Open Inference Protocol has no parameters in a query."""
    tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["x" * size]}
    status, _ = ask(server.port, json.dumps({"inputs": [tensor]}).encode(), f"{OIP}?deadline_ms=0.001")
    assert status == 200
    given = json.dumps({"inputs": {"data": "x" * size}}).encode()
    status, answer = ask(server.port, given, f"{INFER}?deadline_ms=0.001", **JSON)
    assert (status, answer["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("given", ["²", "1²", "+1", "-1", "1_0", ""])
def test_a_size_of_json_that_is_no_number_is_refused(server: LocalServer, given: str, size: int) -> None:
    fields = {"Inference_Header_Content_Length": given}
    status, answer = ask(server.port, b"[]".ljust(size), OIP, **fields)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert f"Inference-Header-Content-Length {given!r}" in answer["error"]


def test_a_drain_answers_what_is_being_read(reading: Any) -> None:
    begun, may_end = reading
    with steered() as server, HttpClient(server.port) as client:
        send_large(client)
        assert begun.acquire(timeout=WAIT)
        server.stop()
        may_end.set()
        assert client.read().status == 200


# -- answers ----------------------------------------------------------------------------------------------------------

RESULTS: dict[str, Any] = {
    "numbers": torch.linspace(0, 1, 30_000)[None],
    "small integers": np.zeros((1, 60_000), np.uint8),
    "text": "ü" * 50_000,
    "list": [{"box": [1, 2, 3, 4], "score": 0.5}] * 3_000,
}


def over_infer(port: int) -> tuple[int, str, str]:
    return _of(fetch(port, INFER, "POST", b"value it"))


def over_oip(port: int) -> tuple[int, str, str]:
    tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["value it"]}
    return _of(fetch(port, OIP, "POST", json.dumps({"inputs": [tensor]}).encode()))


def over_oip_binary(port: int) -> tuple[int, str, str]:
    tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["value it"]}
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return _of(fetch(port, OIP, "POST", json.dumps(asked).encode()))


def _of(answer: Any) -> tuple[int, str, str]:
    if answer.status == 200:
        return len(answer.body), "ok", ""
    assert answer.status == 413
    error = json.loads(answer.body)
    return 0, error["code"], error["error"]


def over_thrift(port: int) -> tuple[int, str, str]:
    with Client(port, framed=True) as client:
        client.send_infer({"data": IDL.Value(bytes=b"value it")})
        (size,) = struct.unpack(">I", client.sock.recv(4, 0x102))  # MSG_WAITALL, MSG_PEEK
        try:
            client.receive()
        except IDL.InferenceError as error:
            return 0, error.code, error.message
    return 4 + size, "ok", ""


def over_grpc(port: int) -> tuple[int, str, str]:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    given = message("inference.ModelInferRequest")(
        model_name="test",
        inputs=[{"name": "data", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"value it"]}}],
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request_serializer=lambda given: given.SerializeToString()
        )
        try:
            return len(infer(given, timeout=WAIT)), "ok", ""
        except grpc.RpcError as error:
            status, code = error.code().name, dict(error.trailing_metadata())["error-code"]
            return 0, code if status == "INVALID_ARGUMENT" else status, error.details()


DOORS: dict[str, Callable[[int], tuple[int, str, str]]] = {
    "infer": over_infer, "oip": over_oip, "oip binary": over_oip_binary, "thrift": over_thrift,
    **({"grpc": over_grpc} if HAS_GRPC else {}),
}  # fmt: skip
ASKS_FOR = {"infer": "binary ones", "oip": "with binary_data"}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("door", DOORS)
def test_the_bound_of_answers_is_what_is_sent(door: str, result: str) -> None:
    def outcome(most: int) -> tuple[int, str, str]:
        with steered(max_reply_bytes=most, **({"grpc_port": 0} if door == "grpc" else {})) as server:
            Steered.values = {"it": RESULTS[result]}
            return DOORS[door](server.grpc_port if door == "grpc" else server.port)

    size, code, _ = outcome(2**22)
    assert code == "ok"
    assert outcome(size)[1] == "ok"
    _, code, said = outcome(size - 1)
    assert code == "too_large"
    assert f"the limit of a reply is {size - 1} (--max-reply-bytes); ask for " in said
    assert result == "text" or ASKS_FOR.get(door, "fewer outputs or smaller ones") in said


Codes = list[str]
MANY: dict[str, list[bytes]] = {
    "results": [b"value numbers"] * 4,
    "results and errors": [b"value numbers", b"corrupt", b"value it", b"none", b"value numbers"],
    "small ones": [b"a", b"corrupt", b"value nested"] * 4,
    "errors": [b"error long"] * 6,
}
VALUES = {
    "numbers": np.arange(5_000, dtype="f4"), "it": "ü" * 3_000, "nested": {"ä": [1.5, None], "b": "x"},
    "long": DecodeError("ü" * 900),
}  # fmt: skip


def many_over_infer(port: int, items: list[bytes]) -> tuple[int, Codes]:
    inputs = [{"data": {"b64": base64.b64encode(item).decode()}} for item in items]
    answer = fetch(port, INFER, "POST", json.dumps({"inputs": inputs}).encode(), **JSON)
    if answer.status != 200:
        return 0, [json.loads(answer.body)["code"]]
    return len(answer.body), [each.get("code", "ok") for each in json.loads(answer.body)["outcomes"]]


def many_over_thrift(port: int, items: list[bytes]) -> tuple[int, Codes]:
    with Client(port, framed=True) as client:
        seqid = client.send("infer_many", inputs=[{"data": IDL.Value(bytes=item)} for item in items])
        (size,) = struct.unpack(">I", client.sock.recv(4, 0x102))  # MSG_WAITALL, MSG_PEEK
        try:
            outcomes = client.receive(seqid)
        except IDL.InferenceError as error:
            return 0, [error.code]
        return 4 + size, [each.error.code if each.error else "ok" for each in outcomes]


@pytest.mark.parametrize("items", MANY)
@pytest.mark.parametrize("ask_many", [many_over_infer, many_over_thrift])
def test_outcomes_of_a_call_share_the_bytes_that_are_sent(ask_many: Any, items: str) -> None:
    def outcome(most: int) -> tuple[int, Codes]:
        with steered(max_reply_bytes=most) as server:
            Steered.values = VALUES
            found: tuple[int, Codes] = ask_many(server.port, MANY[items])
            return found

    size, codes = outcome(2**22)
    assert len(codes) == len(MANY[items])
    assert "too_large" not in codes
    assert outcome(size) == (size, codes), "all of it fits"
    # One byte less costs one outcome, the largest, if the refusal in its place is smaller; else the whole reply.
    less, fewer = outcome(size - 1)
    assert less < size
    if items == "small ones":
        assert fewer == ["too_large"]
    else:
        lost = [was for was, now in zip(codes, fewer, strict=True) if was != now]
        assert (len(lost), fewer.count("too_large")) == (1, 1)


def test_bytes_count_as_base64() -> None:
    with steered(max_reply_bytes=60_000) as server:
        Steered.values = {"it": bytes(44_000), "more": bytes(45_500)}
        assert fetch(server.port, INFER, "POST", b"value it").status == 200
        assert fetch(server.port, INFER, "POST", b"value more").status == 413


@pytest.mark.parametrize("door", ["infer", "oip"])
def test_raw_output_of_a_detector_passes_as_json(door: str) -> None:
    with steered() as server:
        Steered.values = {"it": torch.linspace(0, 640, 84 * 8400).reshape(1, 84, 8400)}
        size, code, _ = DOORS[door](server.port)
        assert (code, size > 2**22) == ("ok", True)

"""The gRPC port: hostile bytes, limits, streams, and the end of a worker."""

from __future__ import annotations

import gc
import json
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from contract import Asked, as_rpc
from kit.services import LIGHT, LocalServer, Process, SteeredProcess, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually

from torchpipe_py import pipe

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
messages = pytest.importorskip("torchpipe_py.methods.oip.messages")

SERVICE = "/inference.GRPCInferenceService"
Request, Answer = (messages.message(f"inference.ModelInfer{what}") for what in ("Request", "Response"))
StreamAnswer = messages.message("inference.ModelStreamInferResponse")
RETRY = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": {
    "maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}}]})  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("Identity", grpc_port=0, max_message_bytes=2**20, max_text_bytes=2**12) as server:
        yield server


def channel(port: int, **options: Any) -> Any:
    own = {"grpc.use_local_subchannel_pool": 1, **{f"grpc.{name}": value for name, value in options.items()}}
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=list(own.items()))


def method(on: Any, name: str = f"{SERVICE}/ModelInfer") -> Any:
    return on.unary_unary(name)


def code_of(call: Callable[[], object]) -> tuple[str, str]:
    """Status and text of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code().name, raised.value.details()


def tensor(datatype: str = "BYTES", shape: Any = (1,), raw: Any = (), **more: Any) -> bytes:
    given = {"name": "data", "datatype": datatype, "shape": shape, **more}
    return Request(model_name="test", inputs=[given], raw_input_contents=raw).SerializeToString()


GOOD = as_rpc(Asked()).SerializeToString()


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (b"\xff\xff no message", "INVALID_ARGUMENT", "not a inference.ModelInferRequest"),
        (b"", "NOT_FOUND", "Request for unknown model: '' is not found; valid: test"),
        (tensor("BYTES", (1,), [bytes(2**20)]), "RESOURCE_EXHAUSTED", "larger than max"),
        (GOOD + b"\x2a\0" * 300, "INVALID_ARGUMENT", "301 inputs; the limit is 256"),
        (b"\x2a\0" * 5000, "INVALID_ARGUMENT", "more than 4096 fields (--max-items)"),
        (
            tensor(shape=(1,) * 100, contents={"bytes_contents": [b""] * 5000}),
            "INVALID_ARGUMENT",
            "more than 4096 fields",
        ),
        (tensor("FP32", [1] * 30_000), "INVALID_ARGUMENT", "30000 bytes of numbers in shape; the limit is 2048"),
        (b"\x0b" * 5000, "INVALID_ARGUMENT", "not a inference.ModelInferRequest"),
        (b"\x08" + b"\xff" * 5000, "INVALID_ARGUMENT", "cut short"),
        (tensor("FP32", (1, 1), [b"1234", b"1"]), "INVALID_ARGUMENT", "2 raw_input_contents for 1 inputs"),
        (
            tensor("INT8", (1, 1), [b"1", b"1"], contents={"int_contents": [1]}),
            *("INVALID_ARGUMENT", "contents field must not be specified when using raw_input_contents for"),
        ),
        (tensor("FP32", (1, -1), [b"1234"]), "INVALID_ARGUMENT", "the shape is not a list of sizes"),
        (tensor("FP32", [1] * 10_000, [b"1234"]), "INVALID_ARGUMENT", "10000 dimensions"),
        (tensor("FP16", (1, 1), contents={"fp32_contents": [1]}), "INVALID_ARGUMENT", "sent as raw_input_contents"),
        (tensor("INT8", (1, 1), contents={"int_contents": [999]}), "INVALID_ARGUMENT", "int8 has -128..127"),
        (
            tensor("INT32", (1, 5000), contents={"int_contents": [1] * 5000}),
            *("INVALID_ARGUMENT", "5000 elements in contents; the limit is 2048"),
        ),
        (
            tensor("FP32", (1, 1), parameters={"shared_memory_region": {"string_param": "x"}}),
            *("INVALID_ARGUMENT", "shared memory is not served"),
        ),
        (
            GOOD + Request(parameters={"deadline": {"int64_param": 1}}).SerializeToString(),
            *("INVALID_ARGUMENT", "did you mean 'deadline_ms'?"),
        ),
    ],
)
def test_a_wrong_message_is_refused(server: LocalServer, data: bytes, status: str, said: str) -> None:
    with channel(server.grpc_port) as on:
        found, text = code_of(lambda: method(on)(data, timeout=WAIT))
        assert (found, said in text) == (status, True), text
        answer = Answer.FromString(method(on)(GOOD, timeout=WAIT))
        assert answer.raw_output_contents == [struct.pack("<I", 3) + b"abc"]


@pytest.mark.parametrize("outputs", [[], ["result"]])
@pytest.mark.parametrize("id", ["", "größe"])
def test_an_answer_has_the_id_and_the_outputs_of_its_request(server: LocalServer, outputs: list[str], id: str) -> None:
    asked = Request(id=id, outputs=[{"name": name} for name in outputs]).SerializeToString()
    with channel(server.grpc_port) as on:
        answer = Answer.FromString(method(on)(GOOD + asked, timeout=WAIT))
        assert (answer.id, [output.name for output in answer.outputs]) == (id, ["result"])
        other = Request(outputs=[{"name": "other"}]).SerializeToString()
        assert "no output 'other'" in code_of(lambda: method(on)(GOOD + other, timeout=WAIT))[1]


def test_a_refused_message_is_let_go_at_once(server: LocalServer) -> None:
    refused = Request(model_name="let go").SerializeToString()
    gc.disable()
    try:
        with channel(server.grpc_port) as on:
            assert code_of(lambda: method(on)(refused, timeout=WAIT))[0] == "NOT_FOUND"
        frames = [each for each in gc.get_objects() if isinstance(each, FrameType)]
        assert [each for each in frames if each.f_locals.get("data") == refused] == []
    finally:
        gc.enable()


def test_what_grpc_offers_besides(server: LocalServer) -> None:
    with channel(server.grpc_port) as on:
        packed = code_of(lambda: method(on)(GOOD, timeout=WAIT, compression=grpc.Compression.Gzip))
        assert packed == ("UNIMPLEMENTED", "Compression algorithm 'gzip' is disabled.")
        fields = code_of(lambda: method(on)(GOOD, timeout=WAIT, metadata=[("x-a", "1" * 20_000)]))
        assert fields[0] == "RESOURCE_EXHAUSTED"
        check = method(on, "/grpc.health.v1.Health/Check")
        assert check(b"", timeout=WAIT) == b"\x08\x01", "SERVING"
        assert check(b"\n\x04test", timeout=WAIT) == b"\x08\x01", "a model's name"
        assert code_of(lambda: check(b"\n\x01x", timeout=WAIT))[0] == "NOT_FOUND"
        load = messages.message("inference.RepositoryModelLoadRequest")(model_name="test").SerializeToString()
        assert code_of(lambda: method(on, f"{SERVICE}/RepositoryModelLoad")(load, timeout=WAIT))[0] == "UNIMPLEMENTED"
        for memory in ("System", "Cuda"):
            for what, region, status in (
                *(("Unregister", b"", ""), ("Status", b"", "")),
                *((what, b"\n\x01x", "UNIMPLEMENTED") for what in ("Unregister", "Status", "Register")),
                ("Register", b"", "UNIMPLEMENTED"),
            ):
                call = partial(method(on, f"{SERVICE}/{memory}SharedMemory{what}"), region, timeout=WAIT)
                assert (code_of(call)[0] if status else call().decode()) == status, what


def test_who_watches_the_health_is_told_of_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    serving_, not_serving, unknown = b"\x08\x01", b"\x08\x02", b"\x08\x03"
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        watch = on.unary_stream("/grpc.health.v1.Health/Watch")
        told, of_unknown = watch(b"", timeout=WAIT), watch(b"\n\x01x", timeout=WAIT)
        assert (next(told), next(of_unknown)) == (serving_, unknown)
        with monkeypatch.context() as patch:
            patch.setattr(pipe, "stats", lambda self: {"nodes": {"node": {"alive": 0}}})
            assert next(told) == not_serving
        assert next(told) == serving_
        assert code_of(lambda: next(watch(b"\xff", timeout=WAIT)))[0] == "INVALID_ARGUMENT"
        long = code_of(lambda: next(watch(b"\n\x88\x27" + b"x" * 5000, timeout=WAIT)))
        assert long == ("INVALID_ARGUMENT", "5003 bytes to watch; the limit is 4096")
        told.cancel()
        eventually(lambda: len(server.rpc._calls) == 1, "a watch whose client is gone takes room")
        told = watch(b"", timeout=WAIT)
        assert next(told) == serving_
        server.call(server.rpc.drain)
        for each in (told, of_unknown):
            assert next(each) == not_serving
            assert code_of(lambda each=each: next(each)) == ("UNAVAILABLE", "the service is ending: watch again")
        assert server.server.counters.summary()["by_method"]["gRPC Watch"] == {"ok": 3, "invalid_request": 2}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_a_client_finds_out_what_there_is(server: LocalServer, version: str) -> None:
    ask_of, told_of = (messages.message(f"grpc.reflection.v1.ServerReflection{one}") for one in ("Request", "Response"))
    asked = [
        ask_of(list_services="*"),
        ask_of(file_containing_symbol="inference.ModelInferRequest"),
        ask_of(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        ask_of(file_containing_symbol="inference.GRPCInferenceService.Infer"),
        ask_of(file_by_filename="passwd"),
    ]
    with channel(server.grpc_port) as on:
        ask = on.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        raw = list(ask((one.SerializeToString() for one in asked), timeout=WAIT))
    services, file, of_method, *missing = map(told_of.FromString, raw)
    assert "inference.GRPCInferenceService" in [one.name for one in services.list_services_response.service]
    assert b"ModelInferRequest" in file.file_descriptor_response.file_descriptor_proto[0]
    assert of_method.file_descriptor_response == file.file_descriptor_response
    assert [one.error_response.error_code for one in missing] == [5, 5]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x80\x01\0\1\0\0\0\4ping\0\0\0\0",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\xff\xff\xff\1\4\0\0\0\1" + bytes(99_999),
    ],
)
def test_what_is_no_http_2_is_not_served(server: LocalServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.grpc_port), WAIT) as sock:
        sock.sendall(data)
        try:
            while sock.recv(2**16):
                pass
        except ConnectionResetError:
            pass
    with channel(server.grpc_port) as on:
        method(on)(GOOD, timeout=WAIT)


def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    with serving("Identity", grpc_port=0, message_seconds=0.2) as server, channel(server.grpc_port) as on:
        never = on.stream_unary(f"{SERVICE}/ModelInfer")
        gate = threading.Event()
        late = code_of(lambda: never(iter(gate.wait, True), timeout=WAIT))
        gate.set()
        assert late == ("DEADLINE_EXCEEDED", "no whole message within 0.2 s")


def test_more_calls_than_allowed_are_refused_with_a_time_to_come_again() -> None:
    with steered(grpc_port=0, max_connections=2) as server, channel(server.grpc_port) as one:
        blocked = as_rpc(Asked(b"block")).SerializeToString()
        with channel(server.grpc_port) as other:
            held = [method(on).future(blocked, timeout=WAIT) for on in (one, other)]
            eventually(lambda: server.run.stats()["inflight"] == 2)
            with pytest.raises(grpc.RpcError) as raised:
                method(one)(GOOD, timeout=2)
            assert raised.value.code().name in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
            Steered.opened.set()
            assert all(call.result(WAIT) for call in held)
        assert method(one)(GOOD, timeout=WAIT)


def test_watches_leave_half_of_the_room_to_others() -> None:
    with steered(grpc_port=0, max_connections=2) as server, channel(server.grpc_port) as one:
        watch = "/grpc.health.v1.Health/Watch"
        held = one.unary_stream(watch)(b"", timeout=WAIT)
        assert next(held) == b"\x08\x01"
        with channel(server.grpc_port) as other:
            assert code_of(lambda: next(other.unary_stream(watch)(b"", timeout=WAIT)))[0] == "RESOURCE_EXHAUSTED"
            assert method(other)(GOOD, timeout=WAIT)
        held.cancel()


def test_a_stream_answers_each_request_in_its_order() -> None:
    asked = [Asked(b"abc"), Asked(b"raise"), Asked(b"none"), *[Asked(str(n).encode()) for n in range(40)]]
    with steered(grpc_port=0) as server, channel(server.grpc_port) as on:
        stream = on.stream_stream(f"{SERVICE}/ModelStreamInfer")
        sent = [as_rpc(one) for one in asked]
        for index, one in enumerate(sent):
            one.id = str(index)
        raw = stream((one.SerializeToString() for one in sent), timeout=WAIT)
        answers = [StreamAnswer.FromString(one) for one in raw]
    assert [answer.infer_response.id for answer in answers] == [one.id for one in sent]
    assert ["ValueError: on request" in answers[1].error_message, "on request" in answers[2].error_message] == [
        True
    ] * 2
    assert [one.infer_response.raw_output_contents[0][4:] for one in answers[3:]] == [one.data for one in asked[3:]]
    assert server.server.counters.summary()["by_method"]["gRPC ModelStreamInfer"]["ok"] == len(sent) - 2


def started(process: Process) -> int:
    """The gRPC port of a service that starts."""
    process.wait_started()
    line = process.process.stdout.readline()
    found = re.search(r"gRPC on 127\.0\.0\.1:(\d+)", line)
    assert found, line
    return int(found[1])


def test_sigterm_answers_what_was_accepted_and_ends_streams(tmp_path: Path) -> None:
    with SteeredProcess(tmp_path, "--grpc-port", "0") as service, channel(started(service)) as on:
        on_end: list[str] = []
        gate = threading.Event()
        stream = on.stream_stream(f"{SERVICE}/ModelStreamInfer")
        asked = as_rpc(Asked(b"abc"))
        asked.model_name = "steered"
        messages_ = iter([asked.SerializeToString()])
        open_ = stream(iter(lambda: next(messages_, None) or (gate.wait() and None), None), timeout=WAIT)
        assert b"abc" in next(open_)
        asked = as_rpc(Asked(b"block"))
        asked.model_name = "steered"
        blocked = method(on).future(asked.SerializeToString(), timeout=WAIT)
        service.wait_entered()
        service.signal()
        on_end.append(code_of(lambda: next(open_))[0])
        service.open()
        assert Answer.FromString(blocked.result(WAIT)).raw_output_contents
        gate.set()
        assert (on_end, service.wait()) == (["UNAVAILABLE"], 0)


def test_a_reload_loses_no_request_that_its_client_retries(tmp_path: Path) -> None:
    config = tmp_path / "test.toml"
    config.write_text('[node]\nbackend = "Identity"\n')
    stop, failed, count = threading.Event(), [], [0, 0]
    with Process("--grpc-port", "0", "--workers", "2", config=str(config), env={"PYTHONPATH": LIGHT}) as service:
        port = started(service)

        def ask(index: int) -> None:
            with channel(port, service_config=RETRY) as on:
                while not stop.is_set():
                    try:
                        method(on)(GOOD, timeout=WAIT)
                        count[index] += 1
                    except grpc.RpcError as error:
                        failed.append(error)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        before = service.workers
        service.signal(signal.SIGHUP)
        eventually(lambda: not {*before} & {*service.workers}, "the old workers do not end")
        reached = list(count)
        eventually(lambda: all(now > then for now, then in zip(count, reached, strict=True)))
        stop.set()
        for thread in threads:
            thread.join(WAIT)
        service.signal()
        assert service.wait() == 0
    assert failed == []


def test_a_port_of_another_service_is_not_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Process("--grpc-port", str(port)) as service:
            assert service.wait() == 1
            assert f"cannot listen on 127.0.0.1:{port} (--grpc-port): Address already in use" in service.stderr


WATCH = "/grpc.health.v1.Health/Watch"


def without_room(path: str, data: bytes, *streams: int) -> bytes:
    """What a client sends that makes calls of one message, and has no room for bytes of answers."""

    def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
        return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data

    fields = f":method POST :scheme http :path {path} :authority a content-type application/grpc te trailers"
    texts = [bytes([len(text)]) + text.encode() for text in fields.split()]
    head = b"".join(b"\0" + key + value for key, value in zip(texts[::2], texts[1::2], strict=True))
    call = [frame(1, 4, at, head) + frame(0, 1, at, b"\0" + struct.pack(">I", len(data)) + data) for at in streams]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)) + b"".join(call)


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer"])
def test_a_client_that_takes_no_answers_loses_its_connection_where_room_is_scarce(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = as_rpc(Asked(b"large")).SerializeToString()
    with steered(grpc_port=0, message_seconds=0.2, max_connections=4) as server:
        with socket.create_connection(("127.0.0.1", server.grpc_port), WAIT) as sock:
            sock.sendall(without_room(f"{SERVICE}/{name}", data, 1, 3))
            while sock.recv(2**16):
                pass
        assert "1 client took no answers: disconnected" in caplog.text
        eventually(lambda: not server.rpc.held_bytes)
        with channel(server.grpc_port) as on:
            assert method(on)(GOOD, timeout=WAIT)


@pytest.mark.parametrize(("path", "data"), [(WATCH, b""), (f"{SERVICE}/ModelInfer", GOOD)])
def test_a_client_that_leaves_before_it_takes_its_answer_is_not_logged(
    path: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("Identity", grpc_port=0) as server:
        with socket.create_connection(("127.0.0.1", server.grpc_port), WAIT) as sock:
            sock.sendall(without_room(path, data, 1))
            eventually(lambda: any(call.answered for call in list(server.rpc._calls)), "no answer")
        eventually(lambda: not server.rpc._calls, "the call of a client that is gone takes room")
    assert caplog.text == ""


def test_a_watch_whose_client_takes_no_answer_does_not_delay_the_end() -> None:
    with serving("Identity", grpc_port=0, drain_seconds=2 * WAIT) as server:
        with socket.create_connection(("127.0.0.1", server.grpc_port), WAIT) as sock:
            sock.sendall(without_room(WATCH, b"", 1))
            eventually(lambda: any(call.answered for call in list(server.rpc._calls)), "no answer")
            server.call(server.rpc.drain)
            while sock.recv(2**16):
                pass
        eventually(lambda: server.rpc.is_finished, "the service does not end")


def test_many_watches_ask_the_pipe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    stats = pipe.stats
    monkeypatch.setattr(pipe, "stats", lambda self: asked.append(0.0) or stats(self))
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        held = [on.unary_stream(WATCH)(b"", timeout=WAIT) for _ in range(50)]
        assert {next(each) for each in held} == {b"\x08\x01"}
        assert len(asked) < len(held)


def test_a_call_leaves_nothing_to_the_garbage_collector() -> None:
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        gc.disable()
        try:
            for _ in range(20):
                method(on)(GOOD, timeout=WAIT)
            eventually(lambda: not server.rpc._calls)
            kept = [each for each in gc.get_objects() if type(each).__name__ == "_ServicerContext"]
            assert len(kept) < 20
        finally:
            gc.enable()


def test_a_stream_that_ends_with_an_error_leaves_nothing() -> None:
    asked = [as_rpc(Asked(b"block")).SerializeToString(), b"\xff no message", *[GOOD] * 100]
    with steered(grpc_port=0) as server, channel(server.grpc_port) as on:
        answers = on.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(asked), timeout=WAIT)
        eventually(lambda: Steered.entered.acquire(blocking=False))
        Steered.opened.set()
        assert next(answers)
        assert code_of(lambda: next(answers))[0] == "INVALID_ARGUMENT"
        eventually(lambda: (server.run.stats()["inflight"], server.rpc.held_bytes) == (0, 0))

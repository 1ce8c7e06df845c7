"""The gRPC port: hostile bytes, limits, streams, and the end of a worker."""

from __future__ import annotations

import gc
import json
import re
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from kit.clients import connect, read_all
from kit.contract import Asked, as_rpc
from kit.services import LIGHT, LocalServer, Process, SteeredProcess, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, error_of, eventually
from torchpipe_server.front import pacing
from torchpipe_server.front.pacing import RefusalPacing

from torchpipe_py import Overloaded, pipe
from torchpipe_py.methods.oip import core

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
messages = pytest.importorskip("torchpipe_py.methods.rpc.messages")

SERVICE = "/inference.GRPCInferenceService"
Request, Answer = (messages.message(f"inference.ModelInfer{what}") for what in ("Request", "Response"))
StreamAnswer = messages.message("inference.ModelStreamInferResponse")
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = b"\x08\x01"
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


def infer(on: Any, data: bytes, **options: Any) -> Any:
    return call(on, f"{SERVICE}/ModelInfer", data, **options)


def call(on: Any, path: str, data: bytes = b"", **options: Any) -> Any:
    return on.unary_unary(path)(data, timeout=WAIT, **options)


def code_of(ask: Callable[[], object]) -> tuple[str, str]:
    """Status and text of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        ask()
    return raised.value.code().name, raised.value.details()


def tensor(datatype: str = "BYTES", shape: Any = (1,), raw: Any = (), **more: Any) -> bytes:
    given = {"name": "data", "datatype": datatype, "shape": shape, **more}
    return Request(model_name="test", inputs=[given], raw_input_contents=raw).SerializeToString()


GOOD = as_rpc(Asked()).SerializeToString()


UNKNOWN, LARGE = "Request for unknown model: '' is not found; valid: test", "larger than max"
SHARED_MEMORY = {"shared_memory_region": {"string_param": "x"}}
WRONG = {
    "not a inference.ModelInferRequest": b"\xff\xff no message",
    UNKNOWN: b"",
    LARGE: tensor("BYTES", (1,), [bytes(2**20)]),
    "601 inputs; the limit is 512": GOOD + b"\x2a\0" * 600,
    "more than 4096 fields (--max-items)": b"\x2a\0" * 5000,
    "more than 4096 fields": tensor(shape=(1,), contents={"bytes_contents": [b""] * 5000}),
    "30000 numbers up to shape; the limit is 2048": tensor("FP32", [1] * 30_000),
    "a inference.ModelInferRequest": b"\x0b" * 5000,
    "cut short": b"\x08" + b"\xff" * 5000,
    "2 raw_input_contents for 1 inputs": tensor("FP32", (1, 1), [b"1234", b"1"]),
    "contents field must not be specified when using raw_input_contents for": tensor(
        "INT8", (1, 1), [b"1", b"1"], contents={"int_contents": [1]}
    ),
    "there are 8; each element of BYTES begins with its length in 4 bytes": tensor(
        "BYTES", (1,), [b"\xff\xd8\xff\xe0JFIF"]
    ),
    "2000 dimensions": tensor("FP32", [1] * 2_000, [b"1234"]),
    "shape [1, 3] does not fit 2 numbers": tensor("FP32", (1, 3), contents={"fp32_contents": [1, 2]}),
    "int8 has -128..127": tensor("INT8", (1, 1), contents={"int_contents": [999]}),
    "UINT8 is read from uint_contents, and the contents have int_contents": tensor(
        "UINT8", (1, 1), contents={"int_contents": [1]}
    ),
    "FP64 is read from fp64_contents, and the contents have fp32_contents": tensor(
        "FP64", (1, 1), contents={"fp64_contents": [1], "fp32_contents": [1]}
    ),
    "sent as raw_input_contents": tensor("FP16", (1, 1), contents={"fp32_contents": [1]}),
    "5002 numbers up to int_contents; the limit is 2048": tensor(
        "INT32", (1, 5000), contents={"int_contents": [1] * 5000}
    ),
    "3000 elements in contents; the limit is 2048": tensor("INT32", (1, 3000), contents={"int_contents": [1] * 3000}),
    "shared memory is not served": tensor("FP32", (1, 1), parameters=SHARED_MEMORY),
    "did you mean 'deadline_ms'?": GOOD + Request(parameters={"deadline": {"int64_param": 1}}).SerializeToString(),
}
OTHER_STATUS = {LARGE: "RESOURCE_EXHAUSTED", UNKNOWN: "NOT_FOUND"}


@pytest.mark.parametrize("said", WRONG)
def test_refuses_invalid_message(server: LocalServer, said: str) -> None:
    with channel(server.grpc_port) as on:
        status, text = code_of(lambda: infer(on, WRONG[said]))
        assert said in text
        assert status == OTHER_STATUS.get(said, "INVALID_ARGUMENT")
        answer = Answer.FromString(infer(on, GOOD))
        assert answer.raw_output_contents == [struct.pack("<I", 3) + b"abc"]


@pytest.mark.parametrize(("datatype", "form"), [("FP32", "<3f"), ("FP64", "<3d")])
def test_takes_nan_and_infinity_as_contents(server: LocalServer, datatype: str, form: str) -> None:
    numbers = [float("nan"), float("-inf"), 1.5]
    sent = tensor(datatype, (1, 3), contents={f"{datatype.lower()}_contents": numbers})
    with channel(server.grpc_port) as on:
        assert Answer.FromString(infer(on, sent)).raw_output_contents == [struct.pack(form, *numbers)]
        short = tensor(datatype, (1, 3), contents={f"{datatype.lower()}_contents": numbers[:2]})
        assert "shape [1, 3] does not fit 2 numbers" in code_of(lambda: infer(on, short))[1]


def test_takes_raw_input_contents_beside_empty_contents(server: LocalServer) -> None:
    """As MLServer's client sends them."""
    value = struct.pack("<I", 3) + b"xyz"
    sent = tensor("BYTES", (1,), [value], contents={})
    assert Request.FromString(sent).inputs[0].HasField("contents")
    with channel(server.grpc_port) as on:
        assert Answer.FromString(infer(on, sent)).raw_output_contents == [value]


@pytest.mark.parametrize("outputs", [[], ["result"]])
@pytest.mark.parametrize("id", ["", "größe"])
def test_answer_has_id_and_outputs_of_its_request(server: LocalServer, outputs: list[str], id: str) -> None:
    asked = Request(id=id, outputs=[{"name": name} for name in outputs]).SerializeToString()
    with channel(server.grpc_port) as on:
        answer = Answer.FromString(infer(on, GOOD + asked))
        assert (answer.id, [output.name for output in answer.outputs]) == (id, ["result"])
        other = Request(outputs=[{"name": "other"}]).SerializeToString()
        assert "no output 'other'" in code_of(lambda: infer(on, GOOD + other))[1]


def test_refuses_deflate_large_metadata_and_unserved_methods(server: LocalServer) -> None:
    with channel(server.grpc_port) as on:
        packed = code_of(lambda: infer(on, GOOD, compression=grpc.Compression.Deflate))
        assert packed == ("UNIMPLEMENTED", "Compression algorithm 'deflate' is disabled.")
        assert code_of(lambda: infer(on, GOOD, metadata=[("x-a", "1" * 20_000)]))[0] == "RESOURCE_EXHAUSTED"
        for model in (b"", b"\n\x04test"):
            assert call(on, "/grpc.health.v1.Health/Check", model) == SERVING
        assert code_of(lambda: call(on, "/grpc.health.v1.Health/Check", b"\n\x01x"))[0] == "NOT_FOUND"
        load = messages.message("inference.RepositoryModelLoadRequest")(model_name="test").SerializeToString()
        assert code_of(lambda: call(on, f"{SERVICE}/RepositoryModelLoad", load))[0] == "UNIMPLEMENTED"
        for path in (f"{SERVICE}/{memory}SharedMemory" for memory in ("System", "Cuda")):
            assert [call(on, path + what) for what in ("Unregister", "Status")] == [b"", b""]
            region = b"\n\x01x"
            for what, named in (("Unregister", region), ("Status", region), ("Register", region), ("Register", b"")):
                assert code_of(partial(call, on, path + what, named))[0] == "UNIMPLEMENTED"


def test_health_watch_reports_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    not_serving, unknown = b"\x08\x02", b"\x08\x03"
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        watch = on.unary_stream(WATCH)
        told, of_unknown = watch(b"", timeout=WAIT), watch(b"\n\x01x", timeout=WAIT)
        assert (next(told), next(of_unknown)) == (SERVING, unknown)
        with monkeypatch.context() as patch:
            patch.setattr(pipe, "stats", lambda self: {"nodes": {"node": {"alive": 0}}})
            assert next(told) == not_serving
        assert next(told) == SERVING
        assert code_of(lambda: next(watch(b"\xff", timeout=WAIT)))[0] == "INVALID_ARGUMENT"
        long = code_of(lambda: next(watch(b"\n\x88\x27" + b"x" * 5000, timeout=WAIT)))
        assert long == ("INVALID_ARGUMENT", "5003 bytes to watch; the limit is 4096")
        told.cancel()
        eventually(lambda: len(server.rpc.limits.calls) == 1, "a watch whose client is gone takes room")
        told = watch(b"", timeout=WAIT)
        assert next(told) == SERVING
        server.call(server.rpc.drain)
        for each in (told, of_unknown):
            assert next(each) == not_serving
            assert code_of(lambda each=each: next(each)) == ("UNAVAILABLE", "the service is ending: watch again")
        assert server.by_method["gRPC Watch"] == {"ok": 3, "invalid_request": 2}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_services_and_files(server: LocalServer, version: str) -> None:
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


def test_ends_call_whose_message_does_not_arrive() -> None:
    with serving("Identity", grpc_port=0, message_seconds=0.2) as server, channel(server.grpc_port) as on:
        never = on.stream_unary(f"{SERVICE}/ModelInfer")
        gate = threading.Event()
        late = code_of(lambda: never(iter(gate.wait, True), timeout=WAIT))
        gate.set()
        assert late == ("DEADLINE_EXCEEDED", "no whole message within 0.2 s")


def test_refuses_calls_beyond_the_limit_with_retry_time() -> None:
    with steered(grpc_port=0, max_connections=2) as server, channel(server.grpc_port) as one:
        blocked = as_rpc(Asked(b"block")).SerializeToString()
        with channel(server.grpc_port) as other:
            held = [on.unary_unary(f"{SERVICE}/ModelInfer").future(blocked, timeout=WAIT) for on in (one, other)]
            eventually(lambda: server.run.stats()["inflight"] == 2)
            with pytest.raises(grpc.RpcError) as raised:
                one.unary_unary(f"{SERVICE}/ModelInfer")(GOOD, timeout=2)
            assert raised.value.code().name in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
            Steered.opened.set()
            assert all(each.result(WAIT) for each in held)
        assert infer(one, GOOD)


def test_refuses_client_that_retries_at_once_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    delay = RefusalPacing.delay

    def recorded(self: RefusalPacing, *args: Any) -> float:
        delays.append(delay(self, *args))
        return delays[-1]

    monkeypatch.setattr(RefusalPacing, "delay", recorded)
    monkeypatch.setattr(pacing, "REFUSALS_AT_ONCE", 0)
    monkeypatch.setattr(pacing, "PACED_SECONDS", WAIT)
    with steered(grpc_port=0, drain_seconds=2 * WAIT) as server:
        Steered.values = {"busy": Overloaded("busy", retry_after_ms=1)}
        request = as_rpc(Asked(b"error busy")).SerializeToString()
        for _ in range(2):
            with channel(server.grpc_port) as on:
                for _ in range(2):
                    assert code_of(partial(infer, on, request)) == ("RESOURCE_EXHAUSTED", "busy")
    assert [delay > 0.0 for delay in delays] == [False, True] * 2


def test_watches_take_half_of_the_room_at_most() -> None:
    with steered(grpc_port=0, max_connections=2) as server, channel(server.grpc_port) as one:
        held = one.unary_stream(WATCH)(b"", timeout=WAIT)
        assert next(held) == SERVING
        with channel(server.grpc_port) as other:
            assert code_of(lambda: next(other.unary_stream(WATCH)(b"", timeout=WAIT)))[0] == "RESOURCE_EXHAUSTED"
            assert infer(other, GOOD)
        held.cancel()


def test_stream_answers_in_order() -> None:
    asked = [Asked(b"abc"), Asked(b"raise"), Asked(b"none"), *[Asked(str(n).encode()) for n in range(40)]]
    with steered(grpc_port=0) as server, channel(server.grpc_port) as on:
        stream = on.stream_stream(f"{SERVICE}/ModelStreamInfer")
        sent = [as_rpc(one) for one in asked]
        for index, one in enumerate(sent):
            one.id = str(index)
        raw = stream((one.SerializeToString() for one in sent), timeout=WAIT)
        answers = [StreamAnswer.FromString(one) for one in raw]
    assert [answer.infer_response.id for answer in answers] == [one.id for one in sent]
    assert "ValueError: on request" in answers[1].error_message
    assert "on request" in answers[2].error_message
    assert [one.infer_response.raw_output_contents[0][4:] for one in answers[3:]] == [one.data for one in asked[3:]]
    assert server.by_method["gRPC ModelStreamInfer"]["ok"] == len(sent) - 2


def test_stream_keeps_no_bytes_of_answers_that_were_read() -> None:
    large = as_rpc(Asked(b"large")).SerializeToString()
    with steered(grpc_port=0) as server, channel(server.grpc_port) as on:
        asked = SimpleQueue[bytes]()
        answers = on.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(asked.get, b""), timeout=WAIT)
        for _ in range(2):
            asked.put(large)
            assert len(next(answers)) > 2**20
            eventually(lambda: server.rpc.limits.held_bytes == 0)
        asked.put(b"")
        assert not list(answers)


def started(process: Process) -> int:
    """The gRPC port of a service that starts."""
    process.wait_started()
    line = process.process.stdout.readline()
    found = re.search(r"gRPC on 127\.0\.0\.1:(\d+)", line)
    assert found, line
    return int(found[1])


def test_sigterm_answers_accepted_calls_and_ends_streams(tmp_path: Path) -> None:
    with SteeredProcess(tmp_path, "--grpc-port", "0") as service, channel(started(service)) as on:
        asked, block = SimpleQueue[bytes](), as_rpc(Asked(b"block"), "steered").SerializeToString()
        asked.put(as_rpc(Asked(b"abc"), "steered").SerializeToString())
        answers = on.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(asked.get, b""), timeout=WAIT)
        assert b"abc" in next(answers)
        blocked = on.unary_unary(f"{SERVICE}/ModelInfer").future(block, timeout=WAIT)
        service.wait_entered()
        service.signal()
        assert code_of(lambda: next(answers))[0] == "UNAVAILABLE"
        service.open()
        assert Answer.FromString(blocked.result(WAIT)).raw_output_contents
        asked.put(b"")
        assert service.wait() == 0


def test_reload_loses_no_retried_request(tmp_path: Path) -> None:
    config = tmp_path / "test.toml"
    config.write_text('[node]\nbackend = "Identity"\n')
    stop, count = threading.Event(), [0, 0]
    with Process("--grpc-port", "0", "--workers", "2", config=str(config), env={"PYTHONPATH": LIGHT}) as service:
        port = started(service)

        def ask(index: int) -> None:
            with channel(port, service_config=RETRY) as on:
                while not stop.is_set():
                    infer(on, GOOD)
                    count[index] += 1

        with ThreadPoolExecutor() as threads:
            asking = [threads.submit(ask, index) for index in range(2)]
            before = service.workers
            service.signal(signal.SIGHUP)
            eventually(lambda: not {*before} & {*service.workers}, "the old workers do not end")
            reached = list(count)
            eventually(lambda: all(now > then for now, then in zip(count, reached, strict=True)))
            stop.set()
            assert [error_of(each) for each in asking] == [None] * 2
        service.signal()
        assert service.wait() == 0


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
def test_disconnects_client_that_reads_nothing_if_room_is_scarce(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data = as_rpc(Asked(b"large")).SerializeToString()
    # NOTE: long enough for a busy machine to read the request in: one that does not arrive is not answered either.
    with steered(grpc_port=0, message_seconds=1.0, max_connections=4) as server:
        with connect(server.grpc_port) as sock:
            sock.sendall(without_room(f"{SERVICE}/{name}", data, 1, 3))
            read_all(sock)
        assert "1 client took no answers: disconnected" in caplog.text
        eventually(lambda: not server.rpc.limits.held_bytes)
        with channel(server.grpc_port) as on:
            assert infer(on, GOOD)


@pytest.mark.parametrize(("path", "data"), [(WATCH, b""), (f"{SERVICE}/ModelInfer", GOOD)])
def test_client_that_leaves_before_its_answer_is_not_logged(
    path: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("Identity", grpc_port=0) as server:
        with connect(server.grpc_port) as sock:
            sock.sendall(without_room(path, data, 1))
            eventually(lambda: any(call.answered_at for call in list(server.rpc.limits.calls)), "no answer")
        eventually(lambda: not server.rpc.limits.calls, "the call of a client that is gone takes room")
    assert caplog.text == ""


def test_stalled_watch_does_not_delay_the_end() -> None:
    with serving("Identity", grpc_port=0, drain_seconds=2 * WAIT) as server:
        with connect(server.grpc_port) as sock:
            sock.sendall(without_room(WATCH, b"", 1))
            eventually(lambda: any(call.answered_at for call in list(server.rpc.limits.calls)), "no answer")
            server.call(server.rpc.drain)
            read_all(sock)
        eventually(lambda: server.rpc.is_finished, "the service does not end")


def test_watches_of_one_tick_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a name that is not served looked for among the others again and again."""
    asked: list[float] = []
    searched: list[str] = []
    stats = pipe.stats
    monkeypatch.setattr(pipe, "stats", lambda self: asked.append(0.0) or stats(self))
    monkeypatch.setattr(core, "nearest", lambda name, valid: searched.append(name) or "")
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        held = [on.unary_stream(WATCH)(b"", timeout=WAIT) for _ in range(50)]
        assert {next(each) for each in held} == {SERVING}
        assert len(asked) < len(held)
        assert next(on.unary_stream(WATCH)(b"\n\x01x", timeout=WAIT)) == b"\x08\x03"
        assert not searched


def test_call_leaves_no_reference_cycle() -> None:
    """One that is refused neither."""
    refused = Request(model_name="let go").SerializeToString()
    with serving("Identity", grpc_port=0) as server, channel(server.grpc_port) as on:
        gc.disable()
        try:
            assert code_of(lambda: on.unary_unary(f"{SERVICE}/ModelInfer")(refused, timeout=WAIT))[0] == "NOT_FOUND"
            for _ in range(20):
                infer(on, GOOD)
            eventually(lambda: not server.rpc.limits.calls)
            kept = gc.get_objects()
            for name in ("_ServicerContext", "RpcCall", "Recipient"):
                assert sum(type(each).__name__ == name for each in kept) < 20, name
            assert not [each for each in kept if isinstance(each, FrameType) and each.f_locals.get("data") == refused]
        finally:
            gc.enable()


def test_failed_stream_leaves_no_reference_cycle() -> None:
    asked = [as_rpc(Asked(b"block")).SerializeToString(), b"\xff no message", *[GOOD] * 100]
    with steered(grpc_port=0) as server, channel(server.grpc_port) as on:
        answers = on.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(asked), timeout=WAIT)
        eventually(lambda: Steered.entered.acquire(blocking=False))
        Steered.opened.set()
        assert next(answers)
        assert code_of(lambda: next(answers))[0] == "INVALID_ARGUMENT"
        eventually(lambda: (server.run.stats()["inflight"], server.rpc.limits.held_bytes) == (0, 0))


def test_fails_to_start_if_grpc_port_is_taken(tmp_path: Path) -> None:
    code = tmp_path / "no_port.py"
    code.write_text(
        "import grpc.aio._server\n\n\n"
        "def refuse(server, address):\n    raise RuntimeError('no port for you')\n\n\n"
        "grpc.aio._server.Server.add_insecure_port = refuse\n"
    )
    config = tmp_path / "test.toml"
    config.write_text('[node]\nbackend = "Identity"\n')
    more = ("--grpc-port", "0", "--import", str(code))
    with Process(*more, config=str(config), env={"PYTHONPATH": LIGHT}) as service:
        assert service.wait() == 1
        assert "(--grpc-port): no port for you" in service.stderr

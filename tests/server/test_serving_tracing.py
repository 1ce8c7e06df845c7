"""Server spans: what a ``traceparent`` leads to, over HTTP and Thrift, and what a hostile one does not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
from kit.clients import fetch
from kit.kept_spans import KeptSpans
from kit.services import ROOT, LocalServer, Process
from kit.waits import WAIT
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from torchpipe_client import AsyncClient, Client, InferenceError
from torchpipe_server.methods.custom import CustomHandler, Handler
from torchpipe_server.options import Options
from torchpipe_server.tracing import set_up
from torchpipe_server.worker.service import usual_service

from torchpipe_py import ConfigError, pipe
from torchpipe_py.methods import tracing
from torchpipe_py.methods.routes import Routes, Served
from torchpipe_py.runtime.record import spans

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
UNSAMPLED = f"{PARENT[:-2]}00"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """As ``set_up`` has it."""
    loggers = [logging.getLogger(name) for name in tracing._LOGGERS]
    levels = [logger.level for logger in loggers]
    tracing.keep_fields_out_of_the_log()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def of(parent: Any, state: str | None = None) -> trace.SpanContext:
    context = tracing.context_of(parent, state)
    return trace.INVALID_SPAN_CONTEXT if context is None else trace.get_current_span(context).get_span_context()


def test_reads_traceparents_of_the_standard() -> None:
    span = of(PARENT, "vendor=x , other@me=y=z")
    assert (span.trace_id, span.span_id, span.is_remote, span.trace_flags) == (TRACE, 0x00F067AA0BA902B7, True, 1)
    assert not of(PARENT, "vendor=x , other@me=y=z").trace_state  # '=' in a value
    assert dict(of(PARENT, "vendor=x ,, other@me=y").trace_state) == {"vendor": "x", "other@me": "y"}
    assert of(f"{PARENT[:-2]}ff").trace_flags.sampled
    assert of(f"01{PARENT[2:]}-more").trace_id == TRACE  # of a version to come, the part that is known
    assert not of(UNSAMPLED).trace_flags.sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT[:-1],
        f"{PARENT}0",
        f"{PARENT}-more",
        PARENT.upper(),
        f"ff{PARENT[2:]}",
        f"01{PARENT[2:]}more",
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", 32 * "0"),
        PARENT.replace("00f067aa0ba902b7", 16 * "0"),
        PARENT.replace("4bf9", "xyz!"),
        PARENT.replace("4bf9", "٤٤٤٤"),
        PARENT.replace("-", "_"),
        f"{PARENT}, {PARENT}",
        f"01{PARENT[2:]}-{'x' * 500}",
        "\x00\x1b[31m",
        "0" * 2**20,
        f"{PARENT}{' ' * 2**20}",
    ],
)
def test_ignores_invalid_traceparents(parent: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert tracing.context_of(parent, "a=b") is None
    assert not caplog.records


def test_unknown_exporter_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonsense")
    with pytest.raises(ConfigError, match=r"\(OTEL_TRACES_EXPORTER=nonsense; .*\): .*'nonsense' not found"):
        set_up()


@pytest.fixture(autouse=True)
def time_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is closed has made all its spans, on a busy machine too."""
    monkeypatch.setattr(spans, "CLOSE_SECONDS", WAIT)


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    kept = KeptSpans()
    yield kept
    kept.provider.shutdown()


class Own(Handler):
    routes: ClassVar[Mapping[str, str]] = {"POST /twice": "twice"}

    async def twice(self, request: Any) -> str:
        for _ in range(2):
            await self.run({"data": request.body})
        return f"{trace.get_current_span().get_span_context().trace_id:x}"


@contextmanager
def serving(
    provider: TracerProvider, ratio: float = 0.0, config: Any = "Identity", own: Any = None, grpc_port: int = -1
) -> Iterator[Any]:
    """A traced service of the usual methods, or of a handler's routes."""
    with pipe({"backend": config} if isinstance(config, str) else config) as run:
        run.instrument(provider, starts_traces=False)
        options = Options("test", grpc_port=grpc_port)
        served = Served({}, Routes(CustomHandler(own, run).routes)) if own else usual_service(options, run)
        traced = tracing.traced(served, provider, ratio, "test")
        with LocalServer(run, make_served=lambda loop: traced, grpc_port=grpc_port) as server:
            yield server


TENSOR = {"inputs": [{"name": "data", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}]}
OIP = "POST /v2/models/{model}/infer"
MODEL = {"torchpipe.model": "test", "torchpipe.model_version": "1"}


@pytest.mark.parametrize(
    ("path", "body", "options", "status", "tree"),
    [
        ("/infer", b"no image", {"config": "DecodeMat"}, 400, ["remote > POST /infer", "POST /infer > pipe node"]),
        ("/v2/models/test/infer", TENSOR, {}, 200, [f"remote > {OIP}", *2 * [f"{OIP} > pipe node"]]),
        ("/twice", b"x", {"own": Own}, 200, ["remote > POST /twice", *2 * ["POST /twice > pipe node"]]),
    ],
)
def test_spans_over_http(kept: KeptSpans, path: str, body: Any, options: Any, status: int, tree: list[str]) -> None:
    with serving(kept.provider, **options) as server:
        for parent in ("hostile", UNSAMPLED, f"ff{PARENT[2:]}"):
            assert fetch(server.port, path, "POST", body, traceparent=parent).status == status
        fields = {"traceparent": PARENT, "tracestate": "a=b", "X_Request_Id": "mine"}
        assert fetch(server.port, path, "POST", body, **fields).status == status
    assert kept.traces == {TRACE}
    assert [line for line in kept.tree() if "compute" not in line] == sorted(tree)
    (root,) = (span for span in kept.spans if span.name.startswith("POST "))
    assert root.kind is trace.SpanKind.SERVER
    failed = {} if status == 200 else {"error.type": "decode_error"}
    route = {"http.request.method": "POST", "http.route": root.name.removeprefix("POST ")}
    assert dict(root.attributes or {}) == {
        "torchpipe.request_id": "mine",
        **route,
        "http.response.status_code": status,
        **({} if "own" in options else MODEL),
        **failed,
    }
    assert root.context is not None
    assert root.context.trace_state.to_header() == "a=b"


def test_clients_send_current_span_or_given_traceparent(kept: KeptSpans) -> None:
    caller = KeptSpans()
    nodes = {"global": {"max_inflight": 64}, "only": {"backend": "Identity"}}
    with serving(kept.provider, config=nodes) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.infer({"data": 1})
        with caller.tracer.start_as_current_span("caller") as span:
            assert client.infer({"data": 1}) == {"result": 1}
            assert [outcome.code for outcome in client.infer_many([b"a", b"b"])] == 2 * ["no_result"]
            with pytest.raises(InferenceError) as failed:
                client.infer_batch(b"a")
            client.infer({"data": 1}, traceparent="")

            async def ask() -> None:
                async with AsyncClient(f"127.0.0.1:{server.port}") as own:
                    await own.infer({"data": 1})
                    await own.infer({"data": 1}, traceparent=PARENT)
                    with pytest.raises(InferenceError):
                        await own.infer_batch(b"a", traceparent=PARENT)
                    await own.infer({"data": 1}, traceparent="0" * 2**19)

            asyncio.run(ask())
    assert failed.value.code == "no_result"
    mine = span.get_span_context()
    assert kept.traces == {mine.trace_id, TRACE}
    assert sorted(kept.tree()) == sorted(
        3 * ["remote > infer"] + 3 * ["infer > pipe only"]
        + 3 * ["remote > infer_many"] + 4 * ["infer_many > pipe only"]
        + 7 * ["pipe only > only: compute"]
    )  # fmt: skip
    for root in kept.named("infer"):
        assert root.parent is not None
        assert root.parent.span_id in (mine.span_id, 0x00F067AA0BA902B7)


def test_spans_over_thrift_name_system_method_and_model(kept: KeptSpans) -> None:
    with serving(kept.provider, ratio=1.0) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.infer({"data": 1})
        with pytest.raises(InferenceError):
            client.infer({"data": 1}, node_name="unknown")
    known, unknown = (dict(span.attributes or {}) for span in kept.named("infer"))
    system = {"rpc.system.name": "thrift", "rpc.method": "infer"}
    assert known.items() >= {**system, **MODEL}.items()
    assert unknown.items() >= {**system, "error.type": "unknown_node"}.items()
    assert "torchpipe.model" not in unknown


@pytest.mark.skipif(find_spec("grpc") is None, reason="grpc is not installed")
def test_spans_over_grpc_name_system_method_model_and_status(kept: KeptSpans) -> None:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    make: Any = message("inference.ModelInferRequest")
    given = {"name": "data", "datatype": "FP32", "shape": [1, 1]}
    with (
        serving(kept.provider, ratio=1.0, grpc_port=0) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for model in ("test", "unknown"):
            request = make(model_name=model, inputs=[given], raw_input_contents=[bytes(4)])
            with suppress(grpc.RpcError):
                infer(request.SerializeToString(), timeout=WAIT)
    known, unknown = (dict(span.attributes or {}) for span in kept.named("gRPC ModelInfer"))
    system = {"rpc.system.name": "grpc", "rpc.method": "ModelInfer"}
    assert known == {**system, **MODEL, "rpc.response.status_code": "OK"}
    assert unknown == {**system, "rpc.response.status_code": "NOT_FOUND", "error.type": "unknown_node"}


# -- from a client through the service into the detector's jumps, as the console exporter writes it -------------------


SCENE = ROOT / "configs/examples/scenes/scene_00.jpg"


def printed_spans(text: str) -> list[dict[str, Any]]:
    """JSON objects, one behind the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        span, end = decoder.raw_decode(text)
        found.append(span)
        text = text[end:]
    return found


def test_one_trace_leads_from_client_to_each_element() -> None:
    caller = KeptSpans()
    arguments = ("--import", "configs/examples/backends.py", "--trace-ratio", "0")
    environment = {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "digits"}
    with Process(*arguments, config="configs/detector.toml", env=environment) as process:
        process.wait_started()
        with Client(f"127.0.0.1:{process.port}") as client:
            client.infer({"data": SCENE.read_bytes()})  # not traced: it has no parent
            with caller.tracer.start_as_current_span("caller") as span:
                boxes = client.infer({"data": SCENE.read_bytes()})["result"]
        process.signal()
        output = process.process.stdout.read()
        assert process.wait() == 0
    spans = printed_spans(output)
    mine = span.get_span_context()
    assert {one["context"]["trace_id"] for one in spans} == {f"0x{mine.trace_id:032x}"}
    assert {one["resource"]["attributes"]["service.name"] for one in spans} == {"digits"}
    names = {one["context"]["span_id"]: one["name"] for one in spans} | {f"0x{mine.span_id:016x}": "caller"}
    tree = sorted(f"{names[one['parent_id']]} > {one['name']}" for one in spans if "compute" in one["name"])
    assert tree == sorted(
        [*(f"pipe decode > {node}: compute" for node in ("decode", "detect", "digits", "merge"))]
        + len(boxes) * ["digit > digit: compute"]
    )
    others = [f"{names[one['parent_id']]} > {one['name']}" for one in spans if ":" not in one["name"]]
    assert sorted(others) == sorted(
        ["caller > infer", "infer > pipe decode", *len(boxes) * ["digits: compute > digit"]]
    )
    assert len(boxes) > 1

"""Where the time of a request went: ``Server-Timing``, and the lines of ``--log-requests slow:MS``."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from kit import contract
from kit.clients import IDL, Client, fetch
from kit.contract import Asked, as_rpc
from kit.services import LocalServer, serving
from kit.waits import WAIT, eventually
from torchpipe_server.options import Options

from torchpipe_py import pipe
from torchpipe_py.methods.routes import Method, Routes, Served
from torchpipe_py.methods.timing import header_of, node_times, timed

CONFIG = {"first": {"backend": "Identity", "next": "last"}, "last": {"backend": "Identity"}}
HEADER = r"total;dur=[\d.]+((, (first|last)\.(queue|wait|compute);dur=[\de.-]+){3}){2}"


def timing_over_http(server: LocalServer, path: str, body: bytes = b"x", **fields: str) -> str:
    return fetch(server.port, path, "POST", body, **fields).fields.get("server-timing", "")


def test_answer_has_node_times_if_asked_for() -> None:
    batch = b'{"inputs": [{"name": "data", "datatype": "BYTES", "shape": [3], "data": ["x", "y", "z"]}]}'
    with serving(CONFIG) as server:
        assert timing_over_http(server, "/infer") == ""
        for path, body, fields in (
            ("/infer?timing=1", b"x", {}),
            ("/infer?outputs=data&timing=1", b"x", {}),
            ("/infer", b"x", {"X_Timing": "1"}),
            ("/v2/models/test/infer?timing=1", batch, {}),
        ):
            assert re.fullmatch(HEADER, timing_over_http(server, path, body, **fields))
        assert timing_over_http(server, "/infer") == ""
    with serving(CONFIG, server_timing="all") as server:
        assert re.fullmatch(HEADER, timing_over_http(server, "/infer"))


@pytest.mark.skipif(not contract.HAS_GRPC, reason="grpcio is not installed")
def test_node_times_over_grpc_are_metadata() -> None:
    import grpc

    with serving(CONFIG, grpc_port=0) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as on:
        infer = on.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        asked = as_rpc(Asked()).SerializeToString()
        for metadata, wanted in (((), False), ((("x-timing", "1"),), True)):
            _, call = infer.with_call(asked, timeout=WAIT, metadata=metadata)
            found = dict(call.trailing_metadata()).get("server-timing")
            assert bool(found and re.fullmatch(HEADER, found)) == wanted, found


def test_slow_requests_are_logged_with_node_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(CONFIG, log_requests="slow:0") as server, Client(server.port) as client:
        client.call("infer", request=IDL.InferRequest(uuid="7", inputs={"data": IDL.Value(bytes=b"x")}))
        eventually(lambda: caplog.records)
    (record,) = caplog.records
    times = r"queue [\de.-]+, wait [\de.-]+, compute [\de.-]+"
    assert re.fullmatch(rf'"7" infer ok [\d.]+ ms first: {times}; last: {times}', record.getMessage())
    fields: Any = record.fields  # type: ignore[attr-defined]
    assert {name: [*phases] for name, phases in fields["nodes"].items()} == {
        name: ["queue", "wait", "compute"] for name in ("first", "last")
    }
    caplog.clear()
    with serving(CONFIG, log_requests="slow:100000") as server, Client(server.port) as client:
        client.call("infer", request=IDL.InferRequest(uuid="8", inputs={"data": IDL.Value(bytes=b"x")}))
    assert caplog.records == []


@pytest.mark.parametrize(("fields", "query"), [(7, "timing=1"), (["x-timing"], ["timing=1"]), (b"x", 7), (None, None)])
def test_thrift_arguments_ask_for_no_node_times(fields: Any, query: Any) -> None:
    """They may have fields of these names; nor does a result with headers of its own change."""
    answer, given = SimpleNamespace(headers={}), list[Any]()
    method = Method(SimpleNamespace, lambda args, done: done(answer), trace_fields=lambda args: (None, None))
    with pipe(CONFIG) as run:
        served = timed(Served({"x": method}, Routes(())), run, True, 0.0)
        served.methods["x"].start(SimpleNamespace(fields=fields, query=query), given.append)
    assert given == [answer]


def test_longest_visit_of_a_node_counts() -> None:
    visits = [
        SimpleNamespace(node="x", arrived=start, collected=start + 1, started=start + 1, ended=end)
        for start, end in ((0, 3), (1, 9), (2, 4))
    ]
    times = node_times(visits)
    assert times == {"x": {"queue": 1000, "wait": 0, "compute": 7000}}
    assert header_of(times, 9) == "total;dur=9000.000, x.queue;dur=1000, x.wait;dur=0, x.compute;dur=7000"
    assert header_of({"a/1/é, x": {"wait": 1}}, 0) == "total;dur=0.000, a_1____x.wait;dur=1", "no header has those"
    assert (Options("a.toml", log_requests="slow:2.5").slow_seconds, Options("a.toml").slow_seconds) == (0.0025, None)

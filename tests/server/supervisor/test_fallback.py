"""What clients are told while no worker is there, and what is answered for a worker that died."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.clients import FRAMINGS, IDL, Client, HttpClient
from kit.services import LocalServer
from thriftpy2.thrift import TApplicationException
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor.connections import Fallback
from torchpipe_server.wire.thrift import Framing, Message

from torchpipe_py.errors import WorkerDied

INFER = IDL.InferRequest(uuid="x", inputs={})
CALLS = {
    "infer_batch": {"params": IDL.InferenceParams(uuid="x", data=b"x")},
    "infer_many": {"params": [IDL.InferenceParams(uuid="x", data=b"x")]},
    "infer": {"request": INFER},
}


def refusing(idl: object = IDL) -> LocalServer:
    server = LocalServer(None)
    server.server.services = Fallback(server.loop, idl, Options("test")).services
    return server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with refusing() as made:
        yield made


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_each_method_has_its_declared_error(server, framed, compact):
    with Client(server.port, framed, compact) as client:
        for method, args in CALLS.items():
            error = client.error_of(method, **args)
            assert (error.code, error.retry_after_ms) == ("unavailable", 500)
            assert error.message


def test_any_path_over_http_says_when_to_come_back_and_keeps_its_connection(server):
    with HttpClient(server.port) as client:
        for path in (b"POST /infer", b"GET /openapi.json", b"GET /v2/health/ready", b"HEAD /infer"):
            client.send(path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok")
            response = client.read(is_head=path.startswith(b"HEAD"))
            assert (response.status, response.fields["retry-after"]) == (503, "1")
            assert response.fields.get("connection") is None
        error = client.error_of("infer_batch", params=IDL.InferenceParams(data=b"x"))
        assert (error.code, error.retry_after_ms) == ("unavailable", 500)


@pytest.mark.parametrize("method", ["ping", "no_such_method"])
def test_what_declares_none_gets_an_application_exception_and_keeps_its_connection(server, method):
    with Client(server.port) as client:
        for _ in range(2):
            with pytest.raises(TApplicationException, match="Unavailable: no worker is running"):
                client.call(method)
        assert client.error_of("infer", request=INFER).code == "unavailable"


REPLIES = [Framing(framed, name) for framed in (False, True) for name in ("binary", "binary_old", "compact")]


@pytest.mark.parametrize("framing", REPLIES, ids=str)
@pytest.mark.parametrize(
    ("name", "idl", "is_declared"),
    [("infer_many", IDL, True), ("ping", IDL, False), ("other", IDL, False), ("infer_batch", None, False)],
)
def test_the_reply_for_a_dead_worker(framing, name, idl, is_declared):
    loop = new_loop(is_fast=False)
    message = Message(name, False, -3, framing)
    reply, _, _ = Fallback(loop, idl, Options("test")).services.thrift.reply(message, WorkerDied("it ended"))
    loop.close()
    text = b"it ended" if is_declared else b"WorkerDied: it ended"
    assert text in reply
    assert (b"worker_died" in reply) == is_declared
    assert name.encode() in reply
    if framing.framed:
        assert int.from_bytes(reply[:4], "big") == len(reply) - 4

"""What a backend raises is in the log with its traceback, once, whichever way the request came in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Register
from service import IDL, Client, LocalServer, eventually, serving
from test_service_http import ask
from thriftpy2.thrift import TApplicationException
from torchpipe_server.front.services import Routes, Served
from torchpipe_server.methods.custom import CustomHandler, Handler

from torchpipe_py import Backend, NoResult, pipe


class Fails(Backend):
    """``raises`` raises, ``none`` has no result."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if item["data"] in (b"raises", "raises"):
                raise KeyError("weights")
            if item["data"] in (b"none", "none"):
                item["error"] = NoResult("nothing found")
            else:
                item["result"] = ("a", 1.0)

    def max(self) -> int:
        return 4


class Own(Handler):
    """Both kinds of methods; neither heeds an exception."""

    service = IDL.InferenceService
    routes = {"POST /own": "upload"}  # noqa: RUF012

    def ping(self) -> None:
        pass

    async def infer_batch(self, params: Any) -> Any:
        await self.run({"data": params.data})

    async def infer_many(self, params: Any, deadline_ms: Any, traceparent: Any, tracestate: Any) -> Any:
        await self.run({"data": b"raises"})

    async def infer(self, request: Any) -> Any:
        await self.run({"data": b"raises"})

    async def upload(self, request: Any) -> Any:
        await self.run({"data": request.body})


@pytest.fixture
def server(register: Register) -> Iterator[LocalServer]:
    with serving(register(Fails)) as server:
        yield server


@pytest.fixture
def own(register: Register) -> Iterator[LocalServer]:
    def made(loop: Any) -> Served:
        handler = CustomHandler(Own, run)
        return Served(handler.methods, Routes(handler.routes))

    with pipe({"backend": register(Fails)}) as run, LocalServer(run, make_served=made) as server:
        yield server


Ask = Callable[[int, str], Any]


def infer_batch(port: int, text: str) -> None:
    with Client(port) as client, pytest.raises(IDL.InferenceError):
        client.infer_batch(text.encode())


def infer_many(port: int, text: str) -> None:
    with Client(port) as client:
        client.infer_many([b"none", text.encode(), b"fine"])


def infer(port: int, text: str) -> None:
    request = IDL.InferRequest(uuid="u", inputs={"data": IDL.Value(text=text)})
    with Client(port) as client, pytest.raises(IDL.InferenceError):
        client.call("infer", request=request)


def over_http(port: int, text: str) -> None:
    assert ask(port, text.encode())[0] in (422, 500)


def oip(port: int, text: str) -> None:
    tensor = {"name": "data", "datatype": "BYTES", "shape": [3], "data": ["none", text, "fine"]}
    assert ask(port, {"inputs": [tensor]}, "/v2/models/test/infer")[0] == 422


@pytest.mark.parametrize("asks", [infer_batch, infer_many, infer, over_http, oip])
def test_of_the_usual_methods(server: LocalServer, caplog: pytest.LogCaptureFixture, asks: Ask) -> None:
    asks(server.port, "none")
    assert caplog.records == [], "what is wrong with a request is no defect"
    asks(server.port, "raises")
    assert_logged_once(caplog)


def test_of_every_item_of_a_batch(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    with Client(server.port) as client:
        outcomes = client.infer_many([b"raises", b"fine", b"raises"])
    assert [outcome.error is not None for outcome in outcomes] == [True, False, True]
    assert len(caplog.records) == 2


def test_of_the_item_that_an_answer_tells_of(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    tensor = {"name": "data", "datatype": "BYTES", "shape": [2], "data": ["fine", "raises"]}
    assert ask(server.port, {"inputs": [tensor]}, "/v2/models/test/infer")[0] == 500
    assert assert_logged_once(caplog).startswith("a request failed: item 1 of 2: ")


def own_method(port: int) -> None:
    with Client(port) as client, pytest.raises(TApplicationException, match="BackendError"):
        client.infer_batch(b"raises")


def own_route(port: int) -> None:
    assert ask(port, b"raises", "/own")[0] == 500


@pytest.mark.parametrize("asks", [own_method, own_route])
def test_of_a_handler_of_ones_own(
    own: LocalServer, caplog: pytest.LogCaptureFixture, asks: Callable[[int], None]
) -> None:
    asks(own.port)
    assert_logged_once(caplog)


def assert_logged_once(caplog: pytest.LogCaptureFixture) -> str:
    """The message of the line."""
    eventually(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    assert message.startswith("a request failed: ")
    assert message.endswith(": KeyError: 'weights'"), "what the client is told"
    assert 'raise KeyError("weights")' in caplog.text, "where it was raised"
    return message

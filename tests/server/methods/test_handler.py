"""Custom handlers: any IDL or routes over HTTP, a class whose methods may await the pipe."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import thriftpy2
from kit.clients import FRAMINGS, Client, ask, fetch
from kit.services import LocalServer, SteeredProcess
from kit.steered import Steered, steering
from kit.waits import WAIT, eventually
from thriftpy2.thrift import TApplicationException
from torchpipe_client import Client as StandardClient
from torchpipe_server import Handler, HttpAnswer
from torchpipe_server.methods.custom import CustomHandler, load_handler
from torchpipe_server.options import Options
from torchpipe_server.worker.service import served_maker

from torchpipe_py import ConfigError, pipe
from torchpipe_py.methods.routes import Routes, Served

THRIFT = """
exception Refused { 1: string reason, 2: optional string code }
struct Photo { 1: required string name, 2: required binary data }
struct Found { 1: required string label, 2: optional double score }

service Named { string name() }

service Photos extends Named {
    Found classify(1: Photo photo) throws (1: Refused refused),
    void remember(1: string name, 2: i32 days),
    oneway void forget(1: string name),
    i32 count(),
}
"""
IDL = thriftpy2.load_fp(io.StringIO(THRIFT), "photos_test_thrift")
Method = Callable[..., Any]


class Whole(Handler):
    """Every method, for tests to replace some."""

    service = IDL.Photos

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.remembered: list[Any] = []

    def name(self) -> str:
        return "photos"

    async def classify(self, photo: Any) -> Any:
        data = await self.run({"data": photo.data})
        return IDL.Found(label=data["result"][0], score=data["result"][1])

    def remember(self, name: str, days: int) -> None:
        self.remembered.append((name, days))

    def forget(self, name: str) -> None:
        self.remembered = [one for one in self.remembered if one[0] != name]

    def count(self) -> int:
        return len(self.remembered)


@contextmanager
def serving(deadline_ms: float = 0, **methods: Method) -> Iterator[LocalServer]:
    """A handler with these methods in place of ``Whole``'s, on a pipe with ``Steered``."""
    cls = type("Mine", (Whole,), methods)
    with (
        steering() as backend,
        pipe({"backend": "Steered", "instance_num": 1}) as run,
        LocalServer(run, make_methods=lambda loop: CustomHandler(cls, run, deadline_ms).methods) as server,
    ):
        try:
            yield server
        finally:
            backend.opened.set()


def photo(data: bytes = b"") -> Any:
    return IDL.Photo(name="x", data=data)


def call(client: Client, method: str, **args: Any) -> Any:
    return client.call(method, IDL.Photos, **args)


# -- answers and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_custom_methods_of_every_kind(framed: bool, compact: bool) -> None:
    with serving() as server, Client(server.port, framed, compact) as client:
        assert call(client, "name") == "photos"  # of the service that it extends
        assert call(client, "classify", photo=photo(b"abc")) == IDL.Found(label="abc", score=3.0)
        assert [call(client, "remember", name=name, days=-1) for name in ("one", "two")] == [None, None]
        client.send("forget", IDL.Photos, name="one")
        assert call(client, "count") == 1
        eventually(lambda: server.by_method["remember"] == {"ok": 2})


def test_method_awaits_several_requests_and_asyncio() -> None:
    async def count(self: Any) -> int:
        first = self.run({"data": b"ab", "mine": 7})
        await asyncio.sleep(0)
        assert (await first)["mine"] == 7
        with pytest.raises(TimeoutError):
            await self.run({"data": b"late"}, timeout=0.0)
        answers = await asyncio.gather(*(self.run({"data": data}) for data in (b"abc", b"de")))
        for _ in range(200):
            await self.run({"data": b"again"})
        return sum(len(data["result"][0]) for data in answers)

    with serving(count=count) as server, Client(server.port) as client:
        assert call(client, "count") == 5


def ending(end: Callable[[], Any]) -> Method:
    """A method that does so, after a request if it is given data."""

    async def classify(self: Any, photo: Any) -> Any:
        if photo.data:
            await self.run({"data": photo.data})
        return end()

    return classify


def raising(error: BaseException) -> Method:
    def end() -> Any:
        raise error

    return ending(end)


REFUSED = IDL.Refused(reason="too dark \udc80", code="dark")


@pytest.mark.parametrize("data", [b"", b"later"], ids=["at once", "after a request"])
@pytest.mark.parametrize(
    ("method", "said"),
    [
        (raising(KeyError("lost")), "KeyError: 'lost'"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(asyncio.CancelledError("gone")), "CancelledError"),
        *((ending(lambda value=value: value), "needs type 'Found'") for value in ("text", {"label": "x"}, 5, object())),
        (ending(lambda: None), "classify"),
        (ending(lambda: IDL.Found(label="ü\ud800")), ""),
        (raising(REFUSED), ""),
        (lambda self, photo: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_answers_with_declared_exceptions_and_logs_others(method: Method, said: str, data: bytes, caplog: Any) -> None:
    """What the IDL declares reaches the client, half a character as "?"; any other error is logged, once."""
    with serving(classify=method) as server, Client(server.port) as client:
        try:
            found = call(client, "classify", photo=photo(data))
        except (IDL.Refused, TApplicationException) as error:
            found = error
        assert call(client, "name") == "photos"
    if said:
        assert found.type == TApplicationException.INTERNAL_ERROR
        assert said in found.message
    else:
        assert vars(found) in (vars(IDL.Found(label="ü?")), {"reason": "too dark ?", "code": "dark"})
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * bool(said)


@pytest.mark.parametrize("ends", ["by its deadline", "with its client"])
def test_method_ends_with_its_request(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the request that it waits for, whichever that is."""
    ended: list[str] = []

    async def classify(self: Any, photo: Any) -> Any:
        try:
            await self.run({"data": b"pass"})
            await self.run({"data": b"block"})
        finally:
            ended.append(ends)

    deadline_ms = 300 if ends == "by its deadline" else 0
    with serving(deadline_ms, classify=classify) as server, Client(server.port) as client:
        seqid = client.send("classify", IDL.Photos, photo=photo())
        if deadline_ms:
            with pytest.raises(TApplicationException, match="DeadlineExceeded: not finished by its deadline"):
                client.receive(seqid)
        else:
            assert Steered.entered.acquire(timeout=WAIT)
            client.close()
        eventually(lambda: ended == [ends])
    assert caplog.records == []


# -- routes over HTTP -----------------------------------------------------------------------------------------------


class Routed(Handler):
    routes: ClassVar[dict[str, str]] = {"GET /photos/{name}": "show"} | {
        f"GET /{name}": name for name in ("raw", "half", "wrong", "split", "elsewhere")
    }

    def elsewhere(self, request: Any) -> None:
        error = OSError("not there")
        error.code = 404  # type: ignore[attr-defined]  # as those of urllib have it: no fault of this client
        raise error

    def show(self, request: Any) -> str:
        return str(request.parameters["name"] + request.query)

    def raw(self, request: Any) -> bytes:
        return b"\x00"

    def half(self, request: Any) -> str:
        return "ü\ud800"

    def wrong(self, request: Any) -> set[int]:
        return {1, 2}

    def split(self, request: Any) -> HttpAnswer:
        return HttpAnswer(200, "text/plain", b"", {"A": f"b{request.query}\r\nC: d"})


def test_serves_routes_of_a_custom_handler() -> None:
    with pipe({"backend": "Identity"}) as run:
        handler = CustomHandler(Routed, run)
        with LocalServer(run, make_served=lambda loop: Served(handler.methods, Routes(handler.routes))) as server:
            for path, body in (("/photos/me?a=b", b"mea=b"), ("/raw", b"\x00"), ("/half", "ü?".encode())):
                assert fetch(server.port, path).body == body
            for path in ("/wrong", "/split", "/elsewhere"):
                status, answer = ask(server.port, b"", path, "GET")
                assert (status, answer["code"]) == (500, "internal")


class Leaving:
    """A value whose own methods raise ``SystemExit``."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise SystemExit(3)


WRONG_ANSWERS: dict[str, Any] = {
    "leaves": [Leaving()],
    "body": HttpAnswer(200, "text/plain", None),  # type: ignore[arg-type]
    "text": HttpAnswer(200, "text/plain", "x" * 100_000),  # type: ignore[arg-type]
    "kind": HttpAnswer(200, None, b"x" * 100_000),  # type: ignore[arg-type]
    "headers": HttpAnswer(200, "text/plain", b"x" * 100_000, 5),  # type: ignore[arg-type]
    "size": HttpAnswer(200, "text/plain", b"", make=lambda: b"", size=None),  # type: ignore[arg-type]
    "make": HttpAnswer(200, "text/plain", b"", make=lambda: 1 / 0),  # type: ignore[arg-type, return-value]
}


class WrongAnswers(Handler):
    routes: ClassVar[dict[str, str]] = {"GET /now/{name}": "show", "GET /later/{name}": "show_later"}

    def show(self, request: Any) -> Any:
        return WRONG_ANSWERS[request.parameters["name"]]

    async def show_later(self, request: Any) -> Any:
        return self.show(request)


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_answer_of_wrong_types_is_an_internal_error(name: str) -> None:
    with pipe({"backend": "Identity"}) as run:
        handler = CustomHandler(WrongAnswers, run)
        with LocalServer(run, make_served=lambda loop: Served(handler.methods, Routes(handler.routes))) as server:
            for path in ("now", "later"):
                for fields in ({}, {"Accept_Encoding": "gzip"}, {"X_Timing": "1"}):
                    status, answer = ask(server.port, b"", f"/{path}/{name}", "GET", **fields)
                    assert (status, answer["code"]) == (500, "internal"), (path, fields)


BESIDE = """
from torchpipe_server import Handler, HttpAnswer

class Beside(Handler):
    routes = {
        "POST /photos": "upload", "GET /v2": "mine", "GET /v2/models/{name}/ready": "ready", "GET /table": "table"
    }

    async def upload(self, request):
        return {"size": len((await self.run({"data": request.body}))["result"])}

    def mine(self, request):
        return "mine"

    def ready(self, request):
        return request.parameters["name"]

    def table(self, request):
        return HttpAnswer(201, "text/csv", b"a,b", {"X-Rows": "1"})

class Alone(Beside):
    standard_routes = False
"""


@contextmanager
def beside(folder: Path, name: str) -> Iterator[LocalServer]:
    (folder / f"of_{name}.py").write_text(BESIDE)
    given = Options("demo.toml", handler=f"{folder}/of_{name}.py:{name}")
    with pipe({"backend": "Identity"}) as run:
        make = served_maker(given)
        with LocalServer(run, make_served=lambda loop: make(run)) as server:
            yield server


def test_routes_of_a_handler_stand_beside_the_standard_ones(tmp_path: Path) -> None:
    with beside(tmp_path, "Beside") as server:
        assert ask(server.port, b"abc", "/photos") == (200, {"size": 3})
        assert ask(server.port, b"abc") == (200, {"result": {"b64": "YWJj"}})
        for path, body in (("/v2", b"mine"), ("/v2/models/nowhere/ready", b"nowhere")):
            assert fetch(server.port, path).body == body, "its own comes first"
        for path in ("/v2/health/ready", "/v2/models/demo", "/openapi.json", "/"):
            assert ask(server.port, b"", path, "GET")[0] == 200
        status, answer = ask(server.port, b"", "/photo", "POST")
        assert (status, answer["error"]) == (404, "no /photo; did you mean '/photos'?")
        table = fetch(server.port, "/table")
        assert (table.status, table.fields["content-type"], table.fields["x-rows"]) == (201, "text/csv", "1")
        with StandardClient(f"127.0.0.1:{server.port}") as client:
            client.ping()


def test_route_answers_detections_and_arrays_in_json(tmp_path: Path) -> None:
    (tmp_path / "of_found.py").write_text(FOUND)
    given = Options("demo.toml", handler=f"{tmp_path}/of_found.py:Finds")
    with pipe({"backend": "Identity"}) as run:
        make = served_maker(given)
        with LocalServer(run, make_served=lambda loop: make(run)) as server:
            found = [{"box": [0.1, 2, 3, 4], "score": 0.9, "class": 0, "label": "cat"}]
            assert ask(server.port, b"", "/found", "GET") == (200, {"found": found, "sizes": [1, 2]})
            assert ask(server.port, b"", "/all", "GET") == (200, found)


FOUND = """
import numpy as np
from torchpipe_py import Detections
from torchpipe_server import Handler

CAT = Detections([[0.1, 2, 3, 4]], [0.9], [0], ["cat"])

class Finds(Handler):
    routes = {"GET /found": "found", "GET /all": "all"}

    def found(self, request):
        return {"found": CAT, "sizes": np.array([1, 2])}

    def all(self, request):
        return CAT
"""


def test_handler_alone_has_no_standard_routes(tmp_path: Path) -> None:
    with beside(tmp_path, "Alone") as server:
        assert ask(server.port, b"abc", "/photos") == (200, {"size": 3})
        for path, verb in (("/infer", "POST"), ("/openapi.json", "GET"), ("/v2/health/live", "GET")):
            assert ask(server.port, b"abc", path, verb)[0] == 404


def test_handler_alone_has_no_grpc(tmp_path: Path) -> None:
    (tmp_path / "without_grpc.py").write_text(BESIDE)
    reference = f"{tmp_path}/without_grpc.py:Alone"
    with pytest.raises(ConfigError, match="--grpc-port serves standard paths"):
        served_maker(Options("demo.toml", handler=reference, grpc_port=0))


# -- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"service": IDL.Named, "nmae": lambda self: ""}, "no method 'name' of its service; did you mean 'nmae'"),
        ({"service": None}, "'service' must be a service made by thriftpy2.load"),
        ({"routes": {"/photos": "show"}}, "expected a method and a path"),
        ({"routes": {"GET /": "shw"}, "show": lambda self: 0}, "no method 'shw' for 'GET /'; did you mean 'show'?"),
    ],
)
def test_refuses_class_that_does_not_fit_its_service(members: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CustomHandler(type("Mine", (Handler,), members), SimpleNamespace())  # type: ignore[arg-type]
    assert said in str(caught.value)


HANDLER = """
import thriftpy2
from pathlib import Path
from torchpipe_server import Handler

class Mine(Handler):
    service = thriftpy2.load(str(Path(__file__).with_name("mine.thrift")), "mine_thrift").Mine

    async def read(self, data):
        return (await self.run({"data": data}))["result"][0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_service.py").write_text(HANDLER)
    (tmp_path / "mine.thrift").write_text("service Mine { string read(1: binary data) }")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.delitem(sys.modules, "my_service", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("my_service:Mine", ""),
        ("{folder}/my_service.py:Mine", ""),
        ("my_service", "expected package.module:Class"),
        ("my_service:Mein", "no such class; did you mean 'Mine'?"),
        ("my_servise:Mine", "my_servise: no such module"),
    ],
)
def test_finds_handler_by_reference_or_says_why_not(folder: Path, reference: str, text: str) -> None:
    reference = reference.format(folder=folder)
    if not text:
        assert load_handler(reference).__name__ == "Mine"
        return
    with pytest.raises(ConfigError) as caught:
        load_handler(reference)
    assert str(caught.value).startswith(f"--handler {reference}: {text}")


def test_service_with_custom_handler(folder: Path) -> None:
    """One that does not fit ends the start; its worker's death is an error like others; a stop waits for it."""
    with SteeredProcess(folder, "--handler", f"{folder}/my_service.py:Mein") as process:
        assert process.process.stdout.read() == ""
        assert process.wait() == 1
    assert process.stderr.endswith("my_service.py:Mein: no such class; did you mean 'Mine'?\n")
    service = thriftpy2.load(str(folder / "mine.thrift"), "mine_test_thrift").Mine
    with SteeredProcess(folder, "--handler", f"{folder}/my_service.py:Mine") as process:
        with Client(process.wait_started().port) as client, Client(process.port) as idle:
            client.send("read", service, data=b"block")
            process.wait_entered()
            os.kill(process.workers[0], signal.SIGKILL)
            with pytest.raises(TApplicationException, match="WorkerDied"):
                client.receive()

            def is_back() -> bool:
                try:
                    return bool(idle.call("read", service, data=b"again") == "again")
                except TApplicationException as error:
                    return "Unavailable" not in error.message

            eventually(is_back)
            seqid = client.send("read", service, data=b"block")
            process.wait_entered()
            process.signal()
            process.open()
            assert client.receive(seqid) == "block"
        assert process.wait() == 0

"""Services of one's own: any IDL, a class whose methods may await the pipe."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import thriftpy2
import thriftpy2.rpc
import torchpipe_server
from conftest import Register
from fakes import WAIT, Gate
from service import FRAMINGS, LIGHT, ROOT, LocalServer, Process, eventually
from thriftpy2.protocol import TBinaryProtocolFactory, TCompactProtocolFactory
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TBufferedTransportFactory, TFramedTransportFactory
from torchpipe_server import Handler
from torchpipe_server.methods.custom import CustomHandler, load_handler

from torchpipe_py import Backend, ConfigError, NoResult, Overloaded, pipe
from torchpipe_py.errors import DecodeError

THRIFT = """
exception Refused { 1: string reason, 2: optional string code }
struct Photo { 1: required string name, 2: required binary data }
struct Found { 1: required string label, 2: optional double score }

service Named { string name() }

service Photos extends Named {
    Found classify(1: Photo photo) throws (1: Refused refused),
    list<Found> classify_all(1: list<Photo> photos),
    void remember(1: string name, 2: i32 days),
    oneway void forget(1: string name),
    i32 count(),
}
"""


@pytest.fixture(scope="module")
def idl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("idl") / "photos.thrift"
    path.write_text(THRIFT)
    return thriftpy2.load(str(path), "photos_test_thrift")


class Reads(Backend):
    """(label, score) of bytes: the text and its length. ``corrupt`` and ``none`` have no result, ``raise`` raises."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            text = item["data"].decode()
            if text == "raise":
                raise ValueError("on request")
            if text == "corrupt":
                item["error"] = DecodeError("no image")
            elif text == "odd":
                item["error"] = "a text"
            elif text != "none":
                item["result"] = (text, float(len(text)))


class Whole(Handler):
    """Every method, for tests to replace some."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.remembered: list[Any] = []
        self.forgotten = threading.Event()

    def name(self) -> str:
        return "photos"

    async def classify(self, photo: Any) -> Any:
        data = await self.run({"data": photo.data})
        return self.idl.Found(label=data["result"][0], score=data["result"][1])

    async def classify_all(self, photos: Any) -> Any:
        return [await self.classify(photo) for photo in photos]

    def remember(self, name: str, days: int) -> None:
        self.remembered.append((name, days))

    def forget(self, name: str) -> None:
        self.remembered = [one for one in self.remembered if one[0] != name]
        self.forgotten.set()

    def count(self) -> int:
        return len(self.remembered)


Call = Callable[..., Any]


class Served:
    """A handler's class with these methods on a server of this process."""

    def __init__(self, idl: Any, run: Any, deadline_ms: float, methods: dict[str, Call], **options: Any) -> None:
        made: list[Whole] = []

        def remember_it(self: Any, run: Any) -> None:
            Whole.__init__(self, run)
            made.append(self)

        cls = type("Mine", (Whole,), {"service": idl.Photos, "idl": idl, "__init__": remember_it, **methods})
        self.idl = idl
        self.server = LocalServer(
            run, make_methods=lambda loop: CustomHandler(cls, run, deadline_ms).methods, **options
        )
        self.handler = made[0]

    def client(self, framed: bool = False, compact: bool = False) -> AbstractContextManager[Any]:
        return client_of(self.idl, self.server.port, framed, compact)

    def photo(self, data: bytes, name: str = "x") -> Any:
        return self.idl.Photo(name=name, data=data)

    def wait_counted(self, method: str, **outcomes: int) -> None:
        """A reply is counted just after it is written."""
        counters = self.server.server.counters
        eventually(lambda: counters.summary()["by_method"].get(method) == outcomes, f"{method} is not {outcomes}")


def client_of(idl: Any, port: int, framed: bool = False, compact: bool = False) -> AbstractContextManager[Any]:
    return thriftpy2.rpc.client_context(
        idl.Photos,
        "127.0.0.1",
        port,
        trans_factory=TFramedTransportFactory() if framed else TBufferedTransportFactory(),
        proto_factory=TCompactProtocolFactory() if compact else TBinaryProtocolFactory(),
        socket_timeout=1000 * WAIT,
    )


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture
def serve(idl: Any, register: Register) -> Serve:
    @contextmanager
    def served(backend: Any = Reads, deadline_ms: float = 0, options: Any = None, **methods: Call) -> Any:
        config = {"global": options or {}, "node": {"backend": register(backend)}}
        with pipe(config) as run:
            made = Served(idl, run, deadline_ms, methods)
            with made.server:
                yield made

    return served


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_every_kind_of_method(serve: Serve, framed, compact):
    with serve() as made, made.client(framed, compact) as client:
        assert client.name() == "photos"  # of the service that it extends
        assert client.classify(made.photo(b"abc")) == made.idl.Found(label="abc", score=3.0)
        assert [one.label for one in client.classify_all([made.photo(b"a"), made.photo(b"b")])] == ["a", "b"]
        assert client.classify_all([]) == []
        assert client.remember("one", 3) is None
        assert client.remember("two", -1) is None
        assert client.count() == 2
        client.forget("one")
        assert client.count() == 1
        assert made.handler.remembered == [("two", -1)]
        made.wait_counted("remember", ok=2)
        made.wait_counted("forget", ok=1)


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_half_a_character_is_a_question_mark(serve: Serve, idl, framed, compact, caplog):
    found = [idl.Found(label="ü\ud800", score=1.0), idl.Found(label="b", score=2.0)]
    error = idl.Refused(reason="\udc80", code="dark")
    methods = {"classify_all": lambda self, photos: found, "classify": raises(error)}
    with serve(**methods) as made, made.client(framed, compact) as client:
        assert client.classify_all([]) == [idl.Found(label="ü?", score=1.0), found[1]]
        with pytest.raises(idl.Refused) as caught:
            client.classify(made.photo(b""))
        assert (caught.value.reason, caught.value.code) == ("?", "dark")
    assert (found[0].label, error.reason) == ("ü\ud800", "\udc80")  # what a handler may keep stays as it is
    assert caplog.records == []


def test_one_request_after_the_other_sees_the_ones_before(serve: Serve):
    async def classify(self: Any, photo: Any) -> Any:
        first = await self.run({"data": photo.data, "mine": 7})
        assert first["mine"] == 7
        second = await self.run({"data": first["result"][0].encode() * 2})
        for _ in range(200):
            second = await self.run(second)
        return self.idl.Found(label=second["result"][0])

    with serve(classify=classify) as made, made.client() as client:
        assert client.classify(made.photo(b"ab")) == made.idl.Found(label="abab")


def test_a_request_may_be_started_before_it_is_awaited(serve: Serve):
    async def classify(self: Any, photo: Any) -> Any:
        waiting = self.run({"data": photo.data})
        return self.idl.Found(label=(await waiting)["result"][0])

    with serve(classify=classify) as made, made.client() as client:
        assert client.classify(made.photo(b"ab")).label == "ab"


def test_many_clients_share_batches(serve: Serve):
    gate = Gate(most=8)

    async def classify(self: Any, photo: Any) -> Any:
        return self.idl.Found(label=(await self.run({"data": photo.name}))["result"])

    with serve(gate.backend, classify=classify) as made, gate:
        answers: dict[str, str] = {}

        def ask(name: str) -> None:
            with made.client() as client:
                answers[name] = client.classify(made.photo(b"", name)).label

        threads = [threading.Thread(target=ask, args=(str(index),)) for index in range(9)]
        for thread in threads:
            thread.start()
        gate.wait_entered()
        eventually(lambda: made.server.run.stats()["inflight"] == 9)
        gate.open()
        for thread in threads:
            thread.join(WAIT)
    assert answers == {str(index): str(index) for index in range(9)}
    assert len(gate.batches) <= 3


# -- errors ---------------------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Call:
    async def classify(self: Any, photo: Any) -> Any:
        if photo.data:
            await self.run({"data": photo.data})
        raise error

    return classify


@pytest.mark.parametrize("data", [b"", b"later"], ids=["at once", "after a request"])
def test_a_declared_exception_reaches_the_client_as_it_is(serve: Serve, idl, data, caplog):
    error = idl.Refused(reason="too dark", code="dark")
    with serve(classify=raises(error)) as made, made.client() as client:
        with pytest.raises(idl.Refused) as caught:
            client.classify(made.photo(data))
        assert (caught.value.reason, caught.value.code) == ("too dark", "dark")
        made.wait_counted("classify", dark=1)
        assert client.name() == "photos"
    assert caplog.records == []


@pytest.mark.parametrize("data", [b"", b"later"], ids=["at once", "after a request"])
def test_any_other_exception_is_an_application_exception_and_logged_once(serve: Serve, data, caplog):
    with serve(classify=raises(KeyError("lost"))) as made, made.client() as client:
        with pytest.raises(TApplicationException, match="KeyError: 'lost'") as caught:
            client.classify(made.photo(data))
        assert caught.value.type == TApplicationException.INTERNAL_ERROR
        assert client.name() == "photos"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_a_plain_method_may_raise_as_well(serve: Serve, idl):
    def classify(self: Any, photo: Any) -> Any:
        raise self.idl.Refused(reason=photo.name)

    def count(self: Any) -> int:
        raise ZeroDivisionError

    with serve(classify=classify, count=count) as made, made.client() as client:
        with pytest.raises(idl.Refused, match="dark"):
            client.classify(made.photo(b"", "dark"))
        with pytest.raises(TApplicationException, match="ZeroDivisionError"):
            client.count()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("gone")], ids=["exit", "cancelled"])
def test_what_no_handler_should_raise_costs_its_own_request(serve: Serve, error):
    def count(self: Any) -> int:
        raise error

    with serve(count=count) as made, made.client() as client:
        with pytest.raises(TApplicationException, match=f"{type(error).__name__}: {error}"):
            client.count()
        assert client.name() == "photos"


def test_an_undeclared_exception_of_a_oneway_method_is_logged_and_no_more(serve: Serve, caplog):
    def forget(self: Any, name: str) -> None:
        raise KeyError(name)

    with serve(forget=forget) as made, made.client() as client:
        client.forget("x")
        assert client.count() == 0
    assert len(caplog.records) == 1


@pytest.mark.parametrize("how", ["at once", "after a request", "plain"])
@pytest.mark.parametrize(
    "value", ["text", {"label": "x"}, 5, None, object()], ids=["text", "dict", "5", "None", "object"]
)
def test_a_result_of_the_wrong_type_is_answered_and_logged(serve: Serve, value, how, caplog):
    async def classify(self: Any, photo: Any) -> Any:
        if how == "after a request":
            await self.run({"data": b"x"})
        return value

    def classify_plainly(self: Any, photo: Any) -> Any:
        return value

    with serve(classify=classify_plainly if how == "plain" else classify) as made, made.client() as client:
        with pytest.raises(TApplicationException) as caught:
            client.classify(made.photo(b""))
        assert caught.value.type == TApplicationException.INTERNAL_ERROR
        assert client.name() == "photos"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_value_of_a_void_method_is_an_error(serve: Serve, is_late):
    async def remember(self: Any, name: str, days: int) -> Any:
        if is_late:
            await self.run({"data": b"x"})
        return name

    wanted = pytest.raises(TApplicationException, match="remember returned a str; in the IDL it is void")
    with serve(remember=remember) as made, made.client() as client, wanted:
        client.remember("x", 1)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**70, "7"], ids=repr)
@pytest.mark.parametrize("compact", [False, True])
def test_a_number_that_does_not_fit_is_an_error_or_refused_by_the_client(serve: Serve, value, compact):
    """Never an endless write, and never another number; the binary protocol cannot carry it, the compact one may."""
    with serve(count=lambda self: value) as made, made.client(compact=compact) as client:
        try:
            found = client.count()
        except TApplicationException:
            found = None
        assert found in (None, value)
        assert client.name() == "photos"


def test_a_method_may_await_what_asyncio_offers(serve: Serve):
    async def count(self: Any) -> Any:
        await asyncio.sleep(0)
        answers = await asyncio.gather(*(self.run({"data": data}) for data in (b"abc", b"de")))
        return sum(len(data["result"][0]) for data in answers)

    with serve(count=count) as made, made.client() as client:
        assert client.count() == 5


REASONS = {b"corrupt": "DecodeError: no image", b"none": "NoResult", b"odd": "a text", b"raise": "on request"}


@pytest.mark.parametrize("data", REASONS)
def test_a_request_without_a_result_raises_why(serve: Serve, data):
    async def count(self: Any) -> int:
        try:
            await self.run({"data": data})
        except NoResult:
            return -1
        return 0

    with serve(count=count) as made, made.client() as client:
        with pytest.raises(TApplicationException, match=REASONS[data]):
            client.classify(made.photo(data))
        if data != b"raise":
            assert client.count() == -1


def test_overloaded_is_raised_by_run(serve: Serve, idl):
    gate = Gate()

    async def classify(self: Any, photo: Any) -> Any:
        for attempt in range(1000):  # each refused at once: no deep stack of retries
            try:
                await self.run({"data": photo.data})
            except Overloaded as error:
                if attempt == 999:
                    raise self.idl.Refused(reason="full", code=error.code) from error
        return self.idl.Found(label="through")

    with serve(gate.backend, options={"max_inflight": 1}, classify=classify) as made, gate:
        held = threading.Event()
        made.server.run.dispatch({"data": b"held"}, lambda data, error: held.set())
        gate.wait_entered()
        with made.client() as client:
            with pytest.raises(idl.Refused) as caught:
                client.classify(made.photo(b"x"))
            assert (caught.value.reason, caught.value.code) == ("full", "overloaded")
        gate.open()
        assert held.wait(WAIT)


def test_what_the_pipe_cannot_take_is_raised(serve: Serve):
    async def classify(self: Any, photo: Any) -> Any:
        await self.run({"image": photo.data})

    wanted = pytest.raises(TApplicationException, match="InvalidRequest: a request needs the key 'data'")
    with serve(classify=classify) as made, made.client() as client, wanted:
        client.classify(made.photo(b""))


def test_an_unknown_method_and_missing_arguments(serve: Serve, idl):
    with serve() as made, made.client() as client:
        with pytest.raises(TApplicationException) as caught:
            client.classify(idl.Photo(name="no data"))
        assert caught.value.type == TApplicationException.PROTOCOL_ERROR
        made.wait_counted("classify", bad_arguments=1)
        client._send("name")  # what comes next goes on from there
        assert client._recv("name") == "photos"


# -- deadlines and disconnects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["the first request", "the second request"])
def test_the_deadline_is_of_the_whole_method(serve: Serve, first):
    gate = Gate(blocks=lambda data: data == b"block")
    seen: list[str] = []

    async def classify(self: Any, photo: Any) -> Any:
        try:
            if not first:
                await self.run({"data": b"pass"})
            await self.run({"data": b"block"})
        finally:
            seen.append("cleaned up")

    with serve(gate.backend, deadline_ms=500, classify=classify) as made, gate, made.client() as client:
        with pytest.raises(TApplicationException, match="DeadlineExceeded: not finished by its deadline"):
            client.classify(made.photo(b""))
        assert not gate.opened.is_set()
        eventually(lambda: seen == ["cleaned up"])


def test_a_timeout_of_one_request_is_for_the_method_to_handle(serve: Serve):
    gate = Gate(blocks=lambda data: data == b"block")

    async def classify(self: Any, photo: Any) -> Any:
        try:
            await self.run({"data": photo.data}, timeout=0.0)
        except TimeoutError:
            return self.idl.Found(label="late")

    with serve(gate.backend, classify=classify) as made, gate, made.client() as client:
        assert client.classify(made.photo(b"x")).label == "late"


def test_a_client_that_is_gone_ends_its_method(serve: Serve, caplog):
    gate = Gate(blocks=lambda data: data == b"block")
    ended = threading.Event()

    async def classify(self: Any, photo: Any) -> Any:
        try:
            await self.run({"data": photo.data})
            raise AssertionError("its client was gone")
        finally:
            ended.set()

    with serve(gate.backend, classify=classify) as made, gate:
        made.server.run.dispatch({"data": b"block"}, lambda data, error: None)
        gate.wait_entered()
        with made.client() as client:
            client._send("classify", photo=made.photo(b"abandoned"))
            eventually(lambda: made.server.run.stats()["inflight"] == 2)
        assert ended.wait(WAIT)
        assert made.server.run.stats()["inflight"] == 1
        gate.open()
        eventually(lambda: made.server.run.stats()["inflight"] == 0)
    assert gate.batches == [[b"block"]]
    assert caplog.records == []


def test_the_end_of_a_client_reaches_a_request_that_is_not_the_first(serve: Serve):
    """Each next request is started by another thread than the one that holds the ticket of the one before."""
    gate = Gate(blocks=lambda data: data == b"block")

    async def classify(self: Any, photo: Any) -> Any:
        for _ in range(20):
            await self.run({"data": b"pass"})
        await self.run({"data": b"wait"})

    with serve(gate.backend, classify=classify) as made, gate:
        for _ in range(20):
            with made.client() as client:
                client._send("classify", photo=made.photo(b""))
                eventually(lambda: sum(batch == [b"pass"] for batch in gate.batches) >= 20)
            eventually(lambda: made.server.run.stats()["inflight"] == 0)
            gate.batches.clear()


# -- what does not fit ----------------------------------------------------------------------------------------------


def fails(idl: Any, **methods: Any) -> str:
    cls = type("Mine", (Whole,), {"service": idl.Photos, "idl": idl, **methods})
    with pytest.raises(ConfigError) as caught:
        CustomHandler(cls, None)
    return str(caught.value)


def test_a_missing_method_names_the_nearest(idl):
    class Misspelt(Handler):
        service = idl.Named

        def nmae(self) -> str:
            return ""

    with pytest.raises(ConfigError, match="Misspelt: no method 'name' of its service; did you mean 'nmae'"):
        CustomHandler(Misspelt, None)


@pytest.mark.parametrize(
    "method", [lambda self: 0, lambda self, photo, more: 0, lambda self, *, photo: 0], ids=["none", "two", "keyword"]
)
def test_a_signature_that_does_not_fit_is_told(idl, method):
    text = fails(idl, classify=method)
    assert "classify(photo): " in text


@pytest.mark.parametrize("service", [None, "photos.thrift", Whole])
def test_a_service_that_is_none_is_told(service):
    with pytest.raises(ConfigError, match=r"'service' must be a service made by thriftpy2\.load"):
        CustomHandler(type("Mine", (Handler,), {"service": service} if service else {}), None)


def test_defaults_and_star_arguments_fit(idl):
    CustomHandler(type("Mine", (Whole,), {"service": idl.Photos, "classify": lambda self, *args: 0}), None)


HANDLER = """
import thriftpy2
from pathlib import Path
from torchpipe_server import Handler

class Mine(Handler):
    service = thriftpy2.load(str(Path(__file__).with_name("mine.thrift")), "mine_thrift").Mine

    async def read(self, data):
        return (await self.run({"data": data}))["result"][0]

    def name(self):
        return "mine"
"""
BACKEND = """
import os, pathlib, time
from torchpipe_py import Backend, register_backend

HERE = pathlib.Path(__file__).parent
PARENT = os.getppid()

class Blocks(Backend):
    def forward(self, items):
        if any(item["data"] == b"block" for item in items):
            (HERE / "entered").touch()
            while not (HERE / "open").exists() and os.getppid() == PARENT:
                time.sleep(0.005)
        for item in items:
            item["result"] = (item["data"].decode(), 1.0)

register_backend(Blocks, "Blocks")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_service.py").write_text(HANDLER)
    (tmp_path / "mine.thrift").write_text("service Mine { string read(1: binary data), string name() }")
    (tmp_path / "blocks.py").write_text(BACKEND)
    (tmp_path / "mine.toml").write_text('[node]\nbackend = "Blocks"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("my_service", "expected package.module:Class"),
        (":Mine", "expected package.module:Class"),
        ("my_service:Mein", "no such class; did you mean 'Mine'?"),
        ("my_service:Path.cwd", "no such class"),
        ("my_service:thriftpy2", "no such class"),
        ("my_servise:Mine", "No module named 'my_servise'"),
        ("my.service:Mine", "No module named 'my"),
    ],
)
def test_a_reference_that_leads_nowhere_is_told(folder, monkeypatch, reference, text):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_service", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_handler(reference)
    assert str(caught.value).startswith(f"--handler {reference}: {text}")


def test_a_module_in_the_working_directory_is_found(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    monkeypatch.delitem(sys.modules, "my_service", raising=False)
    assert load_handler("my_service:Mine").__name__ == "Mine"


def test_a_file_is_taken_as_it_is_for_other_code(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_service", raising=False)
    assert load_handler(f"{folder}/my_service.py:Mine").__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"my_service\.py:Mein: no such class; did you mean 'Mine'"):
        load_handler(f"{folder}/my_service.py:Mein")


def test_the_package_gives_handler_without_heavy_imports():
    code = (
        "import sys, torchpipe_server; light = len(sys.modules); from torchpipe_server import Handler;"
        "print(Handler.__name__, [name for name in ('torch', 'cv2', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("Handler []\n", "")
    with pytest.raises(AttributeError, match="no attribute 'Handlers'"):
        torchpipe_server.Handlers  # noqa: B018


# -- processes ------------------------------------------------------------------------------------------------------


def process_of(folder: Path, reference: str, *args: str) -> Process:
    options = ("--handler", reference, "--import-code", str(folder / "blocks.py"), *args)
    return Process(*options, config=str(folder / "mine.toml"), env={"PYTHONPATH": f"{folder}{os.pathsep}{LIGHT}"})


def test_a_handler_that_does_not_fit_ends_the_start(folder):
    with process_of(folder, "my_service:Mein") as process:
        assert process.process.stdout.read() == ""  # until it ends, however long the imports of a worker take
        assert process.wait() == 1
    assert process.stderr == "torchpipe-serve: --handler my_service:Mein: no such class; did you mean 'Mine'?\n"


def test_a_worker_that_dies_with_a_request_and_one_that_drains(folder):
    idl = thriftpy2.load(str(folder / "mine.thrift"), "mine_test_thrift")

    def client() -> Any:
        return thriftpy2.rpc.client_context(idl.Mine, "127.0.0.1", process.port, socket_timeout=1000 * WAIT)

    with process_of(folder, "my_service:Mine") as process:
        process.wait_started()
        with client() as held, client() as idle:
            assert idle.read(b"fine") == "fine"
            held._send("read", data=b"block")
            eventually((folder / "entered").exists)
            (folder / "entered").unlink()
            (worker,) = process.workers
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(TApplicationException, match="WorkerDied"):
                held._recv("read")

            def is_back() -> bool:
                try:
                    return held.read(b"again") == "again"
                except TApplicationException as error:
                    if "Unavailable" not in str(error):
                        raise
                    return False

            eventually(is_back)
            assert idle.name() == "mine"  # on the same connection as before
            held._send("read", data=b"block")
            eventually((folder / "entered").exists)
            process.signal()
            (folder / "open").touch()
            assert held._recv("read") == "block"
        assert process.wait() == 0

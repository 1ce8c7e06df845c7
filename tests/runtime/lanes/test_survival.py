"""No exception ends the thread of an instance: neither those of hostile backends nor one in the loop itself."""

from __future__ import annotations

import itertools
import linecache
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import pytest
from conftest import Register
from fakes import WAIT, error_of, outcome

import torchpipe_py.runtime.lanes.lane
from torchpipe_py import Backend, BackendError, Registry, pipe
from torchpipe_py.errors import MESSAGE_LIMIT, Failure, describe, first_line, message_of

Data = dict[str, Any]


class NoText(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class Liar(Exception):
    """Raises when asked for its class."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt

    def __reduce__(self) -> Any:
        raise GeneratorExit


class Text(str):
    """A text whose methods are somebody else's."""

    def encode(self, *args: Any) -> Any:
        raise ValueError("no bytes")

    strip = split = __format__ = encode  # type: ignore[assignment]


class Texts(Exception):
    """Its text is no plain ``str``."""

    def __str__(self) -> str:
        return Text("a text")


class Meta(type):
    """Classes without a name."""

    @property
    def __name__(cls) -> str:
        raise ValueError("no name")


class Nameless(NoText, metaclass=Meta):
    """Neither name nor text."""


# By name: pytest would ask the exceptions themselves what they are.
ERRORS: dict[str, BaseException] = {
    **{"no text": NoText(), "no class": Liar("a text"), "no string": Texts(), "no name": Nameless()},
    **{kind.__name__: kind() for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, StopIteration)},
    **{"long": RuntimeError("x" * 10**6), "no unicode": RuntimeError("\ud800\x00")},
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_exception_can_be_told(name: str) -> None:
    error = ERRORS[name]
    for text in (message_of(error), describe(error), first_line(error), message_of(Failure.of(error).error())):
        assert type(text) is str
        assert 0 < len(text.encode()) < MESSAGE_LIMIT + 200


def test_a_message_is_cut_where_it_is_too_long() -> None:
    assert message_of(ValueError("short")) == "short"
    assert message_of(ValueError("x" * 50), 10) == "x" * 10 + " …"
    assert (message_of(ValueError()), describe(ValueError())) == ("ValueError", "ValueError")
    assert describe(ValueError("short")) == "ValueError: short"


class Stubborn(dict[str, Any]):
    """A dict that loses its manners on the threads of a pipe."""

    def pop(self, *args: Any) -> Any:
        if threading.current_thread().name.startswith("torchpipe-"):
            raise NoText
        return super().pop(*args)

    def keys(self) -> Any:
        raise SystemExit

    __iter__ = keys
    items = keys


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("name", ERRORS)
def test_what_a_backend_raises_fails_its_request_only(register: Register, most: int, name: str) -> None:
    error = ERRORS[name]

    class Raises(Backend):
        """Raises for what is no number."""

        def forward(self, items: list[Data]) -> None:
            for item in items:
                if item["data"] == "bad":
                    raise error
                item["result"] = item["data"]

        def max(self) -> int:
            return most

    with pipe({"node": {"backend": register(Raises), "batching_timeout": 50}}) as p:
        for _ in range(3):
            bad, good = p.submit({"data": "bad"}), p.submit({"data": 1})
            raised = error_of(bad)
            assert type(raised) is BackendError
            assert "node 'node'" in str(raised)
            assert len(str(raised)) < MESSAGE_LIMIT + 200
            assert outcome(good)["result"] == 1
        assert_healthy(p)


def assert_healthy(p: pipe) -> None:
    limit = perf_counter() + WAIT
    while p.stats()["inflight"] or any(
        node.lane.idle.count() < len(node.instances) for node in p._runtime.nodes.values()
    ):
        assert perf_counter() < limit, p.stats()
    for node in p.stats()["nodes"].values():
        assert (node["alive"], node["busy"]) == (node["instances"], 0)


@pytest.mark.parametrize("where", ["filter", "second filter", "batch_key", "on_done", "dict", "clears"])
@pytest.mark.parametrize(
    "error", [NoText(), SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_what_others_raise_fails_the_request_only(
    register: Register, restored: Registry, where: str, error: BaseException
) -> None:
    class Batches(Backend):
        """Result is data."""

        def forward(self, items: list[Data]) -> None:
            for item in items:
                if item["data"] == "clears":
                    item.clear()
                else:
                    item["result"] = item["data"]

        def batch_key(self, item: Data) -> Any:
            if item["data"] == "batch_key":
                raise error
            return super().batch_key(item)

        def max(self) -> int:
            return 4

    def filter_(bad: str) -> Callable[[Data], torchpipe_py.Status]:
        def decide(data: Data) -> torchpipe_py.Status:
            if data["data"] == bad:
                raise error
            return torchpipe_py.Status.Run

        return decide

    restored.register_filter(filter_("filter"), "first")
    restored.register_filter(filter_("second filter"), "second")
    nodes = {
        "a": {"backend": "Identity", "filter": "first", "next": "b"},
        "b": {"backend": register(Batches), "filter": "second"},
    }
    with pipe(nodes) as p:
        for _ in range(3):
            ended = threading.Event()
            raised: list[BaseException | None] = []
            data = Stubborn(data=where) if where == "dict" else {"data": where}

            def on_done(
                data: Data, error_: BaseException | None, raised: Any = raised, ended: threading.Event = ended
            ) -> None:
                raised.append(error_)
                ended.set()
                if where == "on_done":
                    raise error

            # NOTE: in the main thread, KeyboardInterrupt could be a signal's.
            thread = threading.Thread(target=p.dispatch, args=(data, on_done))
            thread.start()
            thread.join(WAIT)
            assert ended.wait(WAIT)
            if where in ("on_done", "clears"):
                assert raised == [None]
            else:
                assert type(raised[0]) is BackendError, raised
        p(good := {"data": 1}, timeout=WAIT)
        assert good["result"] == 1
        assert_healthy(p)


# -- in the loop itself ---------------------------------------------------------------------------------------------


PLANTED = ("lanes/lane.py", "lanes/single.py", "lanes/batching.py", "idle.py", "statistics.py", "routes.py")


class Planted(BaseException):
    """What should not be raised there."""


class Planter:
    """Raises once, in the ``number``-th line of these modules that any instance's thread comes to."""

    def __init__(self, number: int) -> None:
        self.left, self.where, self.is_over = number, "", False

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(PLANTED) or not threading.current_thread().name.startswith("torchpipe-"):
            return None
        if event == "line" and not self.where and not self.is_over and code.co_name != "serve":
            self.left -= 1
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            if self.left < 0 and not line.startswith("with "):  # or a lock would not be released at its end
                self.where = f"{Path(code.co_filename).name}:{code.co_name}:{frame.f_lineno}: {line}"
                raise Planted(self.where)
        return self.trace


class Batched(Backend):
    """Result is data; takes batches."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = item["data"]

    def max(self) -> int:
        return 2


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torchpipe_py.runtime.lanes.lane, "_PAUSE", 0.0)
    before = threading.gettrace()
    yield
    threading.settrace(before)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("kind", ["singles", "batches"])
def test_an_exception_in_any_line_of_the_loop_loses_nothing(register: Register, kind: str) -> None:
    batched = register(Batched)
    nodes = {
        "singles": {"a": {"instance_num": 2, "next": "b"}, "b": {}},
        "batches": {"a": {"next": "b"}, "b": {"backend": batched, "instance_num": 2, "batching_timeout": 1}},
    }[kind]
    for number in itertools.count(step={"singles": 4, "batches": 12}[kind]):  # a few hundred lines
        planter = Planter(number)
        threading.settrace(planter.trace)
        with pipe(nodes) as p:
            futures = [p.submit({"data": index}) for index in range(3)]
            assert not wait(futures, WAIT).not_done, planter.where  # without the help of a later request
            futures += [p.submit({"data": 3}) for _ in range(2)]
            assert not wait(futures, WAIT).not_done, planter.where
            errors = [error_of(future) for future in futures]
            assert {type(error) for error in errors} <= {type(None), BackendError}, (planter.where, errors)
            assert errors.count(None) >= 2, (planter.where, errors)
            planter.is_over = True
            p(data := {"data": 5}, timeout=WAIT)
            assert data.get("result") == 5, planter.where
            assert_healthy(p)
        assert all(node["alive"] == 0 for node in p.stats()["nodes"].values()), planter.where
        if not planter.where:
            break
    assert number > 50

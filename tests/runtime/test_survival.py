"""No exception ends the thread of an instance: what backends, filters and callbacks raise fails one request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, EchoFour
from kit.waits import WAIT, all_idle, error_of, outcome

from torchpipe_py import BackendError, Registry, Status, pipe
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


class Texts(Exception):
    """Its text is no plain ``str``."""

    def __str__(self) -> str:
        return type("Text", (str,), {"encode": None, "strip": None, "split": None, "__format__": None})("a text")


# By name: pytest would ask the exceptions themselves what they are.
ERRORS: dict[str, BaseException] = {
    **{"no text": NoText(), "no class": Liar("a text"), "no string": Texts()},
    **{kind.__name__: kind() for kind in (SystemExit, KeyboardInterrupt, MemoryError, StopIteration)},
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


@pytest.mark.parametrize("backend", [Echo, EchoFour])
@pytest.mark.parametrize("name", ERRORS)
def test_what_a_backend_raises_fails_its_request_only(register: Register, backend: Any, name: str) -> None:
    class Raises(backend):
        def forward_item(self, item: Data) -> None:
            if item["data"] == "bad":
                raise ERRORS[name]
            super().forward_item(item)

    with pipe({"node": {"backend": register(Raises), "batching_timeout": 50}}) as p:
        for _ in range(3):
            bad, good = p.submit({"data": "bad"}), p.submit({"data": 1})
            raised = error_of(bad)
            assert type(raised) is BackendError
            assert "node 'node'" in str(raised)
            assert len(str(raised)) < MESSAGE_LIMIT + 200
            assert outcome(good)["result"] == 1
        all_idle(p)
        assert p.stats()["nodes"]["node"]["failed"] == 3


@pytest.mark.parametrize("where", ["filter", "second filter", "batch_key", "on_done"])
@pytest.mark.parametrize("kind", [NoText, SystemExit])
def test_what_others_raise_fails_the_request_only(
    register: Register, restored: Registry, where: str, kind: type[BaseException]
) -> None:
    class Batches(EchoFour):
        def batch_key(self, item: Data) -> Any:
            if item["data"] == "batch_key":
                raise kind
            return super().batch_key(item)

    def filter_(bad: str) -> Callable[[Data], Status]:
        def decide(data: Data) -> Status:
            if data["data"] == bad:
                raise kind
            return Status.Run

        return decide

    restored.register_filter(filter_("filter"), "first")
    restored.register_filter(filter_("second filter"), "second")
    nodes = {
        "0": {"backend": register(Batches), "next": "a"},
        "a": {"backend": "Identity", "filter": "first", "next": "b"},
        "b": {"backend": register(Batches), "filter": "second"},
    }
    with pipe(nodes) as p:
        for _ in range(3):
            ended, raised = threading.Event(), []

            def on_done(data: Data, error: Any, raised: list[Any] = raised, ended: threading.Event = ended) -> None:
                raised.append(error)
                ended.set()
                if where == "on_done":
                    raise kind

            p.dispatch({"data": where}, on_done)
            assert ended.wait(WAIT)
            assert [type(error) for error in raised] == [type(None) if where == "on_done" else BackendError]
        p(good := {"data": 1}, timeout=WAIT)
        assert good["result"] == 1
        all_idle(p)


@pytest.mark.parametrize("backend", [Echo, EchoFour])
def test_an_exception_in_the_loop_itself_fails_what_the_instance_has(
    register: Register, monkeypatch: pytest.MonkeyPatch, backend: type
) -> None:
    """What a recorder of batches raises, say; the instance goes on."""
    with pipe({"backend": register(backend), "instance_num": 2}) as p:
        for instance in p._runtime.instances:
            monkeypatch.setattr(instance.record, "single" if backend is Echo else "batch", None)
        errors = [error_of(future) for future in [p.submit({"data": index}) for index in range(4)]]
        assert [type(error) for error in errors] == [BackendError] * 4
        monkeypatch.undo()
        p(data := {"data": 5}, timeout=WAIT)
        assert data["result"] == 5
        all_idle(p)

"""The package's own exceptions: one base, a code each, as JSON; and the names that messages suggest."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from conftest import Register

import torchpipe_py
from torchpipe_py import (
    Backend,
    BackendUnavailable,
    ConfigError,
    EngineUnavailable,
    Overloaded,
    SetupError,
    TorchpipeError,
    pipe,
)
from torchpipe_py.errors import counted, nearest

EXPORTED = [getattr(torchpipe_py, name) for name in torchpipe_py.__all__]
ERRORS = [each for each in EXPORTED if isinstance(each, type) and issubclass(each, BaseException)]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_can_be_sent_as_json(kind: type[Exception]) -> None:
    assert issubclass(kind, TorchpipeError)
    error = kind("why")
    when = {} if error.retry_after_ms is None else {"retry_after_ms": error.retry_after_ms}
    assert json.loads(json.dumps(error.as_dict())) == {"code": error.code, "message": "why", **when}


def test_when_to_come_back_is_told() -> None:
    assert Overloaded("full", 20).as_dict() == {"code": "overloaded", "message": "full", "retry_after_ms": 20}
    assert Overloaded("full").as_dict() == {"code": "overloaded", "message": "full"}
    assert EngineUnavailable("soon").as_dict() == {"code": "unavailable", "message": "soon", "retry_after_ms": 500}


class Raises(Backend):
    """Cannot be set up."""

    error: ClassVar[Exception]

    def setup(self) -> None:
        raise self.error


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize("error", [BackendUnavailable("no GPU"), KeyError("model"), ConfigError("no such color")])
def test_what_keeps_a_pipe_from_being_built(register: Register, kind: type[Exception], error: Exception) -> None:
    """The C++ library raises the one or the other, depending on the place."""
    with pytest.raises(kind) as caught:
        pipe({"backend": register(type("Raises", (Raises,), {"error": error}))})
    assert type(caught.value) is (type(error) if isinstance(error, TorchpipeError) else SetupError)
    with pytest.raises(kind):
        pipe({"instance_num": "dd"})


@pytest.mark.parametrize(
    ("name", "valid", "clause"),
    [
        ("swop", ["swap", "or"], "did you mean 'swap'?"),
        ("zzz", ["swap", "or"], "valid: or, swap"),
        ("zzz", [], "none is valid here"),
        ("Qaz9", [f"Name{index}" for index in range(38)], "the nearest of 38: Name9, Name29, Name19"),
    ],
)
def test_the_nearest_names(name: str, valid: list[str], clause: str) -> None:
    assert nearest(name, valid) == clause


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (0, "item", "0 items"),
        (1, "item", "1 item"),
        (2, "item", "2 items"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
    ],
)
def test_one_of_something_is_no_plural(count: int, noun: str, said: str) -> None:
    assert counted(count, noun) == said

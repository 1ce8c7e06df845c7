"""Backends and filters made from plain user classes, which need not import this package."""

from __future__ import annotations

import copy
import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from torchpipe_py.backends.base import Backend, BackendConfig, BatchRange, Data
from torchpipe_py.backends.control.basic import Wrapper
from torchpipe_py.backends.params import REQUIRED, Param
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import ConfigError, counted
from torchpipe_py.filters import Filter
from torchpipe_py.keys import TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_float, to_floats, to_int, to_ints, to_str, to_strings

CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    int: to_int,
    float: to_float,
    bool: to_bool,
    str: to_str,
    list[int]: lambda value: list(to_ints(value)),
    list[float]: lambda value: list(to_floats(value)),
    list[str]: lambda value: list(to_strings(value)),
}


class Python(Wrapper):
    """``Python[name]``: the class registered as ``name`` with ``register_backend``."""


class PythonClass(Backend):
    """Makes a backend of a class with ``forward(list_of_dicts)`` and optionally ``init(config)``, ``max``, ``min`` and
    ``signature``.

    Annotated attributes of the class (``sigma: float = 1.0``) are its parameters: converted, checked, and set on each
    instance before ``init``; one without a default is required. A class that has ``init`` and no annotations takes
    every key of its node. ``config`` is a dict of the parameters, or of the node's keys as written, without the scope
    of the class's name. ``max`` and ``min`` are methods or numbers. ``forward`` writes each item's ``result`` into its
    dict and returns nothing, or returns a list (or tuple) with one result per item.
    """

    wrapped: type
    declared: ClassVar[dict[str, Param]] = {}

    @classmethod
    def of(cls, wrapped: type) -> type[PythonClass]:
        """A subclass for ``wrapped``, which can be used like any backend class."""
        params = declared(wrapped)
        content = {
            "wrapped": wrapped,
            "declared": params,
            "any_params": takes_any(wrapped, params),
            "__doc__": wrapped.__doc__,
        }
        return type(wrapped.__name__, (cls,), content)

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        if "max" in cls.declared and ("min" in cls.declared or not hasattr(cls.wrapped, "min")):
            return params.get("min", 1), params["max"]
        return None if hasattr(cls.wrapped, "max") else (1, 1)

    @classmethod
    def parameters(cls) -> dict[str, Param]:
        return dict(cls.declared)

    @classmethod
    def undeclared(cls, key: str, value: Any) -> str:
        return undeclared(cls.wrapped, cls.declared, key, value)

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.params = config.params
        self._object: Any = None

    def setup(self) -> None:
        self._object = configured(self.wrapped, self.declared, self.params)

    def forward(self, items: list[Data]) -> None:
        try:
            results = self._object.forward(items)
        except TypeError as error:
            hint = _hint(error, getattr(self.wrapped, "forward", None))
            if hint:
                raise TypeError(f"{error}; {hint}") from error
            raise
        if results is not None:
            _take(results, items, type(self._object).__name__)

    def close(self) -> None:
        if hasattr(self._object, "close"):
            self._object.close()

    def signature(self) -> Signature:
        says: Signature = self._object.signature() if hasattr(self._object, "signature") else super().signature()
        return says

    def max(self) -> int:
        return self._limit("max")

    def min(self) -> int:
        return self._limit("min")

    def _limit(self, name: str) -> int:
        limit = getattr(self._object, name, 1)
        return int(limit() if callable(limit) else limit)


class PythonFilter:
    """Makes filters of a class with ``forward(data)`` and optionally ``init(config)``; see ``PythonClass``."""

    def __init__(self, wrapped: type) -> None:
        self._wrapped, self._declared = wrapped, declared(wrapped)
        self.any_params = takes_any(wrapped, self._declared)

    def __reduce__(self) -> tuple[Any, ...]:
        return PythonFilter, (self._wrapped,)

    def parameters(self) -> dict[str, Param]:
        """Declared parameters by attribute."""
        return self._declared

    def undeclared(self, key: str, value: Any) -> str:
        """How the class must declare ``key``, if it seems to use it; see ``Backend``."""
        return undeclared(self._wrapped, self._declared, key, value)

    def create(self, params: Mapping[str, Any]) -> Filter:
        """A new filter with these parameter values."""
        forward: Filter = configured(self._wrapped, self._declared, params).forward
        return forward


def _hint(error: TypeError, forward: Any) -> str:
    """A hint for a ``forward`` that was written for one dict, if it raised ``error`` itself; else empty."""
    inner = error.__traceback__ and error.__traceback__.tb_next
    if str(error) != "list indices must be integers or slices, not str" or inner is None or inner.tb_next is not None:
        return ""
    is_own = inner.tb_frame.f_code is getattr(forward, "__code__", None)
    return "forward gets a list of dicts, also for one request: for item in items: item['result'] = …" if is_own else ""


def configured(wrapped: Callable[[], Any], names: Iterable[str], params: Mapping[str, Any]) -> Any:
    """An instance with the parameters ``names`` as attributes; calls ``init`` with all ``params``, if it has one."""
    made = wrapped()
    for name in names:
        setattr(made, name, copy.copy(params[name]))  # each instance gets its own list
    if hasattr(made, "init"):
        made.init(dict(params))
    return made


def _take(results: Any, items: Sequence[Data], name: str) -> None:
    """Store the return value of ``forward`` as the items' results; ``ValueError`` unless it has one for each."""
    if not isinstance(results, (list, tuple)):
        raise ValueError(f"{name}.forward returned {kind(results)}; {_EXPECTED}")
    if len(results) != len(items):
        counts = f"{counted(len(results), 'result')} for {counted(len(items), 'item')}"
        raise ValueError(f"{name}.forward returned a list of {counts}; {_EXPECTED}")
    for item, result in zip(items, results, strict=True):
        if result is not item:  # a returned input dict already holds its result
            item[TASK_RESULT_KEY] = result


_EXPECTED = "expected nothing (write item['result'] then), or a list of one result for each item"


def kind(value: Any) -> str:
    """Its type, for a message."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def takes_any(wrapped: type, names: Collection[str]) -> bool:
    """Whether the class, with declared parameters ``names``, takes every key: its ``init`` reads them itself."""
    return not names and hasattr(wrapped, "init")


def undeclared(wrapped: type, names: Collection[str], key: str, value: Any) -> str:
    """How the class must declare ``key``; empty if it declares other parameters and has no similar attribute."""
    found = {name for name, attribute in vars(wrapped).items() if name[0] != "_" and not callable(attribute)}
    with suppress(TypeError, ValueError):  # a class written in C may not have a signature
        found.update(inspect.signature(wrapped).parameters)
    close = difflib.get_close_matches(key, sorted(found.difference(names)), 1)
    if takes_any(wrapped, names) or (names and not close):
        return ""
    example = f"{close[0] if close else key}: {type(value).__name__}"
    return f"parameters of {wrapped.__name__} are annotations of the class ({example}), not arguments of __init__"


def declared(wrapped: type) -> dict[str, Param]:
    """The class's annotations, and its attributes that are a ``Param``, as parameters.

    ``ConfigError`` for an annotation that no configuration value can have.
    """
    try:
        hints = typing.get_type_hints(wrapped)
    except Exception as error:
        raise ConfigError(f"{wrapped.__name__}: its annotations cannot be read: {error}") from error
    params = {}
    for name, hint in hints.items():
        if name.startswith("_") or typing.get_origin(hint) is ClassVar or hint is ClassVar:
            continue
        if hint not in CONVERTERS:
            known = "int, float, bool, str, or a list of int, float or str"
            raise ConfigError(
                f"{wrapped.__name__}: parameter {name!r} is annotated {hint!r}; expected {known}. "
                "What is no parameter is a ClassVar, or has a name that begins with '_'"
            )
        default = getattr(wrapped, name, REQUIRED)
        params[name] = Param(CONVERTERS[hint], default, doc=f"a parameter of {wrapped.__name__}")
        params[name].key = name
    for base in reversed(wrapped.__mro__):
        params.update({name: value for name, value in vars(base).items() if isinstance(value, Param)})
    return params

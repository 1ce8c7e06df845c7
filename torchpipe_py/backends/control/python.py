"""Backends made of classes of the user's that know nothing of this package."""

from __future__ import annotations

import copy
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torchpipe_py.backends.base import REQUIRED, Backend, BackendConfig, BatchRange, Param
from torchpipe_py.backends.control.basic import Wrapper
from torchpipe_py.errors import ConfigError
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
    """Makes a backend of a class that has ``forward(list_of_dicts)``, perhaps ``init(config)``, ``max`` and ``min``.

    Attributes that the class annotates (``sigma: float = 1.0``) are its parameters: converted, checked, and set on each
    instance before ``init``; one without a value is required. A class without any takes every key of its node.
    ``config`` is a dict of the parameters, or of the node's keys as written, those scoped with the class's name
    without the scope. ``max`` and ``min`` are methods or numbers.
    """

    wrapped: Callable[[], Any]
    declared: ClassVar[dict[str, Param]] = {}

    @classmethod
    def of(cls, wrapped: type) -> type[PythonClass]:
        """A subclass for ``wrapped``, to be used like any other backend class."""
        declared = _declared(wrapped)
        content = {"wrapped": wrapped, "declared": declared, "any_params": not declared, "__doc__": wrapped.__doc__}
        return type(wrapped.__name__, (cls,), content)

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Sequence[BatchRange | None]) -> BatchRange | None:
        return None if hasattr(cls.wrapped, "max") else (1, 1)

    @classmethod
    def parameters(cls) -> dict[str, Param]:
        return dict(cls.declared)

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.params = config.params
        self._object: Any = None

    def setup(self) -> None:
        self._object = self.wrapped()
        for name in self.declared:
            setattr(self._object, name, copy.copy(self.params[name]))  # a list is each instance's own
        if hasattr(self._object, "init"):
            self._object.init(dict(self.params))
        self.forward = self._object.forward  # type: ignore[method-assign]

    def close(self) -> None:
        if hasattr(self._object, "close"):
            self._object.close()

    def max(self) -> int:
        return self._limit("max")

    def min(self) -> int:
        return self._limit("min")

    def _limit(self, name: str) -> int:
        limit = getattr(self._object, name, 1)
        return int(limit() if callable(limit) else limit)


def _declared(wrapped: type) -> dict[str, Param]:
    """What the class annotates, as parameters; ``ConfigError`` for a type that no configuration value can have."""
    try:
        hints = typing.get_type_hints(wrapped)
    except Exception as error:
        raise ConfigError(f"{wrapped.__name__}: its annotations cannot be read: {error}") from error
    declared = {}
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
        declared[name] = Param(CONVERTERS[hint], default, doc=f"a parameter of {wrapped.__name__}")
        declared[name].key = name
    return declared

"""What a worker process needs to make a backend again: classes, parameters, children, filters."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.base import Backend, BackendConfig, Shared
from torchpipe_py.backends.control.python import PythonClass
from torchpipe_py.errors import ConfigError, first_line
from torchpipe_py.filters import BUILT_IN, Filter

_IS_LOADING = "__torchpipe_is_loading__"


@dataclass(frozen=True)
class Recipe:
    """A backend that can be made in another process; ``wraps`` says that ``cls`` is a class with ``forward`` alone."""

    cls: type
    wraps: bool
    params: Mapping[str, Any]
    children: tuple[Recipe, ...]
    filters: tuple[str | Filter | None, ...]
    label: str

    @classmethod
    def of(cls, backend: Backend) -> Recipe:
        """How ``backend`` was made; ``ConfigError`` where another process could not make it."""
        config, made = backend.config, type(backend)
        wraps = issubclass(made, PythonClass) and made.__module__ == PythonClass.__module__
        named = made.wrapped if wraps else made  # type: ignore[attr-defined]
        assert isinstance(named, type)
        _check_importable(named, config.label)
        for name, value in config.params.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                reason = first_line(error)
                raise ConfigError(f"{config.label}: {name!r} cannot go to a worker process: {reason}") from error
        return cls(
            cls=named,
            wraps=wraps,
            params=dict(config.params),
            children=tuple(map(cls.of, config.children)),
            filters=tuple(_described(one, config.label) for one in config.filters),
            label=config.label,
        )

    def create(self, seat: BackendConfig) -> Backend:
        """A new instance, not set up yet; ``seat`` says which instance it is, and on which device."""
        config = replace(
            seat,
            params=self.params,
            children=tuple(child.create(seat) for child in self.children),
            filters=tuple(BUILT_IN[one] if isinstance(one, str) else one for one in self.filters),
            label=self.label,
        )
        made: type[Backend] = PythonClass.of(self.cls) if self.wraps else self.cls
        return made(config)

    def postprocessors(self) -> dict[str, type]:
        """Registered postprocessors that a parameter names: the worker has a registry of its own."""
        registered = {*registry.default.postprocessor_names()} - registry.BUILT_IN_POSTPROCESSORS.keys()
        named = {value for value in self.params.values() if isinstance(value, str) and value in registered}
        found = {name: registry.default.find_postprocessor(name) for name in named}
        for child in self.children:
            found |= child.postprocessors()
        return {name: cls for name, cls in found.items() if cls is not None}


@dataclass(frozen=True)
class Job:
    """The first message to a worker; ``recipe`` is the pickle of a ``Recipe`` and its postprocessors.

    ``wish`` is what ``prefer_color`` was asked, or nothing, and ``log_level`` that of this package's logger.
    """

    recipe: bytes
    device_id: int
    instance: int
    instance_num: int
    reaches_caller: bool
    wish: tuple[str | None, ...]
    main: tuple[str, str] | None
    argv: tuple[str, ...]
    log_level: int

    def seat(self) -> BackendConfig:
        """Where the backend runs; what instances share ends at the process."""
        return BackendConfig(
            device_id=self.device_id,
            instance=self.instance,
            instance_num=self.instance_num,
            reaches_caller=self.reaches_caller,
            shared=Shared(),
        )


def main_source() -> tuple[str, str] | None:
    """What a worker can load as this process's ``__main__``: ("module", name) or ("file", path)."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if isinstance(name, str) and name != "__main__":
        return "module", name
    path = getattr(main, "__file__", None)
    return ("file", os.path.abspath(path)) if path and os.path.isfile(path) else None


def load_main(source: tuple[str, str]) -> None:
    """Run the parent's main module under the name ``__mp_main__``, as ``multiprocessing`` does; once."""
    if hasattr(sys.modules["__main__"], _IS_LOADING):
        return
    kind, value = source
    module = ModuleType("__mp_main__")
    if kind == "module":
        spec = importlib.util.find_spec(value)
        code = spec.loader.get_code(value) if spec and spec.loader else None  # type: ignore[attr-defined]
        module.__spec__, module.__package__ = spec, spec.parent if spec else None
        module.__file__ = spec.origin if spec else None
    else:
        with open(value, "rb") as file:
            code = compile(file.read(), value, "exec")
        module.__file__ = value
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    setattr(module, _IS_LOADING, True)
    try:
        exec(code or "", vars(module))
    finally:
        setattr(module, _IS_LOADING, False)


def is_loading_main() -> bool:
    """Whether this is a worker in the middle of ``load_main``."""
    return bool(getattr(sys.modules.get("__main__"), _IS_LOADING, False))


def _check_importable(cls: type, label: str) -> None:
    try:
        pickle.dumps(cls)
    except Exception as error:
        raise ConfigError(f"{label}: {_advice(cls)}: {first_line(error)}") from error
    if cls.__module__ == "__main__" and main_source() is None:
        raise ConfigError(f"{label}: {_advice(cls)}: this program has no file that it could import")


def _advice(cls: type) -> str:
    return f"a worker process imports class {cls.__qualname__!r}, so it must stand at the top level of a module"


def _described(filter_: Filter | None, label: str) -> str | Filter | None:
    """A built-in filter by its name, since most are closures; others as they are, where that can be sent."""
    for name, one in BUILT_IN.items():
        if one is filter_:
            return name
    try:
        pickle.dumps(filter_)
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(f"{label}: filter {filter_!r} cannot go to a worker process: {reason}") from error
    return filter_

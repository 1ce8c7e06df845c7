"""What a worker process is told first: the plan of its backend, which instance it is, and the main module."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.control.python import PythonClass
from torchpipe_py.errors import ConfigError, first_line
from torchpipe_py.plan.binding import BackendPlan

_IS_LOADING = "__torchpipe_is_loading__"


@dataclass(frozen=True)
class Setup:
    """The first message to a child process; ``pickled`` is what ``pickle_plan`` gave.

    ``config`` says which instance it is, ``colors`` what ``prefer_color`` was asked, or nothing, ``log_level`` that of
    this package's logger, and ``max_memory`` how many MiB it may take beyond what it has after setup; 0 is any.
    ``takes_tensors``: import PyTorch now, which counts for no limit of a batch then.
    """

    pickled: bytes
    config: BackendConfig
    colors: tuple[str | None, ...]
    main: dict[str, Any]
    argv: tuple[str, ...]
    log_level: int
    max_memory: int = 0
    takes_tensors: bool = False


def pickle_plan(config: BackendConfig) -> bytes:
    """The plan of the only child, and the registered postprocessors that it names: a worker has a registry of its own.

    ``ConfigError`` that names what another process could not make.
    """
    plan = BackendPlan.of(config.children[0])
    postprocessors = {}
    for part in plan.parts():
        _check_importable(getattr(part.cls, "wrapped", part.cls), part.label)
        values = {repr(name): value for name, value in part.params.items()}
        for name, value in {**values, **{f"filter {filter_!r}": filter_ for filter_ in part.filters}}.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise ConfigError(f"{part.label}: {name} cannot go to a worker process: {first_line(error)}") from error
            if isinstance(value, str) and value not in registry.BUILT_IN_POSTPROCESSORS:
                postprocessors[value] = registry.default.find_postprocessor(value)
    file = io.BytesIO()
    try:
        _PlanPickler(file).dump((plan, {name: cls for name, cls in postprocessors.items() if cls is not None}))
    except Exception as error:
        raise ConfigError(f"{config.label}: cannot go to a worker process: {first_line(error)}") from error
    return file.getvalue()


class _PlanPickler(pickle.Pickler):
    """Sends the class that a ``PythonClass`` was made of, to be wrapped again."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, PythonClass) and "wrapped" in vars(value):
            return PythonClass.of, (value.wrapped,)
        return NotImplemented


def main_source() -> dict[str, Any]:
    """What ``load_main`` takes to load this process's ``__main__``; empty where there is nothing to load."""
    data = spawn.get_preparation_data("")
    return {key: value for key, value in data.items() if key.startswith("init_main_from") and value}


def load_main(source: dict[str, Any]) -> None:
    """Run the parent's main module under the name ``__mp_main__``, as ``multiprocessing`` does; once."""
    main = sys.modules["__main__"]
    setattr(main, _IS_LOADING, True)
    try:
        spawn.prepare(source)  # type: ignore[attr-defined]
    finally:
        delattr(main, _IS_LOADING)


def is_loading_main() -> bool:
    """Whether this is a worker in the middle of ``load_main``."""
    return hasattr(sys.modules.get("__main__"), _IS_LOADING)


def _check_importable(cls: type, label: str) -> None:
    try:
        pickle.dumps(cls)
    except Exception as error:
        raise ConfigError(f"{label}: {_advice(cls)}: {first_line(error)}") from error
    if cls.__module__ == "__main__" and not main_source():
        raise ConfigError(f"{label}: {_advice(cls)}: this program has no file that it could import")


def _advice(cls: type) -> str:
    return f"a worker process imports class {cls.__qualname__!r}, so it must stand at the top level of a module"

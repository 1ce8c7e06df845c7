"""The first message to a worker process: the plan of its backend, its instance index, and the main module."""

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
    """The first message to a child process; ``pickled`` is the result of ``pickle_plan``.

    ``config`` holds the instance index, ``colors`` the arguments of ``prefer_color`` (or is empty), ``log_level`` the
    level of this package's logger, and ``max_memory`` the MiB allowed on top of the memory after setup; 0: no limit.
    ``name`` is the process's among the sources of gauges.
    ``takes_tensors``: import PyTorch now, so that the import does not count towards the limits of a batch.
    """

    pickled: bytes
    config: BackendConfig
    colors: tuple[str | None, ...]
    main: dict[str, Any]
    argv: tuple[str, ...]
    log_level: int
    max_memory: int = 0
    takes_tensors: bool = False
    name: str = ""


def pickle_plan(config: BackendConfig) -> bytes:
    """Pickle the plan of the only child, with the registered postprocessors it names: a worker has its own registry.

    Raises ``ConfigError``, which names an object that another process could not create.
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
    """Sends the class inside a ``PythonClass``, to be wrapped again."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, PythonClass) and "wrapped" in vars(value):
            return PythonClass.of, (value.wrapped,)
        return NotImplemented


def main_source() -> dict[str, Any]:
    """The argument of ``load_main`` that loads this process's ``__main__``; empty if there is nothing to load."""
    data = spawn.get_preparation_data("")
    return {key: value for key, value in data.items() if key.startswith("init_main_from") and value}


def load_main(source: dict[str, Any]) -> None:
    """Run the parent's main module once under the name ``__mp_main__``, as ``multiprocessing`` does."""
    main = sys.modules["__main__"]
    setattr(main, _IS_LOADING, True)
    try:
        spawn.prepare(source)  # type: ignore[attr-defined]
    finally:
        delattr(main, _IS_LOADING)


def is_loading_main() -> bool:
    """Whether this process is a worker that is running ``load_main``."""
    return hasattr(sys.modules.get("__main__"), _IS_LOADING)


def _check_importable(cls: type, label: str) -> None:
    try:
        pickle.dumps(cls)
    except Exception as error:
        raise ConfigError(f"{label}: {_advice(cls)}: {first_line(error)}") from error
    if cls.__module__ == "__main__" and not main_source():
        raise ConfigError(f"{label}: {_advice(cls)}: this program has no file that it could import")


def _advice(cls: type) -> str:
    return f"a worker process imports class {cls.__qualname__!r}, so it must be at the top level of a module"

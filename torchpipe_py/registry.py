"""Classes by name: built-in backends as import strings, registered ones, and backends of installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import entry_points
from inspect import getattr_static
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from torchpipe_py import filters
from torchpipe_py.backends.base import Backend
from torchpipe_py.backends.params import Param
from torchpipe_py.errors import ConfigError, describe, logger

ENTRY_POINT_GROUP = "torchpipe_py.backends"

_PLAIN_CLASS = "torchpipe_py.backends.control.python:PythonClass"
_PLAIN_FILTER = "torchpipe_py.backends.control.python:PythonFilter"


def _in(module: str, names: str) -> dict[str, str]:
    """Import strings of the classes ``names`` in a module."""
    return {name: f"torchpipe_py.{module}:{name}" for name in names.split()}


BUILT_IN_BACKENDS = {
    **_in("backends.control.basic", "Identity Sequential FirstAvailable Range"),
    **_in("backends.control.python", "Python"),
    **_in("backends.control.jump", "Jump MapReduce"),
    **_in("backends.image.decode", "DecodeMat"),
    **_in("backends.image.gpujpeg", "CheckJpeg DecodeTensor"),
    **_in("backends.image.mat", "cvtColorMat AlignMat PerspectiveTransformMat"),
    **_in("backends.image.ops", "ResizeMat ResizePadMat LetterBoxMat CenterCropMat CropMat DynamicResizeMat"),
    **_in("backends.image.ops", "ResizeShorterMat PillowResizeMat ResizeTensor PillowResizeTensor ResizePadTensor"),
    **_in("backends.image.ops", "LetterBoxTensor DynamicResizeTensor ResizeShorterTensor CenterCropTensor CropTensor"),
    **_in("backends.image.ops", "CopyMakeBorderTensor"),
    **_in("backends.image.tensor", "Mat2Tensor cvtColorTensor Tensor2Mat Tensor2Vector"),
    **_in("backends.image.normalize", "NormalizeMat NormalizeTensor"),
    **_in("backends.image.files", "SaveTensor SaveMat LoadTensor"),
    **_in("backends.cuda", "SyncTensor"),
    **_in("backends.model.onnx", "OnnxTensor"),
    **_in("backends.model.tensorrt", "TensorrtTensor"),
    **_in("backends.model.torch_model", "TorchTensor"),
    **_in("proc.backends", "Process Isolated"),
}

ALIASES = {
    "S": "Sequential",
    "CvtColorMat": "cvtColorMat",
    "CvtColorTensor": "cvtColorTensor",
    "StreamGuard": "SyncTensor",
    "TensorSync": "SyncTensor",
    "Torch": "SyncTensor",
}

BUILT_IN_POSTPROCESSORS = {
    **_in("backends.model.postprocess", "Cpu SoftmaxCpu SoftmaxMax ArgMax SoftmaxArgMax TopK Sigmoid"),
    **_in("backends.model.postprocess", "Boxes YoloBoxes Yolo5Boxes EndToEndBoxes DetrBoxes BoxesScoresLabels"),
    **_in("backends.model.postprocess", "YoloSegments YoloPose L2Normalize"),
    "cpu": "torchpipe_py.backends.model.postprocess:Cpu",
}


class Registry:
    """Names to backends, filters and postprocessors: built-in ones, registered ones, backends of installed packages.

    ``entry_points(group=…)`` finds the backends of installed packages. Any thread may register. A name never changes
    its meaning, unless the code that defines it runs again, as a cell of a notebook or a module that is reloaded: pipes
    that are built later use the new class.
    """

    def __init__(self, entry_points: Callable[..., Iterable[Any]] = entry_points) -> None:
        self._entry_points = entry_points
        self._lock = threading.Lock()
        self._backends: dict[str, type] = {}
        self._filters: dict[str, Callable[..., Any]] = {}
        self._postprocessors: dict[str, type] = {}

    @contextmanager
    def restored(self) -> Iterator[Registry]:
        """Remove at the end what is registered inside."""
        tables: tuple[dict[str, Any], ...] = (self._backends, self._filters, self._postprocessors)
        before = [dict(table) for table in tables]
        try:
            yield self
        finally:
            with self._lock:
                for table, content in zip(tables, before, strict=True):
                    table.clear()
                    table.update(content)

    def register_backend(self, cls: type, name: str | None = None) -> type:
        """Make ``cls`` usable as ``backend = "name"`` and ``Python[name]``; usable as a decorator.

        ``cls`` is a ``Backend``, or any class with ``init(config)`` and ``forward(list_of_dicts)``, and ``max()`` and
        ``min()`` besides if it takes batches. A name that is taken raises ``ConfigError``, and so does a ``Backend``
        whose ``max`` or ``min`` is not a method.
        """
        if isinstance(cls, type):
            _check_methods(cls)
        return self._register(self._backends, cls, name, {*BUILT_IN_BACKENDS, *ALIASES})

    def register_postprocessor(self, cls: type, name: str | None = None) -> type:
        """Make ``cls`` usable as ``postprocessor = "name"`` of a model backend; see ``postprocess.Postprocessor``."""
        return self._register(self._postprocessors, cls, name, BUILT_IN_POSTPROCESSORS)

    def register_filter(self, filter_: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        """Make a filter usable as ``filter = "name"``, ``(name)Backend`` and ``Python[name]``; usable as a decorator.

        It is a function from a request's dict to a ``Status``, or a class with such a ``forward(data)``, perhaps with
        ``init(config)``. A class is instantiated once for each node whose ``filter`` names it, and, inside a backend
        expression, once for each place and instance of the node. A node's filter is called by many threads at once. It
        may change the dict.
        """
        if not callable(filter_) or (isinstance(filter_, type) and not callable(getattr(filter_, "forward", None))):
            raise ConfigError(f"{name or filter_!r}: expected a function, or a class with a method 'forward'")
        name = name or filter_.__name__
        self._add(self._filters, filter_, name, name.lower() in {*filters.BUILT_IN, *filters.ALIASES})
        return filter_

    def _kind(self, table: dict[str, Any]) -> str:
        """The kind of what a table holds, as in the names of the methods."""
        kinds = {id(self._backends): "backend", id(self._filters): "filter", id(self._postprocessors): "postprocessor"}
        return kinds[id(table)]

    def _register(self, table: dict[str, type], cls: type, name: str | None, built_in: Iterable[str]) -> type:
        _as_class(cls, name or repr(cls), self._kind(table))
        name = name or cls.__name__
        if not callable(getattr(cls, "forward", None)):
            hint = "; forward_item is ItemBackend's: derive from it" if hasattr(cls, "forward_item") else ""
            raise ConfigError(f"{name}: class {cls.__name__} has no method 'forward'{hint}")
        self._add(table, cls, name, name in built_in)
        return cls

    def _add(self, table: dict[str, Any], value: Any, name: str, is_built_in: bool) -> None:
        with self._lock:
            known = table.get(name, value)
            if is_built_in or (known is not value and not _is_redefined(known, value)):
                place = "by this package" if is_built_in else f"by {known.__module__}.{known.__qualname__}"
                kind = self._kind(table)
                raise ConfigError(
                    f"{name!r} is registered already, {place}; register_{kind}({value.__name__}, 'other name')"
                )
            table[name] = value

    def find_backend(self, name: str) -> type[Backend] | None:
        """The class called ``name``, or ``None``; a class that is not a ``Backend`` is wrapped in a ``PythonClass``.

        An import error of a known backend is raised as it is; ``ConfigError`` for a class that cannot be a backend.
        """
        name = canonical(name)
        if name in BUILT_IN_BACKENDS:
            cls = _load(BUILT_IN_BACKENDS[name])
        elif name in self._backends:
            cls = self._backends[name]
        else:
            point = next((point for point in self._installed if point.name == name), None)
            if point is None:
                return None
            cls = _as_class(point.load(), name)
        if issubclass(cls, Backend):
            return cls
        wrapper: Any = _load(_PLAIN_CLASS)
        wrapped: type[Backend] = wrapper.of(cls)
        return wrapped

    def find_filter(self, name: str) -> Any:
        """The filter called ``name``, or ``None``; a class is wrapped in a ``PythonFilter``. Built-in ones in any case.

        ``ConfigError`` for a class that cannot be a filter.
        """
        lower = filters.ALIASES.get(name.lower(), name.lower())
        if lower in filters.BUILT_IN:
            return filters.BUILT_IN[lower]
        if name.startswith("Python[") and name.endswith("]"):
            name = name[len("Python[") : -1].strip()
        filter_ = self._filters.get(name)
        return _load(_PLAIN_FILTER)(filter_) if isinstance(filter_, type) else filter_

    def find_postprocessor(self, name: str) -> type | None:
        """The class called ``name``, or ``None``."""
        if name in BUILT_IN_POSTPROCESSORS:
            return _load(BUILT_IN_POSTPROCESSORS[name])
        return self._postprocessors.get(name)

    def backend_names(self) -> list[str]:
        """Every name that can stand in an expression, aliases and installed packages' backends included."""
        return sorted({*BUILT_IN_BACKENDS, *ALIASES, *self._backends, *(point.name for point in self._installed)})

    def backends_with(self, key: str) -> list[str]:
        """Built-in backends that have a parameter of this name, at most three."""
        names = (name for name in sorted(BUILT_IN_BACKENDS, key=len) if key in self._keys_of(name))
        return list(islice(names, 3))

    def postprocessors_with(self, key: str) -> list[str]:
        """Postprocessors that have a parameter of this name, at most three."""
        names = (
            name
            for name in self.postprocessor_names()
            if isinstance(getattr_static(self.find_postprocessor(name), key, None), Param)
        )
        return list(islice(names, 3))

    def _keys_of(self, name: str) -> set[str]:
        try:
            cls = self.find_backend(name)
        except ImportError:  # a library that it needs is missing
            return set()
        return {param.key for param in cls.parameters().values()} if cls is not None else set()

    def filter_names(self) -> list[str]:
        """Every name ``filter = …`` takes."""
        return sorted({*filters.BUILT_IN, *self._filters})

    def postprocessor_names(self) -> list[str]:
        """Every name ``postprocessor = …`` takes."""
        return sorted({*BUILT_IN_POSTPROCESSORS, *self._postprocessors})

    @cached_property
    def _installed(self) -> Iterable[Any]:
        return self._entry_points(group=ENTRY_POINT_GROUP)


def register_hint(kind: str) -> str:
    """The hint for an unknown name of a ``kind``: backend, filter or postprocessor."""
    return f"(register your own first: register_{kind}, import_code, --import)"


default = Registry()
"""The registry of pipes without another, and of code that is imported."""

register_backend = default.register_backend
register_filter = default.register_filter
register_postprocessor = default.register_postprocessor


def import_code(name: str) -> ModuleType:
    """Import a module by name, or a file that ends in ``.py`` by path, for the backends and filters it registers.

    The file becomes the module of its name, and its folder the last one in ``sys.path``: modules beside it can be
    imported, also by worker processes. So does the working directory if only it contains the module. ``ConfigError``
    for a failed import.
    """
    try:
        return _import_file(name) if name.endswith(".py") else _import_module(name)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise ConfigError(f"{name}: cannot be imported: {error}") from error
        text = f"{name}: no such module, installed or in {os.getcwd()}; a file is given with .py at its end"
        raise ConfigError(text) from None
    except (Exception, SystemExit) as error:
        # NOTE: a script that ends itself would end the caller, perhaps with status 0.
        raise ConfigError(f"{name}: cannot be imported: {describe(error)}") from error


def import_all(names: str) -> None:
    """``import_code`` for each of the names, separated by commas."""
    for name in filter(None, map(str.strip, names.split(","))):
        import_code(name)


def _import_module(name: str) -> ModuleType:
    top, here = name.partition(".")[0], os.getcwd()
    spec = importlib.util.find_spec(top)
    if any(os.path.exists(file) for file in (f"{top}.py", top)):
        # NOTE: last, and only for a named module that is missing; otherwise it could replace any library.
        if spec is None:
            sys.path.append(here)
            importlib.invalidate_caches()
        elif not Path(spec.origin or here).is_relative_to(here):
            logger.warning(
                "%s: the installed module is imported (%s), not the one in the working directory: rename that, or "
                "give it as a file, ./%s.py",
                *(name, spec.origin, top),
            )
    return importlib.import_module(name)


def _import_file(path: str) -> ModuleType:
    folder, file = os.path.split(os.path.abspath(path))
    module_name = os.path.splitext(file)[0]
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file (working directory: {os.getcwd()})")
    known = sys.modules.get(module_name)
    if known is not None:
        if os.path.abspath(getattr(known, "__file__", None) or "") != os.path.join(folder, file):
            raise ConfigError(f"{path}: a module called {module_name!r} is imported already; rename the file")
        return known
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # every name that ends in .py has one
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def canonical(name: str) -> str:
    """The full name of a backend: ``Sequential`` for ``S``."""
    return ALIASES.get(name, name)


def _is_redefined(known: Any, value: Any) -> bool:
    """Whether ``value`` is ``known`` from the same place, whose code ran again."""
    name = getattr(value, "__qualname__", "<")
    places = {(getattr(each, "__module__", ""), getattr(each, "__qualname__", "")) for each in (known, value)}
    return len(places) == 1 and "<" not in name  # each call of a function may make another class


def _check_methods(cls: type) -> None:
    """Refuse attributes that hide ``Backend`` methods; warn about methods of the other kind of class."""
    if issubclass(cls, Backend):
        for name in ("max", "min"):
            if not callable(getattr(cls, name)):
                raise ConfigError(f"{cls.__name__}: {name} of a Backend is a method: def {name}(self): return …")
        if hasattr(cls, "init") and "setup" not in vars(cls):
            logger.warning(
                "%s: init(config) is never called: this is a Backend. Call it setup(self), and read parameters that "
                "are declared as attributes, name = Param(…)",
                cls.__name__,
            )
    elif hasattr(cls, "setup") and not hasattr(cls, "init"):
        logger.warning(
            "%s: setup() is never called: this is not a Backend. Derive from Backend, or call it init(self, config)",
            cls.__name__,
        )


def _as_class(value: Any, name: str, kind: str = "backend") -> type:
    if not isinstance(value, type):
        register = f"register_{kind}"
        hint = f"; write @{register}, or {register}(Class, 'name')" if isinstance(value, str) else ""
        raise ConfigError(f"{name}: expected a class, got {type(value).__name__}{hint}")
    return value


def _load(path: str) -> type:
    module, _, attribute = path.partition(":")
    return _as_class(getattr(importlib.import_module(module), attribute), path)

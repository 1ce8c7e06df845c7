"""Models to export: torchvision's classifiers and custom modules, with their weights."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import socket
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import ConfigError, nearest
from torchpipe_py.files import archive_kind, file_kind
from torchpipe_py.registry import import_code
from torchpipe_py.tools.export.config import Transform
from torchpipe_py.tools.export.onnx_file import noise, one_line, quiet, required_parameters
from torchpipe_py.tools.report import ToolError

INSTALL = "pip install torch==2.14.1 torchvision==0.29.1"
"""Installs a pair that was built together; the documentation and ``scripts`` name the same."""

PRETRAINED = "pretrained"
UNTRAINED = "random"
"""Values of ``--weights`` that are not files."""


@dataclass(frozen=True)
class ModelToExport:
    """A model to export. ``weights`` and ``origin``, the source of its preprocessing, are descriptions for people."""

    name: str
    model: Any
    weights: str
    transform: Transform
    origin: str
    labels: tuple[str, ...] = ()


STATE_KEYS = ("state_dict", "model", "model_state", "model_state_dict", "weights", "net")
"""Keys under which a checkpoint may have its state dict, in order of preference."""

PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that DDP, ``torch.compile`` and Lightning add to every name."""

SAVED = (b"PK\x03\x04", b"\x80")
"""First bytes of files of ``torch.save``: current ones, and those from before PyTorch 1.6."""

SHOWN = 3

CLASS_COUNTS = ("classes", "num_classes")
"""Names of a parameter that is the number of classes."""


@dataclass(frozen=True)
class Weights:
    """A state dict; ``under`` is its key in the file, ``classes`` are labels from the checkpoint."""

    path: Path
    tensors: Mapping[str, Any]
    under: str = ""
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}[{self.under!r}]" if self.under else str(self.path)


def read_weights(path: Path) -> Weights:
    """Read a file of ``torch.save`` without running code; ``ToolError`` unless it holds a state dict."""
    import torch

    def is_state(value: Any) -> bool:
        named = isinstance(value, Mapping) and bool(value) and all(isinstance(key, str) for key in value)
        return named and all(isinstance(tensor, torch.Tensor) for tensor in value.values())

    how = f"save the weights alone: torch.save(model.state_dict(), {path.name!r})"
    if not os.path.isfile(path):
        raise ToolError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            if not file.read(4).startswith(SAVED):
                kind = file_kind(path)
                raise ToolError(f"{path}: not a file of torch.save{kind and f': {kind}'}")
        with suppress(zipfile.BadZipFile):
            if archive_kind(str(path)) not in ("checkpoint", ""):
                raise ToolError(f"{path}: TorchScript or a .pt2 file; the backend TorchTensor serves it as it is")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ToolError:
        raise
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL `?([\w.]+)", str(error))
        if refused is None:
            raise ToolError(f"{path}: not a file of torch.save") from error
        code = f"holds more than Tensors: {refused[1]}; loading it could run any code"
        raise ToolError(f"{path}: {code}; {how}") from error
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except Exception as error:
        raise ToolError(f"{path}: not a file of torch.save: {one_line(error)}") from error
    if not isinstance(content, Mapping) or not content:
        raise ToolError(f"{path}: holds a {type(content).__name__}; expected a state dict: {how}")
    if is_state(content):
        return Weights(path, content)
    key = next((key for key in STATE_KEYS if is_state(content.get(key))), None)
    if key is None:
        expected = f"expected Tensors by name, or those under one of {', '.join(map(repr, STATE_KEYS))}"
        raise ToolError(f"{path}: no state dict; it holds {_some(list(map(str, content)))}; {expected}")
    classes: Any = content.get("classes")
    has_names = isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)
    return Weights(path, content[key], key, tuple(classes) if has_names else ())


def count_classes(weights: Weights, shapes: Mapping[str, Sequence[int]], classes: int) -> int:
    """The number of classes in the weights, if the architecture with these ``shapes`` is built for ``classes``.

    It is the only size that the file has wherever a first dimension of the architecture is ``classes``.
    """
    tensors = named_as(weights.tensors, shapes)
    sizes = {
        tensors[name].shape[0]
        for name, shape in shapes.items()
        if name in tensors
        and len(shape)
        and shape[0] == classes
        and tensors[name].shape[1:] == tuple(shape[1:])
        and len(tensors[name].shape) == len(shape)
    }
    return int(sizes.pop()) if len(sizes) == 1 else classes


def load_into(model: Any, weights: Weights, name: str, hint: str = "") -> None:
    """Load the weights into ``model``; ``ToolError`` says what does not fit. ``name`` is for messages."""
    wanted = model.state_dict()
    tensors = named_as(weights.tensors, wanted)
    shapes = [
        f"{key} is {shown_dims(tensors[key].shape)} in the file and {shown_dims(wanted[key].shape)} in the model"
        for key in wanted
        if key in tensors and tensors[key].shape != wanted[key].shape
    ]
    found = {
        "missing in the file: ": [key for key in wanted if key not in tensors],
        "unexpected in it: ": [key for key in tensors if key not in wanted],
        "": shapes,
    }
    if problems := "; ".join(what + _some(names) for what, names in found.items() if names):
        raise ToolError("\n".join(filter(None, [f"{weights}: does not fit {name}: {problems}", hint])))
    model.load_state_dict(tensors)


def named_as(tensors: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, renamed to the names that a module uses."""
    named = dict(tensors)
    while True:
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in named)), "")
        if not prefix or all(name.startswith(prefix) for name in wanted):
            return named
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def find_module(name: str, weights: str | None, transform: Transform, origin: str) -> ModelToExport:
    """The module that ``module:function`` or ``file.py:function`` returns, with the weights of a file if given.

    A parameter ``classes`` or ``num_classes`` without a default gets the number of names in the list ``classes`` of a
    checkpoint.
    It is on the CPU, in float32, and without the wrappers of ``torch.compile`` and parallel training, which exporters
    do not support. The name may also be that of a module object. Code is found as for ``--import``: ``ConfigError`` if
    it cannot be imported, ``ToolError`` otherwise.
    """
    import torch

    module_name, _, function_name = name.rpartition(":")
    module = _with_torchvision(partial(import_code, module_name))
    if not hasattr(module, function_name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ToolError(f"{module_name} has no {function_name!r}; {nearest(function_name, names)}")
    function = getattr(module, function_name)
    loaded = read_weights(Path(weights)) if weights not in (None, PRETRAINED, UNTRAINED) else None
    needed = () if isinstance(function, torch.nn.Module) else required_parameters(function)
    given = {key: len(loaded.classes) for key in needed if loaded and loaded.classes and key in CLASS_COUNTS}
    try:
        model = function if isinstance(function, torch.nn.Module) else _with_torchvision(lambda: function(**given))
    except (Exception, SystemExit) as error:
        lacking = [key for key in needed if key not in given]
        why = f"it is called without arguments, and needs {', '.join(lacking)}" if lacking else one_line(error)
        if any(key in CLASS_COUNTS for key in lacking):
            why += "; the number of classes comes from --weights with a list 'classes'"
        raise ToolError(f"{name}: {why}") from error
    if not isinstance(model, torch.nn.Module):
        raise ToolError(f"{name}: returns a {type(model).__name__}; expected a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    model = model.cpu().float().eval()
    if weights is None:
        return ModelToExport(function_name, model, "its own weights", transform, origin)
    if loaded is None:
        raise ToolError(f"--weights {weights}: only for torchvision's; give a file, or let {function_name} load them")
    load_into(model, loaded, name, f"{function_name} must build the model that the file was saved from")
    return ModelToExport(function_name, model, f"weights of {loaded}", transform, origin, loaded.classes)


DOWNLOAD_TIMEOUT = 10.0  # seconds without a byte
CLASSES = 1000  # torchvision's default
NOT_IN_A_FILE = ("googlenet", "inception_v3")
"""Weights of these do not show whether the model normalises pixels again (``transform_input``)."""


def find_classifier(name: str, weights: str | None, transforms: str | None, seed: int = 0) -> ModelToExport:
    """A classifier of torchvision; ``weights`` is a file, "pretrained" (the default), "random" or a torchvision name.

    Random weights are made from ``seed``. The preprocessing is that of the weights named by ``transforms``, or else of
    ``weights``, or of torchvision's best.
    """
    weights = weights or PRETRAINED
    models = torchvision_models()
    names = models.list_models(module=models)
    if name not in names:
        raise ToolError(f"torchvision has no classifier {name!r}; {nearest(name, names)}; yours is module:function")
    known = {entry.name: entry for entry in models.get_model_weights(name)}
    best = models.get_model_weights(name).DEFAULT
    labels: tuple[str, ...] = ()
    of = None
    if weights == UNTRAINED:
        model, words = _untrained(models, name, seed), "random weights"
    elif weights in (PRETRAINED, "DEFAULT", *known):
        of = known.get(weights, best)
        model, words = _pretrained(models, name, of), f"weights {of.name}"
    elif os.path.isfile(weights):
        loaded = read_weights(Path(weights))
        of = next((entry for entry in known.values() if os.path.basename(entry.url) == loaded.path.name), None)
        model, words, labels = _from_file(models, name, loaded), f"weights of {loaded}", loaded.classes
    else:
        valid = ", ".join([PRETRAINED, UNTRAINED, *known])
        raise ToolError(f"--weights {weights}: no such file; {name} has {valid}")
    labels = labels or (tuple(of.meta["categories"]) if of else ())
    if transforms is None:
        return ModelToExport(name, model, words, Transform.of((of or best).transforms()), str(of or best), labels)
    return ModelToExport(name, model, words, *transform_of(transforms, name), labels)


def pretrained_weights(name: str) -> Weights:
    """torchvision's best weights for a classifier."""
    models = torchvision_models()
    entry = models.get_model_weights(name).DEFAULT
    return Weights(Path(str(entry)), _pretrained(models, name, entry).state_dict())


def transform_of(weights: str, name: str | None = None) -> tuple[Transform, str]:
    """The preprocessing of torchvision's weights, such as ``ResNet18_Weights.DEFAULT``, and their full name.

    With the architecture ``name``, the part before the dot may be left out.
    """
    own = torchvision_models().get_model_weights(name).__members__ if name else {}
    entry = own[weights] if weights in own else find_weights(weights, "--transforms", own)
    return Transform.of(entry.transforms()), str(entry)


def find_weights(weights: str, option: str, others: Iterable[str] = ()) -> Any:
    """torchvision's weights by their full name; ``ToolError`` suggests the nearest, also from ``others``."""
    models = torchvision_models()
    enums = [models.get_model_weights(name) for name in models.list_models(module=models)]
    known = {f"{enum.__name__}.{key}": entry for enum in enums for key, entry in enum.__members__.items()}
    if weights not in known:
        raise ToolError(f"{option} {weights}: no such weights in torchvision; {nearest(weights, [*others, *known])}")
    return known[weights]


def torchvision_models() -> Any:
    """``torchvision.models``; ``ToolError`` says what to install."""
    try:
        return _with_torchvision(partial(importlib.import_module, "torchvision.models"))
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError)
        why = "is not installed" if missing else f"cannot be imported ({one_line(error)})"
        raise ToolError(f"torchvision {why}: {INSTALL}; for your own model give file.py:function") from error


def _with_torchvision(load: Callable[[], Any]) -> Any:
    """Run ``load``, which may import torchvision: with its operators or, if they fail, without."""
    try:
        return load()
    except (RuntimeError, ConfigError) as error:
        if "torchvision::" not in str(error):
            raise
        with _without_operators():
            return load()


@contextmanager
def _without_operators() -> Iterator[None]:
    """Makes a torchvision for CUDA importable with a PyTorch for the CPU.

    Its compiled operators cannot be loaded then, and registering them fails. Only detectors need them.
    """
    import torch

    register = torch.library.register_fake

    def register_others(name: Any, *args: Any, **more: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **more)

    for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
        del sys.modules[module]  # left over from the first try
    torch.library.register_fake = register_others
    try:
        yield
    finally:
        torch.library.register_fake = register


def _pretrained(models: Any, name: str, weights: Any) -> Any:
    try:
        with quiet(), _socket_timeout(DOWNLOAD_TIMEOUT):
            return models.get_model(name, weights=weights).eval()
    except (OSError, RuntimeError) as error:
        hint = f"download {weights.url} elsewhere, and give the file: --weights {os.path.basename(weights.url)}"
        raise ToolError(f"the weights {weights} cannot be downloaded ({one_line(error)}); {hint}") from error


def _from_file(models: Any, name: str, weights: Weights) -> Any:
    if name in NOT_IN_A_FILE:
        hint = f"write a function that builds yours: torchpipe export my_model.py:build --weights {weights.path}"
        raise ToolError(f"--weights {weights.path}: a file does not hold all of {name}; {hint}")
    import torch

    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in _built(models, name).state_dict().items()}
    model = _built(models, name, num_classes=count_classes(weights, shapes, CLASSES))
    hint = f"a modified {name} needs a function that builds it: torchpipe export my_model.py:build --weights …"
    load_into(model, weights, name, hint)
    return model.eval()


def _untrained(models: Any, name: str, seed: int) -> Any:
    """Random weights whose outputs differ, so that comparing them with the ONNX file is meaningful."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _built(models, name).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.any():
                torch.nn.init.normal_(module.weight, std=0.02)  # a vision transformer's classifier is all zeros
        # Without batch norm statistics, random activations shrink layer by layer.
        norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.train().momentum = 1.0
        with torch.no_grad():
            model(torch.cat(noise(224, (4,))))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval().momentum = momentum
    return model


def _built(models: Any, name: str, **options: Any) -> Any:
    with quiet():
        return models.get_model(name, weights=None, **options)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a time limit for ``torch.hub``, which opens URLs without one."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)

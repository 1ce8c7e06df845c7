"""torchvision's classifiers, with its own weights, with the user's, or with none."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchpipe_py.errors import nearest
from torchpipe_py.export.errors import ExportError, one_line
from torchpipe_py.export.onnx_file import noise, quiet
from torchpipe_py.export.source import PRETRAINED, UNTRAINED, Source
from torchpipe_py.export.transforms import Transform
from torchpipe_py.export.weights import Weights, count_classes, load_into, read_weights

DOWNLOAD_TIMEOUT = 10.0  # seconds without a byte
CLASSES = 1000  # that torchvision builds where nobody says how many
NOT_IN_A_FILE = ("googlenet", "inception_v3")
"""Whose weights do not tell whether pixels are normalised once more inside (``transform_input``)."""


def find_classifier(name: str, weights: str | None, transforms: str | None) -> Source:
    """A classifier by its name; ``weights`` is a file, "pretrained" (the default), "random" or a name torchvision has.

    ``transforms`` names the weights whose preprocessing it gets; else those of ``weights``, or torchvision's best.
    """
    weights = weights or PRETRAINED
    models = torchvision_models()
    names = models.list_models(module=models)
    if name not in names:
        raise ExportError(f"torchvision has no classifier {name!r}; {nearest(name, names)}; yours is module:function")
    known = {entry.name: entry for entry in models.get_model_weights(name)}
    labels: tuple[str, ...] = ()
    of = None
    if weights == UNTRAINED:
        model, words = _untrained(models, name), "random weights"
    elif weights in (PRETRAINED, "DEFAULT", *known):
        of = known.get(weights) or models.get_model_weights(name).DEFAULT
        model, labels, words = _pretrained(models, name, of), tuple(of.meta["categories"]), f"weights {of.name}"
    else:
        if not os.path.isfile(weights):
            raise ExportError(
                f"--weights {weights}: no such file; {name} has {', '.join([PRETRAINED, UNTRAINED, *known])}"
            )
        loaded = read_weights(Path(weights))
        of = next((entry for entry in known.values() if os.path.basename(entry.url) == loaded.path.name), None)
        model, words = _from_file(models, name, loaded), f"weights of {loaded}"
        labels = loaded.classes or (tuple(of.meta["categories"]) if of else ())
    if transforms is None:
        of = of or models.get_model_weights(name).DEFAULT
        return Source(name, model, words, Transform.of(of.transforms()), str(of), labels)
    return Source(name, model, words, *transform_of(transforms, name), labels)


def pretrained_weights(name: str) -> Weights:
    """The best that torchvision has for a classifier."""
    models = torchvision_models()
    entry = models.get_model_weights(name).DEFAULT
    return Weights(Path(str(entry)), _pretrained(models, name, entry).state_dict())


def transform_of(weights: str, name: str | None = None) -> tuple[Transform, str]:
    """The preprocessing of torchvision's weights, ``ResNet18_Weights.DEFAULT`` say, and their full name.

    For the architecture ``name`` without the part before the dot.
    """
    models = torchvision_models()
    own = models.get_model_weights(name).__members__ if name else {}
    try:
        entry = own[weights] if weights in own else models.get_weight(weights)
    except (AttributeError, KeyError, ValueError) as error:
        known = ", ".join(own) if own else "a full name: ResNet50_Weights.IMAGENET1K_V2, say"
        raise ExportError(f"--transforms {weights}: no weights of torchvision's; expected {known}") from error
    return Transform.of(entry.transforms()), str(entry)


def torchvision_models() -> Any:
    """``torchvision.models``; ``ExportError`` that says what to install, and leaves PyTorch as it is."""
    try:
        try:
            return importlib.import_module("torchvision.models")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            with _without_operators():
                return importlib.import_module("torchvision.models")
    except Exception as error:
        import torch

        why = (
            "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({one_line(error)})"
        )
        version = torch.__version__.partition("+")[0]
        raise ExportError(
            f"torchvision {why}: pip install torchvision 'torch=={version}'; a model of yours is file.py:function"
        ) from error


@contextmanager
def _without_operators() -> Iterator[None]:
    """Lets a torchvision for CUDA be imported with a PyTorch for the CPU.

    Its compiled operators cannot be loaded then, and to describe them to PyTorch fails. Only detectors need them.
    """
    import torch

    register = torch.library.register_fake

    def register_others(name: Any, *args: Any, **more: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **more)

    for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
        del sys.modules[module]  # what is left of the first try
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
        raise ExportError(
            f"the weights {weights} cannot be had ({one_line(error)}); "
            f"download {weights.url} elsewhere, and name the file: --weights {os.path.basename(weights.url)}"
        ) from error


def _from_file(models: Any, name: str, weights: Weights) -> Any:
    if name in NOT_IN_A_FILE:
        raise ExportError(
            f"--weights {weights.path}: no file tells all of {name} (transform_input, aux_logits); "
            f"write a function that builds yours: torchpipe export my_model.py:build --weights {weights.path}"
        )
    import torch

    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in _built(models, name).state_dict().items()}
    model = _built(models, name, num_classes=count_classes(weights, shapes, CLASSES))
    hint = f"what was changed of {name} needs a function that builds it: torchpipe export my_model.py:build --weights …"
    load_into(model, weights, name, hint)
    return model.eval()


def _untrained(models: Any, name: str) -> Any:
    """Random weights whose outputs differ, so that a comparison with the ONNX file means something."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _built(models, name).eval()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and not module.weight.any():
                torch.nn.init.normal_(module.weight, std=0.02)  # a vision transformer's classifier is all zeros
        # Without statistics of batch norms random activations shrink, layer by layer.
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
    """``torch.hub`` opens URLs without a time limit; this gives it one."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)

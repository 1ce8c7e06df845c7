"""Networks to train, and their checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchpipe_py.errors import first_line, nearest
from torchpipe_py.registry import import_code
from torchpipe_py.tools.export.models import (
    CLASS_COUNTS,
    PRETRAINED,
    load_into,
    named_as,
    pretrained_weights,
    read_weights,
    torchvision_models,
)
from torchpipe_py.tools.report import ToolError as ExportError
from torchpipe_py.training import TrainingError

SMALL = "small"


def make_model(arch: str, classes: int, seed: int) -> nn.Module:
    """``"small"``: four convolutions, for images of any size; ``file.py:function`` or ``module:function``: what that
    function returns; otherwise torchvision's classifier of that name.

    The same weights for the same seed, in any process; ``TrainingError`` for a name that torchvision does not know, or
    a function that fails or returns something else, ``ConfigError`` for code that cannot be imported.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if arch == SMALL:
            return small(classes)
        if ":" in arch:
            return _built(arch, classes)
        try:
            models = torchvision_models()
        except ExportError as error:
            raise TrainingError(f"--arch {arch}: {error}") from error
        names = models.list_models(module=models)
        if arch not in names:
            raise TrainingError(f"--arch {arch}: no such classifier; {nearest(arch, [SMALL, *names])}")
        model: nn.Module = models.get_model(arch, num_classes=classes)
        return model


def _built(arch: str, classes: int) -> nn.Module:
    """The module that ``arch``, ``file.py:function``, returns.

    As at ``torchpipe export``, a parameter ``classes`` or ``num_classes`` without a default gets their number.
    """
    file, _, name = arch.rpartition(":")
    code = import_code(file)
    build = getattr(code, name, None)
    if not callable(build) or isinstance(build, nn.Module):
        functions = [key for key, value in vars(code).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise TrainingError(f"--arch {arch}: {file} has no function {name!r}; {nearest(name, functions)}")
    try:
        parameters = inspect.signature(build).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.name in CLASS_COUNTS]
        model = build(**dict.fromkeys(needed, classes))
    except Exception as error:
        raise TrainingError(f"--arch {arch}: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise TrainingError(f"--arch {arch}: returns a {type(model).__name__}; expected a torch.nn.Module")
    return model


def start_from(model: nn.Module, weights: str, arch: str, classes: Sequence[str]) -> str:
    """Give ``model`` the weights of a file, or torchvision's if it is "pretrained"; return a line that names them.

    The classifier's weights stay as they are if the file has other classes. ``TorchpipeError`` for any other misfit.
    """
    if weights == PRETRAINED and (arch == SMALL or ":" in arch):
        raise TrainingError(f"--weights {weights}: of torchvision's classifiers, chosen by --arch")
    source = pretrained_weights(arch) if weights == PRETRAINED else read_weights(Path(weights))
    wanted = model.state_dict()
    tensors = named_as(source.tensors, wanted)
    head = _classifier(model, len(classes))
    same = list(source.classes or classes) == list(classes)
    if same and all(name in tensors and tensors[name].shape == wanted[name].shape for name in head):
        head = []
    load_into(model, replace(source, tensors={**tensors, **{name: wanted[name] for name in head}}), f"--arch {arch}")
    return f"weights of {source}{', but for ' if head else ''}{', '.join(head)}"


def _classifier(model: nn.Module, classes: int) -> list[str]:
    """Names of the weights of the last layer that has so many outputs."""
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and len(layer.weight) == classes
    ]
    return [name for name in model.state_dict() if layers and name.startswith(f"{layers[-1]}.")]


def small(classes: int) -> nn.Module:
    """Four convolutions, for images 3×H×W of any size; a number for each class.

    ``torchpipe export scripts/recipes/models.py:small --weights last.pt --preprocess FILE.toml`` writes a trained one.
    """
    layers: list[nn.Module] = []
    width = 3
    for wider in (16, 32, 64, 64):
        layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


# -- checkpoints --------------------------------------------------------------------------------------------------


def best_of(path: Path) -> Path:
    """The file beside a checkpoint that keeps the best one: ``last_best.pt`` beside ``last.pt``."""
    return path.with_stem(f"{path.stem}_best")


def load_checkpoint(path: Path | None) -> dict[str, Any] | None:
    """The state, on the CPU; ``None`` if the file is missing. ``TrainingError`` for a file that is not a checkpoint."""
    if path is None or not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainingError(f"{path}: cannot be read as a checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or not {"model", "classes"} <= state.keys():
        raise TrainingError(f"{path}: not a checkpoint of scripts/train.py")
    return state


def check_complete(path: Path, state: dict[str, Any], names: Iterable[str]) -> None:
    """Raise ``TrainingError`` for a checkpoint from which no training can continue."""
    if missing := [name for name in names if name not in state]:
        raise TrainingError(f"{path}: is incomplete: it lacks {', '.join(missing)}; name another --checkpoint")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the file atomically; ``TrainingError`` if that fails."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch's archives raise the latter for a full disk
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        reason = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
        raise TrainingError(f"{path}: the checkpoint cannot be written: {reason}") from error


def check_classes(path: Path, trained: Sequence[str], classes: Sequence[str]) -> None:
    """Raise ``TrainingError`` unless a checkpoint and the data have the same classes in the same order."""
    if list(trained) != list(classes):
        only = {"only trained": set(trained) - set(classes), "only in the folder": set(classes) - set(trained)}
        odd = [f"{where}: {', '.join(sorted(names)[:3])}" for where, names in only.items() if names]
        what = f"its {len(trained)} classes are not the folder's {len(classes)}"
        raise TrainingError(f"{path}: {what} ({'; '.join(odd) or 'another order'})")


def load_weights(path: Path, model: nn.Module, weights: Any, arch: str, trained: str | None) -> None:
    """Load weights, trained for the architecture ``trained``; ``TrainingError`` if they do not fit ``model``."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        known = f"; it was trained with --arch {trained}" if trained else ""
        raise TrainingError(f"{path}: holds no weights of --arch {arch}{known}") from error

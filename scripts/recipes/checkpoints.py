"""A training's state as a file that is whole or not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from examples.files import in_the_place_of
from torch import nn

from torchpipe_py.training import TrainingError


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside it, then take its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_the_place_of(path) as unfinished:
        torch.save(state, unfinished)


def load(path: Path | None) -> dict[str, Any] | None:
    """The state, on the CPU; ``None`` where there is none. ``TrainingError`` for a file that is no checkpoint."""
    if path is None or not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainingError(f"{path}: cannot be read as a checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or not {"model", "classes"} <= state.keys():
        raise TrainingError(f"{path}: no checkpoint of scripts/train.py")
    return state


def check_classes(path: Path, trained: Sequence[str], classes: Sequence[str]) -> None:
    """``TrainingError`` where a checkpoint's classes are not those of the data, in their order."""
    if list(trained) == list(classes):
        return
    odd = [f"only {where}: {', '.join(sorted(names)[:3])}" for where, names in _only_in(trained, classes) if names]
    what = f"its {len(trained)} classes are not the folder's {len(classes)}"
    raise TrainingError(f"{path}: {what} ({'; '.join(odd) or 'another order'})")


def load_weights(path: Path, model: nn.Module, weights: Any, arch: str, trained: str | None) -> None:
    """Into ``model``; ``TrainingError`` where they are of another one. ``trained``: the architecture they are of."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        known = f"; it was trained with --arch {trained}" if trained else ""
        raise TrainingError(f"{path}: holds no weights of --arch {arch}{known}") from error


def _only_in(trained: Sequence[str], classes: Sequence[str]) -> list[tuple[str, set[str]]]:
    return [("trained", set(trained) - set(classes)), ("in the folder", set(classes) - set(trained))]

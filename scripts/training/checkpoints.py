"""A training's state as a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside it, then take its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load(path: Path | None) -> dict[str, Any] | None:
    """The state, on the CPU; ``None`` where there is none."""
    if path is None or not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

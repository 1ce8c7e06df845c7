"""The OpenAPI document of the HTTP routes: ``openapi.json`` beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torchpipe_py


def openapi() -> dict[str, Any]:
    """OpenAPI 3.1."""
    document: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    document["info"]["version"] = torchpipe_py.__version__
    return document

"""The description of the paths over HTTP: the file ``openapi.json`` beside this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torchpipe_py


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document of this version."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("openapi.json").read_text(encoding="utf-8"))
    document["info"]["version"] = torchpipe_py.__version__
    return document

"""The protocol's part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from torchpipe_server.methods.oip.requests import HEADER_LENGTH
from torchpipe_server.methods.oip.tensors import DATATYPES

_TEXT = {"type": "string"}
_PARAMETERS = {"type": "object", "additionalProperties": True}
_SIZES = {"type": "array", "items": {"type": "integer"}}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": _TEXT,
        "datatype": {"type": "string", "enum": list(DATATYPES)},
        "shape": _SIZES,
        "parameters": _PARAMETERS,
        "data": {"type": "array", "items": {}, "description": "absent where it is binary, behind the JSON"},
    },
}
_REQUEST = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": _TEXT,
        "parameters": _PARAMETERS,
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {
            "type": "array",
            "items": {"type": "object", "required": ["name"], "properties": {"name": _TEXT, "parameters": _PARAMETERS}},
        },
    },
}
_ANSWER = {
    "type": "object",
    "required": ["model_name", "outputs"],
    "properties": {
        "model_name": _TEXT,
        "model_version": _TEXT,
        "id": _TEXT,
        "outputs": {"type": "array", "items": _TENSOR},
    },
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}

_OF_MODEL = {"": "metadata", "/ready": "readiness", "/config": "configuration", "/stats": "statistics"}
_OF_SERVER = {
    "/v2": "The server's name and extensions.",
    "/v2/health/live": "Whether the server is alive.",
    "/v2/health/ready": "Whether the server takes requests.",
    "/v2/models/stats": "The model's statistics.",
}


def paths(failures: dict[str, Any]) -> dict[str, Any]:
    """Of every route; ``failures`` are the answers under other statuses than 200."""
    found = {path: {"get": _operation(text, [], failures)} for path, text in _OF_SERVER.items()}
    found["/v2/repository/index"] = {"post": _operation("The models there are.", [], failures)}
    for model, names in (
        ("/v2/models/{model}", ["model"]),
        ("/v2/models/{model}/versions/{version}", ["model", "version"]),
    ):
        for path, what in _OF_MODEL.items():
            found[model + path] = {"get": _operation(f"The model's {what}.", names, failures)}
        found[f"{model}/infer"] = {"post": _infer(names, failures)}
    return found


def _operation(summary: str, names: list[str], failures: dict[str, Any], schema: Any = None) -> dict[str, Any]:
    content = {"application/json": {"schema": schema or {}}}
    return {
        "summary": summary,
        "parameters": [{"in": "path", "name": name, "required": True, "schema": _TEXT} for name in names],
        "responses": {"200": {"description": "what was asked for", "content": content}} | failures,
    }


def _infer(names: list[str], failures: dict[str, Any]) -> dict[str, Any]:
    operation = _operation("Run the pipeline on tensors (Open Inference Protocol).", names, failures, _ANSWER)
    operation["responses"]["200"]["content"]["application/octet-stream"] = _BINARY
    length = {
        "in": "header",
        "name": HEADER_LENGTH,
        "schema": {"type": "integer"},
        "description": "how many bytes of the body are JSON; binary data of tensors follow",
    }
    operation["parameters"].append(length)
    content = {"application/json": {"schema": _REQUEST}, "application/octet-stream": _BINARY}
    operation["requestBody"] = {"required": True, "content": content}
    return operation

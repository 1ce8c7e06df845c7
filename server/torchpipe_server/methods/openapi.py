"""The OpenAPI document of the HTTP routes."""

from __future__ import annotations

from typing import Any

import torchpipe_py
from torchpipe_server.methods.oip.document import paths

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_MILLISECONDS = {"type": "number", "exclusiveMinimum": 0}
_ARRAY = {
    "type": "object",
    "required": ["dtype", "shape", "data"],
    "properties": {
        "dtype": {"type": "string", "description": "NumPy's name of the type, as float32"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "data": {"type": "array", "items": {}, "description": "numbers, or true and false, in C order; flat or nested"},
    },
}
_BYTES = {"type": "object", "required": ["b64"], "properties": {"b64": {"type": "string", "format": "byte"}}}
_LIST = {"type": "array", "minItems": 1, "items": {"anyOf": [_BYTES, _ARRAY]}}
_PLAIN_LIST = {"type": "array", "items": {}, "description": "texts, numbers, true and false, and such lists, as a box"}
_VALUE = {"anyOf": [_TEXT, _NUMBER, {"type": "boolean"}, _BYTES, _ARRAY, _LIST, _PLAIN_LIST]}
_FIELD = {
    "type": "string",
    "description": "a key of the dict: a number, a truth or a list, as JSON has it; else a text",
}
_IMAGE = {"schema": {"type": "string", "format": "binary"}}
_ERROR = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {"error": _TEXT, "code": _TEXT, "retry_after_ms": {"type": "integer"}},
}

_ERRORS = {
    "400": "wrong request, or an image that cannot be decoded",
    "404": "unknown path or node_name",
    "405": "the path has another method; Allow names it",
    "408": "the request took too long to arrive",
    "413": "larger than --max-message-bytes, or JSON than --max-text-bytes",
    "414": "a target that is too long",
    "415": "a compressed body",
    "422": "the pipeline made no result",
    "429": "overloaded; Retry-After says when to come back",
    "431": "header fields that are too large, or too many",
    "500": "a backend failed",
    "503": "no worker can answer now",
    "504": "not finished by its deadline",
}


def openapi() -> dict[str, Any]:
    """OpenAPI 3.1."""
    parameters = [
        _parameter("query", "node_name", _TEXT, "the root to enter, where the configuration has several"),
        _parameter("query", "outputs", _TEXT, "keys that come back, separated by commas; default: result"),
        _parameter("query", "deadline_ms", _MILLISECONDS, "answer within so many milliseconds, or with 504"),
        _parameter("header", "X-Deadline-Ms", _MILLISECONDS, "the same"),
        _parameter("header", "X-Request-Id", _TEXT, "the caller's name for the request, for the log"),
        _parameter(
            "header", "traceparent", _TEXT, "the trace that the request is part of, as the W3C's Trace Context says"
        ),
    ]
    asked = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "inputs": {"type": "object", "additionalProperties": _VALUE},
            "outputs": {"type": "array", "items": _TEXT},
            "node_name": _TEXT,
            "deadline_ms": _MILLISECONDS,
        },
        "additionalProperties": False,
    }
    form = {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {"type": "string", "format": "binary"},
            "outputs": _TEXT,
            "node_name": _TEXT,
            "deadline_ms": _MILLISECONDS,
        },
        "additionalProperties": _FIELD,
    }
    body = {
        "required": True,
        "content": {
            "image/*": _IMAGE,
            "application/octet-stream": _IMAGE,
            "multipart/form-data": {"schema": form},
            "application/json": {"schema": asked},
        },
    }
    result = {
        "type": "object",
        "properties": {"label": _TEXT, "score": _NUMBER},
        "additionalProperties": True,
        "description": "label and score of a classifier; otherwise the keys that were asked for",
    }
    failures = {status: _failure(text) for status, text in _ERRORS.items()}
    infer = {
        "summary": "Run the pipeline on an image, or on a dict of values.",
        "operationId": "infer",
        "parameters": parameters,
        "requestBody": body,
        "responses": {"200": {"description": "the result", "content": {"application/json": {"schema": result}}}}
        | failures,
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "torchpipe_py", "version": torchpipe_py.__version__},
        "paths": {"/infer": {"post": infer}, **paths(failures)},
        "components": {"schemas": {"Error": _ERROR}},
    }


def _parameter(place: str, name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"in": place, "name": name, "required": False, "schema": schema, "description": text}


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}

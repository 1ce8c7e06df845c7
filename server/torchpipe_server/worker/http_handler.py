"""``POST /infer``: an image or a dict over HTTP, what the pipe made of it as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from torchpipe_py import InvalidRequest, pipe
from torchpipe_server.serving.http import Route, json_answer, route
from torchpipe_server.serving.service import Cancellable, Done, ReplyTooLargeError
from torchpipe_server.wire.http import HttpAnswer, HttpRequest
from torchpipe_server.worker.conversion import check_name, check_names, output_of, size_of
from torchpipe_server.worker.deadline import Deadlines
from torchpipe_server.worker.forms import read_form
from torchpipe_server.worker.json_values import NUMBER_BYTES, from_json, parse_json, to_json
from torchpipe_server.worker.openapi import openapi

_OPTIONS = ("node_name", "deadline_ms", "outputs")


class Asked(NamedTuple):
    """What a request wants: ``data`` for the pipe, the ``keys`` of it that come back, within ``deadline_ms``."""

    data: dict[str, Any]
    keys: list[str]
    deadline_ms: float | None


class HttpHandler:
    """Routes on a pipe, for ``Server``. ``text_bytes`` bounds a body of JSON, ``reply_bytes`` an answer."""

    def __init__(self, run: pipe, deadlines: Deadlines, text_bytes: int, reply_bytes: int) -> None:
        self._pipe, self._deadlines = run, deadlines
        self._text_bytes, self._reply_bytes = text_bytes, reply_bytes
        document = json_answer(openapi())
        self.routes: Sequence[Route] = (
            route("POST", "/infer", self._infer),
            route("GET", "/openapi.json", partial(_give, document)),
        )

    def _infer(self, request: HttpRequest, done: Done) -> Cancellable:
        asked = self._read(request)

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                answer: Any = self._answer(data, asked.keys)
            except BaseException as failure:
                answer = failure
            done(answer)

        return self._pipe.dispatch(asked.data, finish, self._deadlines.seconds(asked.deadline_ms))

    def _read(self, request: HttpRequest) -> Asked:
        kind, _, _ = request.fields.get("content-type", "").partition(";")
        kind = kind.strip().lower()
        try:
            options: dict[str, Any] = dict(parse_qsl(request.query, keep_blank_values=True, max_num_fields=16))
        except ValueError:
            raise InvalidRequest("the query has more than 16 parameters") from None
        if kind == "application/json":
            data = self._read_json(request.body, options)
        elif kind == "multipart/form-data":
            data = read_form(request.fields["content-type"], request.body, options)
        else:  # NOTE: whatever kind it says: that of `curl --data-binary` is that of a form
            data = {"data": request.body}
        return _asked(data, options, request.fields.get("x-deadline-ms"))

    def _read_json(self, body: bytes, options: dict[str, Any]) -> dict[str, Any]:
        value = parse_json(body, self._text_bytes)
        if not isinstance(value, dict) or not isinstance(value.get("inputs"), dict):
            raise InvalidRequest('the body is no object with "inputs", as in {"inputs": {"data": {"b64": "…"}}}')
        for key in value:
            if key not in ("inputs", *_OPTIONS):
                raise InvalidRequest(f"unknown member {key[:40]!r}; the members are inputs, {', '.join(_OPTIONS)}")
        options.update({key: value[key] for key in _OPTIONS if value.get(key) is not None})
        check_names("inputs", value["inputs"])
        return {key: from_json(key, given) for key, given in value["inputs"].items()}

    def _answer(self, data: dict[str, Any], keys: list[str]) -> HttpAnswer:
        values = {key: output_of(data, key) for key in keys}
        size = NUMBER_BYTES * sum(map(size_of, values.values()))
        if size > self._reply_bytes:
            raise ReplyTooLargeError(size, self._reply_bytes)
        outputs: dict[str, Any] = {}
        for key, value in values.items():
            outputs.update(to_json(key, value))
        return json_answer(outputs)


def _give(answer: HttpAnswer, request: HttpRequest, done: Done) -> None:
    done(answer)


def _asked(data: dict[str, Any], options: Mapping[str, Any], deadline: str | None) -> Asked:
    for name in options:
        if name not in _OPTIONS:
            raise InvalidRequest(f"unknown parameter {name[:40]!r}; the parameters are {', '.join(_OPTIONS)}")
    outputs = options.get("outputs") or "result"
    keys = [key.strip() for key in outputs.split(",")] if isinstance(outputs, str) else outputs
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        raise InvalidRequest("outputs are names, separated by commas or in a list")
    check_names("outputs", keys)
    node_name = options.get("node_name")
    if node_name is not None:
        if not isinstance(node_name, str):
            raise InvalidRequest("node_name is not a text")
        check_name("node_name", node_name)
        data["node_name"] = node_name
    return Asked(data, list(dict.fromkeys(keys)), _milliseconds(options.get("deadline_ms", deadline)))


def _milliseconds(given: Any) -> float | None:
    if given is None:
        return None
    try:
        milliseconds = float(given)
    except (TypeError, ValueError, OverflowError):
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidRequest(f"a deadline of {str(given)[:40]!r}; expected milliseconds, more than 0")
    return milliseconds

"""``POST /infer`` on a pipe, and ``GET /openapi.json``: the file ``openapi.json`` beside this one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torchpipe_py
from torchpipe_py.methods.roots import Roots
from torchpipe_py.methods.routes import JSON, Cancellable, Done, Route, json_answer, route
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.http import HttpAnswer, HttpRequest
from torchpipe_py.wire.infer import Asked, answer_of, is_long_json, priority_in, read_request
from torchpipe_py.wire.parameters import ForwardedHeaders


class HttpHandler:
    """Routes on a pipe. ``text`` bounds the texts of JSON, ``reply`` an answer; ``headers`` are forwarded."""

    def __init__(self, run: pipe, deadlines: Deadlines, text: Bound, reply: Bound, headers: ForwardedHeaders) -> None:
        self._pipe, self._deadlines, self._text, self._reply, self._headers = run, deadlines, text, reply, headers
        self._roots = Roots(run)
        document = json.loads(Path(__file__).with_name("openapi.json").read_text(encoding="utf-8"))
        document["info"]["version"] = torchpipe_py.__version__
        answer = json_answer(document)
        self.routes: Sequence[Route] = (
            route("POST", "/infer", self._infer, takes_long=is_long_json),
            route("GET", "/openapi.json", lambda request, done: done(answer)),
        )

    def _infer(self, request: HttpRequest, done: Done) -> Cancellable:
        admit = partial(self._admit, request.arrived) if self._pipe.is_refusing else None
        body, images = request.take_body(), self._roots.images
        asked = read_request(body, request.query, request.fields, self._text, self._headers, images, admit)
        root, data = self._roots.item(asked.inputs, asked.node_name, asked.priority, asked.keys, asked.parameters)
        root_name = data.get("node_name")
        seconds = self._deadlines.admit(asked.deadline_ms, priority_in(data), root_name, request.arrived)

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            try:
                answer: Any = error or HttpAnswer(200, JSON, answer_of(data, asked, self._reply, root.output))
            except BaseException as failure:
                answer = failure
            done(answer)

        return self._pipe.dispatch(data, finish, seconds)

    def _admit(self, arrived: float | None, asked: Asked) -> float | None:
        return self._deadlines.admit(asked.deadline_ms, asked.priority or 0, asked.node_name, arrived)

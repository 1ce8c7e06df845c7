"""``POST /infer`` on a pipe, and ``GET /openapi.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchpipe_py.keys import TASK_COLOR_KEY
from torchpipe_py.methods.many import FairAdmission, ReplyBudget
from torchpipe_py.methods.openapi import openapi_document
from torchpipe_py.methods.roots import Root, Roots
from torchpipe_py.methods.routes import JSON, Cancellable, Done, Route, json_answer, route
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.http import SMALL_BYTES, HttpAnswer, HttpRequest
from torchpipe_py.wire.infer import (
    Asked,
    answer_of,
    batch_line,
    checked_size,
    is_long_json,
    line_of,
    outcome_of,
    priority_in,
    read_request,
    values_of,
)
from torchpipe_py.wire.parameters import ForwardedHeaders
from torchpipe_py.wire.pictures import Accepted, accepted_image, picture_of
from torchpipe_py.wire.values import size_of


def line_answer(
    data: Mapping[str, Any], asked: Asked, reply: Bound, output: Callable[[Mapping[str, Any], str], Any]
) -> HttpAnswer:
    """The values that are asked for as a line of JSON, which another thread encodes if it is long."""
    values = values_of(data, asked, output)
    if checked_size(values, reply) <= SMALL_BYTES:
        return HttpAnswer(200, JSON, line_of(values, reply))
    return HttpAnswer(200, JSON, b"", make=partial(line_of, values, reply), size=sum(map(size_of, values.values())))


class HttpHandler:
    """Routes on a pipe.

    ``items`` bounds a batch, ``text`` the texts of JSON, ``reply`` an answer; ``headers`` are forwarded.
    """

    def __init__(
        self, run: pipe, roots: Roots, deadlines: Deadlines, admission: FairAdmission, items: int, text: Bound,
        reply: Bound, headers: ForwardedHeaders,
    ) -> None:  # fmt: skip
        self._pipe, self._roots, self._deadlines, self._admission = run, roots, deadlines, admission
        self._items, self._text, self._reply, self._headers = items, text, reply, headers
        answer = json_answer(openapi_document())
        self.routes: Sequence[Route] = (
            route("POST", "/infer", self._infer, takes_long=is_long_json),
            route("GET", "/openapi.json", lambda request, done: done(answer)),
        )

    def _infer(self, request: HttpRequest, done: Done) -> Cancellable:
        admit = partial(self._admit, request) if self._pipe.is_refusing else None
        asked = read_request(
            request.take_body(), request.query, request.fields, self._text, self._headers, self._roots.images,
            self._roots.parameters, self._items, admit,
        )  # fmt: skip
        request.check_client()
        accepted = accepted_image(request.fields.get("accept", ""))
        if asked.is_batch:
            if accepted is not None:
                accepted.check_json("a call with several items")
            return self._infer_batch(asked, request, done)
        root, data = self._item(asked, asked.items[0])
        request.model = root.model
        root_name = data.get("node_name")
        seconds = self._deadlines.admit(asked.deadline_ms, priority_in(data), root_name, request.arrived)

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            try:
                answer: Any = error or self._answer(data, asked, root, accepted)
            except BaseException as failure:
                answer = failure
            done(answer)

        return self._pipe.dispatch(data, finish, seconds)

    def _infer_batch(self, asked: Asked, request: HttpRequest, done: Done) -> Cancellable:
        """Run the items side by side; each has its own outcome, and all outcomes together the size of one answer."""
        seconds = self._admit(request, asked)
        given, asked.items = asked.items, []
        frame = len(batch_line([b""] * len(given)))
        budget = ReplyBudget(self._reply, frame, len, "send fewer items in a call")

        def answer(root: Root, data: dict[str, Any]) -> bytes:
            return outcome_of(answer_of(data, asked, self._reply, root.output))

        def finish(outcomes: list[bytes]) -> None:
            done(HttpAnswer(200, JSON, batch_line(outcomes)))

        enter = partial(self._item, asked)
        return self._admission.gather_each(given, enter, seconds, answer, outcome_of, budget, finish)

    def _answer(self, data: dict[str, Any], asked: Asked, root: Root, accepted: Accepted | None) -> HttpAnswer:
        """The values that are asked for: as JSON, or the only one as an image, if that is what the client accepts."""
        if accepted is not None:
            if len(asked.keys) == 1:
                value, color = root.output(data, asked.keys[0]), data.get(TASK_COLOR_KEY)
                picture = picture_of(value, color if isinstance(color, str) else "", accepted.kinds)
                if picture is not None:
                    picture.check(self._reply)
                    answer = HttpAnswer(
                        200, picture.kind, b"", make=partial(picture.encode, self._reply), size=picture.size
                    )
                    return answer if picture.size > SMALL_BYTES else answer.made()
            accepted.check_json("the result is not one image, H x W x 3 or H x W of uint8")
        return line_answer(data, asked, self._reply, root.output)

    def _item(self, asked: Asked, given: Any) -> tuple[Root, dict[str, Any]]:
        """The root that an item enters, and the dict for the pipe. Raises the error in place of its inputs."""
        if isinstance(given, BaseException):
            raise given
        return self._roots.item(given, asked.node_name, asked.priority, asked.keys, asked.parameters, asked.whole)

    def _admit(self, request: HttpRequest, asked: Asked) -> float | None:
        request.model = self._roots.model_of(asked.node_name)
        return self._deadlines.admit(asked.deadline_ms, asked.priority or 0, asked.node_name, request.arrived)

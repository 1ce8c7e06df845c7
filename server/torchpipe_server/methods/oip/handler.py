"""The routes under ``/v2`` on a pipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from torchpipe_py import Signature, TorchpipeError, UnknownNode, pipe
from torchpipe_py.errors import nearest
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.wire.errors import Bound, RouteError, describe_error, log_defect
from torchpipe_server.front.services import Cancellable, Done, Route, json_answer, route
from torchpipe_server.methods.many import Turns
from torchpipe_server.methods.oip import metadata
from torchpipe_server.methods.oip.requests import InferLimits, InferRequest, read_head, read_infer
from torchpipe_server.methods.oip.results import RESULT, VERSION, Templates, answer, kept, outputs_of
from torchpipe_server.wire.http import HttpAnswer, HttpRequest

_MODEL = "/v2/models/{model}"
_HEAD = "oip"  # what a head is known to say


class _Root(NamedTuple):
    """Where requests may enter, and their answers."""

    signature: Signature
    templates: Templates


class OipHandler:
    """The protocol's routes, for ``Server``: ``name`` is what its clients call the pipe.

    The items of a request go through the pipe side by side. Where one fails, the request does.
    """

    def __init__(
        self, run: pipe, name: str, deadlines: Deadlines, turns: Turns, limits: InferLimits, reply: Bound
    ) -> None:
        self._pipe, self._name, self._deadlines, self._turns = run, name, deadlines, turns
        self._limits, self._reply = limits, reply
        self._figures = metadata.Figures()
        self._roots: dict[str | None, _Root] = {}
        known, signature = self._known, self._signature
        ready, stats = known(self._ready), known(lambda request: self._figures.summary(name, run.stats()))
        index = [{"name": name, "version": VERSION, "state": "READY", "reason": ""}]
        of_model: Sequence[tuple[str, str, Callable[[HttpRequest, Done], Cancellable | None]]] = (
            ("POST", "/infer", self._infer),
            ("GET", "", known(lambda request: metadata.model(name, signature(request)))),
            ("GET", "/ready", ready),
            ("GET", "/config", known(lambda request: metadata.config(name, signature(request), limits.items))),
            ("GET", "/stats", stats),
        )
        self.routes: Sequence[Route] = (
            *[route(verb, f"{_MODEL}{path}", start) for verb, path, start in of_model],
            *[route(verb, f"{_MODEL}/versions/{{version}}{path}", start) for verb, path, start in of_model],
            route("GET", "/v2", known(lambda request: metadata.SERVER)),
            route("GET", "/v2/health/live", known(lambda request: {"live": True})),
            route("GET", "/v2/health/ready", ready),
            route("GET", "/v2/models/stats", stats),
            route("POST", "/v2/repository/index", known(lambda request: index), is_traced=False),
        )

    def _known(self, answer: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest, Done], None]:
        """The start of a method that knows its answer at once: a value for JSON, or an ``HttpAnswer``."""

        def start(request: HttpRequest, done: Done) -> None:
            self._check(request)
            value = answer(request)
            done(value if isinstance(value, HttpAnswer) else json_answer(value))

        return start

    def _check(self, request: HttpRequest) -> None:
        """``RouteError`` for a model or a version that does not exist."""
        name = unquote(request.parameters.get("model", self._name))
        if name != self._name:
            raise RouteError(f"no model {name[:80]!r}; {nearest(name[:80], [self._name])}")
        version = unquote(request.parameters.get("version", VERSION))
        if version != VERSION:
            raise RouteError(f"no version {version[:40]!r} of model {name[:80]!r}; {nearest('', [VERSION])}")

    def _signature(self, request: HttpRequest) -> Signature:
        """Of the root that ``?node_name=`` names; empty without it, if there are several roots."""
        names = [value for key, value in parse_qsl(request.query[:2048]) if key == "node_name"]
        try:
            return self._pipe.signature(names[0] if names else None)
        except UnknownNode:
            if names:
                raise
            return Signature()

    def _ready(self, request: HttpRequest) -> HttpAnswer:
        is_ready = all(node["alive"] for node in self._pipe.stats()["nodes"].values())
        named = {"name": self._name} if "model" in request.parameters else {}
        return json_answer({**named, "ready": is_ready}, 200 if is_ready else 503)

    # -- inference ----------------------------------------------------------------------------------------------

    def _infer(self, request: HttpRequest, done: Done) -> Cancellable:
        began = perf_counter()
        head = request.known.get(_HEAD)
        if head is None:
            self._check(request)
            head = request.known[_HEAD] = read_head(request.fields)
        asked = read_infer(request.body, head, self._limits)
        root = self._roots.get(asked.node_name)
        if root is None:
            signature = self._pipe.signature(asked.node_name)
            templates = Templates(self._name, [spec.name for spec in signature.outputs])
            root = self._roots[asked.node_name] = _Root(signature, templates)
        items = asked.items(root.signature.inputs)
        count, asked = len(items), asked._replace(rows=())  # NOTE: inputs are kept no longer than the pipe keeps them

        def finish(outcomes: list[Any]) -> None:
            try:
                result: Any = self._answer(asked, root.signature, outcomes)
            except BaseException as failure:
                result = failure
            self._figures.add(count, began, isinstance(result, HttpAnswer))
            done(result)

        def finish_one(data: dict[str, Any], error: BaseException | None) -> None:
            answer = None
            if error is None and is_plain and RESULT in data:
                answer = root.templates.answer(data[RESULT])
            if answer is None:
                finish([_outcome(asked, data, error)])
            else:
                self._figures.add(1, began, True)
                done(answer)

        is_plain = not (asked.outputs or asked.is_binary or asked.id is not None)
        try:
            seconds = self._deadlines.seconds(asked.deadline_ms, asked.priority)
            if count == 1:
                return self._pipe.dispatch(items[0], finish_one, seconds)
            return self._turns.gather(items, seconds, partial(_outcome, asked), finish)
        except BaseException:  # it was not let in
            self._figures.add(count, began, False)
            raise

    def _answer(self, asked: InferRequest, signature: Signature, outcomes: list[Any]) -> HttpAnswer:
        failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        for index in failed[1:]:
            log_defect(outcomes[index])  # the answer reports only the first
        if failed:
            raise _of_item(outcomes[failed[0]], failed[0], len(outcomes))
        return answer(self._name, asked, outputs_of(outcomes, asked, signature.outputs), self._limits.text, self._reply)


def _outcome(asked: InferRequest, data: dict[str, Any], error: BaseException | None) -> Any:
    """What of an item is kept until the others are finished: its outputs, or its error."""
    if error is not None:
        return error
    try:
        return kept(data, asked)
    except BaseException as failure:
        return failure


def _of_item(error: BaseException, index: int, count: int) -> BaseException:
    """The error, and of several items which one it is."""
    if count == 1 or not isinstance(error, TorchpipeError):
        return error
    failure = TorchpipeError(f"item {index} of {count}: {describe_error(error)}")
    failure.code, failure.__cause__ = error.code, error
    failure.retry_after_ms = getattr(error, "retry_after_ms", None)  # type: ignore[attr-defined]
    return failure

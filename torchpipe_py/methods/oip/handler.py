"""The routes under ``/v2``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.methods.oip import metadata
from torchpipe_py.methods.oip.core import Model, OpenInference, RepositoryError, shared_memory
from torchpipe_py.methods.oip.http import answer, read_index, read_infer, read_parameters, takes_long
from torchpipe_py.methods.oip.requests import InferLimits, InferRequest, check_load
from torchpipe_py.methods.oip.tensors import Output
from torchpipe_py.methods.routes import Cancellable, Done, Route, json_answer, route
from torchpipe_py.wire.http import HttpAnswer, HttpRequest
from torchpipe_py.wire.pictures import is_picture

_MODEL = "/v2/models/{model}"


class OipHandler:
    """The protocol's routes, for ``Server``, and the ``Codec`` of their answers."""

    def __init__(self, core: OpenInference, limits: InferLimits) -> None:
        self._core, self._limits = core, limits
        of_model: Sequence[tuple[str, str, Callable[[HttpRequest, Done], Cancellable | None]]] = (
            ("GET", "", _known(lambda request: core.metadata(*_named(request), _node_name(request)))),
            ("GET", "/ready", _known(self._model_ready)),
            ("GET", "/config", _known(lambda request: core.config(*_named(request), _node_name(request)))),
            ("GET", "/stats", lambda request, done: self._statistics(*_named(request), done)),
        )
        self.routes: Sequence[Route] = (
            *[
                route("POST", f"{_MODEL}{version}/infer", self._infer, takes_long=takes_long)
                for version in ("", "/versions/{version}")
            ],
            *[route(verb, f"{_MODEL}{path}", start) for verb, path, start in of_model],
            *[route(verb, f"{_MODEL}/versions/{{version}}{path}", start) for verb, path, start in of_model],
            route("GET", "/v2", _known(lambda request: metadata.SERVER)),
            route("GET", "/v2/health/live", _known(lambda request: {"live": True})),
            route("GET", "/v2/health/ready", _known(lambda request: _ready({}, core.is_ready()))),
            route("GET", "/v2/models/stats", lambda request, done: self._statistics("", "", done)),
            route("POST", "/v2/repository/index", self._index, is_traced=False),
            *[
                route(
                    "POST",
                    f"/v2/repository/models/{{model}}/{action}",
                    partial(self._control, action),
                    False,
                    changes_service=True,
                )
                for action in ("load", "unload")
                if core.control is not None
            ],
            *[
                route(verb, f"/v2/{memory}sharedmemory{path}", _known(_shared_memory), False)
                for memory in ("system", "cuda")
                for verb, path in (
                    *(("GET", "/status"), ("POST", "/unregister")),
                    *(("GET", "/region/{region}/status"), ("POST", "/region/{region}/{action}")),
                )
            ],
        )

    def _model_ready(self, request: HttpRequest) -> HttpAnswer:
        name, version = _named(request)
        return _ready({"name": name}, self._core.is_ready(name, version))

    def _statistics(self, name: str, version: str, done: Done) -> None:
        self._core.statistics(name, version, lambda statistics: done(json_answer(statistics)))

    def _index(self, request: HttpRequest, done: Done) -> None:
        self._core.index(
            read_index(request.body),
            lambda models: done(models if isinstance(models, RepositoryError) else json_answer(models)),
        )

    def _control(self, action: str, request: HttpRequest, done: Done) -> None:
        assert self._core.control is not None
        name = unquote(request.parameters["model"])
        if action == "load" and request.body:
            check_load(name, read_parameters(request.body))
        self._core.control(
            action, name, lambda status, said: done(json_answer(said) if status < 300 else RepositoryError(said))
        )

    def _infer(self, request: HttpRequest, done: Done) -> Cancellable:
        began = request.arrived or perf_counter()
        parameters = request.parameters
        model = self._core.models.find(unquote(parameters["model"]), unquote(parameters.get("version", "")))
        request.model = model.key
        admit = partial(self._core.admit, model, began) if model.pipe.is_refusing else None
        asked = self._read(request, model, admit)
        request.check_client()
        return self._core.infer(model, asked, self, began, done)

    def _read(self, request: HttpRequest, model: Model, admit: Callable[..., object] | None) -> InferRequest:
        body = request.take_body()
        try:
            return read_infer(body, request.fields, self._limits, model.images, admit)
        except InvalidRequest:
            if not is_picture(body):
                raise
        path = "/infer" if model.node_name is None else f"/infer?node_name={quote(model.node_name, '')}"
        raise InvalidRequest(f"the body is a picture, not JSON: POST {path} takes one as it is")

    def answer(self, model: Model, asked: InferRequest, outputs: Sequence[tuple[Output, bool]]) -> HttpAnswer:
        """See ``Codec``."""
        return answer(model.name, model.version, asked, outputs, self._core.reply)


def _known(answer: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest, Done], None]:
    """The start of a method that knows its answer at once: a value for JSON, or an ``HttpAnswer``."""

    def start(request: HttpRequest, done: Done) -> None:
        value = answer(request)
        done(value if isinstance(value, HttpAnswer) else json_answer(value))

    return start


def _named(request: HttpRequest) -> tuple[str, str]:
    """Model and version that the path names; the version may be empty."""
    return unquote(request.parameters["model"]), unquote(request.parameters.get("version", ""))


def _node_name(request: HttpRequest) -> str | None:
    names = [value for key, value in parse_qsl(request.query[:2048]) if key == "node_name"]
    return names[0] if names else None


def _shared_memory(request: HttpRequest) -> Any:
    shared_memory(request.parameters.get("region", ""))
    return [] if request.method == "GET" else {}


def _ready(named: dict[str, Any], is_ready: bool) -> HttpAnswer:
    return json_answer({**named, "ready": is_ready}, 200 if is_ready else 503)

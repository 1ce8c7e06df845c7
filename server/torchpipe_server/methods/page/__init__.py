"""A page to try a pipe on, at ``/`` for browsers, and ``POST /try``, which it calls; the page ``/docs``."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from html import escape
from pathlib import Path
from time import perf_counter
from typing import Any

import torchpipe_py
from torchpipe_py import InvalidRequest, Overloaded, pipe
from torchpipe_py.serving import (
    JSON,
    Bound,
    Cancellable,
    Deadlines,
    Done,
    ForwardedHeaders,
    HttpAnswer,
    HttpRequest,
    Model,
    Models,
    Picture,
    Roots,
    Route,
    Timeline,
    answer_of,
    is_long_json,
    json_answer,
    openapi_document,
    priority_in,
    read_request,
    route,
)
from torchpipe_server.front.services import error_answer, reply_bound
from torchpipe_server.methods.page.docs import docs_page
from torchpipe_server.methods.page.document import html_document
from torchpipe_server.options import Options

MOST_TRIES = 4
"""Concurrent tries in a worker: a try costs more than a plain request."""

_OVERVIEW = {
    "torchpipe_py": torchpipe_py.__version__,
    "GET /": "this overview; in a browser, a page to try images on",
    "POST /infer": "the result for an image: curl --data-binary @image.jpg",
    "GET /v2": "the Open Inference Protocol",
    "GET /openapi.json": "a description of all paths; for people GET /docs",
}
"""``GET /`` for clients other than browsers."""

_FOLDER = Path(__file__).resolve().parent


class PageHandler:
    """The routes of the page, on a pipe. It offers a choice of ``models``."""

    def __init__(self, run: pipe, roots: Roots, models: Models, deadlines: Deadlines, options: Options) -> None:
        self._pipe, self._roots, self._deadlines = run, roots, deadlines
        self._headers = ForwardedHeaders(options.forward_headers)
        self._text = Bound(options.max_text_bytes, "--max-text-bytes")
        self._reply = reply_bound(options.max_reply_bytes)
        self._models, self._port = models, max(0, options.http_port)
        self._shown: Sequence[Model] | None = None  # the models that the page offers
        self._page = HttpAnswer(200, "", b"")
        self._overview = json_answer({**_OVERVIEW, "monitoring": options.monitoring}, headers={"Vary": "Accept"})
        self._tries = threading.BoundedSemaphore(MOST_TRIES)
        docs = docs_page(openapi_document())
        self.routes: Sequence[Route] = (
            route("GET", "/", self._show),
            route("GET", "/docs", lambda request, done: done(docs)),
            route("POST", "/try", self._try, takes_long=is_long_json),
        )

    def _show(self, request: HttpRequest, done: Done) -> None:
        if "text/html" not in request.fields.get("accept", ""):
            done(self._overview)
            return
        models = self._models.all()
        if models is not self._shown:
            self._shown, self._page = models, _page(models, self._port)
        done(self._page)

    def _try(self, request: HttpRequest, done: Done) -> Cancellable:
        """Like ``POST /infer``; adds what happened at each node."""
        began = perf_counter()
        asked = read_request(
            request.take_body(), request.query, request.fields, self._text, self._headers, self._roots.images,
            self._roots.parameters, 1,
        )  # fmt: skip
        request.check_client()
        given = asked.items[0] if asked.items else None
        if not isinstance(given, dict):
            raise given or InvalidRequest("no image to try")
        root, given = self._roots.item(
            given, asked.node_name, asked.priority, asked.keys, asked.parameters, asked.whole
        )
        request.model = root.model
        root_name = given.get("node_name")
        seconds = self._deadlines.admit(asked.deadline_ms, priority_in(given), root_name, request.arrived)
        if not self._tries.acquire(blocking=False):
            raise Overloaded(f"more than {MOST_TRIES} tries at once", retry_after_ms=1000)

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            ended = perf_counter()

            def give() -> None:
                result: HttpAnswer | BaseException
                try:
                    if error is not None:
                        raise error
                    made = HttpAnswer(200, JSON, answer_of(data, asked, self._reply, root.output))
                except BaseException as failure:
                    made = error_answer(failure)
                try:
                    shown = {"status": made.status, "ms": 1000 * (ended - began), "nodes": _nodes(timelines[0], began)}
                    result = json_answer({**shown, "answer": json.loads(made.body)})
                except BaseException as failure:
                    result = failure
                self._tries.release()
                done(result)

            # NOTE: this is an instance's thread, and encoding images takes milliseconds.
            try:
                threading.Thread(target=give, name="torchpipe-try", daemon=True).start()
            except RuntimeError:  # no more threads can be started
                give()

        try:
            with self._pipe.timed(with_pictures=True) as timelines:
                return self._pipe.dispatch(given, finish, seconds)
        except BaseException:
            self._tries.release()
            raise


def _nodes(timeline: Timeline, began: float) -> list[dict[str, Any]]:
    """Times of each node in milliseconds; ``start_ms`` counts from the arrival of the request."""
    pictures = {id(visit): picture for visit, picture in timeline.pictures or ()}
    return [
        {
            "node": visit.node,
            "batch": visit.size,
            "start_ms": 1000 * (visit.arrived - began),
            "queue_ms": 1000 * (visit.collected - visit.arrived),
            "batch_wait_ms": 1000 * (visit.started - visit.collected),
            "compute_ms": 1000 * (visit.ended - visit.started),
            "image": _image(pictures[id(visit)]) if id(visit) in pictures else None,
        }
        for visit in sorted(timeline.all_visits(), key=lambda visit: visit.arrived)
    ]


def _image(picture: Picture) -> dict[str, Any]:
    import cv2

    pixels = picture.pixels[..., ::-1] if picture.pixels.shape[2] == 3 else picture.pixels
    png = base64.b64encode(cv2.imencode(".png", pixels)[1].tobytes()).decode()
    return {"height": picture.height, "width": picture.width, "src": f"data:image/png;base64,{png}"}


def _parameters(model: Model) -> Sequence[str]:
    """The parameters of a request that the model's backends declare to read."""
    signature = model.signature(None)
    return () if signature is None else signature.parameters


def _page(models: Sequence[Model], monitoring_port: int) -> HttpAnswer:
    """The page as one document, with the script and the style beside this file."""
    script, style = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("try.js", "try.css"))
    text = (_FOLDER / "try.html").read_text(encoding="utf-8")
    named = [
        {"name": each.name, "version": each.version, "node_name": each.node_name or "", "parameters": _parameters(each)}
        for each in models
    ]
    samples = [
        {"name": each.name, "type": f"image/{each.suffix[1:]}", "data": base64.b64encode(each.read_bytes()).decode()}
        for each in sorted((_FOLDER / "samples").iterdir())
    ]
    for mark, part in (
        ("SAMPLES", escape(json.dumps(samples))), ("MONITORING", str(monitoring_port)),
        ("STYLE", style), ("SCRIPT", script),
        ("MODELS", escape(json.dumps(named))),  # NOTE: last, since names may have any characters
    ):  # fmt: skip
        text = text.replace(f"@{mark}@", part, 1)
    return html_document(text, style, script)

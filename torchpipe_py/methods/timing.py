"""The times of a request at each node, as a header of its answer and as a line in the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from torchpipe_py.methods.routes import Cancellable, Done, Method, RpcRequest, Served
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import code_of
from torchpipe_py.wire.http import HttpRequest

HEADER, ASKING_HEADER = "Server-Timing", "x-timing"
"""The header, or metadata, of an answer, and of a request that asks for it, as ``?timing=1`` does."""

_NO_TOKEN = re.compile(r"[^A-Za-z0-9!#$%&'*+.^_`|~-]")


def timed(
    served: Served, run: pipe, is_always: bool = False, slow_s: float | None = None,
    log: Callable[..., object] = lambda *figures: None,
) -> Served:  # fmt: skip
    """Add times to answers of requests that ask for them; ``log`` is called for slow requests."""

    def change(name: str, method: Method) -> Method:
        start = method.start
        if method.trace_fields is None:
            return method

        def start_timed(args: Any, done: Done) -> Cancellable | None:
            # NOTE: arguments of Thrift may have fields of these names, of any type.
            is_asked = isinstance(args, (HttpRequest, RpcRequest)) and (
                is_always or ASKING_HEADER in args.fields or (args.query != "" and "timing=1" in args.query.split("&"))
            )
            # A request that does not ask for its times pays only this.
            if not is_asked and slow_s is None:
                return start(args, done)
            began = perf_counter()

            def answer(result: Any) -> None:
                seconds = perf_counter() - began
                times = node_times(visit for each in timelines for visit in each.all_visits())
                if is_asked and hasattr(result, "headers"):
                    with suppress(TypeError):  # headers of a handler's answer that are none: it is refused later
                        result = result._replace(headers={**result.headers, HEADER: header_of(times, seconds)})
                done(result)
                if slow_s is not None and seconds > slow_s:
                    outcome = code_of(result) if isinstance(result, BaseException) else method.outcome(result)
                    log(name, outcome, seconds, method.request_id(args), times)

            with run.timed() as timelines:
                return start(args, answer)

        return method._replace(start=start_timed)

    changed = served.changed(change)
    # An answer of Thrift has no room for times.
    return changed if slow_s is not None else changed._replace(methods=served.methods)


def node_times(visits: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of queue, batch wait and compute by node, in the order of the nodes; of several visits the longest.

    Those of the elements of a jump, and of the items of a request, run side by side: their sum would mean nothing.
    """
    longest: dict[str, Any] = {}
    for visit in sorted(visits, key=lambda visit: (visit.arrived, visit.started)):
        known = longest.get(visit.node)
        if known is None or visit.ended - visit.arrived > known.ended - known.arrived:
            longest[visit.node] = visit
    return {
        node: {
            "queue": round(1000 * (visit.collected - visit.arrived), 3),
            "wait": round(1000 * (visit.started - visit.collected), 3),
            "compute": round(1000 * (visit.ended - visit.started), 3),
        }
        for node, visit in longest.items()
    }


def header_of(times: Mapping[str, Mapping[str, float]], seconds: float) -> str:
    """The header as browsers read it (W3C Server Timing); ``total`` is from the request to its answer.

    Characters that a header's names may not have become ``_``, as the ``/`` in names of a folder's nodes.
    """
    parts = [f"total;dur={1000 * seconds:.3f}"]
    for node, phases in times.items():
        name = _NO_TOKEN.sub("_", node)
        parts += [f"{name}.{phase};dur={ms:g}" for phase, ms in phases.items()]
    return ", ".join(parts)

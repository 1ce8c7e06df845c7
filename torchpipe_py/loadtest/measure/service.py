"""What the nodes and the engine processes of a service did during a run, from its `/stats` before and after."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.cpu import cpu_seconds
from torchpipe_py.loadtest.measure.nodes import node_figures, node_rows

HAND_OVER_TIMES = ("slot_wait_ms", "there_ms", "in_engine_ms", "back_ms")
_ANSWER_S = 10.0
_NOT_THERE = (
    "it answers 404, as the port that takes images does (torchpipe-serve --port); "
    "give the port of torchpipe-serve --http-port"
)


class ServiceMeter:
    """Reads `/stats` twice; without a port it does nothing. Processor time is read where the service is local."""

    def __init__(self, host: str, port: int | None, is_local: bool) -> None:
        self._url = None if port is None else f"http://{f'[{host}]' if ':' in host else host}:{port}/stats"
        self._is_local = is_local

    def start(self) -> None:
        """The span begins; `CannotRunError` where nobody tells what `/stats` does."""
        if self._url is not None:
            try:
                self._before = self._read()
            except (OSError, HTTPException, ValueError) as error:
                why = _NOT_THERE if isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND else error
                raise CannotRunError(f"--http-port: {self._url} does not tell what the service does: {why}") from None

    def stop(self) -> dict[str, Any] | None:
        """The span ends; `service_figures`, or None where nothing is known."""
        if self._url is None:
            return None
        try:
            return service_figures(self._before, self._read())
        except (OSError, HTTPException, ValueError):
            return None  # it has ended

    def _read(self) -> dict[str, Any]:
        opener = build_opener(ProxyHandler({}))  # as the images go: straight to the service
        with opener.open(self._url or "", timeout=_ANSWER_S) as answer:
            told = json.load(answer)
        if not isinstance(told, dict) or not {"nodes", "engines", "hand_over", "time"} <= told.keys():
            raise ValueError("it is no torchpipe-serve of this version")
        for engine in told["engines"]:
            engine["cpu_s"] = cpu_seconds(engine["pid"]) if self._is_local and engine["pid"] else None
        return told


def service_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Pure: of each node what `node_figures` says, of a request the hand-over, of each engine process the CPU use.

    A node or a process that was not there before is left out. CPU is in percent of a core; null is "not known".
    """
    seconds = after["time"] - before["time"]
    nodes = {name: node for name, node in after["nodes"].items() if name in before["nodes"]}
    spent = {engine["pid"]: engine["cpu_s"] for engine in before["engines"]}
    return {
        "nodes": node_figures(before, {"nodes": nodes}, seconds),
        "hand_over": hand_over_figures(before["hand_over"], after["hand_over"]),
        "engines": [
            {"index": engine["index"], "cpu_percent": _percent(spent[engine["pid"]], engine["cpu_s"], seconds)}
            for engine in after["engines"]
            if engine["pid"] in spent
        ],
    }


def hand_over_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """Pure: how many requests engine processes answered, and the milliseconds of one; None where there were none."""
    requests = after["requests"] - before["requests"]
    if requests <= 0:
        return None
    return {"requests": requests, **{key: (after[key] - before[key]) / requests for key in HAND_OVER_TIMES}}


def service_rows(service: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The table's part about the service: a line for each node and each engine process, one for the hand-over."""
    if service is None:
        return []
    rows = node_rows(service["nodes"])
    if service["hand_over"] is not None:
        times = "  ".join(f"{key[:-3].replace('_', ' ')} {service['hand_over'][key]:.2f}" for key in HAND_OVER_TIMES)
        rows.append(("hand-over", f"{service['hand_over']['requests']} requests; {times}  ms each"))
    for engine in service["engines"]:
        use = "n/a" if engine["cpu_percent"] is None else f"{engine['cpu_percent']:.0f} % of a core"
        rows.append((f"engine process {engine['index']}", use))
    return rows


def _percent(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None else 100 * (after - before) / seconds

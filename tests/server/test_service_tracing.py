"""A trace from a client through the service into the detector's jumps, as the console exporter writes it."""

from __future__ import annotations

import json
from typing import Any

from kept_spans import KeptSpans
from kit.services import ROOT, Process
from torchpipe_client import Client

SCENE = ROOT / "configs/examples/scenes/scene_00.jpg"


def printed_spans(text: str) -> list[dict[str, Any]]:
    """JSON objects, one behind the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        span, end = decoder.raw_decode(text)
        found.append(span)
        text = text[end:]
    return found


def test_one_trace_from_the_client_to_each_element() -> None:
    caller = KeptSpans()
    arguments = ("--import", "configs/examples/backends.py", "--trace-ratio", "0")
    environment = {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "digits"}
    with Process(*arguments, config="configs/detector.toml", env=environment) as process:
        process.wait_started()
        with Client(f"127.0.0.1:{process.port}") as client:
            client.infer({"data": SCENE.read_bytes()})  # not traced: it has no parent
            with caller.tracer.start_as_current_span("caller") as span:
                boxes = json.loads(client.infer({"data": SCENE.read_bytes()})["result"])
        process.signal()
        output = process.process.stdout.read()
        assert process.wait() == 0
    spans = printed_spans(output)
    mine = span.get_span_context()
    assert {one["context"]["trace_id"] for one in spans} == {f"0x{mine.trace_id:032x}"}
    assert {one["resource"]["attributes"]["service.name"] for one in spans} == {"digits"}
    names = {one["context"]["span_id"]: one["name"] for one in spans} | {f"0x{mine.span_id:016x}": "caller"}
    tree = sorted(f"{names[one['parent_id']]} > {one['name']}" for one in spans if "compute" in one["name"])
    assert tree == sorted(
        [*(f"pipe decode > {node}: compute" for node in ("decode", "detect", "digits", "merge"))]
        + len(boxes) * ["digit > digit: compute"]
    )
    others = [f"{names[one['parent_id']]} > {one['name']}" for one in spans if ":" not in one["name"]]
    assert sorted(others) == sorted(
        ["caller > infer", "infer > pipe decode", *len(boxes) * ["digits: compute > digit"]]
    )
    assert len(boxes) > 1

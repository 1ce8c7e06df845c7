"""The example pipelines against plain code, and against the truth that lies beside their pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.waits import in_threads

from torchpipe_py import Registry, UnknownNode, import_code, parse_toml, pipe
from torchpipe_py.plan.build import plan_pipeline

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "configs" / "examples"
SCENES = json.loads((EXAMPLES / "scenes" / "truth.json").read_text(encoding="utf-8"))
LINES = json.loads((EXAMPLES / "lines" / "truth.json").read_text(encoding="utf-8"))

LONG = 60_000
"""A batching_timeout in ms: batches close because they are full, or because nothing else is under way."""


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, restored: Registry) -> None:
    """The backends of the examples, for this test; relative paths are those of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "backends", None)  # NOTE: or the module stays, and its registrations do not
    monkeypatch.delitem(sys.modules, "backends")
    import_code("configs/examples/backends.py")
    monkeypatch.syspath_prepend(str(EXAMPLES))


def scene(name: str) -> bytes:
    return (EXAMPLES / "scenes" / name).read_bytes()


def line(name: str) -> bytes:
    return (EXAMPLES / "lines" / name).read_bytes()


def check_equal(boxes: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same boxes to a thousandth of a pixel, the same labels, scores to a thousandth."""
    assert [box["label"] for box in boxes] == [box["label"] for box in expected]
    if expected:
        corners = [np.array([box["box"] for box in many]) for many in (boxes, expected)]
        assert np.abs(corners[0] - corners[1]).max() < 1e-3
        assert max(abs(box["score"] - other["score"]) for box, other in zip(boxes, expected, strict=True)) < 1e-3


@pytest.mark.parametrize("name", ["branch", "demo", "detector", "textline"])
def test_nothing_about_an_example_is_doubted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plan_pipeline(f"configs/{name}.toml")
    assert caplog.messages == []


def test_detector_equals_plain_code() -> None:
    import straight

    plain = straight.Detector(threads=1)
    expected = {name: plain(scene(name)) for name in SCENES}
    for name, truth in SCENES.items():
        assert sorted(box["label"] for box in expected[name]) == sorted(tile["label"] for tile in truth)
    names = [*SCENES]
    with pipe("configs/detector.toml") as p:

        def work(index: int) -> None:
            for name in names[index::4]:
                data: dict[str, Any] = {"data": scene(name)}
                p(data)
                check_equal(data["result"], expected[name])

        in_threads(4, work)
        assert p.stats()["inflight"] == 0


def test_detector_without_objects_and_with_bytes_that_are_no_image() -> None:
    import cv2

    empty = cv2.imencode(".jpg", np.full((192, 256, 3), 128, np.uint8))[1].tobytes()
    good, none, bad = {"data": scene("scene_00.jpg")}, {"data": empty}, {"data": b"no image"}
    with pipe("configs/detector.toml") as p:
        p([good, none, bad])
        with pytest.raises(UnknownNode, match="digit"):
            p({"data": b"", "node_name": "digits"})
    assert len(good["result"]) == len(SCENES["scene_00.jpg"])
    assert none["result"] == []
    assert "result" not in bad
    assert "not a JPEG" in str(bad["error"])


def test_lines_are_read_and_share_batches_by_width() -> None:
    config = parse_toml("configs/textline.toml")
    config["global"]["batching_timeout"] = LONG
    requests = [{"data": line(name)} for name in LINES for _ in range(8)]
    with pipe(config) as p:
        p(requests)
        reader = p.stats()["nodes"]["read"]
    assert [request["result"] for request in requests] == [text for text in LINES.values() for _ in range(8)]
    widths = {request["resize_w"] for request in requests}
    assert all(width % 32 == 0 for width in widths)
    assert len(widths) > 4
    assert reader["batches"] < len(requests) / 2


def test_each_picture_takes_its_branch() -> None:
    lines, scenes = [{"data": line(name)} for name in LINES], [{"data": scene(name)} for name in SCENES]
    with pipe("configs/branch.toml") as p:
        p([*lines, *scenes])
        stats = p.stats()["nodes"]
    labelled = [request for request in (*lines, *scenes) if "label" in request]
    assert all(request["result"] == request["label"] for request in labelled)
    assert all("label" in request for request in scenes)
    read = [name for name, request in zip(LINES, lines, strict=True) if "label" not in request]
    texts = {name: request["result"] for name, request in zip(LINES, lines, strict=True)}
    assert [texts[name] for name in read] == [LINES[name] for name in read]
    assert len(read) >= 8
    assert (stats["read"]["requests"], stats["classify"]["requests"]) == (len(read), len(labelled))

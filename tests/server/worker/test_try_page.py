"""The page to try a pipe on, in a real browser, and what it asks."""

from __future__ import annotations

import base64
import http.client
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from browser import CHROMIUM, Tab
from kit.services import ROOT, LocalServer, serving

from torchpipe_py import Backend, register_backend
from torchpipe_py.runtime.record.pictures import small_copy

IMAGE = ROOT / "configs/demo/images/ring_00.jpg"
SIZE = 211, 357


@register_backend
class TryBoxes(Backend):
    """Two boxes, whatever comes."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = [
                {"box": [8, 8, 24, 40], "label": "seven", "score": 0.75},
                {"box": np.array([30.0, 8.0, 60.0, 60.0], np.float32), "label": "<b>one</b>", "score": 0.5},
            ]


BRANCHES = {
    "decode": {"backend": "S[DecodeMat,cvtColorMat]", "color": "rgb", "next": "small,gray"},
    "small": {"backend": "ResizeMat", "resize_h": 20, "resize_w": 30, "next": "boxes"},
    "gray": {"backend": "cvtColorMat", "color": "gray", "next": "boxes"},
    "boxes": {"backend": "TryBoxes", "map": "small[result:data],gray[result:other]"},
    "plain": {"backend": "DecodeMat"},
}


def ask(server: LocalServer, verb: str, path: str, body: bytes = b"", **fields: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(verb, path, body, fields)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 8, 8).to_sparse(),
        torch.zeros(3, 8, 8, device="meta"),
        torch.zeros(3, 8, 8, dtype=torch.complex64),
        SimpleNamespace(shape=None),
        SimpleNamespace(shape=(3, 8, 8), detach=None),
        np.zeros((8, 8), object),
        "text",
    ],
)
def test_a_result_that_cannot_be_drawn_fails_no_batch(value: Any) -> None:
    assert small_copy(value, "rgb") is None


def test_what_a_try_tells() -> None:
    with serving(BRANCHES) as server:
        status, _, body = ask(server, "POST", "/try?node_name=decode", IMAGE.read_bytes())
        told = json.loads(body)
        assert (status, told["status"], told["answer"]["result"][0]["label"]) == (200, 200, "seven")
        nodes = {node["node"]: node for node in told["nodes"]}
        assert nodes.keys() == {"decode", "small", "gray", "boxes"}
        sizes = {
            name: node["image"] and (node["image"]["height"], node["image"]["width"]) for name, node in nodes.items()
        }
        assert sizes == {"decode": SIZE, "small": (20, 30), "gray": SIZE, "boxes": None}
        png = base64.b64decode(nodes["decode"]["image"]["src"].partition(",")[2])
        seen = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
        assert np.array_equal(seen, cv2.imread(str(IMAGE))[::2, ::2]), "each second pixel as it is"
        for node in told["nodes"]:
            assert 0 <= node["start_ms"] <= told["ms"]
            assert min(node["queue_ms"], node["batch_wait_ms"], node["compute_ms"]) >= 0
        _, _, body = ask(server, "POST", "/try?node_name=plain", b"no image")
        assert (json.loads(body)["status"], json.loads(body)["answer"]["code"]) == (400, "decode_error")
        assert ask(server, "POST", "/try?node_name=none", b"")[0] == 404


def test_the_page_is_for_browsers_and_can_be_turned_off() -> None:
    with serving("configs/demo.toml") as server:
        status, headers, body = ask(server, "GET", "/", Accept="text/html,*/*;q=0.8")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"").replace(b"http://${location", b"")
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
            status, headers, body = ask(server, "GET", "/", **accept)
            assert (status, headers["Vary"]) == (200, "Accept")
            assert {"GET /", "POST /infer", "GET /v2", "GET /openapi.json", "monitoring"} <= json.loads(body).keys()
        assert ask(server, "HEAD", "/")[0] == 200
    with serving("configs/demo.toml", no_page=True) as server:
        assert ask(server, "GET", "/", Accept="text/html")[0] == 404
        assert ask(server, "POST", "/try", IMAGE.read_bytes())[0] == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser(tmp_path: Path) -> None:
    with serving(BRANCHES) as server, Tab(tmp_path) as tab:
        url = f"http://127.0.0.1:{server.port}/"
        for width in (1200, 360):
            tab.open(url, width)
            tab.choose("#file", IMAGE)
            tab.wait_for("document.querySelectorAll('#nodes li').length === 4")
            assert tab.value("[...document.querySelectorAll('#labels b')].map((one) => one.textContent)") == [
                "seven",
                "<b>one</b>",
            ]
            tab.wait_for("document.querySelectorAll('#boxes rect').length === 2")
            assert tab.value("document.querySelectorAll('#images img').length") == 3
            assert tab.value("document.documentElement.scrollWidth") <= width
        assert "node_name=decode" in tab.value("document.getElementById('code').textContent")
        # By keyboard alone: another model, then the same image again.
        tab.value("document.activeElement.blur()")
        for wanted, key in (("model", "ArrowDown"), ("again", "Enter")):
            for _ in range(20):
                if tab.value("document.activeElement.id") == wanted:
                    break
                tab.press("Tab")
            tab.press(key)
            tab.wait_for("document.querySelectorAll('#nodes li').length === 1")
            tab.value("document.getElementById('nodes').replaceChildren()")
        assert {
            request for request in tab.requested if not request.startswith((url, "blob:", "data:", "about:"))
        } == set()

"""The page to try a pipe on, in a real browser, and what it asks."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from kit.clients import ask, fetch
from kit.services import ROOT, serving
from kit.waits import eventually

from torchpipe_py import Backend, Detections, Signature, register_backend
from torchpipe_py.backends.signature import ENCODED_IMAGE, detection_outputs
from torchpipe_py.runtime.record.pictures import small_copy

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000"),
)


class Tab:
    """A page whose browser is driven over a pipe, by Chrome's protocol for developers; ``requested`` are its URLs."""

    def __init__(self, directory: Path) -> None:
        theirs_in, self._send = os.pipe()
        self._receive, theirs_out = os.pipe()
        # What the browser reads and writes has to be 3 and 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", str(CHROMIUM), *FLAGS]
        command += [f"--user-data-dir={directory}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        self.requested: list[str] = []
        self._unread, self._calls, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._calls, "method": method, "params": params, **session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("method") == "Network.requestWillBeSent":
                self.requested.append(heard["params"]["request"]["url"])
            if heard.get("id") == self._calls:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result

    def _hear(self) -> Any:
        while b"\0" not in self._unread:
            received = os.read(self._receive, 2**16)
            assert received, "the browser has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && document.getElementById('code')?.children.length === 3")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        eventually(lambda: self.value(expression), f"never: {expression}")

    def choose(self, selector: str, file: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "ArrowDown": 40}
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)


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


def ellipse() -> np.ndarray:
    return cv2.ellipse(np.zeros(SIZE, np.uint8), (250, 100), (60, 80), 0, 0, 360, 255, -1)


@register_backend
class TryDetections(Backend):
    """Three objects with keypoints, each with a mask of another kind."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        png = cv2.imencode(".png", ellipse())[1].tobytes()
        lengths = {"size": list(SIZE), "counts": [SIZE[0] * 20 + 30, 50, SIZE[0] * (SIZE[1] - 20) - 80]}
        triangle = [[[30, 150], [100, 150], [60.5, 200]]]
        found = Detections(
            [[190, 20, 310, 180], [15.25, 30, 30, 80.1], [30, 150, 100, 200]],
            [0.9, 0.75, 0.1], [1, 0, 9], ("one", "two"),
            [[[250, 60, 0.9]], [[20, 50, 0.8]], [[60, 170, 0.1]]], (png, lengths, triangle),
        )  # fmt: skip
        for item in items:
            item["result"] = found[found.scores >= item.get("parameters", {}).get("threshold", 0)]

    def signature(self) -> Signature:
        return Signature(ENCODED_IMAGE.inputs, detection_outputs(True, 1, True), ("threshold",))


BRANCHES = {
    "decode": {"backend": "S[DecodeMat,cvtColorMat]", "color": "rgb", "next": "small,gray"},
    "small": {"backend": "ResizeMat", "resize_h": 20, "resize_w": 30, "next": "boxes"},
    "gray": {"backend": "cvtColorMat", "color": "gray", "next": "boxes"},
    "boxes": {"backend": "TryBoxes", "map": "small[result:data],gray[result:other]"},
    "plain": {"backend": "DecodeMat"},
}
PIXELS = "(([x, y]) => [...document.getElementById('masks').getContext('2d').getImageData(x, y, 1, 1).data])([%d, %d])"


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
def test_undrawable_result_fails_no_batch(value: Any) -> None:
    assert small_copy(value, "rgb") is None


def test_try_reports_nodes_and_answer() -> None:
    with serving(BRANCHES) as server:
        status, told = ask(server.port, IMAGE.read_bytes(), "/try?node_name=decode")
        assert (status, told["status"], told["answer"]["result"][0]["label"]) == (200, 200, "seven")
        nodes = {node["node"]: node for node in told["nodes"]}
        assert nodes.keys() == {"decode", "small", "gray", "boxes"}
        sizes = {name: (image["height"], image["width"]) for name, node in nodes.items() if (image := node["image"])}
        assert sizes == {"decode": SIZE, "small": (20, 30), "gray": SIZE}
        png = base64.b64decode(nodes["decode"]["image"]["src"].partition(",")[2])
        seen = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
        assert np.array_equal(seen, cv2.imread(str(IMAGE))[::2, ::2]), "each second pixel as it is"
        for node in told["nodes"]:
            assert 0 <= node["start_ms"] <= told["ms"]
            assert min(node["queue_ms"], node["batch_wait_ms"], node["compute_ms"]) >= 0
        _, told = ask(server.port, b"no image", "/try?node_name=plain")
        assert (told["status"], told["answer"]["code"]) == (400, "decode_error")
        assert ask(server.port, b"", "/try?node_name=none")[0] == 404


def test_page_is_for_browsers_and_can_be_turned_off() -> None:
    with serving("configs/demo.toml") as server:
        status, fields, body = fetch(server.port, "/", Accept="text/html,*/*;q=0.8")
        assert (status, fields["content-type"]) == (200, "text/html; charset=utf-8")
        assert "unsafe" not in fields["content-security-policy"]
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"").replace(b"http://${location", b"")
        for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
            status, fields, body = fetch(server.port, "/", **accept)
            assert (status, fields["vary"]) == (200, "Accept")
            assert {"GET /", "POST /infer", "GET /v2", "GET /openapi.json", "monitoring"} <= json.loads(body).keys()
        assert fetch(server.port, "/", "HEAD").status == 200
        samples = re.search(r'data-samples="(.*?)"', fetch(server.port, "/", Accept="text/html").body.decode())
        assert samples is not None
        for sample in json.loads(html.unescape(samples[1])):
            assert ask(server.port, base64.b64decode(sample["data"]))[0] == 200, sample["name"]
        assert 1000 < len(samples[1]) < 25_000
    with serving("configs/demo.toml", no_page=True) as server:
        assert fetch(server.port, "/", Accept="text/html").status == 404
        assert ask(server.port, IMAGE.read_bytes(), "/try")[0] == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    with serving(BRANCHES) as server, Tab(tmp_path) as tab:
        url = f"http://127.0.0.1:{server.port}/"
        for width in (1200, 360):
            tab.open(url, width)
            tab.choose("#file", IMAGE)
            tab.wait_for("document.querySelectorAll('#nodes li').length === 4")
            labels = tab.value("[...document.querySelectorAll('#labels b')].map((one) => one.textContent)")
            assert labels == ["seven", "<b>one</b>"]
            tab.wait_for("document.querySelectorAll('#boxes rect').length === 2")
            assert tab.value("document.querySelectorAll('#images img').length") == 3
            assert tab.value("document.documentElement.scrollWidth") <= width
        assert "node_name=decode" in tab.value("document.getElementById('code').textContent")
        # What is looked at stays where it is: a sample, then the same again with the JSON open and closed.
        tab.value("document.querySelector('#samples button').click()")
        place = "Math.round(document.getElementById('nodes').getBoundingClientRect().top) + 0"
        tab.wait_for("!document.getElementById('outcome').classList.contains('stale')")
        tab.value("document.getElementById('nodes').scrollIntoView()")
        before = tab.value(place)
        for _ in range(2):
            tab.value("document.querySelector('#nodes li').className = 'old'; document.getElementById('again').click()")
            tab.wait_for("!document.querySelector('#nodes .old')")
            assert tab.value(place) == before
            tab.value("document.querySelector('#json-box summary').click()")
            tab.value("document.getElementById('nodes').scrollIntoView()")
            before = tab.value(place)
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
        assert [one for one in tab.requested if not one.startswith((url, "blob:", "data:", "about:"))] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_page_draws_detections_with_the_numbers_of_infer(tmp_path: Path) -> None:
    with serving({"detector": {"backend": "TryDetections"}}) as server, Tab(tmp_path) as tab:
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.choose("#file", IMAGE)
        tab.wait_for("document.querySelectorAll('#boxes rect').length === 3")
        _, answer = ask(server.port, IMAGE.read_bytes())
        assert json.loads(tab.value("document.getElementById('json').textContent")) == answer
        sides = "['x', 'y', 'width', 'height'].map((name) => Number(rect.getAttribute(name)))"
        drawn = tab.value(f"[...document.querySelectorAll('#boxes rect')].map((rect) => {sides})")
        for (x, y, width, height), row in zip(drawn, answer["result"], strict=True):
            assert [x, y, x + width, y + height] == pytest.approx(row["box"])
        labels = tab.value("[...document.querySelectorAll('#boxes text')].map((one) => one.textContent)")
        assert labels == ["two", "one", "9"]
        assert tab.value("document.querySelectorAll('#boxes circle').length") == 2, "of a score of 0.25 or more"
        assert "60.5 200" in tab.value("document.querySelector('#boxes path').getAttribute('d')")
        tab.wait_for("document.getElementById('masks').width === 357")
        tab.wait_for(f"{PIXELS % (20, 50)}[3] === 255")
        colors = [tab.value(PIXELS % place) for place in ((250, 100), (20, 50), (20, 85), (150, 100))]
        assert colors == [[60, 207, 78, 255], [255, 61, 127, 255], [0, 0, 0, 0], [0, 0, 0, 0]]
        # The threshold of the request.
        tab.value("document.querySelector('#parameters input').value = '0.5'")
        tab.value("document.querySelector('#parameters input').onchange()")
        tab.wait_for("document.querySelectorAll('#boxes rect').length === 2")
        code = tab.value("document.getElementById('code').textContent")
        assert "/infer?threshold=0.5" in code
        assert code.count('parameters={"threshold":0.5}') == 2


class _Parts(HTMLParser):
    """What a document has, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name == "src" or (name == "href" and tag != "a")]


def test_docs_show_every_path_and_load_nothing():
    with serving("Identity") as server:
        page, document = fetch(server.port, "/docs"), ask(server.port, b"", "/openapi.json", "GET")[1]
    text = page.body.decode()
    assert (page.status, page.fields["content-type"]) == (200, "text/html; charset=utf-8")
    for path, operations in document["paths"].items():
        (verb,) = operations
        assert f"{verb.upper()} <code>{path}</code>" in text
    assert all(f'id="{name}"' in text for name in document["components"]["schemas"])
    parts = _Parts(text)
    assert parts.loaded == ["data:,"], "its icon"
    assert not parts.tags & {"script", "iframe", "form", "object", "embed"}
    assert "://" not in text
    policy = page.fields["content-security-policy"]
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")


def test_no_page_has_no_docs():
    with serving("Identity", no_page=True) as server:
        assert fetch(server.port, "/docs").status == 404

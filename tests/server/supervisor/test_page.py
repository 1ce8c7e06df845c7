"""The live page in a headless browser, before a service that says what the test tells it to."""

from __future__ import annotations

import copy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torchpipe_server
from browser import CHROMIUM, Browser, labels, text_of

from torchpipe_py import Registry, import_code
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.tools.draw.picture import Arrow, Box, Picture, depict
from torchpipe_py.tools.draw.render import svg

ROOT = Path(__file__).parents[3]
PAGE = Path(torchpipe_server.__file__).parent / "supervisor" / "page"
HOSTILE = "<script>document.title='caught'</script>\"' & <b>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

Answer = dict[str, Any] | int | None
"""What ``/stats`` answers: a snapshot, a status without one, or nothing, on a connection that is closed."""


# -- snapshots ------------------------------------------------------------------------------------------------------

BOUNDS = [0.001 * 2**power for power in range(27)]


def histogram(**buckets: int) -> list[int]:
    """``b10=3``: three in the bucket up to ``BOUNDS[10]``; ``beyond`` counts what is longer than all."""
    counts = [0] * (len(BOUNDS) + 1)
    for name, count in buckets.items():
        counts[-1 if name == "beyond" else int(name[1:])] = count
    return counts


def node(instances: int = 1, **counters: Any) -> dict[str, Any]:
    return {
        **{
            "instances": instances,
            "alive": instances,
            "oldest_batch_s": 0.0,
            "min": 1,
            "max": 1,
            "queued": 0,
            "busy": 0,
            "requests": 0,
            "batches": 0,
        },
        **{"failed": 0, "expired": 0, "batch_sizes": {}, "queue_ms": 0.0, "batch_wait_ms": 0.0, "compute_ms": 0.0},
        "instance_compute_ms": [0.0] * instances,
        "histograms": {"queue": histogram(), "batch_wait": histogram(), "compute": histogram()},
        **counters,
    }


def snapshot(seconds: float, nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Of a service that is ``seconds`` old."""
    worker = {"index": 0, "pid": 124, "state": "ready", "responding": True, "connections": 3, "inflight": 2}
    stats = {
        **{"state": "ready", "ready": True, "version": "0.1.0", "config": "configs/detector.toml", "pid": 123},
        **{"uptime_s": seconds, "time": 1.7e9 + seconds, "graph_id": "a1b2", "restarts": 0, "bounds_ms": BOUNDS},
        "connections": {"open": 3, "max": 1024, "accepted": 10, "refused": 0},
        "workers": [{**worker, "restarts": 0, "uptime_s": seconds, "rss_bytes": 300 * 2**20}],
        "engines": [{**worker, "restarts": 1, "uptime_s": seconds, "rss_bytes": 200 * 2**20}],
        "requests": {"inflight": 2, "by_method": {}, "latency": {"counts": histogram(), "sum_ms": 0.0}},
        "nodes": nodes,
        "streams": {
            "gate 1/2": {
                **{"state": "blocked", "frames": {"ok": 1200, "dropped": 7}, "fps": 7.5, "age_ms": 31.0, "worker": 1},
                **{"reconnects": 3, "last_error": "nothing came for 10 s"},
            },
            "new": {"state": "starting", "frames": {}, "reconnects": 0, "worker": None, "last_error": ""},
        },
        "gpus": [{"index": 0, "name": "NVIDIA H200", "used_bytes": 35 * 2**30, "total_bytes": 140 * 2**30}],
    }
    return {**stats, **changes}


def requests(by_method: dict[str, dict[str, int]], counts: list[int]) -> dict[str, Any]:
    return {"inflight": 2, "by_method": by_method, "latency": {"counts": counts, "sum_ms": 0.0}}


def two_snapshots() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two seconds apart; the figures that the tests expect follow from their difference."""
    old = snapshot(
        10.0,
        {
            "decode": node(2, requests=1000, batches=1000, batch_sizes={"1": 1000}, queue_ms=500.0, compute_ms=4000.0)
            | {"instance_compute_ms": [3000.0, 1000.0], "failed": 2},
            "digit": node(1, requests=100, batches=50, batch_sizes={"1": 10, "2": 40}),
        },
        requests=requests({"infer_batch": {"ok": 1000, "overloaded": 3}}, histogram(b12=1000)),
    )
    new = snapshot(
        12.0,
        {
            "decode": node(
                2,
                queued=4,
                busy=1,
                requests=1200,
                batches=1200,
                failed=5,
                batch_sizes={"1": 1200},
                queue_ms=900.0,
                batch_wait_ms=100.0,
                compute_ms=6400.0,
                instance_compute_ms=[4900.0, 1500.0],
                histograms={
                    "queue": histogram(b11=200),
                    "batch_wait": histogram(b9=200),
                    "compute": histogram(b13=100, b14=100),
                },
            ),
            "digit": node(1, requests=160, batches=70, batch_sizes={"1": 10, "2": 45, "4": 15}, expired=1),
        },
        requests=requests(
            {"infer_batch": {"ok": 1190, "overloaded": 8}, "ping": {"ok": 2}}, histogram(b12=1000, b13=100, b14=100)
        ),
    )
    return old, new


# -- the service and the browser ------------------------------------------------------------------------------------


class Service:
    """Serves the page, a picture, and one answer of ``script`` after the other; the last one stays."""

    def __init__(self, script: list[Answer], drawing: str = "", files: dict[str, str] | None = None) -> None:
        self.script, self.polls, self.pictures = script, 0, 0
        self.drawing, self.files = drawing, files or {}
        self.lock = threading.Lock()
        handler = type("BoundHandler", (Handler,), {"service": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def __enter__(self) -> Service:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def next_answer(self) -> Answer:
        with self.lock:
            self.polls += 1
            return self.script[min(self.polls, len(self.script)) - 1]

    def content(self, path: str) -> tuple[str, str] | int | None:
        """Type and text, or a status, or nothing at all."""
        name = path.partition("?")[0].lstrip("/") or "index.html"
        if name == "stats":
            answer = self.next_answer()
            return ("application/json", json.dumps(answer)) if isinstance(answer, dict) else answer
        if name == "graph.svg":
            self.pictures += 1
            return ("image/svg+xml", self.drawing) if self.drawing else 404
        if name in self.files:
            return "text/html", self.files[name]
        if not (PAGE / name).is_file():
            return 404
        kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
        return kinds[Path(name).suffix], (PAGE / name).read_text(encoding="utf-8")


class Handler(BaseHTTPRequestHandler):
    service: ClassVar[Service]

    def do_GET(self) -> None:
        content = self.service.content(self.path)
        if content is None:
            self.close_connection = True
            return
        status, (kind, text) = (content, ("text/plain", "")) if isinstance(content, int) else (200, content)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path / "profile")


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch, restored: Registry) -> str:
    """The picture of `configs/detector.toml` with room for figures."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "backends", None)  # NOTE: or the module stays, and its registrations do not
    monkeypatch.delitem(sys.modules, "backends")
    import_code("configs/examples/backends.py")
    return svg(depict(plan_pipeline("configs/detector.toml"), live=True))


# -- what it shows --------------------------------------------------------------------------------------------------


def test_figures_are_those_between_two_snapshots(browser: Browser, detector: str) -> None:
    with Service([*two_snapshots()], detector) as service:
        page = browser.run(service.url, 8)
    assert service.polls > 3
    assert service.pictures == 1
    assert page.text("config") == "configs/detector.toml"
    assert page.text("state") == "ready"
    assert page.text("about") == "up 12 s · version 0.1.0 · pid 123"
    assert page.banner == ""
    assert page.totals == {
        "QPS": ("96", "infer_batch 95 ping 1"),
        "errors /s": ("2.5", "overloaded 2.5 /s (8)"),
        "in flight": ("2", "requests"),
        # 100 answers up to 8.192 ms and 100 up to 16.384 ms
        "latency p50": ("8.19 ms", "last interval"),
        "latency p99": ("16.2 ms", "last interval"),
        "connections": ("3", "of 1,024 10 accepted, 0 refused"),
        "restarts": ("0", "of workers"),
    }
    cells = page.table("nodes")["decode"]
    assert {head: text_of(cell) for head, cell in cells.items()} == {
        "node": "decode",
        "rate /s": "100",
        "queued": "4",
        "busy": "60 %1 of 2 now",
        "queue ms": "2.00p99 2.04",
        "batch wait ms": "0.50p99 0.51",
        "compute ms": "12.0p99 16.2",
        "batches by size": "2001",
        "failed": "5 (1.5 /s)",
        "expired": "0",
    }
    assert labels(cells["busy"]) == ["busy by instance: 95 %, 25 %"]
    digit = page.table("nodes")["digit"]
    assert labels(digit["batches by size"]) == ["batches by size: 1: 0, 2: 5, 4: 15"]
    assert text_of(digit["rate /s"]) == "30"
    assert text_of(digit["expired"]) == "1 (0.5 /s)"
    assert text_of(page.table("workers")["0"]["memory"]) == "300 MiB"
    assert text_of(page.table("workers")["engine 0"]["memory"]) == "200 MiB"
    assert [text_of(cell) for cell in page.table("streams")["gate 1/2"].values()][1:] == [
        *("blocked", "7.5", "31.0", "1,200", "–", "7", "–", "–", "3", "1", "nothing came for 10 s")
    ]
    assert text_of(page.table("streams")["new"]["frames /s"]) == "–"
    assert [link.get("href") for link in page.root.iter("a")][:1] == ["streams/gate%201%2F2/snapshot.jpg"]
    assert [text_of(cell) for cell in page.table("gpus")["0"].values()] == [
        *("0", "NVIDIA H200", "35.0 GiB of 140.0 GiB", "25 %")
    ]


def test_the_picture_carries_figures(browser: Browser, detector: str) -> None:
    with Service([*two_snapshots()], detector) as service:
        boxes = browser.run(service.url, 4).boxes()
    assert set(boxes) == {"decode", "detect", "digits", "merge", "digit"}
    decode = boxes["decode"]
    assert [text_of(decode[kind]) for kind in ("rate", "queue", "share")] == ["100 /s", "queue 4", "60 %"]
    track, fill = (float(decode[kind].get("width", 0)) for kind in ("track", "fill"))
    assert fill == pytest.approx(0.6 * track)
    assert "figures" not in boxes["merge"], "a node that the service says nothing of"


def test_names_are_text(browser: Browser) -> None:
    old, new = two_snapshots()
    for stats in (old, new):
        stats["nodes"] = {HOSTILE: stats["nodes"]["decode"], "decode": stats["nodes"]["digit"]}
        stats["config"] = stats["workers"][0]["state"] = HOSTILE
        stats["requests"]["by_method"][HOSTILE] = {HOSTILE: 1}
        stats["gpus"][0]["name"] = stats["streams"]["new"]["last_error"] = HOSTILE
    drawing = svg(
        Picture(
            HOSTILE,
            (Box(HOSTILE, "A", "1", "", live=True), Box("decode", "B", "1", "")),
            (Arrow(HOSTILE, "decode", "next"),),
        )
    )
    with Service([old, new], drawing) as service:
        page = browser.run(service.url, 4)
    title = next(element for element in page.root.iter("title"))
    assert text_of(title) == f"{HOSTILE} · ready"
    assert [element.get("src") for element in page.root.iter("script")] == ["page.js"]
    assert text_of(page.table("nodes")[HOSTILE]["rate /s"]) == "100"
    assert text_of(page.boxes()[HOSTILE]["rate"]) == "100 /s"
    assert page.text("config") == HOSTILE
    assert text_of(page.table("workers")["0"]["state"]) == HOSTILE
    assert text_of(page.table("gpus")["0"]["name"]) == HOSTILE
    assert text_of(page.table("streams")["new"]["last problem"]) == HOSTILE


# -- what may go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silence", [None, 503], ids=["no connection", "status 503"])
def test_a_banner_says_that_no_answer_comes(browser: Browser, detector: str, silence: int | None) -> None:
    with Service([*two_snapshots(), silence], detector) as service:
        page = browser.run(service.url, 8)
    reason = "stats: status 503" if silence else "Failed to fetch"
    assert page.banner.startswith("no answer since ")
    assert page.banner.endswith(f": {reason}")
    body = next(page.root.iter("body"))
    assert body.get("class") == "stale"
    assert page.totals["QPS"][0] == "96", "what was known stays"


def test_it_recovers(browser: Browser, detector: str) -> None:
    old, new = two_snapshots()
    with Service([old, None, None, 503, new], detector) as service:
        page = browser.run(service.url, 12)
    assert page.banner == ""
    assert not next(page.root.iter("body")).get("class")
    assert page.totals["QPS"][0] == "96"


def restarted(after: dict[str, Any], seconds: float, **changes: Any) -> dict[str, Any]:
    """A snapshot whose decode counters began again."""
    new = copy.deepcopy(after)
    new.update(time=after["time"] + seconds, **changes)
    new["nodes"]["decode"] = node(2, requests=20, batches=20, batch_sizes={"1": 20})
    new["requests"]["by_method"] = {"infer_batch": {"ok": 20}}
    new["requests"]["latency"]["counts"] = histogram(b12=20)
    return new


def test_counters_that_fall_give_no_rates(browser: Browser, detector: str) -> None:
    old, new = two_snapshots()
    fallen = restarted(new, 1.0)
    with Service([old, new, fallen], detector) as service:
        page = browser.run(service.url, 8)
    assert page.totals["QPS"] == ("–", "20 answers")
    assert page.totals["latency p99"][0] == "–"
    decode = page.table("nodes")["decode"]
    assert [text_of(decode[head]) for head in ("rate /s", "busy", "compute ms")] == ["–", "–0 of 2 now", "–p99 –"]
    assert labels(decode["batches by size"]) == ["batches by size: 1: –"]
    assert text_of(page.boxes()["decode"]["rate"]) == "– /s"
    assert "-" not in page.text("totals") + page.text("nodes")


def test_a_worker_with_another_pid_begins_anew(browser: Browser, detector: str) -> None:
    old, new = two_snapshots()
    new["workers"][0]["pid"] = 999
    after = copy.deepcopy(new)
    after["time"] += 1.0
    after["nodes"]["decode"]["requests"] += 70
    with Service([old, new], detector) as service:
        assert browser.run(service.url, 5).totals["QPS"][0] == "–"
    with Service([old, new, after], detector) as service:
        page = browser.run(service.url, 6)
    assert text_of(page.table("nodes")["decode"]["rate /s"]) == "70"


# -- the functions --------------------------------------------------------------------------------------------------

EXPRESSIONS: dict[str, Any] = {
    "percentile([0, 0, 0], [1, 2], 0.5)": None,
    "percentile([10, 0, 0], [1, 2], 0.5)": 0.5,
    "percentile([50, 50, 0], [1, 2], 0.5)": 1,
    "percentile([0, 100, 0], [1, 2], 0.99)": 1.99,
    "percentile([1, 1, 8], [1, 2], 0.99) === Infinity": True,
    "minus({a: 5, b: [1, 2], c: {d: 1}}, {a: 2, b: [1, 1]})": {"a": 3, "b": [0, 1], "c": {"d": 1}},
    "hasFallen({a: [2, 3]}, {a: [2, 3]})": False,
    "hasFallen({a: [2, 2]}, {a: [2, 3]})": True,
    "hasFallen({}, {a: {b: 1}})": True,
    "hasFallen({a: 0.3}, {a: 0.1 + 0.2})": False,
    "ratio(1, 0)": None,
    "byCode({a: {ok: 1, late: 2}, b: {ok: 3}})": {"ok": 4, "late": 2},
    "batchBars({}, {})": [],
    "batchBars({10: 7, 2: 3}, {2: 1})": [{"label": "2", "count": 1}, {"label": "10", "count": 0}],
    "batchBars({10: 7}, undefined)": [{"label": "10", "count": None}],
    "batchBars(Object.fromEntries([1,2,3,4,5,6,7,8,9,17].map((n) => [n, n])), {3: 1, 4: 1, 9: 5})": [
        {"label": "1", "count": 0},
        {"label": "2", "count": 0},
        {"label": "3–4", "count": 2},
        {"label": "5–8", "count": 0},
        {"label": "9–16", "count": 5},
        {"label": "17–32", "count": 0},
    ],
    "withPoint([{time: 1}, {time: 100}, {time: 300}], {time: 250})": [{"time": 100}, {"time": 250}],
    "linePath([[0, 0], [1, 10], [2, null], [3, 5], [50, 20]], 0, 100, 10)": (
        "M0.0 58.0 L0.0 58.0 L6.0 2.0 M18.0 30.0 L18.0 30.0 M300.0 2.0 L300.0 2.0"
    ),
    "[0, 1, 3, 10, 11, 700, 0.03].map(roundUp)": [1, 1, 5, 10, 20, 1000, 0.05],
    "[null, 0, 0.01, 0.25, 3, 9.96, 1234.4, 86543, 2.5e6].map(rateText)": [
        *("–", "0", "<0.1", "0.3", "3", "10", "1,234", "86.5k", "2.5M")
    ],
    "[null, 0, 0.001, 1.234, 12.34, 123.4, 67000, Infinity].map((one) => msText(one, 67109))": [
        *("–", "0.00", "<0.01", "1.23", "12.3", "123", "67.0 s", ">67.1 s")
    ],
    "[null, 5, 20000].map((one) => msUnitText(one, 1))": ["–", "5.00 ms", "20.0 s"],
    "[null, 5 * 2 ** 20, 3 * 2 ** 30].map(bytesText)": ["–", "5 MiB", "3.0 GiB"],
    "[3.9, 65, 3700, 90000].map(durationText)": ["3 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"],
    "change(null, {time: 1})": None,
}


def test_the_functions(browser: Browser) -> None:
    script = f"document.body.textContent = JSON.stringify([{', '.join(EXPRESSIONS)}])"
    text = f'<!DOCTYPE html><body></body><script src="page.js"></script><script>{script}</script>'
    with Service([None], files={"functions.html": text}) as service:
        page = browser.run(service.url + "functions.html", 1)
    found = json.loads(text_of(next(page.root.iter("body"))))
    assert dict(zip(EXPRESSIONS, found, strict=True)) == EXPRESSIONS

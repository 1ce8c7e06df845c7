"""Clients over HTTP that nobody here wrote: curl and httpx, against the demo and the detector."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import WAIT, in_threads
from service import ROOT, Client, LocalServer, eventually, reserved_port, serving

from torchpipe_py import import_code

RING = ROOT / "configs/demo/images/ring_00.jpg"
IMAGES = sorted(RING.parent.glob("*.jpg"))


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


@pytest.fixture(scope="module")
def detector() -> Iterator[LocalServer]:
    import_code(str(ROOT / "configs/examples/backends.py"))
    with serving("configs/detector.toml") as server:
        yield server


@pytest.fixture
def asked(demo: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{demo.port}", timeout=WAIT, trust_env=False) as client:
        yield client


def curl(*arguments: str) -> bytes:
    command = ["curl", "-sS", "-m", str(WAIT), "--noproxy", "*", *arguments]
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    done = subprocess.run(command, capture_output=True, timeout=2 * WAIT, check=False)
    if b"libcurl version doesn't support" in done.stderr:
        pytest.skip("this curl was built without what the test asks of it")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data-binary", f"@{RING}"],
        ["-F", f"data=@{RING}"],
        ["-F", f"data=@{RING}", "-F", "outputs=result"],
        ["-F", f"data=@{RING}", "-F", "conf=0.3", "-F", "box=[1, 1, 3, 3]"],
        ["-T", str(RING), "-X", "POST"],
        ["-H", "Transfer-Encoding: chunked", "--data-binary", f"@{RING}"],
        ["-H", "Expect: 100-continue", "--data-binary", f"@{RING}"],
        ["--http1.0", "--data-binary", f"@{RING}"],
        ["--http2", "--data-binary", f"@{RING}"],
        ["--request-target", "http://b/infer", "--data-binary", f"@{RING}"],
    ],
)
def test_curl(demo: LocalServer, arguments: list[str]):
    answer = curl(*arguments, f"http://127.0.0.1:{demo.port}/infer")
    assert json.loads(answer)["label"] == "ring"
    assert answer.endswith(b"}\n")


def test_curl_keeps_its_connection(demo: LocalServer):
    urls, quietly = [f"http://127.0.0.1:{demo.port}/infer"] * 3, ["-o", "/dev/null"] * 3
    assert curl(*quietly, "-w", "%{num_connects} ", "--data-binary", f"@{RING}", *urls) == b"1 0 0 "


@pytest.mark.parametrize(
    "request_of",
    [
        lambda image: {"content": image},
        lambda image: {"content": iter([image[:100], image[100:]])},
        lambda image: {"files": {"data": ("a.jpg", image, "image/jpeg")}},
        lambda image: {"files": {"data": image}, "data": {"outputs": "result"}},
        lambda image: {"json": {"inputs": {"data": {"b64": base64.b64encode(image).decode()}}}},
    ],
    ids=["raw", "chunked", "form", "form and parameter", "json"],
)
def test_httpx(demo: LocalServer, asked: httpx.Client, request_of: Any):
    for _ in range(2):
        response = asked.post("/infer", **request_of(RING.read_bytes()))
        assert (response.status_code, response.json()["label"]) == (200, "ring")
        assert response.headers["content-type"] == "application/json"
    with Client(demo.port) as thrift:
        assert thrift.infer_batch(RING.read_bytes()) == ("ring", response.json()["score"])


def test_httpx_goes_on_after_errors(asked: httpx.Client):
    statuses = [
        asked.post("/infer", content=b"no image").status_code,
        asked.post("/infer", json={"inputs": 3}).status_code,
        asked.get("/infer").status_code,
        asked.post("/nothing", content=bytes(10**5)).status_code,
        asked.head("/openapi.json").status_code,
        asked.options("/infer").status_code,
        asked.post("/infer", content=RING.read_bytes()).status_code,
    ]
    assert statuses == [400, 400, 405, 404, 200, 405, 200]
    assert len(asked._transport._pool.connections) == 1


def test_httpx_many_at_once(demo: LocalServer):
    async def ask_all() -> list[Any]:
        limits = httpx.Limits(max_connections=8)
        url = f"http://127.0.0.1:{demo.port}/infer"
        async with httpx.AsyncClient(limits=limits, timeout=2 * WAIT, trust_env=False) as client:
            return await asyncio.gather(*(client.post(url, content=path.read_bytes()) for path in IMAGES))

    answers = asyncio.run(ask_all())
    expected = demo.run([{"data": path.read_bytes()} for path in IMAGES])
    assert [tuple(answer.json().values()) for answer in answers] == [each["result"] for each in expected]


HAPROXY = """
global
    maxconn 100
defaults
    mode http
    timeout connect 30s
    timeout client 30s
    timeout server 30s
    timeout check 30s
    http-reuse always
    option http-keep-alive
frontend entry
    bind 127.0.0.1:{port}
    default_backend service
backend service
    option httpchk GET /v2/health/ready
    server only 127.0.0.1:{service} check inter 100ms rise 1 fall 1000
"""


@pytest.fixture
def proxied(demo: LocalServer, tmp_path: Path) -> Iterator[httpx.Client]:
    """Through HAProxy, which shares its connections to the service among its clients."""
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed")
    with reserved_port() as port:
        config = tmp_path / "haproxy.cfg"
        config.write_text(HAPROXY.format(port=port, service=demo.port))
        process = subprocess.Popen(["haproxy", "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT, trust_env=False) as client:
                eventually(lambda: _is_up(client), "haproxy does not answer")
                yield client
        finally:
            process.terminate()
            process.wait(WAIT)


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_behind_haproxy(demo: LocalServer, proxied: httpx.Client):
    image = RING.read_bytes()
    answers = [
        proxied.post("/infer", content=image),
        proxied.post("/infer", content=iter([image[:100], image[100:]])),
        proxied.post("/infer", content=image, headers={"Expect": "100-continue"}),
        proxied.post("/infer", files={"data": image}),
        proxied.post("/infer", content=b"no image"),
        proxied.get("/infer"),
        proxied.post("/infer", content=image),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400, 405, 200]
    assert {answer.json()["label"] for answer in answers if answer.status_code == 200} == {"ring"}

    def run(index: int) -> None:
        for path in IMAGES[index::4]:
            answer = httpx.post(
                proxied.base_url.join("/infer"), content=path.read_bytes(), timeout=WAIT, trust_env=False
            )
            assert tuple(answer.json().values()) == demo.run({"data": path.read_bytes()})["result"]

    in_threads(4, run)


def test_the_detector(detector: LocalServer):
    image = (ROOT / "configs/examples/scenes/scene_00.jpg").read_bytes()
    expected = detector.run({"data": image})["result"]
    url = f"http://127.0.0.1:{detector.port}/infer"
    with httpx.Client(timeout=WAIT, trust_env=False) as client:
        raw = client.post(url, content=image)
        form = client.post(url, files={"data": image})
    assert raw.status_code == 200, raw.text
    assert raw.json() == form.json()
    assert [each["label"] for each in raw.json()["result"]] == [each["label"] for each in expected] != []

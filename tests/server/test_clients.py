"""Clients that nobody here wrote, against the demo: Apache Thrift, thriftpy2, a bare socket, curl, httpx, HAProxy."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import onnxruntime
import pytest
from kit.clients import FRAMINGS, IDL, Client, connect, pack_call
from kit.services import ROOT, LocalServer, Process, reserved_port, serving
from kit.waits import WAIT, eventually, in_threads
from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolAccelerated
from thrift.protocol.TCompactProtocol import TCompactProtocol, TCompactProtocolAccelerated
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport

from torchpipe_py import import_code

IMAGES = sorted((ROOT / "configs/demo/images").glob("*.jpg"))
RING = ROOT / "configs/demo/images/ring_00.jpg"
LABELS = (ROOT / "configs/demo/labels.txt").read_text().split()
MEAN, STD = np.float32([123.675, 116.28, 103.53]), np.float32([58.395, 57.12, 57.375])
SILENT, BUSY = 1000, 20


# -- Thrift: a service of two workers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Iterator[Process]:
    with Process("--workers", "2", "--max-connections", str(SILENT + BUSY + 50)) as process:
        yield process.wait_started()


@pytest.fixture(scope="module")
def wanted() -> dict[bytes, tuple[str, Any]]:
    """Label and score of images, and of blends of two, by ONNX Runtime and OpenCV alone."""
    session = onnxruntime.InferenceSession(ROOT / "configs/demo/model.onnx", providers=["CPUExecutionProvider"])
    mats = [cv2.resize(cv2.imread(str(path)), (96, 96)) for path in IMAGES]
    rng = random.Random(3)
    blends = [cv2.addWeighted(*rng.sample(mats, 1), share, *rng.sample(mats, 1), 1 - share, 0) for share in SHARES]
    found = {}
    for image in (*(path.read_bytes() for path in IMAGES), *(cv2.imencode(".jpg", one)[1].tobytes() for one in blends)):
        mat = cv2.cvtColor(cv2.resize(cv2.imdecode(np.frombuffer(image, np.uint8), 1), (64, 64)), cv2.COLOR_BGR2RGB)
        chw = ((mat.astype(np.float32) - MEAN) / STD).transpose(2, 0, 1)[None]
        logits = session.run(None, {"input": chw})[0][0]
        powers = np.exp(logits - logits.max())
        found[image] = LABELS[int(logits.argmax())], pytest.approx(float(powers.max() / powers.sum()), abs=2e-4)
    assert len({round(score.expected, 3) for _, score in found.values()}) > 50  # a wrong answer would be seen
    return found


SHARES = np.linspace(0.2, 0.8, 200)


def test_answers_of_twenty_clients_do_not_cross(service: Process, wanted: dict[bytes, Any]):
    images = list(wanted)

    def work(index: int) -> None:
        order = random.Random(index).choices(images, k=100)
        with Client(service.port, *FRAMINGS[index % 4]) as client:
            for outcome, image in zip(client.infer_many(order[:60]), order, strict=False):
                assert (outcome.result.label, outcome.result.score) == wanted[image]
            for image in order[60:]:
                assert client.infer_batch(image) == wanted[image]
            outputs = client.infer({"data": IDL.Value(bytes=images[0])})
            assert (outputs["label"].text, outputs["score"].number) == wanted[images[0]]

    in_threads(20, work)


@pytest.mark.parametrize("transport", [TBufferedTransport, TFramedTransport])
@pytest.mark.parametrize(
    "protocol", [TBinaryProtocol, TBinaryProtocolAccelerated, TCompactProtocol, TCompactProtocolAccelerated]
)
def test_every_protocol_of_the_apache_library(service: Process, transport, protocol):
    opened = transport(TSocket("127.0.0.1", service.port))
    spoken = protocol(opened)
    opened.open()
    for seqid in (1, -1, 2**31 - 1):
        spoken.writeMessageBegin("ping", 1, seqid)
        spoken.writeStructBegin("ping_args")
        spoken.writeFieldStop()
        spoken.writeStructEnd()
        spoken.writeMessageEnd()
        opened.flush()
        assert spoken.readMessageBegin() == ("ping", 2, seqid)
        spoken.readStructBegin()
        assert spoken.readFieldBegin()[1] == 0
        spoken.readStructEnd()
        spoken.readMessageEnd()
    opened.close()


def test_the_client_with_nothing_but_a_socket(service: Process, wanted: dict[bytes, Any], tmp_path: Path):
    (tmp_path / "none.jpg").write_bytes(b"no image")
    label, score = wanted[IMAGES[3].read_bytes()]
    with reserved_port() as nobody:
        for image, port, said in (
            (IMAGES[3], service.port, f"{label} {score.expected:.3f}"),
            (tmp_path / "none.jpg", service.port, "socket_client: decode_error: "),
            (tmp_path / "nowhere.jpg", service.port, "nowhere.jpg"),
            (RING, nobody, "refused"),
        ):
            command = [
                sys.executable,
                "-I",
                "-S",
                str(ROOT / "scripts/socket_client.py"),
                str(image),
                "--port",
                str(port),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert said in done.stdout + done.stderr
            assert (done.returncode, len((done.stdout + done.stderr).splitlines())) == (image != IMAGES[3], 1)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SILENT + 500:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SILENT + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_silent_connections_beside_busy_ones(service: Process, wanted: dict[bytes, Any]):
    silent = [connect(service.port) for _ in range(SILENT)]

    def ping(socks: list[Any]) -> None:
        for sock in socks:
            sock.sendall(pack_call("ping"))
        for sock in socks:
            with sock.makefile("rb") as stream:
                assert stream.read(17) == b"\x80\x01\0\x02\0\0\0\x04ping\0\0\0\x01\0"

    def work(index: int) -> None:
        with Client(service.port, *FRAMINGS[index % 4]) as client:
            for path in IMAGES[index % 5 :: 5]:
                assert client.infer_batch(path.read_bytes()) == wanted[path.read_bytes()]

    ping(silent[::2])
    in_threads(BUSY, work)
    ping(silent)
    for sock in silent:
        sock.close()


# -- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def curl(*arguments: str) -> bytes:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    command = ["curl", "-sS", "-m", str(WAIT), "--noproxy", "*", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=2 * WAIT, check=False)
    if b"libcurl version doesn't support" in done.stderr:
        pytest.skip("this curl was built without what the test asks of it")
    assert done.returncode == 0, done.stderr
    return done.stdout


BODY = ["--data-binary", f"@{RING}"]


@pytest.mark.parametrize(
    "arguments",
    [
        BODY,
        ["-F", f"data=@{RING}", "-F", "outputs=result"],
        ["-F", f"data=@{RING}", "-F", "conf=0.3", "-F", "box=[1, 1, 3, 3]"],
        ["-T", str(RING), "-X", "POST"],
        ["-H", "Transfer-Encoding: chunked", *BODY],
        ["-H", "Expect: 100-continue", *BODY],
        ["--http1.0", *BODY],
        ["--http2", *BODY],
        ["--request-target", "http://b/infer", *BODY],
    ],
)
def test_curl(demo: LocalServer, arguments: list[str]):
    answer = curl(*arguments, f"http://127.0.0.1:{demo.port}/infer")
    assert json.loads(answer)["label"] == "ring"
    assert answer.endswith(b"}\n")


def test_curl_keeps_its_connection(demo: LocalServer):
    urls, quietly = [f"http://127.0.0.1:{demo.port}/infer"] * 3, ["-o", "/dev/null"] * 3
    assert curl(*quietly, "-w", "%{num_connects} ", *BODY, *urls) == b"1 0 0 "


HAPROXY = """
global
    maxconn 100
defaults
    mode http
    timeout connect 30s
    timeout client 30s
    timeout server 30s
    http-reuse always
    option http-keep-alive
frontend entry
    bind 127.0.0.1:{port}
    default_backend service
backend service
    option httpchk GET /v2/health/ready
    server only 127.0.0.1:{service} check inter 100ms rise 1 fall 1000
"""


@pytest.fixture(params=["", "haproxy"])
def url(request: Any, demo: LocalServer, tmp_path: Path) -> Iterator[str]:
    """Of the service, and of HAProxy before it, which shares its connections to the service among its clients."""
    if not request.param:
        yield f"http://127.0.0.1:{demo.port}"
        return
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed")
    with reserved_port() as port:
        config = tmp_path / "haproxy.cfg"
        config.write_text(HAPROXY.format(port=port, service=demo.port))
        process = subprocess.Popen(["haproxy", "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: _is_up(f"http://127.0.0.1:{port}"), "haproxy does not answer")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(WAIT)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_httpx(demo: LocalServer, url: str):
    """One connection for all requests, after errors too; then many at once."""
    image = RING.read_bytes()
    good: list[dict[str, Any]] = [
        {"content": image},
        {"content": iter([image[:100], image[100:]])},
        {"content": image, "headers": {"Expect": "100-continue"}},
        {"files": {"data": ("a.jpg", image, "image/jpeg")}},
        {"files": {"data": image}, "data": {"outputs": "result"}},
        {"json": {"inputs": {"data": {"b64": base64.b64encode(image).decode()}}}},
    ]
    with httpx.Client(base_url=url, timeout=WAIT, trust_env=False) as client:
        for request in good:
            assert client.post("/infer", **request).json()["label"] == "ring"
        for response, status in (
            (client.post("/infer", content=b"no image"), 400),
            (client.get("/infer"), 405),
            (client.post("/nothing", content=bytes(10**5)), 404),
            (client.head("/openapi.json"), 200),
            (client.options("/infer"), 405),
        ):
            assert response.status_code == status
        assert client.post("/infer", **good[0]).json()["label"] == "ring"
        assert len(client._transport._pool.connections) == 1

    async def ask_all() -> list[Any]:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=2 * WAIT, trust_env=False) as client:
            return await asyncio.gather(*(client.post("/infer", content=path.read_bytes()) for path in IMAGES))

    expected = demo.run([{"data": path.read_bytes()} for path in IMAGES])
    assert [tuple(one.json().values()) for one in asyncio.run(ask_all())] == [each["result"] for each in expected]


def test_the_detector():
    import_code(str(ROOT / "configs/examples/backends.py"))
    image = (ROOT / "configs/examples/scenes/scene_00.jpg").read_bytes()
    with serving("configs/detector.toml") as server:
        expected = server.run({"data": image})["result"]
        answer = httpx.post(f"http://127.0.0.1:{server.port}/infer", content=image, timeout=WAIT, trust_env=False)
    assert [each["label"] for each in answer.json()["result"]] == [each["label"] for each in expected] != []

"""Clients that nobody here wrote, against the demo: Apache Thrift, thriftpy2, a bare socket, curl, httpx, HAProxy."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
from kit.clients import FRAMINGS, IDL, Client
from kit.services import ROOT, LocalServer, Process, reserved_port, serving
from kit.waits import WAIT, in_threads

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

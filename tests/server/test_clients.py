"""Clients that nobody here wrote, against the demo: thriftpy2, a bare socket, curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.clients import FRAMINGS, IDL, Client
from kit.services import ROOT, LocalServer, SteeredProcess, reserved_port, serving
from kit.waits import WAIT, in_threads, run

RING = ROOT / "configs/demo/images/ring_00.jpg"


def test_answers_of_twenty_clients_do_not_cross(tmp_path: Path):
    """Each request is another text, which comes back as its label."""

    def work(index: int) -> None:
        texts = [f"{index} {number}" for number in range(100)]
        with Client(service.port, *FRAMINGS[index % 4]) as client:
            outcomes = client.infer_many([text.encode() for text in texts[:60]])
            labels = [outcome.result.label for outcome in outcomes]
            labels += [client.infer_batch(text.encode())[0] for text in texts[60:80]]
            labels += [client.infer({"data": IDL.Value(text=text)})["label"].text for text in texts[80:]]
            assert labels == texts

    with SteeredProcess(tmp_path, "--workers", "2") as service:
        service.wait_started()
        in_threads(20, work)


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def test_answers_a_bare_socket(demo: LocalServer, tmp_path: Path):
    (tmp_path / "none.jpg").write_bytes(b"no image")
    demo.run(wanted := {"data": RING.read_bytes()})
    label, score = wanted["result"]
    with reserved_port() as nobody:
        for image, port, said in (
            (RING, demo.port, f"{label} {score:.4f}"),
            (tmp_path / "none.jpg", demo.port, "socket_client: decode_error: "),
            (tmp_path / "nowhere.jpg", demo.port, "nowhere.jpg"),
            (RING, nobody, "refused"),
        ):
            done = run(sys.executable, "-I", "-S", "scripts/socket_client.py", image, "--port", port, cwd=ROOT)
            printed = done.stdout + done.stderr
            assert (said in printed, len(printed.splitlines())) == (True, 1)
            assert done.returncode == (not said.startswith(label))


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
        ["-F", f"data=@{RING}", "-F", "color=bgr", "-F", "priority=1"],
        ["-T", str(RING), "-X", "POST"],
        ["-H", "Transfer-Encoding: chunked", *BODY],
        ["-H", "Expect: 100-continue", *BODY],
        ["--http1.0", *BODY],
        ["--http2", *BODY],
        ["--request-target", "http://b/infer", *BODY],
    ],
)
def test_answers_curl(demo: LocalServer, arguments: list[str]):
    answer = curl(*arguments, f"http://127.0.0.1:{demo.port}/infer")
    assert json.loads(answer)["label"] == "ring"
    assert answer.endswith(b"}\n")

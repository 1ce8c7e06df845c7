"""An encrypted model in the service: served, described, reloaded with another key, and nowhere on the disk."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import encode, picture
from kit.clients import Client, HttpClient
from kit.encrypted import NAME, classifier, encrypt
from kit.services import Process
from kit.waits import eventually

from torchpipe_py import pipe

JPEG = encode(picture(8, 8))
CONFIG = """
[node]
backend = "S[DecodeMat,Mat2Tensor,OnnxTensor]"
color = "bgr"
model = "m.onnx.enc"
key_file = "m.onnx.key"
mean = "1, 2, 3"
std = "255"
postprocessor = "SoftmaxMax"
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For all that the service writes. Its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def score_of(config: Path) -> float:
    with pipe(config) as run:
        run(data := {"data": JPEG})
    return float(data["result"][1])


def put(folder: Path, model: str, key: bytes) -> None:
    """Replace what ``CONFIG`` names by another model, encrypted with another key."""
    made = folder / "next"
    made.mkdir()
    for file in encrypt(model, key, made).values():
        os.replace(file, folder / f"m.onnx{Path(file).suffix}")
    made.rmdir()


def open_files(pid: int) -> Iterator[bytes]:
    """The regular files that a process has open, deleted ones as well."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = Path(f"/proc/{pid}/fd/{name}")
        with suppress(FileNotFoundError):  # closed meanwhile
            if stat.S_ISREG(path.stat().st_mode):
                yield path.read_bytes()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux shows what a process has open")
def test_served_and_reloaded_with_another_key(tmp_path: Path, scratch: Path) -> None:
    config = tmp_path / "served.toml"
    config.write_text(CONFIG, encoding="utf-8")
    models = [classifier(tmp_path / f"{seed}.onnx", seed) for seed in range(2)]
    assert all(NAME.encode() in Path(model).read_bytes() for model in models)
    keys = [bytes(range(seed, seed + 32)) for seed in (100, 200)]
    wanted = []
    for model, key in reversed(list(zip(models, keys, strict=True))):
        put(tmp_path, model, key)
        wanted.insert(0, score_of(config))
    assert abs(wanted[0] - wanted[1]) > 0.001

    places = {name: str(scratch) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME")}
    with Process(config=str(config), env=places) as process, Client(process.wait_started().port) as client:
        assert client.infer_batch(JPEG)[1] == pytest.approx(wanted[0])
        with HttpClient(process.port) as http:
            http.send(b"GET /v2/models/served HTTP/1.1\r\nhost: x\r\n\r\n")
            assert [tensor["name"] for tensor in json.loads(http.read().body)["outputs"]] == ["label", "score"]

        put(tmp_path, models[1], keys[1])
        process.signal(signal.SIGHUP)
        eventually(lambda: client.infer_batch(JPEG)[1] == pytest.approx(wanted[1]))

        (tmp_path / "m.onnx.key").write_text(keys[0].hex())
        process.signal(signal.SIGHUP)
        eventually(lambda: "m.onnx.key is not the key that it was encrypted with" in process.stderr)
        eventually(lambda: len(process.workers) == 1)
        assert client.infer_batch(JPEG)[1] == pytest.approx(wanted[1]), "the worker that runs goes on"

        (worker,) = process.workers
        assert int(Path(f"/proc/{worker}/coredump_filter").read_text(), 16) == 0
        held = [content for pid in (process.pid, worker) for content in open_files(pid)]
        written = [path.read_bytes() for path in scratch.rglob("*") if path.is_file()]
        process.signal()
        assert process.wait() == 0
    for content in (*held, *written, (tmp_path / "m.onnx.enc").read_bytes(), process.stderr.encode()):
        assert NAME.encode() not in content

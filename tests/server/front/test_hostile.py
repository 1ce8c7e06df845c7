"""Requests made to break a service cost their sender only: the worker lives, its memory stays, a neighbour goes on."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.clients import Load
from kit.clients import IDL, Client
from kit.monitored import cpu_seconds
from kit.pictures import IEND, bmp, gif, idat, ihdr, png_of, saved, with_scans
from kit.services import ROOT, Process
from kit.waits import eventually

JPEG = (ROOT / "configs/demo/images/ring_00.jpg").read_bytes()
MEBIBYTE = 2**20
SIDE = 9000  # squared, a little more than max_pixels


def claiming(data: bytes, marker: bytes) -> bytes:
    """The JPEG with another size in its frame header."""
    at = data.index(marker) + 5
    return data[:at] + struct.pack(">HH", SIDE, SIDE) + data[at + 4 :]


IMAGES = {
    # OpenCV 5.0 reads beyond its memory.
    "crash": png_of([
        ihdr(31, 24), (b"acTL", struct.pack(">II", 3, 0)), (b"IDAT", b""),
        (b"fcTL", struct.pack(">IIIIIHHBB", 3, 31, 24, 0, 0, 10, 1000, 0, 0)), (b"I\x7f\xff\xff", b""),
    ]),
    "gif": gif(SIDE, SIDE),
    "bmp": bmp(SIDE, SIDE, 8, 1, data=bytes(1024) + b"\0\1"),
    "png": png_of([ihdr(SIDE, SIDE, 1, 0), idat(SIDE * (SIDE // 8 + 1)), IEND]),
    "jpeg": claiming(saved("JPEG"), b"\xff\xc0"),
    "progressive jpeg": claiming(saved("JPEG", progressive=True), b"\xff\xc2"),
    "scans": with_scans(saved("JPEG", 512, 512, progressive=True), 200),
    "hdr": b"#?RGBE\nFORMAT=32-bit_rle_rgbe\n\n-Y 400000 +X 400000\n" + bytes(MEBIBYTE),
}  # fmt: skip


def infer(inputs: dict[str, Any], uuid: str = "u", **options: Any) -> tuple[str, dict[str, Any]]:
    given = {"data": IDL.Value(bytes=JPEG), **inputs}
    return "infer", {"request": IDL.InferRequest(uuid=uuid, inputs=given, **options)}


def tensor(shape: list[int], data: bytes = b"") -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype="uint8", shape=shape, data=data))


LONG = "x" * 2000
VALUE = IDL.Value(integer=1)
MESSAGES = {
    "thousands of sizes": infer({"data": tensor([2**63 - 1] * 65_000)}),
    "dimensions": infer({"data": tensor([0] * 33)}),
    "uuid": infer({}, LONG),
    "a huge node name": infer({}, node_name="\0" * (15 * MEBIBYTE)),
    "node name among the inputs": infer({"node_name": IDL.Value(bytes=bytes(MEBIBYTE))}),
    "name of an input": infer({LONG: VALUE}),
    "inputs": infer({str(index): VALUE for index in range(600)}),
    "an output's name": infer({}, outputs=[LONG]),
    "outputs": infer({"t": tensor([MEBIBYTE], bytes(MEBIBYTE))}, outputs=["t"] * 30_000),
    "tensors": infer({"data": IDL.Value(tensors=[tensor([0]).tensor] * 600)}),
    "images": ("infer_many", {"params": [IDL.InferenceParams(uuid="u", data=b"")] * 300}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenCV's temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with Process(env={"OPENCV_TEMP_PATH": str(folder)}) as process:
        with Client(process.wait_started().port) as client:
            client.infer_batch(JPEG)
        yield process


@pytest.fixture
def neighbour(process: Process) -> Iterator[None]:
    """A client that calls all the time. Nothing happens to it, nor to the worker."""
    workers = process.workers
    peak, used = peak_bytes(workers[0]), cpu_seconds(workers[0])
    with Load(process.port, 1, lambda *_: (JPEG, ("ring", 1.0)), rate=100, judge=lambda answer, _: answer[0]) as load:
        yield
        eventually(load.served("ring", 2))
    assert set(load.tally.ends) == {"ring"}
    assert process.workers == workers
    assert cpu_seconds(workers[0]) - used < 10.0, "so long a neighbour had to wait"
    assert peak_bytes(workers[0]) - peak < 64 * MEBIBYTE


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("name", IMAGES)
def test_refuses_unusual_image(process: Process, neighbour: None, folder: Path, name: str):
    with Client(process.port) as client:
        params = IDL.InferenceParams(uuid="u", data=IMAGES[name])
        assert client.error_of("infer_batch", params=params).code == "decode_error"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", MESSAGES)
def test_refuses_message_of_too_many_items(process: Process, neighbour: None, name: str):
    method, args = MESSAGES[name]
    with Client(process.port) as client:
        error = client.error_of(method, **args)
    assert error.code in ("too_large", "invalid_request", "unknown_node")
    assert len(error.message) < 1200
    assert name != "images" or error.message == "300 images in one call; the limit is 256 (--max-batch)"

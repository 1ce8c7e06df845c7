"""Requests made to break a service cost their sender only: the worker lives, its memory stays, a neighbour goes on."""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.clients import IDL, Client
from kit.services import ROOT, Process
from kit.waits import eventually
from pictures import IEND, bmp, gif, idat, ihdr, png_of, saved, with_scans

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


def infer(inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"request": IDL.InferRequest(uuid="u", inputs={"data": IDL.Value(bytes=JPEG), **inputs}, **options)}


def tensor(shape: list[int], data: bytes) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype="uint8", shape=shape, data=data))


MESSAGES = {
    "dimensions": ("infer", infer({"data": tensor([2**63 - 1] * 65_000, b"")})),
    "node name": ("infer", infer({}, node_name="\0" * (15 * MEBIBYTE))),
    "outputs": ("infer", infer({"t": tensor([MEBIBYTE], bytes(MEBIBYTE))}, outputs=["t"] * 30_000)),
    "images": ("infer_many", {"params": [IDL.InferenceParams(uuid="u", data=b"")] * 2000}),
}


class Neighbour:
    """A client that calls all the time: how often it was answered, and what was not answered as it should be."""

    def __init__(self, port: int) -> None:
        self.calls, self.errors = 0, []
        self.port, self.is_over = port, threading.Event()
        self.thread = threading.Thread(target=self._call_on)
        self.thread.start()

    def _call_on(self) -> None:
        with Client(self.port) as client:
            while not self.is_over.wait(0.005):
                try:
                    assert client.infer_batch(JPEG)[0] == "ring"
                except Exception as error:
                    self.errors.append(repr(error))
                    if not isinstance(error, IDL.InferenceError):
                        return
                self.calls += 1

    def close(self) -> None:
        self.is_over.set()
        self.thread.join()


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
def neighbour(process: Process) -> Iterator[Neighbour]:
    """Nothing happens to it, nor to the worker."""
    workers = process.workers
    peak, used = peak_bytes(workers[0]), cpu_seconds(workers[0])
    neighbour = Neighbour(process.port)
    try:
        yield neighbour
        before = neighbour.calls
        eventually(lambda: neighbour.calls >= before + 2 or not neighbour.thread.is_alive())
    finally:
        neighbour.close()
    assert neighbour.errors == []
    assert process.workers == workers
    assert cpu_seconds(workers[0]) - used < 10.0, "so long a neighbour had to wait"
    assert peak_bytes(workers[0]) - peak < 64 * MEBIBYTE


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_is_no_usual_one_is_refused(process: Process, neighbour: Neighbour, folder: Path, name: str):
    with Client(process.port) as client:
        params = IDL.InferenceParams(uuid="u", data=IMAGES[name])
        assert client.error_of("infer_batch", params=params).code == "decode_error"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_too_much_is_refused(process: Process, neighbour: Neighbour, name: str):
    method, args = MESSAGES[name]
    with Client(process.port) as client:
        error = client.error_of(method, **args)
    assert error.code in ("too_large", "invalid_request")
    assert len(error.message) < 1200

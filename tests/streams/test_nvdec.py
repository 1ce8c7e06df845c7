"""Streams decoded by a GPU, which is replaced: the input of PyNvVideoCodec, and files that it cannot decode."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from kit.videos import GOP, HEIGHT, WIDTH, write_video

from torchpipe_py import ItemBackend, Registry, pipe
from torchpipe_py.backends.cuda import cuda_device
from torchpipe_py.streams import Streams, nvdec
from torchpipe_py.streams import source as source_module

av = pytest.importorskip("av")

FRAMES = 2 * GOP


class Seen(ItemBackend):
    """Shape, colour and mean of an image."""

    def forward_item(self, item):
        item["result"] = tuple(item["data"].shape), item["color"], float(item["data"].float().mean())


class Decoder:
    """Gives for each packet a frame one packet later, as the real one; all of them have the same memory."""

    made = 0
    broken: tuple[int, ...] = ()
    size = (HEIGHT, WIDTH)

    def __init__(self, **options):
        type(self).made += 1
        self.image = torch.zeros(3, *self.size, dtype=torch.uint8)
        self.waiting = []

    def Decode(self, packet):  # noqa: N802 - the library's name
        number = round(packet.pts * 25 / 12_800) if packet.bsl else None
        if number in self.broken:
            raise RuntimeError("cannot be decoded")
        done, self.waiting = self.waiting, [] if number is None else [packet.pts]
        for pts in done:
            yield SimpleNamespace(
                getPTS=lambda pts=pts: pts,
                __dlpack_device__=self.image.__dlpack_device__,
                **{"__dlpack__": self.image.fill_(round(pts * 25 / 12_800)).__dlpack__},
            )


@pytest.fixture
def library(monkeypatch):
    """A library in place of PyNvVideoCodec, and no CUDA."""
    decoder = type("FakeDecoder", (Decoder,), {})
    kinds = SimpleNamespace(H264=4, LOW=1, NATIVE=0, RGBP=2, ENDOFSTREAM=1, ENDOFPICTURE=8)
    names = ("cudaVideoCodec", "DisplayDecodeLatencyType", "OutputColorType", "VideoPacketFlag")
    packet = type("PacketData", (), {})
    module = SimpleNamespace(CreateDecoder=decoder, PacketData=packet, **dict.fromkeys(names, kinds))
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", module)
    monkeypatch.setattr(nvdec, "cuda_device", lambda number: torch.device("cpu", number))
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return decoder


def play(path, **options):
    """The frames of a file that a GPU is to decode, and what the stream counts."""
    registry = Registry()
    registry.register_backend(Seen)
    tables = {"a": {"source": str(path), "keep": "all", "decoder": "pynvvideocodec", **options}}
    with pipe({"backend": "Seen"}, registry=registry) as run, Streams(run, tables) as streams:
        return list(streams), streams.stats()["a"]


def h264(path):
    return write_video(path, [10 * number for number in range(FRAMES)], "libx264")


@pytest.mark.parametrize(
    ("broken", "given", "decoders"),
    [
        ((), range(FRAMES), 1),
        ((3,), [0, 1, *range(GOP, FRAMES)], 2),
        ((GOP + 1,), range(GOP), 1),
    ],
)
def test_frames_own_their_memory_and_resume_at_key_frames(library, tmp_path, broken, given, decoders):
    library.broken = broken
    frames, _ = play(h264(tmp_path / "a.mp4"))
    assert [round(25 * frame.pts) for frame in frames] == list(given)
    assert [frame.result for frame in frames] == [((1, 3, HEIGHT, WIDTH), "rgb", float(number)) for number in given]
    assert library.made == decoders


def test_refuses_undecodable_file_and_large_frames(library, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "MOST_BROKEN", 1)
    library.broken = tuple(range(1000))
    frames, stats = play(h264(tmp_path / "a.mp4"))
    assert not frames
    assert stats["last_error"] == "2 packets in a row cannot be decoded: cannot be decoded"
    library.broken, library.size = (), (2, 2**24 + 1)
    frames, stats = play(tmp_path / "a.mp4")
    assert not frames
    assert "frames of 16777217x2 pixels" in stats["last_error"]


def test_stream_fails_on_missing_gpu(library, tmp_path, monkeypatch):
    monkeypatch.setattr(nvdec, "cuda_device", cuda_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    frames, stats = play(h264(tmp_path / "a.mp4"), device_id=7)
    assert (frames, stats["state"]) == ([], "failed")
    assert stats["last_error"] == "device_id = 7: there are 1 CUDA devices, counted from 0"


@pytest.mark.parametrize(("codec", "why"), [("mpeg4", "mpeg4 of format yuv420p"), ("libx264", "PyNvVideoCodec")])
def test_cpu_decodes_files_that_the_gpu_cannot(library, tmp_path, monkeypatch, caplog, codec, why):
    if codec == "libx264":
        monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = write_video(tmp_path / "a.mp4", [10 * number for number in range(FRAMES)], codec)
    frames, _ = play(path)
    assert [frame.number for frame in frames] == list(range(FRAMES))
    assert {frame.result[:2] for frame in frames} == {((1, 3, HEIGHT, WIDTH), "rgb")}
    assert [frame.result[2] for frame in frames] == pytest.approx([10 * n for n in range(FRAMES)], abs=7)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("stream 'a': decoded on the CPU: ")
    assert why in line

"""Streams decoded by a GPU, which is replaced: the input of PyNvVideoCodec, and files that it cannot decode."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.videos import GOP, HEIGHT, TURNS, WIDTH, picture, turn_clip, write_clip, write_video

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
    latencies: tuple[int, ...] = ()
    flags: frozenset[int] = frozenset()

    def __init__(self, **options):
        type(self).made += 1
        type(self).latencies += (options["latency"],)
        self.image = torch.zeros(3, *self.size, dtype=torch.uint8)
        self.waiting = []

    def Decode(self, packet):  # noqa: N802 - the library's name
        type(self).flags |= {packet.decode_flag}
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


class Stored(Decoder):
    """Gives for each packet the same frame at once, as it is stored."""

    image = picture(WIDTH, HEIGHT)

    def __init__(self, **options):
        self.tensor = torch.from_numpy(self.image[..., ::-1].transpose(2, 0, 1).copy())

    def Decode(self, packet):  # noqa: N802
        if packet.bsl:
            pts, tensor = packet.pts, self.tensor
            ways = {"__dlpack__": tensor.__dlpack__, "__dlpack_device__": tensor.__dlpack_device__}
            yield SimpleNamespace(getPTS=lambda: pts, **ways)


@pytest.mark.parametrize("name", TURNS)
def test_frames_of_the_gpu_are_upright(library, tmp_path, monkeypatch, name):
    """The display matrix is in the container, which PyAV reads."""
    matrix, upright = TURNS[name]
    image = Stored.image
    monkeypatch.setattr(sys.modules["PyNvVideoCodec"], "CreateDecoder", Stored)
    path = turn_clip(write_clip(tmp_path / "a.mp4", image, "libx264", frames=5), matrix)
    table = {"source": str(path), "keep": "all", "decoder": "pynvvideocodec"}
    with pipe({"backend": "Identity"}) as run, Streams(run, {"a": table}) as streams:
        frames = list(streams)
    assert [round(25 * frame.pts) for frame in frames] == list(range(5))
    for frame in frames:
        assert frame.image.is_contiguous()
        assert np.array_equal(frame.image[0].permute(1, 2, 0).numpy()[..., ::-1], upright(image))


def test_frames_of_the_gpu_without_time_stamps_have_those_of_the_nominal_rate(library, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["PyNvVideoCodec"], "CreateDecoder", Stored)
    frames, _ = play(write_clip(tmp_path / "a.h264", Stored.image, "libx264", frames=5))
    assert [frame.pts for frame in frames] == pytest.approx([number / 25 for number in range(5)])


@pytest.mark.parametrize(("is_live", "latency", "flags"), [(False, 0, {0, 1}), (True, 1, {8, 1})])
def test_only_live_streams_ask_for_low_latency(library, tmp_path, is_live, latency, flags):
    play(h264(tmp_path / "a.mp4"), live=is_live)
    assert (library.latencies, library.flags) == ((latency,), flags)


def test_broken_packets_count_in_a_row(library, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "MOST_BROKEN", 1)
    library.broken = (3, GOP + 3)
    frames, stats = play(h264(tmp_path / "a.mp4"))
    assert [round(25 * frame.pts) for frame in frames] == [0, 1, GOP, GOP + 1]
    assert stats["state"] == "ended"


def test_cpu_decodes_ten_bits(library, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    frames, _ = play(write_clip(tmp_path / "a.mp4", Stored.image, "libx264", "yuv420p10le", 2))
    assert len(frames) == 2
    assert "h264 of format yuv420p10le" in caplog.text

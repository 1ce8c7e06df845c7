"""Which of nvImageCodec's decoders gets which image, with a stand-in for the library; tests/gpu has the real one."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from kit.locks import WatchedLock
from kit.waits import WAIT, eventually

from torchpipe_py import BackendUnavailable, DecodeError
from torchpipe_py.backends.image import gpujpeg, nvimgcodec
from torchpipe_py.backends.image.nvimgcodec import NvImageCodec

CPU = torch.device("cpu")
STREAM = SimpleNamespace(cuda_stream=77)
TRIAL = [b"2x2", b"2x2"]


ENGINES, CORES = ("HW_GPU_ONLY",), ("GPU_ONLY", "HYBRID_CPU_GPU")
GARBAGE = 99  # in memory that was given back, and in what was decoded by half


class Picture:
    """The library's image: its memory is another one as soon as it does not suffice, and the former is given back."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.shape = (3, 0, 0)

    def lay_out(self, height: int, width: int) -> None:
        self.shape = (3, height, width)
        if 3 * height * width > self.capacity:
            self.memory.fill_(GARBAGE)
            self.memory = torch.empty(3 * height * width, dtype=torch.uint8)

    @property
    def capacity(self) -> int:
        return self.memory.numel()

    @property
    def pixels(self) -> torch.Tensor:
        return self.memory[: 3 * self.shape[1] * self.shape[2]].view(self.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self.pixels.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


class Library(ModuleType):
    """Images are named ``HxW`` or ``HxWxV``, followed by what alone can decode them.

    Their pixels are V, or 0 by the engines and 1 by the cores. ``poison`` fails every image of the engines' call that
    it is in.
    """

    __version__ = "1.2"
    SampleFormat = SimpleNamespace(P_RGB="P_RGB")
    ColorSpec = SimpleNamespace(SRGB="SRGB")
    BackendKind = SimpleNamespace(**{kind: kind for kind in ENGINES + CORES})

    def __init__(self) -> None:
        super().__init__("nvimgcodec")
        self.works = {ENGINES: True, CORES: True}
        self.calls: list[tuple[str, list[bytes]]] = []
        self.made: list[dict[str, Any]] = []
        self.kept: list[tuple[Any, int]] = []
        self.pictures: weakref.WeakSet[Picture] = weakref.WeakSet()

    def DecodeParams(self, **params: Any) -> dict[str, Any]:  # noqa: N802
        return params

    def Backend(self, kind: str) -> str:  # noqa: N802
        return kind

    def Decoder(self, device_id: Any, max_num_cpu_threads: int, backends: Sequence[str], options: str) -> Any:  # noqa: N802
        kinds = tuple(backends)
        name = "engines" if kinds == ENGINES else "cores"
        assert kinds in self.works
        self.made.append({"device_id": device_id, "max_num_cpu_threads": max_num_cpu_threads})
        assert options == ":fancy_upsampling=1"

        def decode(encoded: list[bytes], params: dict[str, Any], cuda_stream: int, images: Any = None) -> list[Any]:
            if images is not None and len(images) != len(encoded):
                raise ValueError("Size mismatch")
            assert params == {"apply_exif_orientation": False, "color_spec": "SRGB", "sample_format": "P_RGB"}
            assert cuda_stream == STREAM.cuda_stream
            self.calls.append((name, encoded))
            pairs = zip(encoded, images or [None] * len(encoded), strict=True)
            images = [self._image(content.decode(), name, image) for content, image in pairs]
            if not self.works[kinds] or (name == "engines" and b"poison" in encoded and len(encoded) > 1):
                return [None] * len(encoded)
            return images

        return SimpleNamespace(decode=decode)

    def _image(self, text: str, name: str, image: Picture | None) -> Picture | None:
        size, *able = text.split()
        if size == "poison":
            return None
        if size == "raises":
            raise RuntimeError("no memory")
        height, width, *value = map(int, size.split("x"))
        image = image or Picture()
        self.pictures.add(image)
        image.lay_out(height, width)
        fails = able and name not in able
        image.pixels.fill_(GARBAGE if fails else value[0] if value else name == "cores")
        return None if fails else image


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library, package = Library(), ModuleType("nvidia")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", library)
    monkeypatch.setattr(nvimgcodec, "_keep_memory", lambda device, size: library.kept.append((device, size)))
    return library


@pytest.fixture
def codec(library: Library) -> NvImageCodec:
    """One that has started; ``library.calls`` begins after that."""
    made = NvImageCodec(CPU, STREAM, TRIAL)
    library.calls.clear()
    return made


def described(images: list[Any]) -> list[Any]:
    """Height, width and the one value of each, or its error."""
    for image in images:
        assert isinstance(image, DecodeError) or (image.shape[:2] == (1, 3) and image.min() == image.max())
    return [str(image) if isinstance(image, DecodeError) else (*image.shape[2:], int(image.max())) for image in images]


# -- which decoder ----------------------------------------------------------------------------------------------------


def test_cores_decode_only_files_that_engines_refuse(library: Library, codec: NvImageCodec) -> None:
    assert library.made == [{"device_id": None, "max_num_cpu_threads": 1}] * 2
    assert library.kept == [(CPU, 2**28)]
    images = codec.decode([b"2x3", b"4x5 cores", b"2x3", b"6x7 nothing", b"4x5 cores"])
    problem = "11 bytes: nvImageCodec cannot decode them (PYNVIMGCODEC_VERBOSITY=2 makes it say why)"
    assert described(images) == [(2, 3, 0), (4, 5, 1), (2, 3, 0), problem, (4, 5, 1)]
    assert library.calls == [
        ("engines", [b"2x3", b"4x5 cores", b"2x3", b"6x7 nothing", b"4x5 cores"]),
        *(("engines", [content]) for content in (b"4x5 cores", b"6x7 nothing", b"4x5 cores")),
        ("cores", [b"4x5 cores", b"6x7 nothing", b"4x5 cores"]),
        ("cores", [b"6x7 nothing"]),
    ]
    library.calls.clear()
    assert described(codec.decode([b"2x3", b"4x5"])) == [(2, 3, 0), (4, 5, 0)]
    assert library.calls == [("engines", [b"2x3", b"4x5"])]
    first, second, third = described(codec.decode([b"2x3", b"poison", b"4x5"]))
    assert (first, third) == ((2, 3, 0), (4, 5, 0)), "one that fails the whole call harms the others"
    assert second.startswith("6 bytes: nvImageCodec cannot decode them")


def test_without_engines_it_decodes_on_the_cores_and_logs_that(library: Library, caplog: Any) -> None:
    """They may be missing, which is logged, or switched off, which is not."""
    unwanted = gpujpeg.DECODERS["nvimgcodec_cuda"](CPU, STREAM, TRIAL)
    assert caplog.messages == []
    library.works[ENGINES] = False
    missing = NvImageCodec(CPU, STREAM, TRIAL)
    assert caplog.messages == ["nvImageCodec 1.2 finds no JPEG engines on cpu, and decodes on its cores"]
    for codec in (unwanted, missing):
        library.calls.clear()
        assert not codec.uses_engines
        assert described(codec.decode([b"2x3", b"4x5"])) == [(2, 3, 1), (4, 5, 1)]
        assert library.calls == [("cores", [b"2x3", b"4x5"])]


# -- images that the next call decodes into ---------------------------------------------------------------------------


def test_images_are_decoded_into_again_and_results_are_copies(
    library: Library, codec: NvImageCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped: list[Any] = []
    as_tensor = codec._as_tensor
    monkeypatch.setattr(
        codec, "_as_tensor", lambda image, device: wrapped.append(image) or as_tensor(image, device=device)
    )
    batches = [[b"2x3x4", b"2x3x5"], [b"2x3x6", b"2x3x7"], [b"2x3x8"]]
    results = [codec.decode(batch) for batch in batches]
    assert list(map(described, results)) == [[(2, 3, 4), (2, 3, 5)], [(2, 3, 6), (2, 3, 7)], [(2, 3, 8)]]
    assert len(wrapped) == 2, "a tensor is made of an image only if its size changes"
    batches = [[b"2x3x4", b"3x2x5"], [b"3x2x6", b"3x2x7"], [b"9x8x8", b"1x1x9"], [b"3x2x1", b"1x6x2"]]
    results = [codec.decode(batch) for batch in batches]
    expected = [[(2, 3, 4), (3, 2, 5)], [(3, 2, 6), (3, 2, 7)], [(9, 8, 8), (1, 1, 9)], [(3, 2, 1), (1, 6, 2)]]
    assert list(map(described, results)) == expected
    assert len(library.pictures) == 2
    for count in (1, 5, 3, 5):  # more than the trial had
        assert described(codec.decode([b"2x3x4"] * count)) == [(2, 3, 4)] * count
    assert len(library.pictures) == 5


@pytest.mark.parametrize("bad", [b"9x9 nothing", b"2x3 nothing", b"poison"])
def test_does_not_reuse_image_of_failed_decoding(library: Library, bad: bytes) -> None:
    codec = NvImageCodec(CPU, STREAM, [b"2x2"] * 3)
    codec.decode([b"2x3x4"] * 3)
    before = list(library.pictures)
    first, failed, third = codec.decode([b"2x3x5", bad, b"2x3x6"])
    second = codec.decode([b"2x3x7", b"2x3x8", b"2x3x9"])
    assert isinstance(failed, DecodeError)
    assert described([first, third]) == [(2, 3, 5), (2, 3, 6)]
    assert described(second) == [(2, 3, 7), (2, 3, 8), (2, 3, 9)]
    assert len(set(library.pictures) - set(before)) == 1


# -- the library ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("works", {ENGINES: False, CORES: False}, "cannot decode a small JPEG"),
        ("Decoder", lambda **options: SimpleNamespace(decode=lambda *given, **more: []), r"0\.9 or newer is needed"),
        ("SampleFormat", SimpleNamespace(), r"0\.9 or newer is needed, and nvJPEG: .*P_RGB"),
        (
            "Decoder",
            MagicMock(side_effect=RuntimeError("no driver\nand more")),
            r"1\.2 does not work here; .*: no driver$",
        ),
    ],
    ids=["decodes nothing", "leaves images out", "other names", "raises"],
)
def test_broken_library_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, value: Any, message: str
) -> None:
    monkeypatch.setattr(library, name, value)
    with pytest.raises(BackendUnavailable, match=message):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_missing_library_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BackendUnavailable, match=r"pip install 'nvidia-nvimgcodec-cu13\[nvjpeg\]>=0\.9'\)"):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_instances_that_are_set_up_in_parallel_leave_stderr_as_it_was(
    monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    monkeypatch.delitem(sys.modules, "nvidia.nvimgcodec")
    second_is_there, first_is_ready = threading.Event(), threading.Event()
    imports: list[str] = []
    monkeypatch.setattr(nvimgcodec, "_importing", WatchedLock(second_is_there.set))

    def slow_import(name: str) -> Library:
        imports.append(name)
        if len(imports) == 1:
            assert second_is_there.wait(WAIT), "here, or at the lock"
        else:
            second_is_there.set()
            first_is_ready.wait(WAIT)
        sys.modules[name] = library
        return library

    def first() -> None:
        NvImageCodec(CPU, STREAM, TRIAL)
        first_is_ready.set()

    monkeypatch.setattr(nvimgcodec, "importlib", SimpleNamespace(import_module=slow_import))
    before, kept = os.fstat(2), os.dup(2)
    try:
        threads = [threading.Thread(target=first), threading.Thread(target=NvImageCodec, args=(CPU, STREAM, TRIAL))]
        for thread in threads:
            thread.start()
            eventually(lambda: imports)
        for thread in threads:
            thread.join(WAIT)
        assert os.path.samestat(os.fstat(2), before)
        assert "PYNVIMGCODEC_VERBOSITY" not in os.environ
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Fallback:
    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None:
        if not trial:
            raise BackendUnavailable("nor does this")


def test_falls_back_to_torchvision(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(gpujpeg, "Torchvision", Fallback)
    assert isinstance(gpujpeg.best_decoder(CPU, STREAM, TRIAL), NvImageCodec)
    library.works = {ENGINES: False, CORES: False}
    assert isinstance(gpujpeg.best_decoder(CPU, STREAM, TRIAL), Fallback)
    with pytest.raises(BackendUnavailable, match=r"nvImageCodec 1\.2 does not work here.*; nor does this"):
        gpujpeg.best_decoder(CPU, STREAM, [])

"""Which of nvImageCodec's decoders gets which image, with a stand-in for the library; tests/gpu has the real one."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torchpipe_py import BackendUnavailable, DecodeError
from torchpipe_py.backends.images import nvimgcodec, nvjpeg
from torchpipe_py.backends.images.nvimgcodec import NvImageCodec

CPU = torch.device("cpu")
STREAM = SimpleNamespace(cuda_stream=77)
TRIAL = [b"2x2", b"2x2"]
VERBOSITY = "PYNVIMGCODEC_VERBOSITY"

ENGINES, CORES = ("HW_GPU_ONLY",), ("GPU_ONLY", "HYBRID_CPU_GPU")


class Library(ModuleType):
    """Images are named ``HxW``, with what alone can decode them behind; the engines' pixels are 0.

    ``poison`` fails every image of the engines' call that it is in.
    """

    __version__ = "1.2"
    SampleFormat = SimpleNamespace(P_RGB="P_RGB")
    ColorSpec = SimpleNamespace(SRGB="SRGB")
    BackendKind = SimpleNamespace(**{kind: kind for kind in ENGINES + CORES})

    def __init__(self, has_engines: bool = True, has_cores: bool = True) -> None:
        super().__init__("nvimgcodec")
        self.works = {ENGINES: has_engines, CORES: has_cores}
        self.calls: list[tuple[str, list[bytes]]] = []
        self.made: list[dict[str, Any]] = []
        self.kept: list[tuple[Any, int]] = []

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

        def decode(encoded: list[bytes], params: dict[str, Any], cuda_stream: int) -> list[Any]:
            assert params == {"apply_exif_orientation": False, "color_spec": "SRGB", "sample_format": "P_RGB"}
            assert cuda_stream == STREAM.cuda_stream
            self.calls.append((name, encoded))
            if not self.works[kinds] or (name == "engines" and b"poison" in encoded and len(encoded) > 1):
                return [None] * len(encoded)
            return [self._image(content.decode(), name) for content in encoded]

        return SimpleNamespace(decode=decode)

    def _image(self, text: str, name: str) -> Any:
        size, *able = text.split()
        if size == "poison" or (able and name not in able):
            return None
        height, width = map(int, size.split("x"))
        return torch.full((3, height, width), 0 if name == "engines" else 1, dtype=torch.uint8)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return installed(monkeypatch, Library())


def installed(monkeypatch: pytest.MonkeyPatch, library: Library) -> Library:
    package = ModuleType("nvidia")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", library)
    monkeypatch.setattr(nvimgcodec, "_keep_memory", lambda device, size: library.kept.append((device, size)))
    return library


def described(images: list[Any]) -> list[Any]:
    return [str(image) if isinstance(image, DecodeError) else (*image.shape[2:], int(image.max())) for image in images]


def test_the_cores_get_only_what_the_engines_do_not_take(library: Library) -> None:
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    library.calls.clear()
    images = codec.decode([b"2x3", b"4x5 cores", b"2x3", b"6x7 nothing", b"4x5 cores"])
    problem = "11 bytes: nvImageCodec cannot decode them (PYNVIMGCODEC_VERBOSITY=2 makes it say why)"
    assert described(images) == [(2, 3, 0), (4, 5, 1), (2, 3, 0), problem, (4, 5, 1)]
    assert library.calls == [
        ("engines", [b"2x3", b"4x5 cores", b"2x3", b"6x7 nothing", b"4x5 cores"]),
        *(("engines", [content]) for content in (b"4x5 cores", b"6x7 nothing", b"4x5 cores")),
        ("cores", [b"4x5 cores", b"6x7 nothing", b"4x5 cores"]),
        ("cores", [b"6x7 nothing"]),
    ]


def test_what_the_engines_take_whole_is_one_call(library: Library) -> None:
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    library.calls.clear()
    assert described(codec.decode([b"2x3", b"4x5"])) == [(2, 3, 0), (4, 5, 0)]
    assert library.calls == [("engines", [b"2x3", b"4x5"])]


def test_the_librarys_images_live_until_the_next_call(library: Library) -> None:
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    image, given = library._image, []
    library._image = lambda text, name: given.append(weakref.ref(made := image(text, name))) or made  # type: ignore[method-assign]
    codec.decode([b"2x3", b"4x5"])
    assert all(reference() is not None for reference in given)
    first, _ = given
    codec.decode([b"2x3"])
    assert first() is None


def test_an_image_that_fails_the_whole_call_harms_nobody(library: Library) -> None:
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    first, second, third = described(codec.decode([b"2x3", b"poison", b"4x5"]))
    assert (first, third) == ((2, 3, 0), (4, 5, 0))
    assert second.startswith("6 bytes: nvImageCodec cannot decode them")


def test_images_are_copies_whether_their_sizes_differ_or_not(library: Library) -> None:
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    given: list[Any] = []
    image = library._image
    library._image = lambda text, name: given.append(image(text, name)) or given[-1]  # type: ignore[method-assign]
    for batch in ([b"2x3"], [b"2x3", b"2x3"], [b"2x3", b"3x2"]):
        given.clear()
        images = codec.decode(batch)
        for array in given:
            array.fill_(9)
        assert [int(image.max()) for image in images] == [0] * len(batch)


def test_a_gpu_without_engines_decodes_on_its_cores_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = installed(monkeypatch, Library(has_engines=False))
    codec = NvImageCodec(CPU, STREAM, TRIAL)
    library.calls.clear()
    assert described(codec.decode([b"2x3"])) == [(2, 3, 1)]
    assert [name for name, _ in library.calls] == ["cores"]
    assert caplog.messages == ["nvImageCodec 1.2 finds no JPEG engines on cpu, and decodes on its cores"]


def test_all_decoders_start_at_setup_with_as_many_images_as_a_batch_has(library: Library) -> None:
    NvImageCodec(CPU, STREAM, TRIAL)
    assert library.calls == [("engines", TRIAL), ("cores", TRIAL)]
    assert library.made == [{"device_id": None, "max_num_cpu_threads": 1}] * 2
    assert library.kept == [(CPU, 2**28)]


def test_the_library_is_silent_and_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(
        nvimgcodec.importlib, "import_module", lambda name: seen.append(os.environ.get(VERBOSITY)) or library
    )
    monkeypatch.delenv(VERBOSITY, raising=False)
    NvImageCodec(CPU, STREAM, TRIAL)
    assert VERBOSITY not in os.environ
    monkeypatch.setenv(VERBOSITY, "3")
    NvImageCodec(CPU, STREAM, TRIAL)
    assert seen == ["0", "3"]
    assert os.environ[VERBOSITY] == "3"


@pytest.mark.parametrize(("before", "after"), [(0, 2**20), (2**20 - 1, 2**20), (2**40, 2**40)])
def test_a_pool_keeps_at_least_so_much(monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    threshold = before

    def get_pool(pool: Any, device: int) -> int:
        assert device == 3
        pool._obj.value = 5
        return 0

    def get(pool: Any, attribute: int, value: Any) -> int:
        assert (pool.value, attribute) == (5, 4)
        value._obj.value = threshold
        return 0

    def put(pool: Any, attribute: int, value: Any) -> int:
        nonlocal threshold
        assert (pool.value, attribute) == (5, 4)
        threshold = value._obj.value
        return 0

    cuda = SimpleNamespace(cuDeviceGetDefaultMemPool=get_pool, cuMemPoolGetAttribute=get, cuMemPoolSetAttribute=put)
    monkeypatch.setattr(nvimgcodec.ctypes, "CDLL", lambda name: cuda)
    nvimgcodec._keep_memory(torch.device("cuda", 3), 2**20)
    assert threshold == after


def test_a_library_that_decodes_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Library(has_engines=False, has_cores=False))
    with pytest.raises(BackendUnavailable, match="cannot decode a small JPEG"):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_an_older_library_that_leaves_images_out_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    monkeypatch.setattr(library, "Decoder", lambda **options: SimpleNamespace(decode=lambda *given, **more: []))
    with pytest.raises(BackendUnavailable, match=r"0\.9 or newer is needed"):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_a_library_of_other_names_is_unavailable(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(library, "SampleFormat", SimpleNamespace())
    with pytest.raises(BackendUnavailable, match=r"0\.9 or newer is needed, and nvJPEG: .*P_RGB"):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_no_memory_is_no_reason_to_go_on_without_the_gpu(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    def fail(**options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(library, "Decoder", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_a_library_that_fails_is_unavailable(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    def fail(**options: Any) -> None:
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(library, "Decoder", fail)
    with pytest.raises(
        BackendUnavailable,
        match=r"nvImageCodec 1\.2 does not work here; 0\.9 or newer is needed, and nvJPEG: no driver$",
    ):
        NvImageCodec(CPU, STREAM, TRIAL)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BackendUnavailable, match=r"pip install 'nvidia-nvimgcodec-cu13\[nvjpeg\]>=0\.9'\)"):
        NvImageCodec(CPU, STREAM, TRIAL)


# -- where nobody says which library ----------------------------------------------------------------------------------


class Fallback:
    def __init__(self, device: Any, stream: Any, trial: Sequence[bytes]) -> None:
        if not trial:
            raise BackendUnavailable("nor does this")


def test_it_comes_before_torchvision(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg, "Torchvision", Fallback)
    assert isinstance(nvjpeg.best_decoder(CPU, STREAM, TRIAL), NvImageCodec)


def test_torchvision_takes_its_place_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg, "Torchvision", Fallback)
    installed(monkeypatch, Library(has_engines=False, has_cores=False))
    assert isinstance(nvjpeg.best_decoder(CPU, STREAM, TRIAL), Fallback)
    with pytest.raises(BackendUnavailable, match=r"nvImageCodec 1\.2 does not work here.*; nor does this"):
        nvjpeg.best_decoder(CPU, STREAM, [])

"""The engine cache and the settings of TensorrtTensor, as far as they go without TensorRT."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.waits import WAIT, eventually

from torchpipe_py import BackendUnavailable, ConfigError
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.engine import build as engine_build
from torchpipe_py.backends.model.engine.api import MODULES, load_tensorrt
from torchpipe_py.backends.model.engine.build import EngineCache, EngineSpec, cached_engine
from torchpipe_py.backends.model.normalisation import Normalisation

SPEC = EngineSpec(model="m.onnx", onnx=b"model", least=to_bounds(1), most=to_bounds(4))
TRT = SimpleNamespace(__version__="8.6.0", Builder=None)
GPU = "a GPU, compute capability 9.0"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """TensorRT's part replaced: an engine is ``engine of …``; the list holds what was built."""
    made: list[str] = []

    def build(trt: Any, spec: EngineSpec, cache: EngineCache | None) -> tuple[str, bytes]:
        made.append(spec.precision)
        content = b"engine of " + spec.onnx
        return content.decode(), content

    def load(trt: Any, content: bytes, name: str, version_compatible: bool = False) -> str:
        if not content.startswith(b"engine of "):
            raise ConfigError(f"{name}: cannot load this engine")
        return content.decode()

    monkeypatch.setattr(engine_build, "new_engine", build)
    monkeypatch.setattr(engine_build, "load_engine", load)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4, (((4,),),)),
        ("4", (((4,),),)),
        ("4x3x224x224", (((4, 3, 224, 224),),)),
        ("1;8", (((1,),), ((8,),))),
        ("4x3x8x8,4x10", (((4, 3, 8, 8), (4, 10)),)),
        (["4x3", "4x2"], (((4, 3), (4, 2)),)),
    ],
)
def test_parses_ranges(value: Any, expected: Any) -> None:
    assert to_bounds(value).profiles == expected
    assert to_bounds(str(to_bounds(value))) == to_bounds(value)


@pytest.mark.parametrize("value", ["", "0", "x", "4x", "4,5", "1;", "4x3x-1", 1.5, True])
def test_refuses_invalid_ranges(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|one batch size"):
        to_bounds(value)


def test_built_once_then_loaded(tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "new folder" / "m.trt")
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert built == ["fp16"]
    assert sorted(file.name for file in Path(path).parent.iterdir()) == ["m.trt", "m.trt.key", "m.trt.lock"]
    for _ in range(2):  # without a cache
        cached_engine(TRT, SPEC, "", GPU)
    assert len(built) == 3
    assert "no model::cache is given" in caplog.text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"onnx": b"other"}, "ONNX model was"),
        ({"precision": "fp32"}, "precision was fp16, is fp32"),
        ({"fp32_layers": ("conv",)}, "precision::fp32 was"),
        ({"most": to_bounds(8)}, "max was"),
        ({"least": to_bounds(2)}, "min was"),
        ({"normalisation": Normalisation(mean=(1.0,))}, "mean was"),
        ({"normalisation": Normalisation(std=(1.0,))}, "std was"),
        ({"workspace": 2}, "workspace was 1024, is 2"),
        ({"version_compatible": True}, "version_compatible was False, is True"),
        ({"gpu": "another"}, "GPU was a GPU, compute capability 9.0, is another"),
        ({"trt": SimpleNamespace(__version__="10.0", Builder=None)}, "TensorRT was 8.6.0, is 10.0"),
    ],
)
def test_any_change_rebuilds_and_is_named(tmp_path: Path, built: Any, caplog: Any, change: Any, word: str) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    trt, gpu = change.get("trt", TRT), change.get("gpu", GPU)
    changed = {name: value for name, value in change.items() if name not in ("trt", "gpu")}
    cached_engine(trt, replace(SPEC, **changed), path, gpu)
    assert len(built) == 2
    assert f"stale: {word}" in caplog.text


def unhashed(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["engine"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("m.trt", lambda path: path.write_bytes(path.read_bytes()[:5])),
        ("m.trt", lambda path: path.write_bytes(b"engine of something else")),
        ("m.trt.key", Path.unlink),
        ("m.trt.key", lambda path: path.write_text("[1, 2]")),
        ("m.trt.key", unhashed),
        ("m.trt", lambda path: EngineCache(str(path)).store(b"of a broken driver", SPEC.key(TRT, GPU))),
    ],
)
def test_a_damaged_cache_is_never_loaded(tmp_path: Path, built: list[str], name: str, damage: Any) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    damage(tmp_path / name)
    for _ in range(2):
        assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert len(built) == 2


def test_refuses_unwritable_or_irregular_cache_file(tmp_path: Path, built: list[str]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "link.lock").symlink_to(victim)
    os.mkfifo(tmp_path / "fifo.lock")
    for path, problem in (
        (victim / "m.trt", "model::cache: cannot write"),
        (tmp_path / "link", "model::cache: cannot write beside"),
        (tmp_path / "fifo", "not a regular file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            cached_engine(TRT, SPEC, str(path), GPU)
    assert victim.read_text() == "precious"
    assert built == []


@pytest.mark.parametrize("name", ["m.trt", "m.trt.key", "m.trt.PID.tmp", "m.trt.key.PID.tmp"])
def test_a_link_beside_a_cache_is_not_followed(tmp_path: Path, built: list[str], name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / name.replace("PID", str(os.getpid()))
    link.symlink_to(victim)
    cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)
    assert victim.read_text() == "precious"
    assert link.is_symlink() == name.endswith(".tmp")


def test_cache_files_are_writable_by_owner_only(tmp_path: Path, built: list[str]) -> None:
    before = os.umask(0)
    try:
        cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"m.trt": 0o644, "m.trt.key": 0o644, "m.trt.lock": 0o600}


@pytest.mark.parametrize("is_built", [False, True])
def test_refuses_engine_that_others_could_have_written(tmp_path: Path, built: list[str], is_built: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = str(folder / "m.trt")
    if is_built:
        cached_engine(TRT, SPEC, path, GPU)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="every user of this machine can write in"):
        cached_engine(TRT, SPEC, path, GPU)
    folder.chmod(0o1777)  # sticky, as /tmp
    cached_engine(TRT, SPEC, path, GPU)
    Path(path).chmod(0o666)
    with pytest.raises(ConfigError, match="every user of this machine can write it"):
        cached_engine(TRT, SPEC, path, GPU)
    assert built == ["fp16"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_engine_of_another_user_is_refused(tmp_path: Path, built: list[str]) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="it belongs to another user, uid 12345"):
        cached_engine(TRT, SPEC, path, GPU)
    os.chown(tmp_path, 12345, -1)  # whose folder it is, him the configuration trusts
    cached_engine(TRT, SPEC, path, GPU)


def test_only_one_builds_an_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has a descriptor, as another process has."""
    cache, entered = EngineCache(str(tmp_path / "m.trt")), threading.Event()

    def enter() -> None:
        with cache.locked():
            entered.set()

    thread = threading.Thread(target=enter)
    with cache.locked():
        thread.start()
        eventually(lambda: "another process is at it, waiting" in caplog.text)
        assert not entered.is_set()
    assert entered.wait(WAIT)
    thread.join()


# -- what is missing ----------------------------------------------------------------------------------------------


def test_a_missing_broken_or_old_tensorrt_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendUnavailable, match="TensorRT is not installed"):
        load_tensorrt()
    monkeypatch.delitem(sys.modules, "tensorrt")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.8: cannot open')")
    with pytest.raises(BackendUnavailable, match=r"cannot be loaded: libnvinfer.so.8: cannot open"):
        load_tensorrt()
    (tmp_path / "tensorrt.py").unlink()
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="8.4.3"))
    with pytest.raises(BackendUnavailable, match=r"TensorRT 8.4.3 is too old"):
        load_tensorrt()

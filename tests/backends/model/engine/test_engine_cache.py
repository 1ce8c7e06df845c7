"""The engine cache and the settings of TensorrtTensor, as far as they go without TensorRT."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fakes import PROGRAM_WAIT, WAIT, eventually

from torchpipe_py import BackendUnavailable, ConfigError, pipe
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.engine import build as engine_build
from torchpipe_py.backends.model.engine.api import MODULES, load_tensorrt
from torchpipe_py.backends.model.engine.build import EngineCache, EngineSpec, cached_engine
from torchpipe_py.backends.model.engine.precision import half_model
from torchpipe_py.backends.model.onnx_graph import model_bytes
from torchpipe_py.encryption.model_file import ModelFile

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
def test_ranges(value: Any, expected: Any) -> None:
    assert to_bounds(value).profiles == expected
    assert to_bounds(str(to_bounds(value))) == to_bounds(value)


@pytest.mark.parametrize("value", ["", "0", "x", "4x", "4,5", "1;", "4x3x-1", 1.5, True])
def test_what_is_no_range(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|one batch size"):
        to_bounds(value)


def test_built_once_then_loaded(tmp_path: Path, built: list[str]) -> None:
    path = str(tmp_path / "new folder" / "m.trt")
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert built == ["fp16"]
    assert sorted(file.name for file in Path(path).parent.iterdir()) == ["m.trt", "m.trt.key", "m.trt.lock"]


def test_without_a_cache_it_is_built_each_time(built: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        cached_engine(TRT, SPEC, "", GPU)
    assert len(built) == 2
    assert "no model::cache is given" in caplog.text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"onnx": b"other"}, "ONNX model was"),
        ({"precision": "fp32"}, "precision was fp16, is fp32"),
        ({"fp32_layers": ("conv",)}, "precision::fp32 was"),
        ({"most": to_bounds(8)}, "max was"),
        ({"least": to_bounds(2)}, "min was"),
        ({"mean": (1.0,)}, "mean was"),
        ({"std": (1.0,)}, "std was"),
        ({"workspace": 2}, "workspace was 1024, is 2"),
        ({"version_compatible": True}, "version_compatible was False, is True"),
    ],
)
def test_any_change_rebuilds_and_is_named(
    tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture, change: dict[str, Any], word: str
) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    cached_engine(TRT, replace(SPEC, **change), path, GPU)
    assert len(built) == 2
    assert f"stale: {word}" in caplog.text


@pytest.mark.parametrize("key", [(TRT, "another GPU"), (SimpleNamespace(__version__="10.0", Builder=None), GPU)])
def test_another_machine_rebuilds(tmp_path: Path, built: list[str], key: tuple[Any, str]) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    cached_engine(key[0], SPEC, path, key[1])
    assert len(built) == 2


def _cut(cache: EngineCache) -> None:
    cache.path.write_bytes(cache.path.read_bytes()[:5])


def _foreign(cache: EngineCache) -> None:
    cache.path.write_bytes(b"engine of something else")


def _no_key(cache: EngineCache) -> None:
    cache.key_path.unlink()


def _bad_key(cache: EngineCache) -> None:
    cache.key_path.write_text("[1, 2]")


def _unhashed_key(cache: EngineCache) -> None:
    content = json.loads(cache.key_path.read_text())
    del content["engine"]
    cache.key_path.write_text(json.dumps(content))


@pytest.mark.parametrize("damage", [_cut, _foreign, _no_key, _bad_key, _unhashed_key])
def test_a_damaged_cache_is_never_loaded(
    tmp_path: Path, built: list[str], damage: Callable[[EngineCache], None]
) -> None:
    path = str(tmp_path / "m.trt")
    cached_engine(TRT, SPEC, path, GPU)
    damage(EngineCache(path))
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert cached_engine(TRT, SPEC, path, GPU) == "engine of model"
    assert len(built) == 2


def test_an_engine_that_tensorrt_refuses_is_rebuilt(tmp_path: Path, built: list[str]) -> None:
    cache = EngineCache(str(tmp_path / "m.trt"))
    cache.store(b"written by a broken driver", SPEC.key(TRT, GPU))
    assert cached_engine(TRT, SPEC, str(cache.path), GPU) == "engine of model"
    assert built == ["fp16"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, built: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="model::cache: cannot write"):
        cached_engine(TRT, SPEC, str(tmp_path / "file" / "m.trt"), GPU)
    assert built == []


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that somebody who can write beside the cache would like to see overwritten."""
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def test_a_link_at_the_lock_is_refused(tmp_path: Path, victim: Path, built: list[str]) -> None:
    (tmp_path / "m.trt.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="model::cache: cannot write beside"):
        cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["m.trt", "m.trt.key", "m.trt.PID.tmp", "m.trt.key.PID.tmp"])
def test_a_link_beside_a_cache_is_not_followed(tmp_path: Path, victim: Path, built: list[str], name: str) -> None:
    link = tmp_path / name.replace("PID", str(os.getpid()))
    link.symlink_to(victim)
    cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)
    assert victim.read_text() == "precious"
    assert link.is_symlink() == name.endswith(".tmp")


def test_a_fifo_at_the_lock_is_refused(tmp_path: Path, built: list[str]) -> None:
    os.mkfifo(tmp_path / "m.trt.lock")
    with pytest.raises(ConfigError, match="no regular file"):
        cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)


def test_nobody_else_may_write_what_is_kept(tmp_path: Path, built: list[str]) -> None:
    before = os.umask(0)
    try:
        cached_engine(TRT, SPEC, str(tmp_path / "m.trt"), GPU)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"m.trt": 0o644, "m.trt.key": 0o644, "m.trt.lock": 0o600}


@pytest.mark.parametrize("is_built", [False, True])
def test_an_engine_that_others_could_have_written_is_refused(tmp_path: Path, built: list[str], is_built: bool) -> None:
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


def test_the_lock_keeps_a_second_one_waiting(tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "m.trt")
    inside, go_on = threading.Event(), threading.Event()
    quick = engine_build.new_engine

    def slow(*args: Any) -> tuple[Any, bytes]:
        inside.set()
        assert go_on.wait(WAIT)
        return quick(*args)

    monkeypatch.setattr(engine_build, "new_engine", slow)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(cached_engine(TRT, SPEC, path, GPU))) for _ in range(2)]
    threads[0].start()
    assert inside.wait(WAIT)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(WAIT)
    assert results == ["engine of model"] * 2
    assert built == ["fp16"]


def _hold(path: str, held: Any, go_on: Any) -> None:
    with EngineCache(path).locked():
        held.set()
        go_on.wait(WAIT)


def test_the_lock_holds_between_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("spawn")
    path, held, go_on = str(tmp_path / "m.trt"), context.Event(), context.Event()
    other = context.Process(target=_hold, args=(path, held, go_on))
    other.start()
    assert held.wait(PROGRAM_WAIT)
    entered = threading.Event()

    def enter() -> None:
        with EngineCache(path).locked():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    eventually(lambda: "another process is at it, waiting" in caplog.text)
    assert not entered.is_set()
    go_on.set()
    assert entered.wait(WAIT)
    thread.join()
    other.join()


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_unavailable(classifier: str) -> None:
    with pytest.raises(BackendUnavailable, match="PyTorch finds no CUDA device"):
        pipe({"backend": "TensorrtTensor", "model": classifier})


@pytest.mark.parametrize(
    ("more", "message"),
    [({"max": "1;4"}, "min has 1 profile, max has 2"), ({"min": 4}, "min = 4 is larger than max = 1")],
)
def test_ranges_that_do_not_fit(classifier: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe({"backend": "TensorrtTensor", "model": classifier, **more})


# -- half precision for strongly typed networks -------------------------------------------------------------------


def test_a_model_in_half_precision_is_near_and_keeps_its_inputs_and_outputs(classifier: str) -> None:
    content = model_bytes(ModelFile(classifier), (10.0, 20.0, 30.0), (50.0,))
    half = half_model(content, ())
    model = onnx.load_from_string(half)
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.FLOAT16 in types
    full, small = (onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]) for model in (content, half))
    (given,) = full.get_inputs()
    shape = [dim if isinstance(dim, int) else 2 for dim in given.shape]
    feed = {given.name: np.random.default_rng(0).uniform(0, 255, shape).astype(np.float32)}
    expected, result = full.run(None, feed)[0], small.run(None, feed)[0]
    assert result.dtype == np.float32
    assert np.linalg.norm(result - expected) < 1e-2 * np.linalg.norm(expected)


def test_layers_that_stay_in_fp32_must_exist(classifier: str) -> None:
    content = model_bytes(ModelFile(classifier), (), ())
    name = onnx.load_from_string(content).graph.node[0].name or "none"
    with pytest.raises(ConfigError, match="precision::fp32: no layer"):
        half_model(content, (f"{name}x",))

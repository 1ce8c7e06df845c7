"""The engine cache on a GPU: built once, loaded after, rebuilt when anything it depends on changes."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.encrypted import encrypt
from kit.gpu import needs_tensorrt, photo
from test_tensorrt import small_model

from torchpipe_py import ConfigError, pipe
from torchpipe_py.files import ENCRYPTED

pytestmark = [needs_tensorrt, pytest.mark.timeout(400)]

Start = Callable[..., bool]


def config_in(folder: Path) -> dict[str, Any]:
    return {
        "backend": "SyncTensor[TensorrtTensor]",
        "model": str(folder / "small.onnx"),
        "max": 4,
        "instance_num": 3,
        "model::cache": str(folder / "cache" / "small.trt"),
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model and the cache of its engine, to be copied: a build takes seconds."""
    folder = tmp_path_factory.mktemp("built")
    small_model(folder / "small.onnx")
    with pipe(config_in(folder)):
        return folder / "cache"


@pytest.fixture
def cached(built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Start:
    """Starts a pipe whose engine is in the cache, makes one call, and says whether an engine was built."""

    def start_pipe(**more: Any) -> bool:
        config = {**config_in(tmp_path), **more}
        caplog.clear()
        with caplog.at_level(logging.WARNING), pipe(config) as run:
            assert "result" in run({"data": photo(8, 8, 0)})
        return "building it from" in caplog.text

    shutil.copytree(built, tmp_path / "cache")
    small_model(tmp_path / "small.onnx")
    return start_pipe


def test_changed_or_damaged_engines_are_rebuilt(
    cached: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change once; ``test_engine_cache`` has them all."""
    assert not cached()
    assert cached(precision="fp32")
    assert "stale: precision was fp16, is fp32" in caplog.text
    assert not cached(precision="fp32")
    small_model(tmp_path / "small.onnx", seed=1)
    assert cached()
    engine = tmp_path / "cache" / "small.trt"
    engine.write_bytes(engine.read_bytes()[:-1])
    assert cached()
    assert not cached()


def test_the_cache_of_an_encrypted_model_is_encrypted(cached: Start, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    keys = encrypt(tmp_path / "small.onnx")
    cache = str(tmp_path / "secret" / "small.trt")
    assert cached(**{**keys, "model::cache": cache})
    assert not cached(**{**keys, "model::cache": cache})
    assert not cached(), "that of the plain model is another one"
    kept = {path.name: path.read_bytes() for path in Path(cache).parent.iterdir() if not path.name.endswith(".lock")}
    assert sorted(kept) == ["small.trt", "small.trt.key", "small.trt.timing"]
    for content in kept.values():
        assert content.startswith(ENCRYPTED)
        assert b"positive" not in content, "what flows between two layers"
    key = Path(keys["key_file"])
    encrypt(tmp_path / "small.onnx", bytes(range(32)))
    assert cached(**{**keys, "model::cache": cache}), "of another key"
    assert not cached(**{**keys, "model::cache": cache})
    key.write_text("00" * 32)
    with pytest.raises(ConfigError, match="is not the key that it was encrypted with"):
        cached(**{**keys, "model::cache": cache})


def test_two_processes_build_once(tmp_path: Path) -> None:
    model, cache = small_model(tmp_path / "small.onnx", channels=64), tmp_path / "small.trt"
    code = f"""
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
from torchpipe_py import pipe
with pipe({{"backend": "TensorrtTensor", "model": {model!r}, "max": 4, "model::cache": {str(cache)!r}}}) as run:
    print("ready")
"""
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("building it from" in output for output in outputs) == 1, outputs
    assert all("ready" in output for output in outputs)
    assert sorted(path.name for path in tmp_path.iterdir() if ".tmp" in path.name) == []

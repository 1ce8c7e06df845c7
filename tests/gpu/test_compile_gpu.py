"""The alternatives of ``torchpipe compile`` that need a GPU: they run, and their loss is measured."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from kit.gpu import needs_tensorrt
from test_tensorrt import small_model

from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.tools.compare_models.images import images_of
from torchpipe_py.tools.compare_models.tolerance import Verdict, read_tolerance
from torchpipe_py.tools.compile import compile_config
from torchpipe_py.tools.compile.losses import Losses
from torchpipe_py.tools.tune.candidates import Candidate
from torchpipe_py.tools.tune.pixels import ALTERNATIVES, with_alternative

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
IMAGES = str(ROOT / "configs" / "demo" / "images")


def verdict_of(tables: Tables, name: str, limits: str) -> Verdict | None:
    """What the demo's pictures show about an alternative."""
    (alternative,) = [each for each in ALTERNATIVES if each.name == name]
    with closing(Losses(tables, read_tolerance(limits), IMAGES, images_of(IMAGES), 300.0)) as losses:
        return losses.of(with_alternative(Candidate("file", tables), alternative), 300.0).verdict


def test_gpu_decode_keeps_the_classes_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert verdict_of(parse_toml("configs/demo.toml"), "GPU decode", "top1=0.8") is Verdict.WITHIN


@needs_tensorrt
def test_fp16_keeps_the_results_of_an_engine(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small.onnx", channels=8, size=(16, 16))
    keys = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor,TensorrtTensor]", "resize_h": 16, "resize_w": 16}
    tables = Tables.of({"n": {**keys, "color": "rgb", "model": model, "max": 4, "precision": "fp32", "std": 255}})
    assert verdict_of(tables, "fp16", "cosine=0.99, images=0.8") is Verdict.WITHIN


def test_a_file_is_compiled_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = compile_config("configs/demo.toml", IMAGES, "top1=0.7", tmp_path / "c.toml", budget=120)
    measured = {change["name"]: change for change in report["changes"] if change["loss"]}
    assert measured["GPU decode"]["loss"]["verdict"] == "within"
    assert report["gpu"]

"""Files and calls as the documentation of the C++ library torchpipe shows them; only the models' paths are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchpipe_py import parse_toml, pipe
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.filters import or_
from torchpipe_py.plan.build import Pipeline, plan_pipeline

SERVICE = """
batching_timeout = 5
instance_num = 8
precision = "fp16"
[cpu_decoder]
backend = "DecodeMat"
next = "cpu_posdecoder"
[cpu_posdecoder]
backend = "Sequential[ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]"
resize_h = 224
resize_w = 224
color = "rgb"
next = "resnet50"
[resnet50]
backend = "SyncTensor[TensorrtTensor]"
min = 1
max = 4
instance_num = 4
model = "MODEL"
mean="123.675, 116.28, 103.53" # 255*"0.485, 0.456, 0.406"
std="58.395, 57.120, 57.375" # 255*"0.229, 0.224, 0.225"
"model::cache"="resnet50.trt" # or resnet50.trt.encrypted
"""

TRAIN = """
batching_timeout = 1
instance_num =1
"Interpreter::backend" = "PipelineV3"
[jpg_decoder]
backend = "SyncTensor[ Sequential[DecodeTensor,ResizeTensor,cvtColorTensor] ]"
resize_h = 224
resize_w = 224
color = "rgb"
next = "cpu_decoder"
instance_num =6
[cpu_decoder]
backend = " Sequential[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]  "
filter = "or"
resize_h = 224
resize_w = 224
color = "rgb"
instance_num =8
"""
TEST = (
    TRAIN.replace("batching_timeout = 1", 'batching_timeout = 1\nprecision="fp16"')
    + """
next = "resnet50"
[resnet50]
backend = "SyncTensor[TensorrtTensor]"
max='4'
model = "MODEL"
instance_num = 2
"""
)


@pytest.fixture
def plan(tmp_path: Path, classifier: str) -> Callable[[str], Pipeline]:
    def plan_text(text: str) -> Pipeline:
        path = tmp_path / "torchpipe.toml"
        path.write_text(text.replace("MODEL", classifier), encoding="utf-8")
        config = parse_toml(path)
        for key in config:
            if key != "global":
                config[key]["device_id"] = 0  # as the library's documentation does it
        assert plan_pipeline(config).plans.keys() == plan_pipeline(path).plans.keys()
        return plan_pipeline(config)

    return plan_text


@pytest.mark.parametrize("text", [SERVICE, TRAIN, TEST], ids=["service", "train", "test"])
def test_plans_unchanged_file_of_cpp_library(plan: object, text: str) -> None:
    pipeline = plan(text)  # type: ignore[operator]
    if "jpg_decoder" in pipeline.plans:
        assert pipeline.plans["cpu_decoder"].filter.create() is or_
        assert [pipeline.plans[name].spec.instance_num for name in ("jpg_decoder", "cpu_decoder")] == [(6,), (8,)]
    if "resnet50" in pipeline.plans:
        assert pipeline.plans["resnet50"].batch_range() == (1, 4)
        params = pipeline.plans["resnet50"].backends[0].children[0].params
        assert (params["precision"], params["max_batch"]) == ("fp16", to_bounds(4))


def test_runs_tutorial_file_with_chosen_decoder(classifier: str, jpeg: bytes, tmp_path: Path) -> None:
    path, choice = tmp_path / "tutorial.toml", "FirstAvailable[TensorrtTensor,OnnxTensor]]"
    path.write_text(SERVICE.replace("MODEL", classifier).replace("TensorrtTensor]", choice), encoding="utf-8")
    good, bad = [{"data": data, "node_name": "cpu_decoder"} for data in (jpeg, b"no image")]
    with pipe(path) as run:
        run([good, bad])
        assert (run.max(), run.min()) == (4, 1)
    assert good["result"].shape == (1, 5)  # type: ignore[attr-defined]
    assert "result" not in bad

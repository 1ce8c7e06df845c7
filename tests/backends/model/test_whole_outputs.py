"""Models whose outputs have no batch: with ``max = 1`` an item has them whole, of whatever shape they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register, picture, save_model
from fakes import cpu_as_gpu
from onnx import helper

from torchpipe_py import BackendError, ConfigError, ItemBackend, pipe, register_postprocessor
from torchpipe_py.plan.build import plan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Data = dict[str, Any]

FOUND = [[10.0, 10, 20, 20, 0.9], [11, 10, 21, 20, 0.8], [40, 40, 60, 60, 0.7]]  # the second one overlaps the first
NOTHING = [[10.0, 10, 20, 20, 0.1]] * 3


@pytest.fixture
def detector(tmp_path: Path) -> str:
    """Boxes and scores 1×K×5 in, NMS inside: boxes M×4, scores M, and how many they are, a scalar."""
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["all_boxes", "column"], axis=2),
        helper.make_node("Transpose", ["column"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["all_boxes", "rows", "most", "iou", "least"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "two"], ["indices"], axis=1),
        helper.make_node("Squeeze", ["all_boxes", "zero"], ["flat_boxes"]),
        helper.make_node("Gather", ["flat_boxes", "indices"], ["boxes"]),
        helper.make_node("Reshape", ["column", "all"], ["flat_scores"]),
        helper.make_node("Gather", ["flat_scores", "indices"], ["scores"]),
        helper.make_node("Size", ["indices"], ["size"]),
        helper.make_node("Cast", ["size"], ["count"], to=1),
    ]
    constants = {
        "sizes": np.array([4, 1]),
        "most": np.array([100]),
        "iou": np.array([0.5], np.float32),
        "least": np.array([0.5], np.float32),
        "two": np.array(2),
        "zero": np.array([0]),
        "all": np.array([-1]),
    }
    outputs: dict[str, list[int | str]] = {"boxes": ["M", 4], "scores": ["M"], "count": []}
    return save_model(tmp_path / "detector.onnx", nodes, {"x": ["N", 3, 5]}, outputs, constants)


def reshaped(path: Path, shape: list[int], declared: list[int | str]) -> str:
    """A model of N×4×6 whose output is reshaped."""
    reshape = helper.make_node("Reshape", ["x", "to"], ["y"])
    return save_model(path / "model.onnx", [reshape], {"x": ["N", 4, 6]}, {"y": declared}, {"to": np.array(shape)})


def shapes(item: Data) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in item["result"]]


@pytest.mark.parametrize("more", [{}, {"postprocessor": "cpu"}, {"instance_num": 2}])
def test_a_detector_with_its_nms_inside(detector: str, more: Data) -> None:
    """The shapes differ from call to call, down to no box at all."""
    with pipe({"backend": "OnnxTensor", "model": detector, "max": 1, **more}) as run:
        items = [{"data": torch.tensor([rows])} for rows in (FOUND, NOTHING, FOUND[:1] * 3)]
        run(items)
    assert [shapes(item) for item in items] == [[(2, 4), (2,), ()], [(0, 4), (0,), ()], [(1, 4), (1,), ()]]
    boxes, scores, count = items[0]["result"]
    assert boxes.tolist() == [FOUND[0][:4], FOUND[2][:4]]
    assert scores.tolist() == pytest.approx([0.9, 0.7])
    assert count.item() == 2


def test_no_max_is_a_max_of_one(detector: str) -> None:
    with pipe({"backend": "OnnxTensor", "model": detector}) as run:
        run(item := {"data": torch.tensor(FOUND)})
        assert shapes(item) == [(2, 4), (2,), ()]


@pytest.mark.parametrize(
    ("shape", "declared"),
    [([24], [24]), ([4, 6], [4, 6]), ([-1, 2], ["M", 2]), ([1, 24], ["N", 24]), ([1, 4, 6], [1, 4, 6])],
)
@pytest.mark.parametrize("more", [{}, {"postprocessor": "cpu"}])
def test_an_output_of_any_shape_is_the_items(tmp_path: Path, shape: list[int], declared: Any, more: Data) -> None:
    values = torch.arange(24.0).reshape(1, 4, 6)
    with pipe({"backend": "OnnxTensor", "model": reshaped(tmp_path, shape, declared), **more}) as run:
        run(item := {"data": values})
    assert torch.equal(item["result"], values.reshape(shape))


@pytest.mark.parametrize(("shape", "declared"), [([4, 6], [4, 6]), ([-1], ["M"])])
def test_batches_of_several_say_that_one_at_a_time_will_do(tmp_path: Path, shape: list[int], declared: Any) -> None:
    with pytest.raises(ConfigError, match=r"output 'y' is .*; or set max = 1: an item that runs alone is given the"):
        pipe({"backend": "OnnxTensor", "model": reshaped(tmp_path, shape, declared), "max": 4})


@pytest.mark.parametrize("postprocessor", ["SoftmaxMax", "TopK", "SoftmaxCpu"])
def test_postprocessors_that_need_rows_are_told(tmp_path: Path, postprocessor: str) -> None:
    """What is set already is not proposed."""
    model = reshaped(tmp_path, [-1, 6], ["M", 6])
    with pytest.raises(ConfigError, match=r"output 'y' is 4x6 for one item, so it does not follow the batch") as caught:
        pipe({"backend": "OnnxTensor", "model": model, "postprocessor": postprocessor})
    assert "set max = 1" not in str(caught.value)


@pytest.mark.usefixtures("restored")
def test_a_postprocessor_of_ones_own_gets_the_outputs_whole(detector: str) -> None:
    class Best:
        def init(self, config: Data) -> None:
            assert config["max"] == 1

        def forward(self, outputs: list[torch.Tensor]) -> list[Any]:
            boxes, scores, count = outputs
            assert len(boxes) == len(scores) == count
            return [boxes.tolist()]

    class EachRow:
        def forward(self, outputs: list[torch.Tensor]) -> list[Any]:
            return [row.tolist() for row in outputs[0]]

    register_postprocessor(Best, "best")
    register_postprocessor(EachRow, "each_row")
    config = {"backend": "OnnxTensor", "model": detector}
    with pipe({**config, "postprocessor": "best"}) as run:
        for rows, count in ((FOUND, 2), (NOTHING, 0)):
            run(item := {"data": torch.tensor(rows)})
            assert len(item["result"]) == count
    with (
        pipe({**config, "postprocessor": "each_row"}) as run,
        pytest.raises(BackendError, match="EachRow gave 2 results for 1 item"),
    ):
        run({"data": torch.tensor(FOUND)})


@pytest.mark.parametrize("size", [[8, 10], ["H", "W"]])
def test_an_image_without_a_batch(tmp_path: Path, size: list[int | str]) -> None:
    """As the detectors of torchvision are exported."""
    means = helper.make_node("ReduceMean", ["image"], ["y"], axes=[1, 2], keepdims=0)
    model = save_model(tmp_path / "image.onnx", [means], {"image": [3, *size]}, {"y": [3]})
    mat = picture(8, 10)
    planes = torch.from_numpy(mat).permute(2, 0, 1)
    config = {"backend": "OnnxTensor", "model": model}
    plan_pipeline(config)
    for more, expected in (
        ({}, planes),
        ({"mean": "1, 2, 3", "std": 2}, (planes - torch.tensor([[[1]], [[2]], [[3]]])) / 2),
    ):
        with pipe({**config, **more}) as run:
            for value in (mat, planes, planes[None], planes.float()):
                run(item := {"data": value})
                torch.testing.assert_close(item["result"], expected.float().mean((1, 2)))
            assert [spec.dims[:2] for spec in run.signature().inputs] == [(1, 3)]
    with pytest.raises(ConfigError, match="input 'image' has a fixed batch of 3"):
        pipe({**config, "max": 2})


class Detector(torch.nn.Module):
    """Boxes M×4 and scores M of those above 0.5, and how many they are, of boxes and scores 1×1×K×5."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 2)
        rows = rows[(rows[:, 4] > 0.5).nonzero()[:, 0]]
        return rows[:, :4], rows[:, 4], torch.tensor(rows.shape[0])


@pytest.fixture
def script(tmp_path: Path) -> Data:
    path = tmp_path / "model.pt"
    torch.jit.script(Detector().eval()).save(str(path))
    return {"backend": "TorchTensor", "trusted": True, "model": str(path)}


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("more", [{}, {"postprocessor": "cpu"}])
def test_torchscript(script: Data, more: Data, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, replaced by the CPU here, memory for the outputs on the host is as large as they are."""
    if on_gpu:
        cpu_as_gpu(monkeypatch)
        script["cuda_graph"] = False
    with pipe({**script, **more}) as run:
        for rows, count in ((FOUND, 3), (FOUND[:1] * 5, 5), (FOUND[:1], 1), (NOTHING, 0), (FOUND, 3)):
            run(item := {"data": torch.tensor([[rows]])})
            boxes, scores, found = item["result"]
            assert boxes.tolist() == [row[:4] for row in rows[:count]]
            assert (scores.shape, found.item()) == ((count,), count)
    with pipe({**script, "max": 2}) as run, pytest.raises(BackendError, match="or set max = 1"):
        run({"data": torch.tensor([[FOUND]])})


def test_an_exported_program(tmp_path: Path) -> None:
    class Squeezed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.squeeze(0) * 2, x.sum()

    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Squeezed(), (torch.zeros(1, 3, 5),)), path)
    with pipe({"backend": "TorchTensor", "trusted": True, "model": str(path)}) as run:
        run(item := {"data": torch.ones(1, 3, 5)})
    assert shapes(item) == [(3, 5), ()]


def test_results_are_not_the_memory_of_the_next_call(detector: str) -> None:
    with pipe({"backend": "OnnxTensor", "model": detector}) as run:
        run(first := {"data": torch.tensor(FOUND)})
        kept = [part.clone() for part in first["result"]]
        run({"data": torch.tensor([[1.0, 2, 3, 4, 0.8]] * 3)})
    assert all(map(torch.equal, first["result"], kept))


def test_the_next_node_maps_boxes_back(detector: str, register: Register) -> None:
    class Scale(ItemBackend):
        def forward_item(self, item: Data) -> None:
            boxes, scores, _ = item["data"]
            item["result"] = [
                (box.tolist(), score.item()) for box, score in zip(boxes * item["scale"], scores, strict=True)
            ]

    config = {
        "detect": {"backend": "OnnxTensor", "model": detector, "next": "scale"},
        "scale": {"backend": register(Scale)},
    }
    with pipe(config) as run:
        run(item := {"data": torch.tensor(FOUND), "scale": 2})
        run(none := {"data": torch.tensor(NOTHING), "scale": 2})
    assert item["result"] == [([20, 20, 40, 40], pytest.approx(0.9)), ([80, 80, 120, 120], pytest.approx(0.7))]
    assert none["result"] == []

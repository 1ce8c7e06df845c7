"""Each item gets its own results: models that mix items are refused; with ``max = 1`` outputs have any shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import picture, save_model
from kit.fake_gpu import cpu_as_gpu
from kit.models import Data, answer, batched, one_node, onnx_node, refused, torch_model
from onnx import helper

from torchpipe_py import BackendError, ConfigError, pipe
from torchpipe_py.backends.model.check import EXACT, HALF, QUANTISED, ROWS, BatchCheck
from torchpipe_py.backends.signature import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Run = Callable[[list[np.ndarray]], list[np.ndarray]]

MIXED = "an item's output depends on the rest of its batch: output 'y' differs by"


def node_with(path: Path, kind: str, gives: Any, size: Any = 6, attributes: Any = None, **constants: Any) -> Data:
    """A node of up to four items, whose model has this operator, from N×``size``."""
    more = {"gives": gives, "constants": constants, **(attributes or {})}
    return onnx_node(one_node(path / "model.onnx", ["N", size], kind, *constants, **more), max=4)


@pytest.mark.parametrize(
    ("kind", "gives", "to", "problem"),
    [
        ("Reshape", [1, "M"], [1, -1], r"output 'y' is 1x\? for every batch, but batches here are 1\.\.4"),
        ("Reshape", [4, 6], [4, 6], r"output 'y' is 4x6 for every batch"),
        ("Reshape", ["M"], [-1], r"output 'y' is 6 for one item, .*; or set max = 1: an item that runs alone"),
        ("ReduceSum", [], None, "output 'y' is a scalar for one item, so it does not follow the batch"),
    ],
)
def test_refuses_output_that_does_not_follow_batch(
    tmp_path: Path, kind: str, gives: Any, to: Any, problem: str
) -> None:
    constants = {} if to is None else {"to": to}
    refused(node_with(tmp_path, kind, gives, attributes=None if to else {"keepdims": 0}, **constants), problem)


def test_refuses_batch_that_fails_while_items_succeed(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["z"]), helper.make_node("Add", ["z", "x"], ["y"])]
    dims: Any = ["N", 6]
    config = onnx_node(save_model(tmp_path / "two.onnx", nodes, {"x": dims}, {"y": dims}, {"to": np.array([1, 6])}))
    refused({**config, "max": 4}, r"it takes a batch of 1, but one of 4 fails: .*; export it with a dynamic batch")
    assert answer(config, torch.ones(6))["result"].tolist() == [[2.0] * 6]  # one at a time it is right


MIXES: dict[str, Any] = {
    "softmax over the batch": ("Softmax", {"axis": 0}, {}),
    "cumulative sum": ("CumSum", {}, {"axis": 0}),
    "in another order": ("Slice", {}, {"last": [-1], "first": [-9], "axis": [0], "step": [-1]}),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("size", [6, "D"], ids=["known", "open"])
def test_refuses_models_that_mix_items(tmp_path: Path, name: str, size: int | str) -> None:
    """At loading if the model's shape is known, otherwise with the first request, in a batch of any size."""
    kind, attributes, constants = MIXES[name]
    config = node_with(tmp_path, kind, ["N", size], size, attributes, **constants) | {"instance_num": 2}
    if size == 6:
        refused(config, MIXED)
    else:
        with pipe(config) as run:
            for _ in range(2):
                with pytest.raises(BackendError, match=MIXED):
                    run({"data": torch.arange(6.0)})
        for bounds in ({"max": "4x8"}, {"min": "1x2", "max": "4x8"}):
            refused({**config, **bounds}, MIXED)
    assert answer({**config, "max": 1}, torch.arange(6.0))["result"].shape == (1, 6)


def rows_mix(config: Data) -> bool:
    """What the model is found to be with ``max = 1``: the same for each instance."""
    with pipe({"max": 1, "instance_num": 2, **config}) as run:
        (spec,) = run.signature().inputs
        return bool(spec.rows_mix)


ALIKE: dict[str, Any] = {
    "softmax of each row": ("Softmax", {"axis": 1}, {}),
    "random": ("Dropout", {}, {"ratio": np.float32(0.5), "training": True}),
    "fails for two rows": ("Reshape", {}, {"to": np.array([1, 64])}),
}
"""Models of which it is not known that their rows mix."""


@pytest.mark.parametrize("name", [*MIXES, *ALIKE])
def test_finds_rows_that_mix_if_items_run_alone(tmp_path: Path, name: str) -> None:
    kind, attributes, constants = {**MIXES, **ALIKE}[name]
    config = node_with(tmp_path, kind, ["N", 64], 64, attributes, **constants) | {"max": 1}
    assert rows_mix(config) == (name in MIXES)
    one, two = torch.arange(64.0), torch.arange(128.0).reshape(2, 64)
    assert answer(config, one)["result"].shape == (1, 64)
    error = answer(config, two)["error"]
    assert ("the model's rows depend on each other" in str(error)) == (name in MIXES)


@pytest.mark.parametrize(("gives", "keep"), [([1, 6], 1), ([], 0)], ids=["one row", "a scalar"])
def test_finds_outputs_that_are_of_all_rows_together(tmp_path: Path, gives: Any, keep: int) -> None:
    more = {"axes": [0], "keepdims": keep} if keep else {"keepdims": keep}
    assert rows_mix(onnx_node(one_node(tmp_path / "model.onnx", ["N", 6], "ReduceMax", gives=gives, **more)))


def test_gives_memory_of_two_rows_back_where_items_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[str] = []

    class Options(onnxruntime.RunOptions):  # type: ignore[misc]
        def add_run_config_entry(self, key: str, value: str) -> None:
            entries.append(f"{key} {value}")
            super().add_run_config_entry(key, value)

    monkeypatch.setattr(onnxruntime, "RunOptions", Options)
    assert not rows_mix(node_with(tmp_path, "Relu", ["N", 6]) | {"max": 1})
    assert entries == ["memory.enable_memory_arena_shrinkage cpu:0"]  # once for both instances


class OneRow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, -1)


@pytest.mark.slow
def test_checks_torch_models(tmp_path: Path) -> None:
    """An exported program says its shapes; TorchScript does not, and is tried with the first request."""
    example = torch.zeros(2, 4, 3, 3)
    norm = torch.nn.BatchNorm2d(4, track_running_stats=False)  # statistics of the batch, also in eval()
    for module, told, found in ((norm, "depends on the rest", "depends on"), (OneRow(), "for every batch", "is 1x72")):
        exported = torch_model(tmp_path / "model", module, example, shapes=batched())
        refused({**exported, "max": 4}, told)
        script = torch_model(tmp_path / "model", module) | {"max": 4}
        with pipe(script) as run, pytest.raises(BackendError, match=found):
            run({"data": torch.ones(1, 4, 3, 3)})
    config = torch_model(tmp_path / "one.pt2", torch.nn.ReLU(), torch.zeros(1, 4))
    refused({**config, "max": 4}, r"has a fixed batch of 1, but the range is 1\.\.4; .* or set max = 1$")
    assert answer(config, torch.ones(1, 4))["result"].tolist() == [[1.0] * 4]
    for module, mixes in ((torch.nn.Softmax(0), True), (torch.nn.Softmax(1), False)):
        config = torch_model(tmp_path / "rows", module, torch.zeros(2, 4), shapes=batched())
        assert rows_mix(config) == mixes
        assert ("rows depend on each other" in str(answer(config, torch.ones(2, 4))["error"])) == mixes


# -- what does not mix ----------------------------------------------------------------------------------------------


def test_recognises_random_outputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # So wide that two draws are never the same by chance.
    with pipe(node_with(tmp_path, "Dropout", ["N", 64], 64, ratio=np.float32(0.5), training=True)):
        pass
    assert "gives another output each time for the same input, as random numbers and dropout in training" in caplog.text


def check(run: Run, tolerance: float = EXACT) -> None:
    spec = TensorSpec("x", (None, 3, 4, 4), "float32")
    BatchCheck("m.onnx", ROWS, tolerance, False).require(run, [spec], ["y"], 1, 5)


@pytest.mark.parametrize(("tolerance", "error"), [(EXACT, 1e-4), (HALF, 1e-2), (QUANTISED, 5e-2)])
def test_accepts_rounding_and_refuses_larger_differences(tolerance: float, error: float) -> None:
    def rounding(factor: float) -> Run:
        return lambda inputs: [inputs[0] * (1 + (factor * error if len(inputs[0]) > 1 else 0))]

    check(rounding(1), tolerance)
    with pytest.raises(ConfigError, match=r"model m\.onnx: .* output 'y' differs by .* BatchNorm in training mode"):
        check(rounding(40), tolerance)


def odd_numbers(rows: np.ndarray) -> np.ndarray:
    rows = rows.reshape(len(rows), -1)[:, :3].copy()
    rows[:, 0], rows[:, 1] = np.nan, np.inf
    return rows


def no_memory(rows: np.ndarray) -> np.ndarray:
    if len(rows) > 1:
        raise MemoryError("Unable to allocate 56.1 GiB")
    return rows


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (odd_numbers, ""),
        (lambda rows: odd_numbers(rows) if len(rows) == 1 else np.nan_to_num(odd_numbers(rows)), "differs by inf"),
        (lambda rows: np.zeros((len(rows), len(rows)), np.float32), "output 'y' is 1x5 in a batch, 1x1 alone"),
        (no_memory, "not enough memory for a batch of max = 5: Unable .*; set a smaller max"),
    ],
)
def test_reports_largest_difference_of_a_batch(run: Any, problem: str) -> None:
    if not problem:
        check(lambda inputs: [run(inputs[0])])
        return
    with pytest.raises(ConfigError, match=problem):
        check(lambda inputs: [run(inputs[0])])


# -- outputs of one item, whole -------------------------------------------------------------------------------------

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
    numbers = {"sizes": [4, 1], "most": [100], "two": 2, "zero": [0], "all": [-1]}
    halves = dict.fromkeys(("iou", "least"), np.array([0.5], np.float32))
    constants = {**{name: np.array(value) for name, value in numbers.items()}, **halves}
    outputs: Any = {"boxes": ["M", 4], "scores": ["M"], "count": []}
    return save_model(tmp_path / "detector.onnx", nodes, {"x": ["N", 3, 5]}, outputs, constants)


def shapes(item: Data) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in item["result"]]


@pytest.mark.parametrize("more", [{}, {"postprocessor": "cpu"}, {"instance_num": 2, "max": 1}])
def test_serves_detector_with_nms_inside(detector: str, more: Data) -> None:
    """Shapes differ from call to call, down to no box at all; results do not share memory."""
    items = answer(onnx_node(detector, **more), *(torch.tensor([rows]) for rows in (FOUND, NOTHING, FOUND[:1] * 3)))
    assert [shapes(item) for item in items] == [[(2, 4), (2,), ()], [(0, 4), (0,), ()], [(1, 4), (1,), ()]]
    boxes, scores, count = items[0]["result"]
    assert boxes.tolist() == [FOUND[0][:4], FOUND[2][:4]]
    assert scores.tolist() == pytest.approx([0.9, 0.7])
    assert count.item() == 2


@pytest.mark.parametrize("size", [[8, 10], ["H", "W"]])
def test_serves_model_of_images_without_batch(tmp_path: Path, size: list[int | str]) -> None:
    """As the detectors of torchvision are exported."""
    config = onnx_node(one_node(tmp_path / "m", [3, *size], "ReduceMean", gives=[3], axes=[1, 2], keepdims=0))
    mat = picture(8, 10)
    planes = torch.from_numpy(mat).permute(2, 0, 1)
    normal = (planes - torch.tensor([[[1]], [[2]], [[3]]])) / 2
    for more, expected in (({}, planes), ({"mean": "1, 2, 3", "std": 2}, normal)):
        with pipe({**config, **more}) as run:
            for value in (mat, planes, planes[None], planes.float()):
                torch.testing.assert_close(run({"data": value})["result"], expected.float().mean((1, 2)))
            assert [spec.dims[:2] for spec in run.signature().inputs] == [(1, 3)]
    refused({**config, "max": 2}, "input 'x' has a fixed batch of 3")


class Detector(torch.nn.Module):
    """Boxes M×4 and scores M of those above 0.5, and how many they are, of boxes and scores 1×1×K×5."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 2)
        rows = rows[(rows[:, 4] > 0.5).nonzero()[:, 0]]
        return rows[:, :4], rows[:, 4], torch.tensor(rows.shape[0])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("more", [{}, {"postprocessor": "cpu"}])
def test_checks_torchscript(tmp_path: Path, more: Data, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, replaced by the CPU here, memory for the outputs on the host is as large as they are."""
    script = torch_model(tmp_path / "model.pt", Detector()) | {"cuda_graph": not on_gpu}
    if on_gpu:
        cpu_as_gpu(monkeypatch)
    with pipe({**script, **more}) as run:
        for rows, count in ((FOUND, 3), (FOUND[:1] * 5, 5), (FOUND[:1], 1), (NOTHING, 0), (FOUND, 3)):
            boxes, scores, found = run({"data": torch.tensor([[rows]])})["result"]
            assert boxes.tolist() == [row[:4] for row in rows[:count]]
            assert (scores.shape, found.item()) == ((count,), count)
    with pipe({**script, "max": 2}) as run, pytest.raises(BackendError, match="or set max = 1"):
        run({"data": torch.tensor([[FOUND]])})

"""No model gives an item what belongs to others of its batch: what mixes is refused, and what rounds is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_model
from fakes import in_threads
from onnx import TensorProto, helper

from torchpipe_py import BackendError, ConfigError, pipe
from torchpipe_py.backends.model.check import EXACT, HALF, QUANTISED, ROWS, BatchCheck
from torchpipe_py.backends.signature import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Run = Callable[[list[np.ndarray]], list[np.ndarray]]


def node(kind: str, *inputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs), ["y"], **attributes)


def onnx_model(path: Path, operator: Any, output: list[int | str], size: Any = 6, **constants: Any) -> str:
    dims: dict[str, list[int | str]] = {"x": ["N", size]}
    arrays = {name: np.array(value) for name, value in constants.items()}
    return save_model(path / "model.onnx", [operator], dims, {"y": output}, arrays)


# -- declared shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "dims", "shown"),
    [([1, -1], [1, "M"], "1x?"), ([4, -1], [4, "M"], "4x?"), ([4, 6], [4, 6], "4x6")],
)
def test_a_declared_output_that_does_not_follow_the_batch(tmp_path: Path, target: Any, dims: Any, shown: str) -> None:
    model = onnx_model(tmp_path, node("Reshape", "x", "to"), dims, to=target)
    with pytest.raises(ConfigError) as caught:
        pipe({"backend": "OnnxTensor", "model": model, "max": 4})
    said = str(caught.value)
    assert f"output 'y' is {shown} for every batch, but batches here are 1..4, and each item needs a row" in said
    assert "write x.flatten(1) or x.view(x.shape[0], -1)" in said


def test_an_output_without_a_batch_is_found_by_the_trial(tmp_path: Path) -> None:
    model = onnx_model(tmp_path, node("ReduceSum", "x", keepdims=0), [])
    with pytest.raises(ConfigError, match="output 'y' is a scalar for one item, so it does not follow the batch"):
        pipe({"backend": "OnnxTensor", "model": model, "max": 4})


def test_a_batch_that_fails_though_its_items_do_not(tmp_path: Path) -> None:
    model = onnx_model(tmp_path, node("Reshape", "x", "to"), ["N", "M"], to=[1, 6])
    with pytest.raises(ConfigError, match=r"output 'y' is 1x6 for every batch"):
        pipe({"backend": "OnnxTensor", "model": model, "max": 4})
    path = save_model(
        tmp_path / "two.onnx",
        [helper.make_node("Reshape", ["x", "to"], ["z"]), helper.make_node("Add", ["z", "x"], ["y"])],
        {"x": ["N", 6]},
        {"y": ["N", 6]},
        {"to": np.array([1, 6])},
    )
    with pytest.raises(
        ConfigError, match=r"it takes a batch of 1, but one of 4 fails: .*; export it with a dynamic batch"
    ):
        pipe({"backend": "OnnxTensor", "model": path, "max": 4})
    with pipe({"backend": "OnnxTensor", "model": path}):  # one at a time it is right
        pass


# -- what mixes -----------------------------------------------------------------------------------------------------

MIXES = {
    "softmax over the batch": (node("Softmax", "x", axis=0), {}),
    "cumulative sum": (node("CumSum", "x", "axis"), {"axis": 0}),
    "in another order": (
        node("Slice", "x", "last", "first", "axis", "step"),
        {"last": [-1], "first": [-9], "axis": [0], "step": [-1]},
    ),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("size", [6, "D"], ids=["known", "open"])
def test_items_that_mix_are_refused(tmp_path: Path, name: str, size: int | str) -> None:
    """When the model is loaded where its shape is known, else with the first request, whatever its batch."""
    operator, constants = MIXES[name]
    model = onnx_model(tmp_path, operator, ["N", size], size, **constants)
    config = {"backend": "OnnxTensor", "model": model, "max": 4, "instance_num": 2}
    problem = "an item's output depends on what else is in its batch: output 'y' differs by"
    if size == 6:
        with pytest.raises(ConfigError, match=problem):
            pipe(config)
    else:
        with pipe(config) as run:
            for _ in range(2):
                with pytest.raises(BackendError, match=problem):
                    run({"data": torch.arange(6.0)})
    with pipe({**config, "max": 1}) as run:
        run(item := {"data": torch.arange(6.0)})
        assert item["result"].shape == (1, 6)


def test_bounds_give_the_shape_of_the_trial(tmp_path: Path) -> None:
    operator, constants = MIXES["softmax over the batch"]
    model = onnx_model(tmp_path, operator, ["N", "D"], "D", **constants)
    for bounds in ({"max": "4x8"}, {"min": "1x2", "max": "4x8"}):
        with pytest.raises(ConfigError, match="an item's output depends on what else is in its batch"):
            pipe({"backend": "OnnxTensor", "model": model, **bounds})


class TrainedNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.BatchNorm2d(4, track_running_stats=False)  # statistics of the batch, also in eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class OneRow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, -1)


@pytest.mark.parametrize(
    ("module", "problem"), [(TrainedNorm, "depends on what else"), (OneRow, "is 1x72 for 2 items")]
)
@pytest.mark.parametrize("kind", ["script", "export"])
def test_torch_models_are_tried_too(tmp_path: Path, kind: str, module: type, problem: str) -> None:
    """An exported program says its shapes; TorchScript does not, and is tried with the first request."""
    path = tmp_path / "model"
    if kind == "export":
        shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
        program = torch.export.export(module().eval(), (torch.zeros(2, 4, 3, 3),), dynamic_shapes=shapes)
        torch.export.save(program, path)
    else:
        torch.jit.script(module().eval()).save(str(path))
    config = {"backend": "TorchTensor", "trusted": True, "model": str(path), "max": 4}
    if kind == "export":
        with pytest.raises(ConfigError, match=problem if module is TrainedNorm else "for every batch"):
            pipe(config)
        return
    with pipe(config) as run, pytest.raises(BackendError, match=problem):
        run({"data": torch.ones(1, 4, 3, 3)})


def test_an_export_of_one_batch_takes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.zeros(1, 4),)), path)
    config = {"backend": "TorchTensor", "trusted": True, "model": str(path)}
    with pytest.raises(ConfigError, match=r"has a fixed batch of 1, but the range is 1\.\.4; .* or set max = 1$"):
        pipe({**config, "max": 4})
    with pipe(config) as run:
        run(item := {"data": torch.ones(1, 4)})
        assert item["result"].tolist() == [[1.0] * 4]


# -- what does not mix ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4])
def test_random_outputs_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int) -> None:
    # So wide that two draws are never the same by chance.
    dropout = node("Dropout", "x", "ratio", "training")
    model = onnx_model(tmp_path, dropout, ["N", 64], ratio=np.float32(0.5), training=True)
    with pipe({"backend": "OnnxTensor", "model": model, "max": most}):
        pass
    assert "gives another output each time for the same input, as random numbers and dropout in training" in caplog.text


def check(run: Run, tolerance: float = EXACT, dtype: str = "float32", least: int = 1, most: int = 5) -> None:
    spec = TensorSpec("x", (None, 3, 4, 4), dtype)
    BatchCheck("m.onnx", ROWS, tolerance, False).require(run, [spec], ["y"], least, most)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8", "int64", "bool", "bfloat16"])
@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 5), (3, 7), (4, 4)])
def test_a_right_model_of_any_type_and_range_passes(dtype: str, least: int, most: int) -> None:
    sizes = []

    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        sizes.append(len(inputs[0]))
        return [inputs[0]]

    check(run, dtype=dtype, least=least, most=most)
    assert {least, most} == set(sizes)


@pytest.mark.parametrize(("tolerance", "error"), [(EXACT, 1e-4), (HALF, 1e-2), (QUANTISED, 5e-2)])
def test_rounding_is_no_mixing_and_more_than_that_is(tolerance: float, error: float) -> None:
    def rounding(factor: float) -> Run:
        return lambda inputs: [inputs[0] * (1 + (factor * error if len(inputs[0]) > 1 else 0))]

    check(rounding(1), tolerance)
    with pytest.raises(ConfigError, match=r"model m\.onnx: .* output 'y' differs by .* BatchNorm in training mode"):
        check(rounding(40), tolerance)


def test_numbers_that_are_none_are_equal_to_themselves_only() -> None:
    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        rows = inputs[0].reshape(len(inputs[0]), -1)[:, :3].copy()
        rows[:, 0], rows[:, 1] = np.nan, np.inf
        return [rows]

    check(run)
    with pytest.raises(ConfigError, match="differs by inf"):
        check(lambda inputs: [run(inputs)[0] if len(inputs[0]) == 1 else np.nan_to_num(run(inputs)[0])])


def test_integers_may_differ_in_few_places() -> None:
    def run(inputs: list[np.ndarray], share: float) -> list[np.ndarray]:
        classes = (inputs[0].reshape(len(inputs[0]), -1) > 0).astype(np.int64)
        if len(inputs[0]) > 1:
            classes[:, : round(share * classes.shape[1])] += 1
        return [classes]

    check(lambda inputs: run(inputs, 0.1))
    with pytest.raises(ConfigError, match="50% of output 'y' differ"):
        check(lambda inputs: run(inputs, 0.5))


def test_a_row_of_another_shape_in_a_batch() -> None:
    with pytest.raises(ConfigError, match="output 'y' is 1x5 in a batch, 1x1 alone"):
        check(lambda inputs: [np.zeros((len(inputs[0]), len(inputs[0])), np.float32)])


def test_one_trial_for_all_instances_and_its_verdict_stays() -> None:
    runs: list[int] = []
    mixing = BatchCheck("m.onnx", ROWS, EXACT, True)

    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        runs.append(len(inputs[0]))
        return [inputs[0] - inputs[0].mean(0)]

    def refused(_: int) -> None:
        with pytest.raises(ConfigError, match="depends on what else"):
            mixing.require(run, [TensorSpec("x", (None, 2))], [], 1, 3)

    in_threads(4, refused)
    assert runs == [1, 1, 1, 1, 3]


def test_no_memory_for_the_largest_batch() -> None:
    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        if len(inputs[0]) > 1:
            raise MemoryError("Unable to allocate 56.1 GiB")
        return inputs

    with pytest.raises(ConfigError, match=r"no memory for a batch of max = 5: Unable .*; set a smaller max"):
        check(run)


def test_inputs_that_cannot_be_made_up_are_tried_with_other_shapes(caplog: pytest.LogCaptureFixture) -> None:
    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        if inputs[0].shape[1] == 1:
            raise ValueError("too small")
        return [inputs[0] - inputs[0].mean(0)]

    checked = BatchCheck("m.onnx", ROWS, EXACT, False)
    assert not checked.require(run, [TensorSpec("x", (None, 1))], [], 1, 3)
    assert "m.onnx: not warmed up: too small" in caplog.text
    with pytest.raises(ConfigError, match="depends on what else"):
        checked.require(run, [TensorSpec("x", (None, 2))], [], 1, 3)
    hopeless = BatchCheck("m.onnx", ROWS, EXACT, False)
    assert [hopeless.require(run, [TensorSpec("x", (None, 1))], [], 1, 3) for _ in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_quantised_model_may_find_its_scales_in_the_batch(tmp_path: Path) -> None:
    """Where the scale is that of the whole batch, items differ by its rounding; that is how such models are."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    model = save_model(tmp_path / "dynamic.onnx", nodes, {"x": ["N", 6]}, {"y": ["N", 6]}, dtype=TensorProto.FLOAT)
    with pipe({"backend": "OnnxTensor", "model": model, "max": 4}) as run:
        run(item := {"data": torch.arange(6.0)})
        torch.testing.assert_close(item["result"], torch.arange(6.0)[None], atol=0.02, rtol=0)

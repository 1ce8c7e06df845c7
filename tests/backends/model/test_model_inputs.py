"""What a request brings for a model: inputs by order or by name, of shapes that ``min`` and ``max`` allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture, save_model
from onnx import TensorProto, helper

from torchpipe_py import ConfigError, InvalidRequest, pipe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Weighted(torch.nn.Module):
    """Sums of the channels of an image, and those times a vector."""

    def forward(self, img: torch.Tensor, meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = img.flatten(2).sum(2)
        return sums, sums * meta


@pytest.fixture(scope="module", params=["onnx", "script", "export"])
def weighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weighted")
    if request.param == "onnx":
        nodes = [
            helper.make_node("ReduceSum", ["img", "axes"], ["sums"], keepdims=0),
            helper.make_node("Mul", ["sums", "meta"], ["weighted"]),
        ]
        dims: dict[str, list[int | str]] = {"img": ["N", 3, "H", "W"], "meta": ["N", 3]}
        outputs: dict[str, list[int | str]] = {"sums": ["N", 3], "weighted": ["N", 3]}
        path = save_model(folder / "model.onnx", nodes, dims, outputs, {"axes": np.array([2, 3])})
        return {"backend": "OnnxTensor", "model": path, "max": 4}
    if request.param == "script":
        torch.jit.script(Weighted()).save(str(folder / "model"))
    else:
        batch, height, width = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "height", "width"))
        program = torch.export.export(
            Weighted(),
            (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3)),
            dynamic_shapes=({0: batch, 2: height, 3: width}, {0: batch}),
        )
        torch.export.save(program, folder / "model")
    return {"backend": "TorchTensor", "trusted": True, "model": str(folder / "model"), "max": 4}


def test_inputs_by_order_and_by_name_are_the_same(weighted: dict[str, Any]) -> None:
    mat = picture(6, 8)
    image = torch.from_numpy(mat).permute(2, 0, 1).float()
    vector = torch.tensor([1.0, 2.0, 4.0])
    given: list[Any] = [
        [image, vector[None]],
        (image[None].numpy(), vector[None]),
        {"img": image, "meta": vector[None]},
        {"meta": vector[None], "img": mat},
        {"meta": [[1.0, 2.0, 4.0]], "img": image},
    ]
    sums = image.flatten(1).sum(1)
    with pipe(weighted) as run:
        items: list[dict[str, Any]] = [{"data": data} for data in given]
        run(items)
    for item in items:
        torch.testing.assert_close(item["result"][0], sums[None])
        torch.testing.assert_close(item["result"][1], (sums * vector)[None])


def test_a_vector_without_its_batch(weighted: dict[str, Any]) -> None:
    image = torch.ones(1, 3, 4, 4)
    vectors: list[Any] = [[1, 2, 4], np.array([1.0, 2, 4]), torch.tensor([1, 2, 4])]
    items: list[dict[str, Any]] = [{"data": {"img": image, "meta": vector}} for vector in vectors]
    with pipe(weighted) as run:
        run(items)
    assert [item["result"][1].tolist() for item in items] == [[[16.0, 32.0, 64.0]]] * 3


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (torch.zeros(1, 3, 4, 4), "the model has 2 inputs, data holds 1: img"),
        ([torch.zeros(1, 3, 4, 4)] * 3, "the model has 2 inputs, data holds 3: img"),
        ({"image": torch.zeros(1, 3, 4, 4)}, "the model has no input 'image'; did you mean 'img'.* Its inputs: img"),
        ({1: 2}, "the model has no input 1; names are texts"),
        ({"img": torch.zeros(1, 3, 4, 4)}, "input 'meta' is not in data; the model's inputs: img"),
        ({"img": torch.zeros(1, 3, 4, 4), "meta": ["a", "b", "c"]}, "a list of str makes no tensor"),
        ({"img": [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)], "meta": [1, 2, 3]}, "a list that makes no tensor"),
        ({"img": torch.zeros(1, 3, 4, 4), "meta": [[1, 2], [3]]}, "a list that makes no tensor"),
        ({"img": torch.zeros(1, 3, 4, 4), "meta": "text"}, "input 'meta' takes a .*tensor, got str"),
    ],
)
def test_what_is_no_input_says_which_there_are(weighted: dict[str, Any], data: Any, problem: str) -> None:
    item = {"data": data}
    with pipe(weighted) as run:
        run(item)
        run(good := {"data": {"img": torch.zeros(1, 3, 4, 4), "meta": torch.zeros(1, 3)}})
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    assert re.search(problem, str(item["error"]))
    assert "result" in good


def test_messages_have_the_shapes_that_the_model_says(weighted: dict[str, Any]) -> None:
    with pipe(weighted) as run:
        run(item := {"data": []})
    shown = {"OnnxTensor": "img 1x3x?x? float32, meta 1x3 float32", "TorchTensor": "img"}[weighted["backend"]]
    assert shown in str(item["error"])


def test_frames_are_stacked(models: Path) -> None:
    """A clip: one tensor T×C×H×W, or a list of frames under the input's name."""
    nodes = [helper.make_node("ReduceMean", ["clip"], ["y"], axes=[3, 4], keepdims=0)]
    dims: dict[str, list[int | str]] = {"clip": ["N", "T", 3, "H", "W"]}
    model = save_model(models / "clip.onnx", nodes, dims, {"y": ["N", "T", 3]})
    mats = [picture(4, 6, seed) for seed in range(5)]
    tensors = [torch.from_numpy(mat).permute(2, 0, 1).float() for mat in mats]
    wanted = torch.stack(tensors).mean((2, 3))[None]
    given: list[Any] = [torch.stack(tensors), {"clip": tensors}, {"clip": mats}, [tensors], [mats]]
    with pipe({"backend": "OnnxTensor", "model": model, "max": 2}) as run:
        for data in given:
            run(item := {"data": data})
            torch.testing.assert_close(item["result"], wanted)


def identity(path: Path, dims: list[int | str], dtype: int = TensorProto.FLOAT) -> str:
    """A model that gives its input."""
    return save_model(path, [helper.make_node("Identity", ["x"], ["y"])], {"x": dims}, {"y": dims}, dtype=dtype)


@pytest.mark.parametrize("vector", [[1, 2, 3], (1.0, 2.0, 3.0), [np.float32(1), 2, 3], [[1, 2, 3]]])
def test_a_list_of_numbers_is_a_vector(tmp_path: Path, vector: Any) -> None:
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", ["N", 3])}) as run:
        assert run({"data": vector})["result"].tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("dims", "turned"),
    [
        (["N", 3, "H", "W"], True),
        (["N", 3, 4, 3], False),
        (["N", 3, 3, 4], True),
        (["N", "H", "W", 3], False),
        (["N", 3, 4, "C"], False),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_mat_is_laid_out_as_the_input_is(tmp_path: Path, dims: list[int | str], turned: bool, dtype: Any) -> None:
    mat = picture(5 if "H" in dims else 3, 4).astype(dtype)
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", dims)}) as run:
        result = run({"data": mat})["result"].numpy()
    np.testing.assert_array_equal(result[0], mat.transpose(2, 0, 1) if turned else mat)


@pytest.mark.parametrize("given", [{}, {"color": "rgb"}])
def test_an_image_from_a_model_has_the_channel_order_of_its_mat(tmp_path: Path, given: dict[str, str]) -> None:
    config = {"model": identity(tmp_path / "model.onnx", ["N", 3, "H", "W"]), "dtype": "uint8"}
    with pipe({"backend": "S[OnnxTensor,Tensor2Mat,cvtColorMat]", "color": "rgb", **config}) as run:
        run(item := {"data": picture(6, 8), **given})
    assert np.array_equal(item["result"], picture(6, 8)[:, :, :: 1 if given else -1])


@pytest.mark.parametrize("dims", [["N", 1, 3, 4], ["N", 1, "H", "W"], ["N", "H", "W", 1]])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_mat_of_one_channel_needs_no_third_dimension(tmp_path: Path, dims: list[int | str], dtype: Any) -> None:
    """As ``cv2.imread`` gives it with ``IMREAD_GRAYSCALE``."""
    mat = picture(3, 4)[:, :, 0].astype(dtype)
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", dims)}) as run:
        np.testing.assert_array_equal(run({"data": mat})["result"].numpy().reshape(3, 4), mat)


def test_a_mat_of_one_channel_is_refused_where_three_are_taken(tmp_path: Path) -> None:
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", ["N", 3, 3, 4])}) as run:
        assert str(run({"data": np.zeros((3, 4), np.uint8)})["error"]) == "input 'x' takes 1x3x3x4, got 3x4"


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_rows_of_a_mat_of_one_channel_are_no_channels(tmp_path: Path, dtype: Any) -> None:
    """However few there are."""
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "one.onnx", ["N", 1, "H", "W"])}) as run:
        assert run({"data": np.zeros((1, 5), dtype)})["result"].shape == (1, 1, 1, 5)
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "any.onnx", ["N", "C", "H", "W"])}) as run:
        error = run({"data": np.zeros((4, 5), dtype)})["error"]
    assert "does not say where a Mat's channels belong" in str(error)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_torch_takes_a_mat_of_one_channel(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "model.pt2"
    batch = torch.export.Dim("batch")
    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 1, 3, 4),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)
    mat = picture(3, 4)[:, :, 0].astype(dtype)
    with pipe({"backend": "TorchTensor", "trusted": True, "model": str(path), "max": 2}) as run:
        np.testing.assert_array_equal(run({"data": mat})["result"].numpy().reshape(3, 4), mat)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_mat_for_an_input_that_does_not_say_its_channels_is_refused(tmp_path: Path, dtype: Any) -> None:
    mat = picture(5, 6).astype(dtype)
    planes = np.ascontiguousarray(mat.transpose(2, 0, 1))
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", ["N", "A", "B", "C"])}) as run:
        run(refused := {"data": mat})
        for given in (torch.from_numpy(planes), planes[None], mat[None]):
            np.testing.assert_array_equal(run({"data": given})["result"][0].numpy(), given.reshape(given.shape[-3:]))
    assert "does not say where a Mat's channels belong" in str(refused["error"])


@pytest.mark.parametrize(
    ("dtype", "value", "problem"),
    [
        (TensorProto.INT32, torch.tensor([1, 2**40]), "input 'x' takes int32, got int64 of 0..1099511627776"),
        (TensorProto.INT8, [1, 300], "input 'x' takes int8, got int64 of 0..300"),
        (TensorProto.UINT8, [1, -1], "input 'x' takes uint8, got int64 of -1..1"),
        (TensorProto.UINT8, torch.tensor([1.5, 2.0]), "input 'x' takes uint8, got float32"),
    ],
)
def test_numbers_that_the_input_cannot_hold(tmp_path: Path, dtype: int, value: Any, problem: str) -> None:
    """Not wrapped around, and not cut off."""
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", ["N", 2], dtype)}) as run:
        run(item := {"data": value})
        assert run({"data": [1, 2]})["result"].tolist() == [[1, 2]]
    assert str(item["error"]) == problem


def test_a_tensor_of_the_shape_and_dtype_of_the_last_one_may_hold_other_numbers(tmp_path: Path) -> None:
    path = identity(tmp_path / "model.onnx", ["N", 2], TensorProto.UINT8)
    with pipe({"backend": "OnnxTensor", "model": path}) as run:
        for numbers, is_taken in (([1, 2], True), ([1, 300], False), ([3, 255], True), ([-1, 0], False)):
            data = run({"data": torch.tensor([numbers])})
            assert ("result" in data) is is_taken
            assert data["result"].tolist() == [numbers] if is_taken else isinstance(data["error"], InvalidRequest)
        assert run({"data": torch.tensor([[4, 5]], dtype=torch.uint8)})["result"].tolist() == [[4, 5]]
        assert isinstance(run({"data": torch.tensor([[4, 5, 6]], dtype=torch.uint8)})["error"], InvalidRequest)


def test_bfloat16_is_taken(tmp_path: Path) -> None:
    with pipe({"backend": "OnnxTensor", "model": identity(tmp_path / "model.onnx", ["N", 2])}) as run:
        assert run({"data": torch.tensor([1.5, 2.0], dtype=torch.bfloat16)})["result"].tolist() == [[1.5, 2.0]]


def test_a_model_that_does_not_name_its_inputs_takes_lists() -> None:
    from torchpipe_py.backends.model.inputs import request_values

    with pytest.raises(InvalidRequest, match="the model does not say what its inputs are called; give a list"):
        request_values({"data": {"x": 1}}, ())


# -- bounds ---------------------------------------------------------------------------------------------------------


def test_min_and_max_bound_shapes(classifier: str) -> None:
    config = {"backend": "OnnxTensor", "model": classifier, "min": "1x3x4x4", "max": "4x3x8x16"}
    with pipe(config) as run:
        assert (run.min(), run.max()) == (1, 4)
        items = [{"data": torch.zeros(3, *size)} for size in ((4, 4), (8, 16), (8, 17), (3, 8))]
        run(items)
    assert ["result" in item for item in items] == [True, True, False, False]
    assert str(items[2]["error"]) == "inputs of 3x8x17 are outside of min = 1x3x4x4 and max = 4x3x8x16"
    with pipe({**config, "min": "1;1", "max": "4x3x4x4;2x3x8x8"}) as run:
        items = [{"data": torch.zeros(3, size, size)} for size in (4, 8, 9)]
        run(items)
    assert ["result" in item for item in items] == [True, True, False]


@pytest.mark.parametrize(
    ("most", "problem"),
    [
        ("4x1x8x8", r"input 'x' is \?x3x\?x\?, max says 4x1x8x8"),
        ("4x3x8", r"input 'x' is \?x3x\?x\?, max says 4x3x8"),
        ("4x3x8x8,4x2", "max gives 2 inputs, the model has 1"),
    ],
)
def test_bounds_that_the_model_does_not_take(classifier: str, most: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pipe({"backend": "OnnxTensor", "model": classifier, "max": most})

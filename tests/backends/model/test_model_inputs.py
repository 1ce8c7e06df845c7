"""Inputs of a model in a request: by order or by name, of shapes that ``min`` and ``max`` allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture, save_model
from kit.models import Data, answer, one_node, onnx_node, refused, torch_model
from onnx import TensorProto, helper

from torchpipe_py import InvalidRequest, pipe
from torchpipe_py.backends.model.inputs import request_values

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Weighted(torch.nn.Module):
    """Sums of the channels of an image, and those times a vector."""

    def forward(self, img: torch.Tensor, meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = img.flatten(2).sum(2)
        return sums, sums * meta


@pytest.fixture(scope="module", params=["onnx", "script", "export"])
def weighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = tmp_path_factory.mktemp("weighted") / "model"
    if request.param == "script":
        return torch_model(path, Weighted()) | {"max": 4}
    if request.param == "export":
        batch, height, width = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "height", "width"))
        shapes = ({0: batch, 2: height, 3: width}, {0: batch})
        return torch_model(path, Weighted(), torch.zeros(2, 3, 4, 5), torch.zeros(2, 3), shapes=shapes) | {"max": 4}
    nodes = [
        helper.make_node("ReduceSum", ["img", "axes"], ["sums"], keepdims=0),
        helper.make_node("Mul", ["sums", "meta"], ["weighted"]),
    ]
    dims: Any = {"img": ["N", 3, "H", "W"], "meta": ["N", 3]}
    outputs: Any = {"sums": ["N", 3], "weighted": ["N", 3]}
    return onnx_node(save_model(path, nodes, dims, outputs, {"axes": np.array([2, 3])}), max=4)


def test_encoded_picture_for_a_model_names_a_decoder(weighted: Data) -> None:
    with pipe(weighted) as run:
        for data, is_picture in ((b"\xff\xd8\xff\xe0", True), (b"no picture", False)):
            error = run({"data": {"img": data, "meta": [1, 2, 4]}})["error"]
            assert isinstance(error, InvalidRequest)
            assert "tensor, got bytes" in str(error)
            assert str(error).endswith("DecodeMat and Mat2Tensor before the model") is is_picture


def test_inputs_by_order_and_by_name_are_the_same(weighted: Data) -> None:
    mat = picture(6, 8)
    image = torch.from_numpy(mat).permute(2, 0, 1).float()
    vector = torch.tensor([1.0, 2.0, 4.0])
    given: list[Any] = [
        [image, vector[None]],
        (image[None].numpy(), vector[None]),
        {"img": image, "meta": vector[None]},
        {"meta": vector[None], "img": mat},
        {"meta": [[1.0, 2.0, 4.0]], "img": image},
        *({"img": image, "meta": each} for each in ([1, 2, 4], np.array([1.0, 2, 4]), torch.tensor([1, 2, 4]))),
    ]
    sums = image.flatten(1).sum(1)
    for item in answer(weighted, *given):
        torch.testing.assert_close(item["result"][0], sums[None])
        torch.testing.assert_close(item["result"][1], (sums * vector)[None])


WRONG: list[tuple[Any, str]] = [
    (torch.zeros(1, 3, 4, 4), "the model has 2 inputs, data holds 1: img"),
    ([torch.zeros(1, 3, 4, 4)] * 3, "the model has 2 inputs, data holds 3: img"),
    ({"image": torch.zeros(1, 3, 4, 4)}, "the model has no input 'image'; did you mean 'img'.* Its inputs: img"),
    ({1: 2}, "the model has no input 1; names are texts"),
    ({"img": torch.zeros(1, 3, 4, 4)}, "input 'meta' is not in data; the model's inputs: img"),
    (
        {"img": torch.zeros(1, 3, 4, 4), "meta": ["a", "b", "c"]},
        "input 'meta': a list with 'a' at .0.; expected (float32|numbers)",
    ),
    (
        {"img": torch.zeros(1, 3, 4, 4), "meta": [[1, None, 2]]},
        "'meta': a list with None at .0..1.; expected (float32|numbers)",
    ),
    ({"img": [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)], "meta": [1, 2, 3]}, "a list that makes no tensor"),
    ({"img": torch.zeros(1, 3, 4, 4), "meta": [[1, 2], [3]]}, "a list that makes no tensor"),
    ({"img": torch.zeros(1, 3, 4, 4), "meta": "text"}, "input 'meta' takes a .*tensor, got str"),
    ([], "data holds 0: img( 1x3x.x. float32, meta 1x3 float32)?"),
]
"""Data, and what is said about it."""


def test_unknown_input_names_the_inputs(weighted: Data) -> None:
    good = {"img": torch.zeros(1, 3, 4, 4), "meta": torch.zeros(1, 3)}
    *bad, last = answer(weighted, *(data for data, _ in WRONG), good)
    for item, (_, problem) in zip(bad, WRONG, strict=True):
        assert "result" not in item
        assert isinstance(item["error"], InvalidRequest)
        assert re.search(problem, str(item["error"]))
    assert "result" in last


def test_a_model_that_does_not_name_its_inputs_takes_lists() -> None:
    with pytest.raises(InvalidRequest, match="the model does not name its inputs; give a list"):
        request_values({"data": {"x": 1}}, ())


def test_stacks_frames(tmp_path: Path) -> None:
    """A clip: one tensor T×C×H×W, or a list of frames under the input's name."""
    dims: Any = ["N", "T", 3, "H", "W"]
    means = {"gives": ["N", "T", 3], "axes": [3, 4], "keepdims": 0}
    mats = [picture(4, 6, seed) for seed in range(5)]
    tensors = [torch.from_numpy(mat).permute(2, 0, 1).float() for mat in mats]
    given: list[Any] = [torch.stack(tensors), {"x": tensors}, {"x": mats}, [tensors], [mats]]
    for item in answer(onnx_node(one_node(tmp_path / "m", dims, "ReduceMean", **means), max=2), *given):
        torch.testing.assert_close(item["result"], torch.stack(tensors).mean((2, 3))[None])


def identity(path: Path, dims: list[int | str], dtype: int = TensorProto.FLOAT) -> Data:
    """A node that gives its input."""
    return onnx_node(one_node(path / "model.onnx", dims, dtype=dtype))


@pytest.mark.parametrize(
    "vector", [[1, 2, 3], (1.0, 2.0, 3.0), [np.float32(1), 2, 3], [[1, 2, 3]], torch.tensor([1, 2, 3]).bfloat16()]
)
def test_numbers_are_a_vector(tmp_path: Path, vector: Any) -> None:
    assert answer(identity(tmp_path, ["N", 3]), vector)["result"].tolist() == [[1.0, 2.0, 3.0]]


# -- Mats -----------------------------------------------------------------------------------------------------------

PLACE = "does not define the place of a Mat's channels"


@pytest.mark.parametrize(
    ("dims", "shape", "gives"),
    [
        (["N", 3, "H", "W"], (5, 4, 3), "planes"),
        (["N", 3, 4, 3], (3, 4, 3), "as it is"),
        (["N", 3, 3, 4], (3, 4, 3), "planes"),
        (["N", "H", "W", 3], (5, 4, 3), "as it is"),
        (["N", 3, 4, "C"], (3, 4, 3), "as it is"),
        (["N", 1, 3, 4], (3, 4), "planes"),
        (["N", 1, "H", "W"], (1, 5), "planes"),
        (["N", "H", "W", 1], (3, 4), "as it is"),
        (["N", 3, 3, 4], (3, 4), "input 'x' takes 1x3x3x4, got 3x4"),
        (["N", "C", "H", "W"], (4, 5), PLACE),
        (["N", "A", "B", "C"], (5, 6, 3), PLACE),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_mat_is_laid_out_as_the_input_is(tmp_path: Path, dims: Any, shape: Any, gives: str, dtype: Any) -> None:
    """One of one channel needs no third dimension, as ``cv2.imread`` gives it with ``IMREAD_GRAYSCALE``."""
    mat = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    image = mat if mat.ndim == 3 else mat[:, :, None]
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    with pipe(identity(tmp_path, dims)) as run:
        run(item := {"data": mat})
        if gives == PLACE and mat.ndim == 3:  # what else has three dimensions, or four, is taken as it is
            for given in (torch.from_numpy(planes), planes[None], mat[None]):
                result = run({"data": given})["result"][0].numpy()
                np.testing.assert_array_equal(result, given.reshape(given.shape[-3:]))
    if "error" in item:
        assert gives in str(item["error"])
    else:
        np.testing.assert_array_equal(item["result"][0].numpy(), planes if gives == "planes" else image)


# -- numbers and bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "problem"),
    [
        (TensorProto.INT32, torch.tensor([1, 2**40]), "input 'x' takes int32, got int64 of 0..1099511627776"),
        (TensorProto.INT8, [1, 300], "input 'x' takes int8, got int64 of 0..300"),
        (TensorProto.UINT8, [1, -1], "input 'x' takes uint8, got int64 of -1..1"),
        (TensorProto.UINT8, torch.tensor([1.5, 2.0]), "input 'x' takes uint8, got float32"),
    ],
)
def test_refuses_numbers_that_dtype_cannot_hold(tmp_path: Path, dtype: int, value: Any, problem: str) -> None:
    """Not wrapped around, and not cut off."""
    bad, good = answer(identity(tmp_path, ["N", 2], dtype), value, [1, 2])
    assert str(bad["error"]) == problem
    assert good["result"].tolist() == [[1, 2]]


def test_min_and_max_bound_shapes(classifier: str) -> None:
    config = onnx_node(classifier, min="1x3x4x4", max="4x3x8x16")
    items = answer(config, *(torch.zeros(3, *size) for size in ((4, 4), (8, 16), (8, 17), (3, 8))))
    assert ["result" in item for item in items] == [True, True, False, False]
    assert str(items[2]["error"]) == "inputs of 3x8x17 are outside of min = 1x3x4x4 and max = 4x3x8x16"
    profiles = {"min": "1;1", "max": "4x3x4x4;2x3x8x8"}
    items = answer({**config, **profiles}, *(torch.zeros(3, size, size) for size in (4, 8, 9)))
    assert ["result" in item for item in items] == [True, True, False]
    for most, problem in (
        ("4x1x8x8", r"input 'x' is \?x3x\?x\?, max sets 4x1x8x8"),
        ("4x3x8", r"input 'x' is \?x3x\?x\?, max sets 4x3x8"),
        ("4x3x8x8,4x2", "max gives 2 inputs, the model has 1"),
    ):
        refused(onnx_node(classifier, max=most), problem)

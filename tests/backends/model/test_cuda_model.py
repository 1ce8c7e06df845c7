"""What GPU models do on the host: kinds of values, groups, padding, postprocessors; the GPU replaced by the CPU."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from kit.fake_gpu import cpu_as_gpu

from torchpipe_py import InvalidRequest
from torchpipe_py.backends import cuda
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.model import cuda_model
from torchpipe_py.backends.model.check import to_bounds
from torchpipe_py.backends.model.cuda_model import CudaModel, Shapes, StagedInput, finish_of
from torchpipe_py.backends.model.inputs import InputSpec
from torchpipe_py.backends.model.postprocess import Cpu, Postprocessor, SoftmaxMax
from torchpipe_py.backends.params import Param
from torchpipe_py.values import to_str


@cuda.on_stream
class Model(CudaModel):
    """Sums of each channel, and what the largest batch saw: N×C×H×W to N×C."""

    model = Param(to_str, "", doc="none")
    use_graphs = False
    dims: Any = (3, None, None)

    def setup(self) -> None:
        super().setup()
        self.sizes_run: list[int] = []
        self.forgotten: list[Shapes] = []

    def input_specs(self, count: int) -> list[InputSpec]:
        return [InputSpec("x", torch.float32, self.dims)]

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        self.sizes_run.append(len(inputs[0]))
        return [inputs[0].flatten(2).sum(2) if inputs[0].ndim == 4 else inputs[0] * 2]

    def forget(self, shapes: Shapes) -> None:
        self.forgotten.append(shapes)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    cpu_as_gpu(monkeypatch)

    def make_model(**settings: Any) -> Model:
        dims = settings.pop("dims", (3, None, None))
        defaults = {name: param.default for name, param in Model.parameters().items()}
        model = Model(BackendConfig(params={**defaults, "max_batch": to_bounds(16), **settings}))
        model.dims = dims
        model.setup()
        return model

    return make_model


def run(model: Model, values: list[Any]) -> list[Any]:
    items = [{"data": value} for value in values]
    model.forward(items)
    return [item["result"] for item in items]


def sums(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.astype(np.float32).sum((0, 1)))[None]


KINDS = {
    "mat": lambda mat: mat,
    "mat, reversed twice": lambda mat: np.ascontiguousarray(mat[::-1, ::-1])[::-1, ::-1],
    "mat, unpickled": lambda mat: pickle.loads(pickle.dumps(mat)),
    "array": lambda mat: np.ascontiguousarray(mat.transpose(2, 0, 1))[None],
    "array, strided": lambda mat: mat.astype(np.float32).transpose(2, 0, 1)[None, :, ::-1][:, :, ::-1],
    "uint8": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None],
    "float": lambda mat: torch.from_numpy(mat).permute(2, 0, 1).float(),
    "half": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None].half(),
    "bfloat16": lambda mat: torch.from_numpy(mat).permute(2, 0, 1)[None].bfloat16(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 5, 9, 16])
def test_every_kind_of_value_arrives(make: Any, kind: str, count: int) -> None:
    model = make()
    mats = [picture(6, 10, seed) for seed in range(count)]
    results = run(model, [KINDS[kind](mat) for mat in mats])
    run(model, [KINDS[kind](mat[::-1, ::-1] // 2) for mat in mats])  # into the same buffers, which are no results
    for mat, result in zip(mats, results, strict=True):
        assert torch.equal(result, sums(mat)) or kind == "bfloat16"
        torch.testing.assert_close(result, sums(mat), rtol=1e-3, atol=1e-3)


def test_a_batch_of_all_kinds_and_two_sizes(make: Any) -> None:
    model = make()
    mats = [picture(6, 10, seed) for seed in range(len(KINDS))]
    other = picture(4, 4)
    values = [kind(mat) for kind, mat in zip(KINDS.values(), mats, strict=True)]
    results = run(model, [*values, other])
    for mat, result in zip([*mats, other], results, strict=True):
        torch.testing.assert_close(result, sums(mat), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tensors_on_the_gpu_are_put_together_whatever_their_dimensions(dtype: torch.dtype) -> None:
    staged = StagedInput(torch.zeros(4, 3, 2, 2))
    values = [torch.full(shape, number).to(dtype) for number, shape in ((1, (3, 2, 2)), (2, (1, 3, 2, 2)))]
    staged._concatenate(values, dtype)  # what `gather` does with tensors that are there already
    assert staged.buffer[:, 0, 0, 0].tolist() == [1, 2, 0, 0]


def test_a_batch_is_padded_to_the_next_size(make: Any) -> None:
    model = make()
    for count in (1, 7, 9, 11, 13, 16):
        run(model, [picture(6, 10, seed) for seed in range(count)])
    trial = [1, 1, 1, 2]  # two items alone, one of them twice, and together
    assert model.sizes_run == [*trial, 1, 7, 10, 12, 14, 16]


def test_what_was_used_longest_ago_is_forgotten(make: Any) -> None:
    model = make()
    for side in range(1, cuda_model.MAX_SHAPES + 3):
        run(model, [picture(side, 4)])
        run(model, [picture(1, 4)])
    assert model.forgotten == [((3, 2, 4),), ((3, 3, 4),)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 4, 1), np.uint8), "takes 1x3x.x., got 4x4x1"),
        (torch.zeros(2, 3, 4, 4), "takes one item, 1x…, got 2x3x4x4"),
        (["a", "b"], "the model has 1 input, data holds 2"),
        ([[0]] * 65, "data holds 65 inputs, more than the 64 that a model may have"),
    ],
)
def test_what_does_not_fit_is_the_outcome_of_its_item(make: Any, value: Any, message: str) -> None:
    items = [{"data": picture(6, 10)}, {"data": value}, {"data": picture(6, 10)}]
    make().forward(items)
    assert ["result" in item for item in items] == [True, False, True]
    assert isinstance(items[1]["error"], InvalidRequest)
    assert re.search(message, str(items[1]["error"]))


def test_a_postprocessor_is_split_where_it_can_be(make: Any) -> None:
    class OnlyForward(SoftmaxMax):
        def forward(self, outputs: list[Any]) -> list[Any]:
            return ["mine"] * len(outputs[0])

    class Plain(Postprocessor):
        def forward(self, outputs: list[Any]) -> list[Any]:
            return [float(row.sum()) for row in outputs[0]]

    assert finish_of(SoftmaxMax()) is not None
    assert finish_of(Cpu()) is not None
    assert finish_of(OnlyForward()) is None
    assert finish_of(Plain()) is None
    assert finish_of(None) is None
    mats = [picture(6, 10, seed) for seed in range(3)]
    assert run(make(postprocessor=OnlyForward), mats) == ["mine"] * 3
    assert run(make(postprocessor=Plain), mats) == [pytest.approx(float(sums(mat).sum())) for mat in mats]
    split = run(make(postprocessor=SoftmaxMax), mats)
    whole = SoftmaxMax()
    whole.init({})
    expected = whole.forward([torch.cat([sums(mat) for mat in mats])])
    assert [label for label, _ in split] == [label for label, _ in expected]
    kept = run(make(postprocessor=Cpu), mats)
    assert all(torch.equal(result, sums(mat)) for result, mat in zip(kept, mats, strict=True))

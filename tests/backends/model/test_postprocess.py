"""Postprocessors against what PyTorch computes, on the host, and split as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchpipe_py import BackendError, ConfigError
from torchpipe_py.backends.model.postprocess import (
    ArgMax,
    L2Normalize,
    Postprocessor,
    Sigmoid,
    SoftmaxArgMax,
    SoftmaxCpu,
    SoftmaxMax,
    TopK,
    read_labels,
)
from torchpipe_py.backends.model.postprocess import make_postprocessor as make
from torchpipe_py.backends.model.postprocess.nms import suppress
from torchpipe_py.encryption.model_file import ModelFile

NAMES = ["null", "ün", "deux", "trois"]
LOGITS = torch.tensor([[0.5, 3.0, -1.0, 1.0], [2.0, 2.5, 9.0, -80.0], [-1.0, -2.0, -3.0, -4.0]])

Forward = Callable[[Postprocessor, list[Any]], list[Any]]


@pytest.fixture(params=["whole", "split"])
def forward(request: pytest.FixtureRequest) -> Forward:
    """On the host at once, or as on a GPU: the tensors that are read on the host are overwritten afterwards."""
    if request.param == "whole":
        return lambda post, outputs: post.forward(outputs)

    def split(post: Any, outputs: list[Any]) -> list[Any]:
        tensors = [tensor.clone() for tensor in post.on_device(outputs)]
        results: list[Any] = post.on_host(tensors)
        for tensor in tensors:
            tensor.fill_(7)
        return results

    return split


@pytest.fixture
def labels(tmp_path: Path) -> str:
    path = tmp_path / "labels.txt"
    path.write_text("\n".join(NAMES), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("cls", [SoftmaxMax, ArgMax, SoftmaxArgMax, TopK])
def test_single_class_always_wins(forward: Forward, cls: type) -> None:
    """For a yes/no model with one logit, the probability would always be 1."""
    with pytest.raises(ConfigError, match=f"{cls.__name__} of one class is always that class; Sigmoid gives its score"):
        forward(make(cls, {}), [torch.tensor([[-5.0]])])
    assert forward(make(Sigmoid, {}), [torch.tensor([[5.0]])])[0][0][1] == pytest.approx(0.9933, abs=1e-4)


def test_reads_label_file_of_windows(tmp_path: Path, forward: Forward) -> None:
    """A byte order mark is not part of the first label, and lines end as in an editor."""
    path = tmp_path / "labels.txt"
    path.write_bytes(b"\xef\xbb\xbfcat\r\nsea\x0blion\r\nox")
    results = forward(make(TopK, {"labels": str(path)}), [torch.tensor([[3.0, 2.0, 1.0]])])
    assert [label for label, _ in results[0]] == ["cat", "sea\x0blion", "ox"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [ArgMax, SoftmaxArgMax])
def test_argmax_returns_label_of_largest_value(forward: Forward, labels: str, cls: type, dtype: torch.dtype) -> None:
    for path, called in (("", [1, 2, 0]), (labels, ["ün", "deux", "null"])):
        results = forward(make(cls, {"labels": path}), [LOGITS.to(dtype)])
        values = LOGITS.to(dtype).float()
        scores = values if cls is ArgMax else values.softmax(1)
        assert [result["result"] for result in results] == called
        assert [result["class"] for result in results] == [1, 2, 0]
        assert [result["score"] for result in results] == pytest.approx(scores.max(1).values.tolist(), rel=1e-5)
        assert all(type(result["score"]) is float for result in results)


@pytest.mark.parametrize(("classes", "dtype"), [(3, torch.uint8), (256, torch.uint8), (257, torch.int32)])
def test_argmax_of_class_maps(forward: Forward, labels: str, classes: int, dtype: torch.dtype) -> None:
    for shape in ((2, classes, 5), (2, classes, 3, 4)):
        output = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        results = forward(make(ArgMax, {}), [output])
        assert [result.dtype for result in results] == [dtype] * 2
        assert torch.equal(torch.cat(results).long(), output.argmax(1))
    with pytest.raises(ValueError, match="ArgMax of an output NxCx… gives class indices: leave 'labels' out"):
        forward(make(ArgMax, {"labels": labels}), [torch.zeros(1, 4, 2, 2)])


@pytest.mark.parametrize("k", [1, 3, 4, 9])
def test_topk_returns_most_probable_classes(forward: Forward, labels: str, k: int) -> None:
    results = forward(make(TopK, {"labels": labels, "k": k}), [LOGITS])
    scores, indices = LOGITS.softmax(1).topk(min(k, 4), 1)
    for result, score, index in zip(results, scores.tolist(), indices.tolist(), strict=True):
        assert [label for label, _ in result] == [NAMES[each] for each in index]
        assert [each for _, each in result] == pytest.approx(score, rel=1e-5)
    assert [type(part) for part in forward(make(TopK, {}), [LOGITS])[0][0]] == [int, float]


def test_sigmoid_returns_classes_above_threshold(forward: Forward, labels: str) -> None:
    results = forward(make(Sigmoid, {"labels": labels, "threshold": 0.73}), [LOGITS])
    assert [[label for label, _ in result] for result in results] == [["ün", "trois"], ["deux", "ün", "null"], []]
    wanted = LOGITS.sigmoid()
    assert [score for _, score in results[1]] == pytest.approx([wanted[1, index].item() for index in (2, 1, 0)])
    every = forward(make(Sigmoid, {"threshold": 0.0}), [LOGITS])
    assert [score for _, score in every[1]] == pytest.approx(sorted(wanted[1].tolist(), reverse=True), abs=1e-6)


def test_items_with_nan_get_an_error_and_the_others_their_results(forward: Forward) -> None:
    number = float("nan")
    for cls in (SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid, SoftmaxCpu, L2Normalize):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            maps = [LOGITS[:, :, None, None].expand(3, 4, 2, 5)] if cls in (ArgMax, SoftmaxArgMax) else []
            for logits in (LOGITS, *maps):
                post, batch = make(cls, {"node": "n", "model": ModelFile("m.onnx")}), logits.to(dtype).clone()
                good = forward(post, [batch])
                batch[1].view(-1)[-1] = number
                first, wrong, last = forward(post, [batch])
                assert isinstance(wrong, BackendError), (cls, dtype)
                assert str(wrong).startswith("node 'n': model m.onnx: output '0' has ")
                assert repr([first, last]) == repr([good[0], good[2]])


@pytest.mark.parametrize("cls", [SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid])
def test_refuses_outputs_and_labels_that_do_not_fit(forward: Forward, labels: str, cls: type) -> None:
    with pytest.raises(ConfigError, match="has 4 lines, the model has 3 classes"):
        forward(make(cls, {"labels": labels}), [LOGITS[:, :3]])
    with pytest.raises(ValueError, match=f"{cls.__name__} takes an output NxC, got 3"):
        forward(make(cls, {}), [LOGITS[:, 0]])


@pytest.mark.parametrize("cls", [SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid, SoftmaxCpu, L2Normalize])
@pytest.mark.parametrize("shape", [(3,), (3, 0)])
def test_refuses_outputs_without_numbers_for_each_item(forward: Forward, cls: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__} takes an output NxC, got "):
        forward(make(cls, {}), [torch.zeros(shape)])


def test_blank_lines_at_the_end_of_a_label_file_are_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    for text, labels in (("a\n\nc\n\n", ["a", "", "c"]), ("a\r\nb\r\n \r\n", ["a", "b"]), ("\n", [])):
        path.write_bytes(text.encode())
        assert read_labels(str(path)) == labels


@pytest.mark.parametrize(("iou", "kept"), [(0.5, [0, 1]), (0.499, [0])])
def test_box_is_dropped_by_more_than_the_threshold(iou: float, kept: list[int]) -> None:
    """As ``torchvision.ops.nms`` has it: this overlap is 0.5 to the bit."""
    boxes = np.array([[0, 0, 4, 4], [0, 0, 4, 2]], np.float32)
    assert suppress(boxes, np.zeros(2, int), iou, 9).tolist() == kept

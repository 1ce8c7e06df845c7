"""``torchpipe parity``: figures against hand computation, every outcome of an image, the reports, the exit status."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Register, encode, picture
from hypothesis import given
from hypothesis import strategies as st

from torchpipe_py import ItemBackend
from torchpipe_py.cli import main
from torchpipe_py.tools.parity.figures import (
    Compared,
    Difference,
    Prediction,
    accuracy,
    agreement,
    difference,
    disagreeing,
    labelled,
    paired,
    pictures,
    shrink,
    spreads,
    wilson,
)
from torchpipe_py.tools.parity.results import Unusable, read_pixels, read_prediction
from torchpipe_py.tools.parity.run import BATCH, Settings, compare_configs, shown_name
from torchpipe_py.tools.report import ToolError

ROOT = Path(__file__).resolve().parents[2]

SIZE = "resize_h = 64\nresize_w = 64\n"
BILINEAR = f'backend = "S[DecodeMat,ResizeMat]"\n{SIZE}'
AREA = f'{BILINEAR}interpolation = "area"\n'
PILLOW = f'backend = "S[DecodeMat,PillowResizeMat]"\n{SIZE}'
RGB_TENSOR = f'backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"\ncolor = "rgb"\n{SIZE}'
BGR_TENSOR = f'backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"\ncolor = "bgr"\n{SIZE}'
AS_DECODED = 'backend = "DecodeMat"\n'
DEMO_MODEL = f"""
backend = "OnnxTensor"
model = "{ROOT / "configs" / "demo" / "model.onnx"}"
max = 8
threads = 1
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
"""
LABELLED = f"""{DEMO_MODEL}
postprocessor = "SoftmaxMax"
labels = "{ROOT / "configs" / "demo" / "labels.txt"}"
"""

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration; returns its path."""

    def write_config(name: str, text: str) -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_config


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five JPEGs of different sizes, one in a folder of its own."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for index in range(5):
        name = f"{index}.jpg" if index < 4 else "more/4.JPEG"
        (folder / name).write_bytes(encode(picture(100 + 10 * index, 150 - 20 * index, index)))
    return folder


class Run:
    """One call of the command: its status, what it printed, its JSON and HTML."""

    def __init__(self, status: int, out: str, err: str, json_file: Path, html_file: Path) -> None:
        self.status, self.out, self.err = status, out, err
        self.json: dict[str, Any] = json.loads(json_file.read_text("utf-8")) if json_file.exists() else {}
        self.html = html_file.read_text("utf-8") if html_file.exists() else ""


Parity = Callable[..., Run]


@pytest.fixture
def parity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Parity:
    """Runs ``torchpipe parity`` with both files written."""

    def run(a: str, b: str, img_dir: Path, *options: str) -> Run:
        json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
        files = ("--json", str(json_file), "--html", str(html_file))
        status = main(["parity", a, b, "--img_dir", str(img_dir), *files, *options])
        printed = capsys.readouterr()
        assert max(map(len, printed.out.splitlines()), default=0) <= 120
        return Run(status, printed.out, printed.err, json_file, html_file)

    return run


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_tiny_arrays() -> None:
    a = np.array([[[10], [20]], [[30], [40]]], np.float32)
    b = np.array([[[10], [21]], [[26], [45.5]]], np.float32)
    assert difference(a, b) == Difference(max=5.5, mean=(0 + 1 + 4 + 5.5) / 4, share=0.5, shift=(0 + 1 - 4 + 5.5) / 4)


def test_exactly_one_is_not_more_than_one() -> None:
    zeros = np.zeros((2, 2, 3), np.float32)
    assert difference(zeros, zeros + 1).share == 0
    assert difference(zeros, zeros + 1.5).share == 1


def test_the_worst_is_the_farthest_from_zero() -> None:
    values = {"x": 1.0, "y": -5.0, "z": 3.0}
    figure = spreads([Compared(name, Difference(0, 0, 0, value)) for name, value in values.items()])["shift"]
    assert (figure.median, figure.worst, figure.worst_name) == (1.0, -5.0, "y")
    assert figure.mean == pytest.approx(-1 / 3)
    assert spreads([]) == {}


def test_wilson_intervals_from_the_literature() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(29, 29) == pytest.approx((1 - 0.1170, 1.0), abs=1e-4)


@given(st.integers(1, 10_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_a_wilson_interval_holds_the_share(counts: tuple[int, int]) -> None:
    hits, total = counts
    low, high = wilson(hits, total)
    assert 0 <= low <= hits / total <= high <= 1
    assert high - low > 0


def classified(*labels: tuple[str, str, float, float]) -> list[Compared]:
    nothing = Difference(0, 0, 0, 0)
    return [
        Compared(str(index), nothing, Prediction(a, score_a), Prediction(b, score_b))
        for index, (a, b, score_a, score_b) in enumerate(labels)
    ]


def test_agreement_counts_labels_and_compares_scores_of_the_same() -> None:
    compared = classified(("x", "x", 0.9, 0.8), ("x", "y", 0.6, 0.1), ("y", "y", 0.5, 0.8), ("z", "z", 0.5, 0.5))
    agreed = agreement([*compared, Compared("unclassified", Difference(0, 0, 0, 0))])
    assert agreed is not None
    assert (agreed.same, agreed.total, agreed.share) == (3, 4, 0.75)
    assert agreed.score_mean == pytest.approx(0.4 / 3)
    assert agreed.score_max == pytest.approx(0.3)
    assert disagreeing(compared) == [("1", Prediction("x", 0.6), Prediction("y", 0.1))]
    assert agreement([]) is None


def test_an_interval_for_pairs_from_the_literature() -> None:
    assert paired(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)  # Newcombe 1998, table II
    assert paired(2, 0, 0, 0)[0] < 0 < paired(2, 0, 0, 0)[1]


@given(st.tuples(*[st.integers(0, 400)] * 4).filter(any))
def test_an_interval_for_pairs_holds_the_difference(counts: tuple[int, int, int, int]) -> None:
    both, only_a, only_b, neither = counts
    low, high = paired(*counts)
    assert -1 - 1e-9 <= low <= (only_a - only_b) / sum(counts) <= high <= 1 + 1e-9
    mirrored = paired(both, only_b, only_a, neither)
    assert (-mirrored[1], -mirrored[0]) == pytest.approx((low, high))


def named(*rows: tuple[str, Any, Any]) -> list[Compared]:
    return [Compared(name, None, Prediction(a), Prediction(b)) for name, a, b in rows]


def test_accuracy_is_that_of_names_or_folders() -> None:
    compared = labelled(
        named(("x_1.jpg", "x", "x"), ("x/2.jpg", "x", "y"), ("y_3.jpg", "x", "y"), ("y_4.jpg", "y", "x"))
    )
    right = accuracy(compared)
    assert right is not None
    assert (right.a.hits, right.b.hits, right.a.total, right.drop) == (3, 2, 4, 25)
    assert right.low < 25 < right.high
    assert [image.truth for image in labelled(named(("7/a.jpg", 7, 7), ("8/a.jpg", 7, 7)))] == ["7", "8"]


@pytest.mark.parametrize("name", ["IMG_1.jpg", "1.jpg", "more/1.jpg"])
def test_names_that_are_no_labels(name: str) -> None:
    assert accuracy(labelled(named((name, 1, 1), (name, 2, 2)))) is None
    assert accuracy([]) is None


def test_a_shrunk_picture_is_made_of_blocks() -> None:
    pixels = np.arange(24, dtype=np.float32).reshape(4, 6, 1)
    assert shrink(pixels, np.max, 3)[:, :, 0].tolist() == [[7, 9, 11], [19, 21, 23]]
    assert shrink(pixels, np.mean, 3)[0, 0, 0] == (0 + 1 + 6 + 7) / 4
    assert shrink(pixels, np.mean, 4).shape == (2, 3, 1)
    assert shrink(pixels[:, :5], np.max, 3).shape == (2, 3, 1)
    assert shrink(pixels, np.mean, 6) is pixels


def test_the_difference_is_shown_sixteen_times_as_strong() -> None:
    a = np.full((2, 2, 3), 100, np.float32)
    b = a + np.array([0, -2, 40], np.float32)
    shown_a, shown_b, amplified = pictures(a, b)
    assert shown_a[0, 0].tolist() == [100, 100, 100]
    assert shown_b[0, 0].tolist() == [100, 98, 140]
    assert amplified[0, 0].tolist() == [0, 32, 255]
    assert {shown.dtype for shown in (shown_a, shown_b, amplified)} == {np.dtype(np.uint8)}


# -- results ----------------------------------------------------------------------------------------------------------

RED = np.full((2, 3, 3), (0, 0, 255), np.uint8)
"""A red Mat in BGR."""


def values(item: dict[str, Any]) -> np.ndarray:
    return read_pixels(item, "x.toml").values


def test_pixels_are_rgb_whatever_they_came_as() -> None:
    red = np.full((2, 3, 3), (255, 0, 0), np.float32)
    planes = torch.from_numpy(red.transpose(2, 0, 1).copy())[None]
    for item in (
        {"result": RED, "color": "bgr"},
        {"result": RED},
        {"result": RED[:, :, ::-1], "color": "rgb"},
        {"result": planes},
        {"result": planes[0]},
        {"result": planes.to(torch.uint8), "color": "rgb"},
        {"result": planes.flip(1).to(torch.bfloat16), "color": "bgr"},
        {"result": planes.to(torch.float16)},
    ):
        pixels = values(item)
        assert pixels.dtype == np.float32
        assert np.array_equal(pixels, red)


def test_where_pixels_came_from_is_said() -> None:
    def origin(**item: Any) -> str:
        return read_pixels(item, "x.toml").origin

    assert origin(result=RED, color="bgr") == "Mat, BGR, converted to RGB before comparing"
    assert "assumed" in origin(result=RED)
    assert origin(result=torch.zeros(1, 3, 2, 2), color="rgb") == "Tensor, RGB"
    assert "assumed" in origin(result=torch.zeros(1, 3, 2, 2))
    assert origin(result=np.zeros((2, 2), np.uint8)) == "Mat, 1 channel"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("text", "str"),
        (("a", 0.5), "tuple of 2"),
        (np.zeros((2, 2, 3), np.float32), "array of float32, shape 2x2x3"),
        (torch.zeros(2, 3, 4, 4), "Tensor of torch.float32, shape 2x3x4x4"),
        (torch.zeros(1, 5), "Tensor of torch.float32, shape 1x5"),
        (None, "NoneType"),
    ],
)
def test_a_result_that_is_no_image(result: Any, said: str) -> None:
    with pytest.raises(ToolError, match=re.escape("x.toml: its result is neither Mat nor Tensor")) as caught:
        values({"result": result})
    assert str(caught.value).endswith(f"got {said}")


@pytest.mark.parametrize(
    "result", [torch.full((1, 3, 2, 2), math.nan), torch.full((1, 3, 2, 2), math.inf), torch.zeros(1, 3, 0, 2)]
)
def test_an_image_without_usable_values(result: torch.Tensor) -> None:
    with pytest.raises(Unusable):
        values({"result": result})


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (("ring", 0.5), Prediction("ring", 0.5)),
        ([np.int64(3), np.float32(0.5)], Prediction(3, 0.5)),
        (torch.tensor([[0.1, 3.0, -1.0]]), Prediction(1)),
        (torch.tensor([0.1, 3.0], dtype=torch.bfloat16), Prediction(1)),
        (np.array([[2.0, 1.0]]), Prediction(0)),
    ],
)
def test_a_result_that_is_a_class(result: Any, wanted: Prediction) -> None:
    assert read_prediction(result, "m.toml") == wanted


@pytest.mark.parametrize(
    "result",
    [
        "ring",
        3,
        ("ring",),
        ("ring", "0.5"),
        (0.5, "ring"),
        (True, 0.5),
        ("ring", 0.5, 1),
        [torch.zeros(1, 5), torch.zeros(1, 5)],
        torch.zeros(2, 5),
        torch.zeros(1, 1),
        torch.zeros(1, 3, 2, 2),
    ],
)
def test_a_result_that_is_no_class(result: Any) -> None:
    with pytest.raises(ToolError, match=r"m\.toml: its result cannot be read as a class: .*, got "):
        read_prediction(result, "m.toml")


@pytest.mark.parametrize("result", [torch.tensor([[1.0, math.nan]]), ("ring", math.nan)])
def test_a_class_that_is_not_to_be_trusted(result: Any) -> None:
    with pytest.raises(Unusable):
        read_prediction(result, "m.toml")


# -- two configurations -----------------------------------------------------------------------------------------------


def test_equal_configurations_do_not_differ(parity: Parity, write: Write, images: Path) -> None:
    config, model = write("a", RGB_TENSOR), write("model", LABELLED)
    run = parity(config, config, images, "--model", model, "--max-mean", "0", "--min-agreement", "1")
    assert run.status == 0
    assert run.json["counts"] == {"found": 5, "compared": 5, "refused": 0, "shapes_differ": 0, "unclassified": 0}
    assert {figure["worst"] for figure in run.json["summary"].values()} == {0.0}
    assert run.json["agreement"]["share"] == 1.0
    assert run.json["worst"] == []
    assert [bar["ok"] for bar in run.json["bars"]] == [True, True]
    assert "0 for 5 images." in run.html


@pytest.mark.parametrize("other", [AREA, PILLOW])
def test_another_resize_differs(parity: Parity, write: Write, images: Path, other: str) -> None:
    run = parity(write("a", BILINEAR), write("b", other), images)
    assert run.status == 0
    assert all(run.json["summary"][figure]["median"] > 0 for figure in ("max", "mean", "share"))
    assert len(run.json["images"]) == len(run.json["worst"]) == 5


def test_the_figures_are_those_of_the_images(parity: Parity, write: Write, images: Path) -> None:
    run = parity(write("a", BILINEAR), write("b", AREA), images)
    for image in run.json["images"]:
        mat = cv2.imread(str(images / image["name"]))
        a, b = (cv2.resize(mat, (64, 64), interpolation=way) for way in (cv2.INTER_LINEAR, cv2.INTER_AREA))
        delta = b.astype(np.float64) - a
        assert image["max"] == np.abs(delta).max()
        assert image["mean"] == pytest.approx(np.abs(delta).mean())
        assert image["share"] == (np.abs(delta) > 1).mean()
        assert image["shift"] == pytest.approx(delta.mean())
    means = [image["mean"] for image in run.json["images"]]
    assert run.json["summary"]["mean"]["median"] == pytest.approx(np.median(means))
    assert run.json["summary"]["mean"]["worst"] == max(means)


@pytest.mark.parametrize("a", [BILINEAR, BGR_TENSOR])
def test_bgr_equals_rgb(parity: Parity, write: Write, images: Path, a: str) -> None:
    run = parity(write("a", a), write("b", RGB_TENSOR), images)
    assert run.json["summary"]["max"]["worst"] == 0
    assert any("A: " in note and "BGR, converted to RGB" in note for note in run.json["notes"])
    assert "converted to RGB" in run.out


def test_images_are_found_recursively_and_sorted(parity: Parity, write: Write, images: Path) -> None:
    (images / "readme.txt").write_text("no image")
    config = write("a", BILINEAR)
    run = parity(config, config, images)
    assert [image["name"] for image in run.json["images"]] == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "more/4.JPEG"]
    run = parity(config, config, images, "--limit", "2")
    assert [image["name"] for image in run.json["images"]] == ["0.jpg", "1.jpg"]
    assert run.json["counts"]["found"] == 5
    assert "the first 2 of 5 images" in run.out


def test_a_corrupt_image_is_listed(parity: Parity, write: Write, images: Path) -> None:
    (images / "broken.jpg").write_bytes(b"no image at all")
    run = parity(write("a", BILINEAR), write("b", RGB_TENSOR), images)
    assert run.status == 0
    (refused,) = run.json["refused"]
    assert refused["name"] == "broken.jpg"
    assert refused["a"] == refused["b"] == ("DecodeError: 15 bytes are no image of formats jpeg, png, webp, bmp")
    assert len(run.json["images"]) == 5
    assert "broken.jpg" in run.out
    assert "broken.jpg" in run.html


def test_a_file_that_cannot_be_read_is_listed(parity: Parity, write: Write, images: Path) -> None:
    (images / "gone.jpg").symlink_to(images / "nowhere.jpg")
    config = write("a", BILINEAR)
    run = parity(config, config, images)
    assert "cannot be read" in run.json["refused"][0]["a"]
    assert run.json["counts"]["compared"] == 5


def test_different_shapes_are_listed(parity: Parity, write: Write, images: Path) -> None:
    (images / "square.png").write_bytes(encode(picture(64, 64), ".png"))
    run = parity(write("a", AS_DECODED), write("b", RGB_TENSOR), images)
    assert [image["name"] for image in run.json["images"]] == ["square.png"]
    assert run.json["shapes_differ"][0] == {"name": "0.jpg", "a": [100, 150, 3], "b": [64, 64, 3]}
    assert "100x150x3" in run.out
    assert "100x150x3" in run.html


def test_one_defect_does_not_end_the_report(parity: Parity, write: Write, images: Path, register: Register) -> None:
    class Fussy(ItemBackend):
        """Raises for narrow Mats."""

        def forward_item(self, item: dict[str, Any]) -> None:
            if item["data"].shape[1] == 130:
                raise ValueError("a <narrow>\nMat")
            item["result"] = item["data"]

    b = write("b", f'backend = "S[DecodeMat,{register(Fussy)}]"')
    run = parity(write("a", AS_DECODED), b, images)
    (refused,) = run.json["refused"]
    assert (refused["name"], refused["a"]) == ("1.jpg", None)
    assert refused["b"].startswith("BackendError: ")
    assert "a <narrow> Mat" in refused["b"]
    assert "A: gives a result" in run.out
    assert "a &lt;narrow&gt; Mat" in run.html
    assert run.json["counts"]["compared"] == 4


def test_a_backend_that_gives_no_reason(parity: Parity, write: Write, images: Path, register: Register) -> None:
    class Silent(ItemBackend):
        """Gives nothing."""

        def forward_item(self, item: dict[str, Any]) -> None:
            pass

    run = parity(write("a", AS_DECODED), write("b", f'backend = "{register(Silent)}"'), images)
    assert run.status == 1
    assert run.json["refused"][0]["b"].startswith("NoResult: ")
    assert "nothing could be compared: 5 images refused" in run.err


def test_values_on_another_scale_are_pointed_out(
    parity: Parity, write: Write, images: Path, register: Register
) -> None:
    class Scaled(ItemBackend):
        """0..255 to 0..1."""

        def forward_item(self, item: dict[str, Any]) -> None:
            item["result"] = item["data"].float() / 255

    scaled = RGB_TENSOR.replace("Mat2Tensor", f"Mat2Tensor,{register(Scaled)}")
    run = parity(write("a", RGB_TENSOR), write("b", scaled), images)
    assert any("not on one scale" in note for note in run.json["notes"])


def test_another_order_of_the_channels_is_pointed_out(parity: Parity, write: Write, images: Path) -> None:
    run = parity(write("a", RGB_TENSOR), write("b", BGR_TENSOR), images)
    assert any(note.startswith("B gives BGR, A RGB: ") for note in run.json["notes"])


def test_more_images_than_may_be_in_flight(parity: Parity, write: Write, images: Path) -> None:
    for index in range(2 * BATCH):
        (images / f"more_{index}.jpg").write_bytes(encode(picture(30, 40, index)))
    run = parity(write("a", f"max_inflight = 3\n{BILINEAR}"), write("b", f"[node]\n{PILLOW}"), images)
    assert run.json["counts"]["compared"] == 5 + 2 * BATCH
    names = [image["name"] for image in run.json["images"]]
    assert names == sorted(names)


# -- a model ----------------------------------------------------------------------------------------------------------


def test_the_demo_model_agrees_with_itself_after_another_resize(parity: Parity, write: Write) -> None:
    pillow = RGB_TENSOR.replace("ResizeMat", "PillowResizeMat")
    demo, model = ROOT / "configs" / "demo" / "images", write("model", LABELLED)
    run = parity(write("a", RGB_TENSOR), write("b", pillow), demo, "--model", model, "--min-agreement", "0.9")
    assert run.status == 0
    agreed = run.json["agreement"]
    assert agreed["total"] == 48
    assert 0.9 <= agreed["low"] <= agreed["share"] <= agreed["high"] <= 1
    assert 0 < agreed["score_mean"] < agreed["score_max"] < 1
    labels = (ROOT / "configs" / "demo" / "labels.txt").read_text("utf-8").split()
    assert {image["a"]["label"] for image in run.json["images"]} <= set(labels)
    assert "top-1 agreement" in run.out
    assert "95 % interval" in run.out


def test_two_models_are_compared_by_class(parity: Parity, write: Write, tmp_path: Path) -> None:
    demo = ROOT / "configs" / "demo" / "images"
    a = LABELLED.replace('"OnnxTensor"', '"S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"')
    a = f'color = "rgb"\n{SIZE}{a}'
    b = a.replace('mean = "123.675, 116.28, 103.53"', 'mean = "20"')  # which is wrong
    run = parity(write("a", a), write("b", b), demo, "--max-drop", "0", "--min-agreement", "1")
    assert run.status == 1
    assert run.json["counts"]["compared"] == 48
    assert run.json["summary"] == {}
    right = run.json["accuracy"]
    assert right["a"]["total"] == 48
    lost = right["a"]["hits"] - right["b"]["hits"]
    assert right["drop"] == pytest.approx(100 * lost / 48)
    assert 0 < lost <= run.json["agreement"]["total"] - run.json["agreement"]["same"]
    assert [bar["ok"] for bar in run.json["bars"]] == [False, False]
    assert f"({right['a']['hits']} of 48; 95 % interval 0." in run.out
    assert "B loses" in run.html
    assert "per image" not in run.out
    assert parity(write("a", a), write("a2", a), demo, "--max-drop", "0").status == 0
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "IMG_1.jpg").write_bytes((demo / "ring_00.jpg").read_bytes())
    run = parity(write("a", a), write("b", b), tmp_path / "images", "--max-drop", "0")
    assert "no accuracy: the images are not labelled; 'IMG' of IMG_1.jpg is no class" in run.out
    assert "--max-drop 0: nothing to compare, missed" in run.out


def test_logits_are_a_class_without_a_score(parity: Parity, write: Write, images: Path) -> None:
    config = write("a", RGB_TENSOR)
    run = parity(config, config, images, "--model", write("model", DEMO_MODEL))
    assert run.json["agreement"]["share"] == 1
    assert run.json["agreement"]["score_mean"] is None
    assert all(isinstance(image["a"]["label"], int) and image["a"]["score"] is None for image in run.json["images"])


class ByWidth(ItemBackend):
    """The most frequent channel is the class; some widths fail."""

    def forward_item(self, item: dict[str, Any]) -> None:
        assert item["color"] == "bgr"
        mean = item["data"].mean((0, 1))
        if item["data"].shape[1] == 130:
            raise ValueError("no class for this one")
        item["result"] = (f"<{'bgr'[int(mean.argmax())]}>", float(mean.max() / 255))


class Exchanged(ItemBackend):
    """Channels in another order."""

    def forward_item(self, item: dict[str, Any]) -> None:
        item["result"] = np.ascontiguousarray(item["data"][:, :, ::-1])


def test_disagreeing_images_are_listed(parity: Parity, write: Write, tmp_path: Path, register: Register) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for name, color, width in (("green", (0, 99, 0), 20), ("red", (0, 0, 99), 20), ("wide", (0, 0, 99), 130)):
        (folder / f"{name}.png").write_bytes(encode(np.full((10, width, 3), color, np.uint8), ".png"))
    b = write("b", f'backend = "S[DecodeMat,{register(Exchanged)}]"')
    model = write("model", f'backend = "{register(ByWidth)}"')
    run = parity(write("a", AS_DECODED), b, folder, "--model", model, "--min-agreement", "0.6")
    assert run.status == 1
    assert (run.json["agreement"]["same"], run.json["agreement"]["total"]) == (1, 2)
    (image,) = run.json["agreement"]["disagreeing"]
    assert (image["name"], image["a"]["label"], image["b"]["label"]) == ("red.png", "<r>", "<b>")
    assert "&lt;r&gt; (0.3882)" in run.html
    assert "<r>" not in run.html
    (unclassified,) = run.json["unclassified"]
    assert unclassified["name"] == "wide.png"
    assert "no class for this one" in unclassified["b"]
    assert "--min-agreement 0.6: 0.5000 over 2 images, missed" in run.out


def test_a_model_that_names_no_class(parity: Parity, write: Write, images: Path) -> None:
    config, model = write("a", RGB_TENSOR), write("model", 'backend = "Identity"')
    run = parity(config, config, images, "--model", model)
    assert run.status == 1
    assert f"torchpipe: {model}: its result cannot be read as a class" in run.err
    assert "Tensor of torch.uint8, shape 1x3x64x64" in run.err


def test_a_model_that_refuses_everything(parity: Parity, write: Write, images: Path) -> None:
    config, model = write("a", BILINEAR), write("model", AS_DECODED)  # takes encoded bytes, and gets a Mat
    run = parity(config, config, images, "--model", model)
    assert run.status == 1
    assert run.json["counts"] == {"found": 5, "compared": 5, "refused": 0, "shapes_differ": 0, "unclassified": 5}
    assert run.json["agreement"] is None
    assert "no image has a class on both sides" in run.err


# -- status and errors ------------------------------------------------------------------------------------------------


def test_bars(parity: Parity, write: Write, images: Path) -> None:
    a, b = write("a", BILINEAR), write("b", AREA)
    mean = parity(a, b, images).json["summary"]["mean"]["mean"]
    missed = parity(a, b, images, "--max-mean", str(mean / 2))
    assert missed.status == 1
    assert missed.json["bars"] == [{"option": "--max-mean", "limit": mean / 2, "value": mean, "images": 5, "ok": False}]
    assert "missed" in missed.out
    assert 'class="missed"' in missed.html
    assert parity(a, b, images, "--max-mean", str(mean)).status == 0


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--img_dir", ".", "--limit", "0"),
        ("--img_dir", ".", "--worst", "-1"),
        ("--img_dir", ".", "--max-mean", "nan"),
        ("--img_dir", ".", "--max-mean", "-1"),
        ("--img_dir", ".", "--model", "m.toml", "--min-agreement", "1.1"),
        ("--img_dir", ".", "--max-drop", "101"),
        ("--img_dir", ".", "--html", "no/such/folder/x.html"),
        ("--img_dir", ".", "--json", "."),
    ],
)
def test_wrong_arguments(options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["parity", "a.toml", "b.toml", *options])
    assert caught.value.code == 2


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a run says that ends with status 1 and no report."""
    assert main(["parity", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_directories_without_images(capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
    config = write("a", BILINEAR)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    assert "no image in it (looked for .jpg" in failure(capsys, config, config, "--img_dir", str(tmp_path / "empty"))
    assert "no such directory" in failure(capsys, config, config, "--img_dir", str(tmp_path / "missing"))
    assert "no such directory" in failure(capsys, config, config, "--img_dir", config)


def test_a_directory_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ToolError, match=r"cannot be read: Permission denied"):
        compare_configs(Settings("a.toml", "b.toml", str(tmp_path)))


def test_configurations_that_are_wrong(capsys: pytest.CaptureFixture[str], write: Write, images: Path) -> None:
    good, bad = write("good", BILINEAR), write("bad", BILINEAR.replace("resize_h", "resize_hh"))
    where = ("--img_dir", str(images))
    said = failure(capsys, good, bad, *where)
    assert f"torchpipe: {bad}: node 'node': key 'resize_hh': unknown key" in said
    assert "no such file" in failure(capsys, good, "missing.toml", *where)
    cuda = write("cuda", f'{RGB_TENSOR}device = "cuda"\n')
    if not torch.cuda.is_available():
        assert "finds no CUDA device" in failure(capsys, good, cuda, *where)
    roots = write("roots", f"[one]\n{AS_DECODED}[two]\n{AS_DECODED}")
    said = failure(capsys, good, roots, *where)
    assert f"torchpipe: {roots}: " in said
    assert "one root" in said


def test_a_preprocessing_that_returns_a_class(parity: Parity, write: Write, images: Path, register: Register) -> None:
    class Label(ItemBackend):
        """A class, not an image."""

        def forward_item(self, item: dict[str, Any]) -> None:
            item["result"] = ("ring", 0.5)

    b = write("b", f'backend = "{register(Label)}"')
    run = parity(write("a", BILINEAR), b, images)
    assert run.status == 1
    assert run.err.startswith(f"torchpipe: {b}: its result is neither Mat nor Tensor: ")
    assert run.err.rstrip().endswith("got tuple of 2")


def test_the_other_commands_stay_light() -> None:
    heavy = ("torch", "cv2", "torchpipe_py.tools.parity.run")
    code = f"import sys, torchpipe_py.cli; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags in balance, pictures, everything that could be fetched, and the text."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[np.ndarray] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "src" and value and value.startswith("data:image/png;base64,"):
                encoded = np.frombuffer(base64.b64decode(value.partition(",")[2], validate=True), np.uint8)
                self.pictures.append(cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED))
            elif key in ("src", "href", "srcset", "action", "data", "poster") or key.startswith("on"):
                self.fetched.append(f"{key}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_is_self_contained(parity: Parity, write: Write, images: Path) -> None:
    run = parity(write("a", BILINEAR), write("b", RGB_TENSOR.replace("ResizeMat", "PillowResizeMat")), images)
    page = Page(run.html)
    assert page.fetched == []
    assert not page.tags & {"script", "link", "iframe", "object", "b"}
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"base64,[^\"]*", "", run.html))
    assert len(page.pictures) == 3 * 5
    assert {shown.shape for shown in page.pictures} == {(64, 64, 3)}
    text = "".join(page.words)
    assert "|B - A| × 16" in text
    assert all(image["name"] in text for image in run.json["images"])


def test_the_worst_come_first_and_their_pictures_are_right(parity: Parity, write: Write, images: Path) -> None:
    run = parity(write("a", BILINEAR), write("b", AREA), images, "--worst", "2")
    means = {image["name"]: image["mean"] for image in run.json["images"]}
    worst = sorted(means, key=lambda name: -means[name])[:2]
    assert run.json["worst"] == worst
    page = Page(run.html)
    assert len(page.pictures) == 6
    mat = cv2.imread(str(images / worst[0]))
    a, b = (cv2.resize(mat, (64, 64), interpolation=way) for way in (cv2.INTER_LINEAR, cv2.INTER_AREA))
    assert np.array_equal(page.pictures[0], a)
    assert np.array_equal(page.pictures[1], b)
    assert np.array_equal(page.pictures[2], np.clip(np.abs(b.astype(int) - a) * 16, 0, 255))


def test_a_name_cannot_break_the_page(parity: Parity, write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    names = ["<b>.jpg", '"onload="x".jpg', "&amp;.jpg", "<script>.jpg"]
    for name in names:
        (folder / name).write_bytes(encode(picture(80, 90)))
    (folder / "<i>broken.jpg").write_bytes(b"")
    page = Page(parity(write("a", BILINEAR), write("b", AREA), folder).html)
    assert page.fetched == []
    assert not page.tags & {"b", "i", "script"}
    text = "".join(page.words)
    assert all(name in text for name in [*names, "<i>broken.jpg"])


def test_names_that_are_no_text() -> None:
    assert shown_name(Path("a\nb\x1b.jpg")) == "a?b?.jpg"
    assert shown_name(Path("\udcff.jpg")) == "?.jpg"
    assert shown_name(Path("süß/ß.jpg")) == "süß/ß.jpg"


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (700, 3)])
def test_odd_shapes_have_pictures(
    parity: Parity, write: Write, tmp_path: Path, shape: tuple[int, int], register: Register
) -> None:
    class Gray(ItemBackend):
        """One channel, half as bright, and one more."""

        def forward_item(self, item: dict[str, Any]) -> None:
            mat = item["data"]
            item["result"] = np.ascontiguousarray(mat if mat.ndim == 2 else mat[:, :, 0]) // 2 + 1

    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "x.png").write_bytes(encode(np.full((*shape, 3), 100, np.uint8), ".png"))
    gray = register(Gray)
    a, b = write("a", f'backend = "S[DecodeMat,{gray}]"'), write("b", f'backend = "S[DecodeMat,{gray},{gray}]"')
    run = parity(a, b, folder)
    assert run.json["images"][0]["shift"] == 26 - 51
    assert all(max(shown.shape) <= 320 for shown in Page(run.html).pictures)


def test_json_says_everything(parity: Parity, write: Write, images: Path) -> None:
    a, b = write("a", BILINEAR), write("b", AREA)
    run = parity(a, b, images)
    assert set(run.json) == {
        *("schema", "a", "b", "model", "img_dir", "notes", "counts", "summary", "agreement", "accuracy", "bars"),
        *("worst", "images", "refused", "unclassified", "shapes_differ"),
    }
    assert (run.json["schema"], run.json["a"], run.json["b"], run.json["model"]) == (1, a, b, None)
    assert set(run.json["summary"]) == {"max", "mean", "share", "shift"}
    for figure in run.json["summary"].values():
        assert set(figure) == {"median", "mean", "worst", "worst_name"}
    assert set(run.json["images"][0]) == {"name", "max", "mean", "share", "shift"}


def test_without_files_no_pictures_are_kept(write: Write, images: Path) -> None:
    compared = compare_configs(Settings(write("a", BILINEAR), write("b", AREA), str(images)))
    assert len(compared.worst) == 5
    assert compared.views == {}


# -- the images to compare with ---------------------------------------------------------------------------------------


def make_images(folder: Path, *options: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_parity_images.py"), "--out", str(folder), *options]
    subprocess.run(command, capture_output=True, timeout=100, check=True)


def test_made_images_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    make_images(tmp_path / "one", "--count", "24")
    make_images(tmp_path / "two", "--count", "12")
    make_images(tmp_path / "three", "--count", "12", "--seed", "1")
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / name).iterdir())}
        for name in ("one", "two", "three")
    ]
    assert list(map(len, digests)) == [24, 12, 12]
    assert digests[1].items() <= digests[0].items()
    assert not set(digests[2].values()) & set(digests[0].values())
    for number in range(1, 9):
        assert any(f"_exif{number}_" in name for name in digests[0])


def test_made_images_go_through(parity: Parity, write: Write, tmp_path: Path) -> None:
    make_images(tmp_path / "made", "--count", "17", "--odd")
    run = parity(write("a", BILINEAR), write("b", PILLOW), tmp_path / "made")
    assert run.status == 0
    assert run.json["counts"]["found"] == 17 + 7
    assert {image["name"] for image in run.json["refused"]} >= {"odd_empty.jpg", "odd_no_image.jpg"}
    assert all(image["name"].startswith("odd_") for image in run.json["refused"])
    assert any(image["name"] == "odd_cmyk.jpg" for image in run.json["images"])

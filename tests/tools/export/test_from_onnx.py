"""``torchpipe export model.onnx``: its TOML passes the check and serves the file, and it says what it assumed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from kit.detectors import constant_model
from kit.model_kinds import KINDS, LABELS, Graph
from onnx import TensorProto, helper

from torchpipe_py import ConfigError, parse_toml, pipe
from torchpipe_py.cli import main
from torchpipe_py.plan.build import plan_pipeline

FLOAT = TensorProto.FLOAT
READ_AS = {
    "yolo": ("YoloBoxes", "LetterBoxMat"),
    "yolo_seg": ("YoloSegments", "LetterBoxMat"),
    "yolo_pose": ("YoloPose", "LetterBoxMat"),
    "fp16_input": ("SoftmaxMax", "CenterCropMat"),
    "uint8_input": ("SoftmaxMax", "CenterCropMat"),
    "keras": ("ArgMax", "ResizeMat"),
    "embeddings": ("L2Normalize", "CenterCropMat"),
    "fixed_batch": ("SoftmaxMax", "CenterCropMat"),
    "several_outputs": ("cpu", "CenterCropMat"),
}
"""Postprocessor and resizing of the kinds of ``kit.model_kinds`` that take a picture."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a good export prints."""
    capsys.readouterr()
    assert main(["export", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an export that must fail prints; it writes nothing."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main(["export", *arguments]) == 1
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().err


def model_of(toml: str) -> dict[str, Any]:
    return dict(parse_toml(toml)["model"])


def jpeg(height: int = 48, width: int = 96) -> bytes:
    done, encoded = cv2.imencode(".jpg", np.full((height, width, 3), 128, np.uint8))
    assert done
    return bytes(encoded.tobytes())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_of_model_gets_a_toml_that_passes_the_check(kind: Any, folder: Path, capsys: Any) -> None:
    path = kind.make(folder / f"{kind.name}.onnx")
    content = path.read_bytes()
    printed = exported(capsys, path.name)
    assert main(["check", f"{kind.name}.toml"]) == 0
    assert path.read_bytes() == content
    assert {each.name for each in folder.iterdir()} == {f"{kind.name}.onnx", f"{kind.name}.toml"}
    node = model_of(f"{kind.name}.toml")
    assert node["model"] == path.name
    if kind.name in READ_AS:
        postprocessor, resizing = READ_AS[kind.name]
        assert node["postprocessor"] == postprocessor
        assert resizing in parse_toml(f"{kind.name}.toml")["decode"]["backend"]
        assert "a picture of 320x240 was answered" in printed
    else:
        assert list(parse_toml(f"{kind.name}.toml")) == ["global", "model"]


def test_a_detectors_boxes_are_those_of_the_picture(folder: Path, capsys: Any) -> None:
    next(kind for kind in KINDS if kind.name == "yolo").make(folder / "yolo.onnx")
    printed = exported(capsys, "yolo.onnx")
    for text in ("task detect", "output0 ?x7x84", 'color           "rgb"', "person to dog", "YoloBoxes"):
        assert text in printed
    with pipe("yolo.toml") as run:
        run(data := {"data": jpeg()})
    np.testing.assert_allclose(data["result"].boxes[0], [12, 12, 48, 36], atol=1e-3)
    assert data["result"].labels == ["dog", "car"]


def test_a_detector_whose_file_leaves_all_sizes_open_is_served(folder: Path, capsys: Any) -> None:
    graph, output = Graph(), np.zeros((1, 7, 84), np.float32)
    output[0, :7, 5] = [20, 32, 24, 16, 0, 0, 0.9]
    graph.rows("images", output, "output0")
    names = {"task": "detect", "names": "{0: 'person', 1: 'car', 2: 'dog'}", "imgsz": "[64, 64]"}
    outputs = {"output0": (FLOAT, ["batch", "rows", "anchors"])}
    graph.save(folder / "yolo.onnx", {"images": (FLOAT, ["batch", 3, "height", "width"])}, outputs, names)
    exported(capsys, "yolo.onnx")
    assert model_of("yolo.toml")["max"] == "8x3x64x64"
    assert main(["check", "yolo.toml"]) == 0
    with pipe("yolo.toml") as run:
        run(data := {"data": jpeg()})
    assert data["result"].labels == ["dog"]


def test_refers_to_the_file_from_another_folder(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    (folder / "models").mkdir()
    constant_model(folder / "models" / "m.onnx", {"logits": np.ones((1, 10))})
    exported(capsys, "models/m.onnx", "--out", "served/mine")
    assert model_of("served/mine.toml")["model"] == "../models/m.onnx"
    monkeypatch.chdir(folder / "served")
    assert main(["check", "mine.toml"]) == 0


def test_size_is_that_of_the_metadata_or_of_the_option_where_the_file_leaves_it_open(folder: Path, capsys: Any) -> None:
    graph = Graph()
    graph.add("Identity", graph.head("x", 10), output="logits")
    graph.save(folder / "m.onnx", {"x": (FLOAT, ["n", 3, "h", "w"])}, {"logits": (FLOAT, ["n", 10])},
               {"imgsz": "[96, 160]"})  # fmt: skip
    exported(capsys, "m.onnx")
    assert model_of("m.toml")["max"] == "8x3x96x160"
    printed = exported(capsys, "m.onnx", "--resize", "64x80", "--force")
    assert (model_of("m.toml")["min"], model_of("m.toml")["max"]) == ("1x3x64x80", "8x3x64x80")
    assert "the file leaves it open" in printed


@pytest.mark.parametrize(
    ("outputs", "postprocessor", "said"),
    [
        ({"y": (1, 7)}, "SoftmaxMax", 'if this is an embedding, postprocessor = "L2Normalize"'),
        ({"y": (1, 512)}, "L2Normalize", 'if these are scores of classes, postprocessor = "SoftmaxMax"'),
        ({"class_logits": (1, 512)}, "SoftmaxMax", "by its name"),
        ({"y": (1, 3, 32, 32)}, "ArgMax", 'for an image, postprocessor = ""'),
        ({"y": (1, 21, 32, 32)}, "ArgMax", "a segmenter"),
        ({"y": (1, 1, 32, 32)}, None, "one number for each pixel"),
        ({"y": (1, 1)}, None, 'postprocessor = "Sigmoid"'),
        ({"y": (1, 84, 6)}, "Yolo5Boxes", 'postprocessor = "EndToEndBoxes"'),
        ({"y": (1, 50, 384)}, None, 'postprocessor = "YoloBoxes"'),
        ({"logits": (1, 20, 92), "pred_boxes": (1, 20, 4)}, "DetrBoxes", "a detector"),
    ],
)
def test_says_the_other_reading_and_its_key_where_the_shapes_allow_two(
    outputs: dict[str, tuple[int, ...]], postprocessor: str | None, said: str, folder: Path, capsys: Any
) -> None:
    random = np.random.default_rng(0)
    constant_model(folder / "m.onnx", {name: random.standard_normal(shape) for name, shape in outputs.items()})
    assert said in exported(capsys, "m.onnx")
    assert model_of("m.toml").get("postprocessor") == postprocessor


TURNED, ROTATED = "boxes of YOLOv8 and later (N×A×(4+C))", "rotated boxes"
NAMES = "{0: 'a', 1: 'b', 2: 'c'}"


@pytest.mark.parametrize(
    ("shape", "metadata", "postprocessor", "said", "unsaid"),
    [
        ((1, 84, 7), {}, "Yolo5Boxes", f"is read as 2 classes; {TURNED} have 3 in this shape", ROTATED),
        ((1, 84, 7), {"names": NAMES}, "YoloBoxes", "of the file's metadata: a to c", "NOTE"),
        ((1, 84, 7), {"names": NAMES, "task": "detect"}, "YoloBoxes", "of the file's metadata: a to c", "NOTE"),
        ((1, 84, 8), {"names": NAMES}, "Yolo5Boxes", "of the file's metadata: a to c", "NOTE"),
        ((1, 252, 7), {}, "Yolo5Boxes", "a detector", "NOTE"),  # three rows for each place, as YOLOv5 has
        ((1, 8, 84), {}, "YoloBoxes", f"is read as 4 classes; {ROTATED} have 3 in this shape", TURNED),
        ((1, 8, 84), {"names": NAMES}, None, f"a detector of {ROTATED} (the metadata names 3 classes", TURNED),
        ((1, 7, 84), {"names": NAMES}, "YoloBoxes", "of the file's metadata: a to c", "NOTE"),
        ((1, 7, 84), {"task": "detect"}, "YoloBoxes", "a detector", "NOTE"),
        ((1, 8, 84), {"names": NAMES, "task": "detect"}, None, "no postprocessor reads", ROTATED),
        ((1, 5, 84), {}, "YoloBoxes", "a detector", "NOTE"),
    ],
)
def test_names_in_the_metadata_decide_what_boxes_are(
    shape: tuple[int, ...], metadata: dict[str, str], postprocessor: str | None, said: str, unsaid: str,
    folder: Path, capsys: Any,
) -> None:  # fmt: skip
    constant_model(folder / "m.onnx", {"output0": np.full(shape, 0.5)}, metadata)
    printed = exported(capsys, "m.onnx")
    assert model_of("m.toml").get("postprocessor") == postprocessor
    assert said in printed
    assert unsaid not in printed
    assert main(["check", "m.toml"]) == 0


def test_a_name_that_is_not_utf8_is_refused(folder: Path, capfd: Any) -> None:
    constant_model(folder / "m.onnx", {"output0": np.full((1, 3), 0.5)})
    name = os.fsdecode(b"m\xff.onnx")
    (folder / "m.onnx").rename(folder / name)
    assert main(["export", name, "--out", "m.toml"]) == 1
    refused = "has a name that is not UTF-8, which neither TOML nor ONNX Runtime takes: rename it"
    assert refused in capfd.readouterr().err
    with pytest.raises(ConfigError, match=refused):
        plan_pipeline({"backend": "OnnxTensor", "model": name})


def test_labels_decide_what_boxes_are(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"output0": np.full((1, 84, 7), 0.5)})
    (folder / "two.txt").write_text("a\nb\n")
    assert "NOTE" not in exported(capsys, "m.onnx", "--labels", "two.txt")


def test_labels_tell_yolov8_in_rows_from_yolov5_as_names_in_the_metadata_do(folder: Path, capsys: Any) -> None:
    output = np.zeros((1, 84, 7), np.float32)
    output[0, 5] = [32, 32, 16, 16, 0, 0, 0.9]
    constant_model(folder / "m.onnx", {"output0": output})
    (folder / "three.txt").write_text("a\nb\nc\n")
    exported(capsys, "m.onnx", "--labels", "three.txt")
    assert model_of("m.toml")["postprocessor"] == "YoloBoxes"
    with pipe("m.toml") as run:
        run(data := {"data": jpeg(64, 64)})
    assert data["result"].labels == ["c"]
    printed = refused(capsys, "m.onnx", "--labels", "three.txt", "--postprocessor", "Yolo5Boxes", "--out", "n")
    assert "Yolo5Boxes reads 2 classes" in printed
    assert 'has 3 labels. postprocessor = "YoloBoxes" reads as many' in printed


def test_labels_that_fit_no_layout_are_counted(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"output0": np.full((1, 84, 7), 0.5)})
    (folder / "six.txt").write_text("a\nb\nc\nd\ne\nf\n")
    printed = refused(capsys, "m.onnx", "--labels", "six.txt")
    assert "Yolo5Boxes reads 2 classes from the outputs, and m.labels.txt has 6 labels" in printed


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 7, 500), "--postprocessor YoloBoxes reads 3 classes from output0 ?x7x500"),
        ((1, 2, 5), "these have labels, if --postprocessor names one: SoftmaxMax, "),
    ],
)
def test_labels_of_an_unknown_output_name_who_reads_them(shape: Any, said: str, folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"output0": np.full(shape, 0.5)})
    (folder / "three.txt").write_text("a\nb\nc\n")
    printed = refused(capsys, "m.onnx", "--labels", "three.txt")
    assert "--labels three.txt: read as a model of images (outputs output0 1x" in printed
    assert "whose answers have no labels; " in printed
    assert said in printed


def test_boxes_alone_of_a_model_with_masks_get_a_note(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"output0": np.full((1, 39, 84), 0.5), "output1": np.full((1, 32, 16, 16), 0.5)})
    assert "--postprocessor YoloSegments reads masks" in exported(capsys, "m.onnx", "--postprocessor", "YoloBoxes")


def test_a_segmenters_map_has_the_size_of_the_picture(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"y": np.random.default_rng(0).standard_normal((1, 21, 32, 32))})
    exported(capsys, "m.onnx")
    with pipe("m.toml") as run:
        run(data := {"data": jpeg(48, 96)})
    assert tuple(data["result"].shape) == (1, 48, 96)


def test_a_map_of_integers_is_a_segmenters(folder: Path, capsys: Any) -> None:
    graph = Graph()
    channels = graph.add("Conv", "images", graph.random(4, 3, 1, 1))
    graph.add("ArgMax", channels, axis=1, keepdims=0, output="classes")
    inputs, outputs = ({"images": (FLOAT, ["n", 3, 64, 64])}, {"classes": (TensorProto.INT64, ["n", 64, 64])})
    for metadata, resizing in (({}, "ResizeMat"), ({"task": "semantic", "imgsz": "[64, 64]"}, "LetterBoxMat")):
        graph.save(folder / "segmenter.onnx", inputs, outputs, metadata)
        exported(capsys, "segmenter.onnx", "--force")
        assert (model_of("segmenter.toml")["postprocessor"], main(["check", "segmenter.toml"])) == ("ArgMax", 0)
        assert resizing in parse_toml("segmenter.toml")["decode"]["backend"]
        with pipe("segmenter.toml") as run:
            run(data := {"data": jpeg()})
        assert data["result"].shape == (1, 48, 96)


def test_rtdetr_of_ultralytics_gets_the_whole_picture_stretched(folder: Path, capsys: Any) -> None:
    rows = np.zeros((1, 300, 6), np.float32)
    rows[0, 7] = [0.5, 0.25, 0.5, 0.5, 0.9, 2]
    metadata = {"head": "RTDETRDecoder", "task": "detect", "names": "['person', 'car', 'dog']", "imgsz": "[64, 64]"}
    constant_model(folder / "rtdetr.onnx", {"output0": rows}, metadata)
    printed = exported(capsys, "rtdetr.onnx")
    assert "pixels 0 to 1" in printed
    with pipe("rtdetr.toml") as run:
        run(data := {"data": jpeg()})
    assert data["result"].labels == ["dog"]
    assert data["result"].boxes.tolist() == [[24, 0, 72, 24]]


def test_options_change_what_was_assumed(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"logits": np.ones((1, 10))})
    (folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")
    options = ("--fit", "letterbox", "--color", "bgr", "--mean", "0.5", "--std", "0.25", "--labels", "labels.txt")
    printed = exported(capsys, "m.onnx", *options, "--postprocessor", "TopK")
    decode, node = parse_toml("m.toml")["decode"], model_of("m.toml")
    assert "LetterBoxMat" in decode["backend"]
    assert decode["color"] == "bgr"
    assert (node["mean"], node["std"], node["postprocessor"]) == ("127.5", "63.75", "TopK")
    assert (folder / "m.labels.txt").read_text(encoding="utf-8").split("\n")[:-1] == LABELS
    assert "label 0 to label 9" in printed


def test_the_unit_of_mean_and_std_is_said_and_taken(folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"logits": np.ones((1, 10))})
    assert "need --mean 0 --std 1 (mean = 0 and std = 255 in the TOML, of 0 to 255)" in exported(capsys, "m.onnx")
    exported(capsys, "m.onnx", "--mean", "0", "--std", "1", "--force")
    assert (float(model_of("m.toml").get("mean", 0)), float(model_of("m.toml")["std"])) == (0, 255)


def test_pixels_stay_whole_where_the_model_normalises_them(folder: Path, capsys: Any) -> None:
    for scale, std in ((255.0, None), (0.2, "255")):
        graph = Graph()
        scaled = graph.add("Div", "x", graph.constant(np.float32(scale)))
        graph.add("Identity", graph.head(scaled, 10), output="logits")
        graph.save(folder / "m.onnx", {"x": (FLOAT, ["n", 3, 32, 32])}, {"logits": (FLOAT, ["n", 10])})
        assert "the model normalises them itself" in exported(capsys, "m.onnx", "--force")
        assert model_of("m.toml").get("std") == std


def test_requests_run_alone_where_batches_fail(folder: Path, capsys: Any) -> None:
    graph = Graph()
    rows = graph.head("x", 10)
    graph.add("Sub", rows, graph.add("ReduceMean", rows, axes=[0], keepdims=1), output="logits")
    graph.save(folder / "m.onnx", {"x": (FLOAT, ["n", 3, 32, 32])}, {"logits": (FLOAT, ["n", 10])})
    assert "max = 1, since batches fail: node 'model'" in exported(capsys, "m.onnx")
    assert model_of("m.toml")["max"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--weights", "w.pt"), "--weights: for PyTorch models"),
        (("--resize", "32x32"), "images of 32x32: m.onnx takes ?x3x64x64"),
        (("--color", "gray"), "--color gray: the model takes 3 channels"),
        (("--mean", "123"), "expected values for pixels 0 to 1"),
        (("--mean", "0", "--std", "255"), "as in the TOML, are divided by 255: --std 1"),
        (("--fit", "whole"), "--fit whole: the model takes ?x3x64x64"),
        (("--postprocessor", "SoftMax"), "--postprocessor SoftMax: did you mean 'SoftmaxMax'?"),
        (("--labels", "none.txt"), "--labels none.txt: No such file or directory"),
        (("--labels", "two.txt"), ": key 'labels': m.labels.txt has 2 lines, the model has 10 classes"),
        (("--postprocessor", "YoloBoxes"), "does not run as it was read, a detector"),
    ],
)
def test_refuses_options_that_do_not_fit(options: tuple[str, ...], said: str, folder: Path, capsys: Any) -> None:
    constant_model(folder / "m.onnx", {"logits": np.ones((1, 10))})
    (folder / "two.txt").write_text("a\nb\n", encoding="utf-8")
    printed = refused(capsys, "m.onnx", *options)
    assert said in printed


def test_refuses_models_that_cannot_be_tried(folder: Path, capsys: Any) -> None:
    for operator, side, output, said in (
        ("SequenceConstruct", 8, helper.make_tensor_sequence_value_info("y", FLOAT, None), "output 'y' is a sequence"),
        ("Relu", 2**32, helper.make_tensor_value_info("y", FLOAT, None), "does not take images of"),
    ):
        images = helper.make_tensor_value_info("x", FLOAT, ["n", 3, side, side])
        graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", [images], [output])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "odd.onnx")
        assert said in refused(capsys, "odd.onnx")


def test_refuses_files_that_are_not_models_and_keeps_existing_ones(folder: Path, capsys: Any) -> None:
    assert "none.onnx: no such file" in refused(capsys, "none.onnx")
    (folder / "text.onnx").write_text("hello", encoding="utf-8")
    assert "text.onnx: ONNX Runtime cannot load it" in refused(capsys, "text.onnx")
    ends = [[helper.make_tensor_value_info(name, FLOAT, ["n", 3])] for name in "xy"]
    graph = helper.make_graph([helper.make_node("Odd", ["x"], ["y"], domain="acme")], "g", *ends)
    for version, said in ((10, "acme:Odd(-1) is not a registered function/op"), (99, "model IR version: 99")):
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("acme", 1)], ir_version=version)
        onnx.save(made, folder / "odd.onnx")
        assert said in refused(capsys, "odd.onnx")
    constant_model(folder / "m.onnx", {"logits": np.ones((1, 10))})
    (folder / "m.toml").write_text("# mine\n", encoding="utf-8")
    assert "m.toml: there already; --force replaces" in refused(capsys, "m.onnx")
    assert (folder / "m.toml").read_text(encoding="utf-8") == "# mine\n"

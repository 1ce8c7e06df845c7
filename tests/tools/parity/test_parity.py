"""``torchpipe parity``: every outcome of an image, the reports, the exit status."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
import torch
from conftest import Register, encode, picture
from kit.backends import returns
from kit.small_zoo import use_small_zoo

from torchpipe_py import Detections, ItemBackend, Param
from torchpipe_py.cli import main
from torchpipe_py.tools.compare_models.figures import Prediction
from torchpipe_py.tools.compare_models.images import Pictures, Recorded, ResultSource, shown_name
from torchpipe_py.tools.compare_models.results import Unusable, kinds_of, read, read_pixels, read_prediction
from torchpipe_py.tools.compare_models.run import compare
from torchpipe_py.tools.report import ToolError

ROOT = Path(__file__).resolve().parents[3]

SIZE = "resize_h = 64\nresize_w = 64\n"
BILINEAR = f'backend = "S[DecodeMat,ResizeMat]"\n{SIZE}'
AREA = f'{BILINEAR}interpolation = "area"\n'
PILLOW = f'backend = "S[DecodeMat,PillowResizeMat]"\n{SIZE}'
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

    def run(a: str, b: str | None, img_dir: Path, *options: str) -> Run:
        json_file, html_file = tmp_path / "out.json", tmp_path / "out.html"
        files = ("--json", str(json_file), "--html", str(html_file))
        capsys.readouterr()
        status = main(["parity", a, *filter(None, [b]), "--img_dir", str(img_dir), *files, *options])
        printed = capsys.readouterr()
        assert max(map(len, printed.out.splitlines()), default=0) <= 120
        return Run(status, printed.out, printed.err, json_file, html_file)

    return run


# -- results ----------------------------------------------------------------------------------------------------------

RED = np.full((2, 3, 3), (0, 0, 255), np.uint8)
"""A red Mat in BGR."""


def test_pixels_are_rgb_in_every_layout() -> None:
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
        pixels = read_pixels(item, "x.toml").values
        assert pixels.dtype == np.float32
        assert np.array_equal(pixels, red)


def test_reads_each_kind_of_result() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0]])
    found = Detections(np.zeros((1, 4)), [0.5], [1])
    softmax = 1 / (1 + math.exp(-2) + math.exp(-1))
    wanted: list[tuple[Any, str, Any]] = [
        (("ring", 0.5), "classes", Prediction("ring", 0.5)),
        ((np.int64(3), np.float32(0.5)), "classes", Prediction(3, 0.5)),
        (["ring", 1], "classes", Prediction("ring", 1.0)),
        ([("ring", 0.5), ("box", 0.25)], "classes", Prediction("ring", 0.5, ("ring", "box"))),
        ([], "classes", Prediction(None, None, ())),
        ("ring", "classes", Prediction("ring")),
        (3, "classes", Prediction(3)),
        (row, "classes", Prediction(1, pytest.approx(softmax))),
        (row[0].numpy(), "classes", Prediction(1, pytest.approx(softmax))),
        (torch.tensor([0.25, 0.75], dtype=torch.bfloat16), "classes", Prediction(1, 0.75)),
        (torch.tensor([[0.6, -0.8]]), "embeddings", np.array([0.6, -0.8])),
        ([0.6, 0.0, 0.8], "embeddings", np.array([0.6, 0.0, 0.8])),
        (torch.zeros(1, 2, 3, dtype=torch.int32), "masks", np.zeros((2, 3))),
        (torch.zeros(1, 2, 3, dtype=torch.uint8), "masks", np.zeros((2, 3))),
        (np.ones((2, 3), bool), "masks", np.ones((2, 3))),
        (found, "detections", found),
        (RED, "pixels", None),
        (torch.zeros(1, 3, 2, 2), "pixels", None),
    ]
    for value, kind, result in wanted:
        item = {"result": value}
        assert kinds_of(item, "m.toml")[0] == kind, value
        if result is not None:
            read_as = read(kind, item, "m.toml")
            assert np.allclose(read_as, result) if isinstance(result, np.ndarray) else read_as == result, value

    rows = [torch.zeros(1, 5), torch.zeros(1, 5)]
    for value in (rows, ("ring", 0.5, 1), ("ring", True), (True, 0.5), (1.5, 0.5), ("ring", "0.5"), ("a",), object()):
        with pytest.raises(ToolError, match=r"m.toml: its result cannot be compared: expected a class, detections"):
            kinds_of({"result": value}, "m.toml")
    for shape in ((1, 1), (2, 5), (1, 5, 1, 1), ()):
        with pytest.raises(ToolError, match=r"m.toml: its result cannot be read as a class: expected \(label, score\)"):
            read_prediction({"result": torch.zeros(shape)}, "m.toml")


def test_an_image_without_usable_values() -> None:
    for tensor in (torch.zeros(1, 3, 0, 4), torch.full((1, 3, 2, 2), math.nan), torch.full((1, 3, 2, 2), math.inf)):
        with pytest.raises(Unusable):
            read_pixels({"result": tensor}, "x.toml")
    broken = Detections(np.full((1, 4), math.nan), [0.5], [1])
    vector = np.array([0.6, math.inf])
    for kind, result in (
        *(("classes", result) for result in (torch.tensor([[1.0, math.nan]]), ("ring", math.nan))),
        ("detections", broken),
        ("embeddings", vector),
    ):
        with pytest.raises(Unusable):
            read(kind, {"result": result}, "m.toml")


# -- two configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [AREA, PILLOW])
def test_figures_equal_those_computed_from_the_images(parity: Parity, write: Write, images: Path, other: str) -> None:
    a, b = write("a", BILINEAR), write("b", other)
    run = parity(a, b, images)
    assert (run.status, run.json["schema"], run.json["a"], run.json["b"], run.json["model"]) == (0, 1, a, b, None)

    assert len(run.json["images"]) == len(run.json["worst"]) == 5
    for image in run.json["images"]:
        mat = cv2.imread(str(images / image["name"]))
        reference = cv2.resize(mat, (64, 64), interpolation=cv2.INTER_LINEAR)
        if other == AREA:
            delta = cv2.resize(mat, (64, 64), interpolation=cv2.INTER_AREA).astype(np.float64) - reference
            assert (image["max"], image["share"]) == (np.abs(delta).max(), (np.abs(delta) > 1).mean())
            assert (image["mean"], image["shift"]) == pytest.approx((np.abs(delta).mean(), delta.mean()))
    means = [image["mean"] for image in run.json["images"]]
    assert run.json["summary"]["mean"]["median"] == pytest.approx(np.median(means))
    assert run.json["summary"]["mean"]["worst"] == max(means) > 0


def test_images_that_cannot_be_compared_are_listed(
    parity: Parity, write: Write, images: Path, register: Register
) -> None:
    class Fussy(ItemBackend):
        """Raises for narrow Mats."""

        def forward_item(self, item: dict[str, Any]) -> None:
            if item["data"].shape[1] == 130:
                raise ValueError("a <narrow>\nMat")
            narrower = item["data"].shape[1] == 140
            item["result"] = item["data"][:, 1:] if narrower else item["data"]

    (images / "broken.jpg").write_bytes(b"no image at all")
    (images / "gone.jpg").symlink_to(images / "nowhere.jpg")
    (images / "readme.txt").write_text("no image")
    (images / "wide.png").write_bytes(encode(picture(64, 140), ".png"))
    run = parity(write("a", AS_DECODED), write("b", f'backend = "S[DecodeMat,{register(Fussy)}]"'), images)
    assert (run.status, run.json["counts"]["found"]) == (0, 8)
    assert [image["name"] for image in run.json["images"]] == ["0.jpg", "2.jpg", "3.jpg", "more/4.JPEG"]
    refused = {image["name"]: (image["a"], image["b"]) for image in run.json["refused"]}
    reason = "DecodeError: 15 bytes: not a JPEG, PNG, WebP or BMP image"
    assert refused["broken.jpg"] == (reason, reason)
    assert "cannot be read" in refused["gone.jpg"][0]
    assert refused["1.jpg"][0] is None
    assert refused["1.jpg"][1].startswith("BackendError: ")
    assert "a <narrow> Mat" in refused["1.jpg"][1]
    assert run.json["shapes_differ"] == [{"name": "wide.png", "a": [64, 140, 3], "b": [64, 139, 3]}]
    assert "A: gives a result" in run.out
    assert "64x140x3" in run.out
    assert "A and B: DecodeError" in run.out
    assert "a &lt;narrow&gt; Mat" in run.html


# -- a model ----------------------------------------------------------------------------------------------------------


def test_two_models_are_compared_by_class(parity: Parity, write: Write, tmp_path: Path) -> None:
    demo = ROOT / "configs" / "demo" / "images"
    a = LABELLED.replace('"OnnxTensor"', '"S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"')
    a = f'color = "rgb"\n{SIZE}{a}'
    b = a.replace('mean = "123.675, 116.28, 103.53"', 'mean = "20"')  # which is wrong
    run = parity(write("a", a), write("b", b), demo, "--max-drop", "0", "--min-agreement", "1")
    assert (run.status, run.json["counts"]["compared"], run.json["summary"]) == (1, 48, {})
    right = run.json["accuracy"]
    lost = right["a"]["hits"] - right["b"]["hits"]
    assert right["drop"] == pytest.approx(100 * lost / 48)
    assert 0 < lost <= run.json["agreement"]["total"] - run.json["agreement"]["same"]
    assert [bar["ok"] for bar in run.json["bars"]] == [False, False]
    assert parity(write("a", a), write("a2", a), demo, "--max-drop", "0").status == 0
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "IMG_1.jpg").write_bytes((demo / "ring_00.jpg").read_bytes())
    run = parity(write("a", a), write("b", b), tmp_path / "images", "--max-drop", "0")
    assert "no accuracy: the images are not labelled; 'IMG' of IMG_1.jpg is not a class" in run.out
    assert "--max-drop 0: nothing to compare, missed" in run.out


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


# -- a function, and a tolerance --------------------------------------------------------------------------------------

BY_COLOR = """
import cv2

def predict(path):
    mean = cv2.imread(path).mean((0, 1))
    if len(cv2.imread(path)) == 110:
        raise SystemExit("not this one")
    return int(mean.argmax()), float(mean.max() / 255)
"""


class Brightest(ItemBackend):
    """The number of the brightest channel, with its mean as score."""

    def forward_item(self, item: dict[str, Any]) -> None:
        mean = item["data"].mean((0, 1))
        item["result"] = ("bgr"[int(mean.argmax())], float(mean.max() / 255))


def test_a_function_is_the_reference(
    parity: Parity, write: Write, images: Path, tmp_path: Path, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "by_color.py").write_text(BY_COLOR)
    (tmp_path / "labels.txt").write_text("b\ng\nr\n")
    monkeypatch.delitem(sys.modules, "by_color", raising=False)
    function = f"{tmp_path / 'by_color.py'}:predict"
    config = write("a", f'backend = "S[DecodeMat,{register(Brightest)}]"')
    run = parity(config, None, images, "--against", function)
    assert run.status == 1
    assert f"{config} gives labels ('" in run.err
    assert f"{function} numbers of classes" in run.err

    labelled = register(type("Labelled", (Brightest,), {"labels": Param(str, doc="labels")}))
    config = write("b", f'backend = "S[DecodeMat,{labelled}]"\nlabels = "{tmp_path / "labels.txt"}"')
    run = parity(config, None, images, "--against", function, "--tolerance", "top1=0.3, score=0.001, images=0.3")
    assert (run.json["a"], run.json["b"], run.json["kinds"]) == (function, config, ["classes"])
    assert [(each["name"], each["a"]) for each in run.json["refused"]] == [("1.jpg", "SystemExit: not this one")]
    assert run.json["agreement"]["same"] == 4
    # The image for which only one side has a result counts.
    assert [each["beyond"] for each in run.json["tolerance"]["limits"]] == [0.2, 0.2]

    for name, problem in (
        (function[: -len(":predict")], "by_color.py: expected file.py:function or package.module:function; for"),
        (function.replace("predict", "predic"), "has no function 'predic'; did you mean 'predict'?"),
        ("nowhere.py:predict", "nowhere.py: no such file"),
    ):
        assert problem in parity(config, None, images, "--against", name).err
    monkeypatch.delitem(sys.modules, "by_color")


def test_status_and_answer_say_whether_the_tolerance_is_kept(parity: Parity, write: Write, images: Path) -> None:
    a, b = write("a", BILINEAR), write("b", AREA)
    for tolerance, status, answer, seen in (
        ("mean=40, images=0.3", 0, "B is within the tolerance, as all 5 images show", 5),
        ("mean=0.001, images=0.8", 1, "B is beyond the tolerance (mean ≤ 0.001), as all 5 images show", 5),
        ("max=255", 1, "undecided: all 5 images are too few for max ≤ 255; about 420 like these would decide", 5),
    ):
        run = parity(a, b, images, "--tolerance", tolerance)
        assert (run.status, run.out.split("\n")[0], run.json["counts"]["seen"]) == (status, answer, seen)
        assert run.json["answer"] == answer
        assert run.json["tolerance"]["stopped"].startswith("after 5 of 5 images: ")
        assert answer in Page(run.html).text
        assert run.json["tolerance"]["text"] == tolerance
    run = parity(a, b, images, "--tolerance", "top1=0.9")
    assert (run.status, run.out) == (1, "")
    assert "--tolerance: 'top1' is not measured on pixels, which the results are; valid: max, mean" in run.err


def test_a_recorded_source_runs_once_for_each_image(images: Path) -> None:
    called: list[str] = []

    def predict(path: str) -> Any:
        called.append(path)
        return "ring", 0.5

    with ExitStack() as stack:
        reference = Recorded(ResultSource("f", predict), stack)
        for _ in range(2):
            found = compare(reference, ResultSource("g", lambda path: ("ring", 0.25)), Pictures(str(images)))
            assert [image.figures for image in found.compared] == [{"top1": 1, "score": 0.25}] * 5
    assert len(called) == len(set(called)) == 5


# -- torchvision's transform ------------------------------------------------------------------------------------------


def test_warning_of_the_configuration_is_given_once(
    write: Write, images: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_small_zoo(monkeypatch)
    config = write("a", '[n]\nbackend = "S[DecodeMat,NormalizeMat]"\nmean = 0.5\nstd = 0.2\n')
    main(["parity", config, "--img_dir", str(images), "--torchvision", "Tiny_Weights.V1"])
    assert sum("key 'std'" in record.getMessage() for record in caplog.records) == 1


def test_pixels_are_torchvisions(parity: Parity, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_zoo(monkeypatch)
    assert main(["export", "tiny", "--weights", "random", "--out", str(tmp_path / "model")]) == 0
    asked = (str(tmp_path / "model.toml"), None, images, "--torchvision", "Tiny_Weights.V1", "--max-mean", "0.1")
    run = parity(*asked)
    assert (run.status, run.json["counts"]["compared"], run.json["b"]) == (0, 5, "torchvision's Tiny_Weights.V1")
    assert run.json["notes"] == ["A: Mat, RGB", "B: Tensor, RGB"]
    text = (tmp_path / "model.toml").read_text("utf-8")
    (tmp_path / "model.toml").write_text(text.replace('"51, ', '"52, ').replace("size = 40", "size = 36"))
    run = parity(*asked)
    wrong = "model: std is (52.0, 63.75, 76.5); torchvision's, times 255, is (51.0, 63.75, 76.5)"
    assert (run.status, run.json["notes"][-1]) == (1, wrong)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (
            "tiny_weights.v1",
            "--torchvision tiny_weights.v1: no such weights in torchvision; did you mean 'Tiny_Weights.V1'?",
        ),
        ("", "--torchvision : no such weights in torchvision; valid: Tiny_Weights.DEFAULT, Tiny_Weights.V1"),
        (None, "torchvision is not installed: pip install torch=="),
    ],
)
def test_unknown_torchvision_weights_are_an_error(
    parity: Parity, write: Write, images: Path, monkeypatch: pytest.MonkeyPatch, weights: str | None, problem: str
) -> None:
    use_small_zoo(monkeypatch)
    if weights is None:
        monkeypatch.setitem(sys.modules, "torchvision.models", None)
    run = parity(write("a", BILINEAR), None, images, "--torchvision", "any" if weights is None else weights)
    assert (run.status, problem in run.err) == (1, True), run.err


# -- status and errors ------------------------------------------------------------------------------------------------


def test_refuses_pipes_that_cannot_be_compared(
    capsys: Any, write: Write, images: Path, tmp_path: Path, register: Register
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("")
    good, bad = write("good", BILINEAR), write("bad", BILINEAR.replace("resize_h", "resize_hh"))
    roots = write("roots", f"[one]\n{AS_DECODED}[two]\n{AS_DECODED}")

    class Silent(ItemBackend):
        """Gives nothing."""

        def forward_item(self, item: dict[str, Any]) -> None: ...

    silent = write("silent", f'backend = "{register(Silent)}"')
    label = write("label", f'backend = "{register(returns(("ring", 0.5)))}"')
    cases = [
        (silent, images, "nothing could be compared: 5 images refused"),
        (good, tmp_path / "empty", "no image in it (looked for .jpg"),
        (good, tmp_path / "missing", "no such directory"),
        (good, good, "no such directory"),
        (bad, images, f"torchpipe: {bad}: node 'node': key 'resize_hh': unknown key"),
        ("missing.toml", images, "no such file"),
        (roots, images, f"torchpipe: {roots}: "),
        (roots, images, "one root"),
        (label, images, f"{good} gives pixels, {label} gives classes: only results of one kind can be compared\n"),
    ]

    for config, folder, message in cases:
        assert main(["parity", good, config, "--img_dir", str(folder)]) == 1
        printed = capsys.readouterr()
        assert config == silent or printed.out == ""
        assert message in printed.err


# -- the page ---------------------------------------------------------------------------------------------------------


class Page:
    """A page whose body is well-formed: pictures, everything that could be fetched, and the text."""

    def __init__(self, html: str) -> None:
        body = html.partition("<body>")[2].rpartition("</body>")[0]
        elements = list(ElementTree.fromstring(f"<body>{body}</body>").iter())
        self.tags = {element.tag for element in elements}
        self.text = "".join(elements[0].itertext())
        self.pictures, self.fetched = [], []
        for key, value in (attribute for element in elements for attribute in element.items()):
            if key == "src" and value.startswith("data:image/png;base64,"):
                encoded = np.frombuffer(base64.b64decode(value.partition(",")[2], validate=True), np.uint8)
                self.pictures.append(cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED))
            elif key in ("src", "href", "srcset", "action", "data", "poster") or key.startswith("on"):
                self.fetched.append(f"{key}={value}")


def test_the_page_is_self_contained_and_its_pictures_are_right(parity: Parity, write: Write, images: Path) -> None:
    run = parity(write("a", BILINEAR), write("b", AREA), images, "--worst", "2")
    means = {image["name"]: image["mean"] for image in run.json["images"]}
    worst = sorted(means, key=lambda name: -means[name])[:2]
    assert run.json["worst"] == worst
    page = Page(run.html)
    assert page.fetched == []
    assert not page.tags & {"script", "link", "iframe", "object", "b"}
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"base64,[^\"]*", "", run.html))
    assert "|B - A| × 16" in page.text
    assert all(name in page.text for name in worst)
    assert [shown.shape for shown in page.pictures] == [(64, 64, 3)] * 6
    mat = cv2.imread(str(images / worst[0]))
    a, b = (cv2.resize(mat, (64, 64), interpolation=way) for way in (cv2.INTER_LINEAR, cv2.INTER_AREA))
    for shown, wanted in zip(page.pictures, (a, b, np.clip(np.abs(b.astype(int) - a) * 16, 0, 255)), strict=False):
        assert np.array_equal(shown, wanted)


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
    assert all(name in page.text for name in [*names, "<i>broken.jpg"])
    for path, shown in (("a\nb\x1b.jpg", "a?b?.jpg"), ("\udcff.jpg", "?.jpg"), ("süß/ß.jpg", "süß/ß.jpg")):
        assert shown_name(Path(path)) == shown

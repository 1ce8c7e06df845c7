"""Backends that do not take what the one before them gives: refused before anything starts, and only these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture, save_model
from onnx import helper

from torchpipe_py import ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.image.mat import cvtColorMat
from torchpipe_py.backends.image.ops import ResizeMat
from torchpipe_py.backends.signature import ENCODED, MAT, NUMBERS, TENSOR
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.registry import BUILT_IN_BACKENDS, Registry, default

SIZE = {"resize_h": 8, "resize_w": 8}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_pipeline(config)
    return str(caught.value)


# -- what the classes say is what they do -----------------------------------------------------------------------------

DATA = {
    ENCODED: encode(picture(20, 30)),
    MAT: picture(20, 30),
    TENSOR: torch.zeros(1, 3, 20, 30, dtype=torch.uint8),
    NUMBERS: [0.5, 1.5],
}
PARAMS: dict[str, Any] = {
    **dict.fromkeys(("resize_h", "max_h", "crop_h", "size"), 8),
    **dict.fromkeys(("resize_w", "max_w", "crop_w"), 9),
    "color": "rgb",
    "align": 8,
    "widths": 16,
    "box": [0, 0, 8, 8],
}
OF_KINDS = [name for name in BUILT_IN_BACKENDS if (cls := default.find_backend(name)) and (cls.takes or cls.gives)]


def kind_of(result: Any) -> str:
    kinds = {torch.Tensor: TENSOR, np.ndarray: MAT, list: NUMBERS, bytes: ENCODED}
    return kinds.get(type(result), type(result).__name__)


@pytest.mark.parametrize("name", [name for name in OF_KINDS if name != "DecodeTensor"])
def test_the_kinds_of_a_built_in_backend_are_what_it_takes_and_gives(name: str, tmp_path: Path) -> None:
    cls = default.find_backend(name)
    assert cls is not None
    torch.save(torch.zeros(1), tmp_path / "one.pt")
    values = {**PARAMS, "save_dir": str(tmp_path), "tensor_name": str(tmp_path / "one.pt")}
    params = {param.key: values[param.key] for param in cls.parameters().values() if param.key in values}
    params = {key: value for key, value in params.items() if (key, name) != ("max_w", "AlignMat")}
    box = [[0, 0], [8, 0], [8, 8], [0, 8]] if name == "PerspectiveTransformMat" else PARAMS["box"]
    with pipe({"backend": name, **params}) as run:
        for kind, value in DATA.items():
            run(data := {"data": value, "box": box, **SIZE})
            if cls.takes in ("", kind):
                result = data["result"]
                assert kind_of(result) == cls.gives
                sides = (20, 30) if cls.keeps_sides else tuple(params[side] for side in cls.sides)
                if sides:
                    assert (result.shape[2:] if cls.gives == TENSOR else result.shape[:2]) == sides
                if cls.gives in (MAT, TENSOR) and name != "LoadTensor":
                    assert result.shape[1 if cls.gives == TENSOR else 2] == 3
            else:
                assert isinstance(data["error"], InvalidRequest)
                assert "result" not in data


def test_all_backends_for_images_say_their_kinds() -> None:
    silent = {name for name in BUILT_IN_BACKENDS if name.endswith("Mat")} - set(OF_KINDS)
    assert silent == set()
    silent = {name for name in BUILT_IN_BACKENDS if name.endswith("Tensor")} - set(OF_KINDS)
    assert silent == {"SyncTensor", "OnnxTensor", "TensorrtTensor", "TorchTensor"}


# -- neighbours in a sequence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        (
            "S[DecodeMat,Mat2Tensor,ResizeMat]",
            "ResizeMat takes a Mat, and Mat2Tensor before it gives a Tensor; "
            "ResizeTensor takes a Tensor, or put Tensor2Mat before it",
        ),
        (
            "S[DecodeMat,ResizeTensor,SyncTensor]",
            "ResizeTensor takes a Tensor, and DecodeMat before it gives a Mat; "
            "ResizeMat takes a Mat, or put Mat2Tensor before it",
        ),
        (
            "S[ResizeMat,DecodeMat]",
            "DecodeMat takes encoded bytes, and ResizeMat before it gives a Mat; "
            "the image is decoded already: leave DecodeMat out",
        ),
        (
            "S[ResizeTensor,Mat2Tensor]",
            "Mat2Tensor takes a Mat, and ResizeTensor before it gives a Tensor; leave Mat2Tensor out",
        ),
        (
            "S[Tensor2Vector,ResizeTensor]",
            "ResizeTensor takes a Tensor, and Tensor2Vector before it gives a list of numbers",
        ),
        (
            "S[DecodeMat,Identity,CopyMakeBorderTensor]",
            "CopyMakeBorderTensor takes a Tensor, and DecodeMat before it gives a Mat; put Mat2Tensor before it",
        ),
    ],
)
def test_a_backend_that_cannot_take_what_its_neighbour_gives_is_refused(backend: str, told: str) -> None:
    size = SIZE if "Resize" in backend else {}
    assert refusal({"backend": backend, **size}) == f"config: node 'node': key 'backend': {told}"


@pytest.mark.parametrize(
    "backend",
    [
        "S[SyncTensor[S[DecodeMat,Mat2Tensor]],ResizeMat]",
        "S[DecodeMat,Process[Mat2Tensor],ResizeMat]",
        "S[DecodeMat,FirstAvailable[Mat2Tensor,S[Identity,Mat2Tensor]],ResizeMat]",
        "S[DecodeMat,Mat2Tensor,FirstAvailable[ResizeMat,PillowResizeMat]]",
        "S[DecodeMat,S[Mat2Tensor,ResizeMat]]",
        "S[LoadTensor,ResizeMat]",
    ],
)
def test_brackets_hide_no_mistake(backend: str, tmp_path: Path) -> None:
    (tmp_path / "one.pt").touch()
    loads = {"tensor_name": str(tmp_path / "one.pt")} if "Load" in backend else {}
    assert "ResizeMat takes a Mat, and" in refusal({"backend": backend, **SIZE, **loads})


@pytest.mark.parametrize(
    "backend",
    [
        "S[DecodeMat,ResizeMat,Mat2Tensor,ResizeTensor,Tensor2Mat,ResizeMat]",
        "S[FirstAvailable[DecodeTensor,DecodeMat],ResizeMat]",
        "S[FirstAvailable[DecodeTensor,S[DecodeMat,Mat2Tensor]],ResizeTensor,SyncTensor]",
        "S[DecodeMat,FirstAvailable[ResizeTensor,ResizeMat]]",
        "S[DecodeMat,(or)ResizeTensor]",
        "S[DecodeMat,(or)Mat2Tensor,ResizeMat]",
        "S[S[DecodeMat,(or)Mat2Tensor],ResizeMat]",
        "S[DecodeMat,Own,ResizeTensor]",
        "S[DecodeMat,Python[Own],ResizeTensor]",
        "S[DecodeMat,Mat2Tensor,OwnResize]",
        "S[OwnResize,ResizeTensor]",
        "S[DecodeMat,Range[Own],ResizeTensor]",
    ],
)
def test_what_may_be_right_is_not_refused(backend: str, restored: Registry) -> None:
    class Own:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

    class OwnResize(ResizeMat):
        """Takes Tensors, whatever it inherits."""

    restored.register_backend(Own)
    restored.register_backend(OwnResize)
    limits = {"range": "1,1"} if "Range" in backend else {}
    plan_pipeline({"backend": backend, **SIZE, **limits})


def test_a_composition_is_refused_where_none_of_its_parts_fits() -> None:
    before = {"backend": "DecodeMat", "next": "b"}
    told = refusal({"a": before, "b": {"backend": "ResizeTensor&PillowResizeTensor", **SIZE}})
    assert told.startswith("config: node 'b': key 'backend': ResizeTensor takes a Tensor, and DecodeMat of 'a'")
    plan_pipeline({"a": before, "b": {"backend": "ResizeTensor&ResizeMat", **SIZE}})


# -- along next -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [{}, {"filter": "Run"}, {"filter": "Continue"}])
def test_a_node_that_cannot_take_what_the_one_before_gives_is_refused(first: dict[str, str]) -> None:
    nodes = {"a": {"backend": "DecodeMat", "next": "b", **first}, "b": {"backend": "S[DecodeMat,ResizeMat]", **SIZE}}
    told = refusal(nodes)
    assert told == (
        "config: node 'b': key 'backend': DecodeMat takes encoded bytes, and DecodeMat of 'a' before it gives a Mat; "
        "the image is decoded already: leave DecodeMat out"
    )


def test_a_mistake_in_a_node_that_is_named_twice_is_told_once() -> None:
    nodes = {"a": {"backend": "S[DecodeMat,Tensor2Mat]", "next": "b"}, "b": {"next": "a.2"}, "a.2": {}}
    assert refusal(nodes).count("Tensor2Mat takes a Tensor") == 1


def test_a_node_may_take_in_one_place_what_it_refuses_in_another() -> None:
    nodes = {"a": {"backend": "DecodeMat", "next": "b"}, "b": {"backend": "ResizeMat", "next": "a.2", **SIZE}}
    told = refusal({**nodes, "a.2": {}})
    assert told.startswith("config: node 'a.2': key 'backend': DecodeMat takes encoded bytes, and ResizeMat of 'b'")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"map": "a[data:data]"}),
        ({}, {"filter": "or"}),
        ({}, {"filter": "run"}),
        ({}, {"filter": "mine"}),
        ({"filter": "mine"}, {}),
    ],
)
def test_a_map_or_a_filter_may_bring_something_else(
    first: dict[str, Any], second: dict[str, Any], restored: Registry
) -> None:
    restored.register_filter(lambda data: None, "mine")
    plan_pipeline({"a": {"backend": "DecodeMat", "next": "b", **first}, "b": {"backend": "DecodeMat", **second}})


def test_a_chain_that_may_be_skipped_gives_nothing_that_is_known() -> None:
    nodes: dict[str, Any] = {"a": {"next": "b"}, "b": {"filter": "SerialSkip", "next": "c"}}
    plan_pipeline({**nodes, "c": {"backend": "DecodeMat", "next": "d"}, "d": {"backend": "DecodeMat"}})


def test_what_a_jump_gives_is_not_known() -> None:
    nodes: dict[str, Any] = {"a": {"backend": "S[DecodeMat,Jump]", "jump": "c", "next": "b"}}
    plan_pipeline({**nodes, "b": {"backend": "ResizeTensor", **SIZE}, "c": {"backend": "DecodeMat"}})


# -- sizes ------------------------------------------------------------------------------------------------------------


def model_of(path: Path, *shape: int | str) -> dict[str, Any]:
    """The keys of a node with a model that takes images of this shape."""
    inputs: dict[str, Any] = {"x": ["N", *shape]}
    save_model(path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], inputs, {"y": ["N", *shape]})
    return {"model": str(path / "m.onnx")}


@pytest.mark.parametrize(
    "backend", ["OnnxTensor", "TensorrtTensor", "SyncTensor[FirstAvailable[TensorrtTensor,OnnxTensor]]"]
)
def test_another_size_than_that_of_the_model_is_refused(backend: str, tmp_path: Path) -> None:
    node = {"backend": f"S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,{backend}]", "color": "rgb"}
    node |= model_of(tmp_path, 3, 64, 48)
    told = refusal({**node, "ResizeMat::resize_h": 96, "resize_w": 49}).split("\n")
    assert told == [
        f"config: node 'node': key 'ResizeMat::resize_h': 96, but {node['model']} takes 1x3x64x48: a height of 64",
        f"config: node 'node': key 'resize_w': 49, but {node['model']} takes 1x3x64x48: a width of 48",
    ]
    plan_pipeline({**node, "resize_h": 64, "resize_w": 48})


@pytest.mark.parametrize("resize", ["LetterBoxMat,Mat2Tensor", "ResizePadMat", "Mat2Tensor,LetterBoxTensor"])
def test_it_is_refused_along_next(resize: str, tmp_path: Path) -> None:
    nodes: dict[str, Any] = {
        "global": {"max_h": 320},
        "a": {"backend": f"S[DecodeMat,{resize}]", "max_w": 640, "next": "b"},
        "b": {"backend": "Identity", "next": "c"},
        "c": {"backend": "OnnxTensor", **model_of(tmp_path, 3, 640, 640)},
    }
    model = nodes["c"]["model"]
    assert refusal(nodes) == f"config: global: key 'max_h': 320, but {model} takes 1x3x640x640: a height of 640"
    for change in ({"map": "a[result:data]"}, {"filter": "or"}):
        plan_pipeline({**nodes, "b": {**nodes["b"], **change}})


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("S[ResizeMat,OnnxTensor]", (3, "height", "width")),
        ("S[ResizeMat,OnnxTensor]", (96, 80, 3)),
        ("S[ResizeMat,OnnxTensor]", (3, 64)),
        ("S[ResizeMat,CropMat,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,Mat2Tensor,CopyMakeBorderTensor,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,DynamicResizeMat,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,(or)CropMat,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,OwnCrop,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,FirstAvailable[CropMat,Identity],OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,CenterCropMat,OnnxTensor]", (3, 64, 64)),
    ],
)
def test_a_size_that_may_fit_or_may_change_is_not_refused(
    backend: str, shape: tuple[int | str, ...], tmp_path: Path, restored: Registry
) -> None:
    class OwnCrop:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

    restored.register_backend(OwnCrop)
    crop = {"crop_h": 64, "crop_w": 64} if "CenterCrop" in backend else {}
    plan_pipeline({"backend": backend, "resize_h": 96, "resize_w": 80, **crop, **model_of(tmp_path, *shape)})


def test_what_is_refused_is_what_the_model_would_refuse(tmp_path: Path) -> None:
    config = {"backend": "OnnxTensor", **model_of(tmp_path, 3, 64, 48)}
    with pipe(config) as run:
        for data in (picture(64, 49), picture(48, 64), torch.zeros(1, 3, 64, 49)):
            run(item := {"data": data})
            assert "takes 1x3x64x48, got" in str(item["error"])


# -- channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "color", "channels", "told"),
    [
        ("S[DecodeMat,OnnxTensor]", "gray", 3, "gray is 1 channel, but {} takes 1x3x64x64: 3 channels"),
        ("S[DecodeMat,cvtColorMat,Mat2Tensor,OnnxTensor]", "gray", 3, "gray is 1 channel, but {} takes 1x3x64x64: "),
        ("S[DecodeMat,CropMat,OnnxTensor]", "rgb", 1, "rgb is 3 channels, but {} takes 1x1x64x64: 1 channel"),
        ("S[cvtColorTensor,CropTensor,OnnxTensor]", "bgr", 1, "bgr is 3 channels, but {} takes 1x1x64x64: 1 channel"),
        ("S[DecodeMat,OnnxTensor]", None, 1, "bgr, the default, is 3 channels, but {} takes 1x1x64x64: 1 channel"),
        ("S[DecodeTensor,OnnxTensor]", None, 1, "rgb, the default, is 3 channels, but {} takes 1x1x64x64: 1 channel"),
    ],
)
def test_other_channels_than_those_of_the_model_are_refused(
    backend: str, color: str | None, channels: int, told: str, tmp_path: Path
) -> None:
    node = {"backend": backend, **({} if color is None else {"color": color}), **model_of(tmp_path, channels, 64, 64)}
    assert refusal(node).startswith(f"config: node 'node': key 'color': {told.format(node['model'])}")
    plan_pipeline({**node, **model_of(tmp_path, 4 - channels, 64, 64)})


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("S[DecodeMat,OnnxTensor]", ("channels", 64, 64)),
        ("S[DecodeMat,OnnxTensor]", (64, 64, 1)),
        ("S[DecodeMat,OnnxTensor]", (3, 64, "width")),  # an image H×W×C of three rows
        ("S[DecodeMat,cvtColorTwice,OnnxTensor]", (3, 64, 64)),
        ("S[DecodeMat,(or)CropMat,OnnxTensor]", (3, 64, 64)),
    ],
)
def test_channels_that_may_fit_or_may_change_are_not_refused(
    backend: str, shape: tuple[int | str, ...], tmp_path: Path, restored: Registry
) -> None:
    class cvtColorTwice(cvtColorMat):
        """Gives other channels than it inherits."""

    restored.register_backend(cvtColorTwice)
    plan_pipeline({"backend": backend, "color": "gray", **model_of(tmp_path, *shape)})


def test_gray_for_a_model_of_channels_last_is_refused(tmp_path: Path) -> None:
    node = {"backend": "S[DecodeMat,OnnxTensor]", "color": "gray", **model_of(tmp_path, 64, 64, 3)}
    assert refusal(node).endswith(f"gray is 1 channel, but {node['model']} takes 1x64x64x3: 3 channels")


def test_images_of_one_channel_keep_it() -> None:
    gray = cv2.cvtColor(picture(20, 30), cv2.COLOR_BGR2GRAY)
    size = {"resize_h": 8, "resize_w": 9}
    with pipe({"backend": "S[ResizeMat,PillowResizeMat,Mat2Tensor,ResizeTensor,Tensor2Mat]", **size}) as run:
        run(data := {"data": gray})
    assert data["result"].shape == (8, 9, 1)


# -- the order of channels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [
        "S[DecodeMat,Mat2Tensor,OnnxTensor]",
        "S[DecodeMat,CropMat,FirstAvailable[TensorrtTensor,OnnxTensor]]",
        "Process[S[DecodeMat,OnnxTensor]]",
    ],
)
def test_an_order_of_channels_that_nobody_has_said_is_doubted_once(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = {"backend": backend, **model_of(tmp_path, 3, "h", "w")}
    plan_pipeline(node)
    (line,) = caplog.messages
    assert line == (
        "config: node 'node': key 'color': DecodeMat gives BGR, and the model takes the channels as they come; one "
        'that was trained on RGB, as nearly all in PyTorch are, needs color = "rgb" here; color = "bgr" says that BGR '
        "is right"
    )
    caplog.clear()
    for color in ("rgb", "bgr", "gray"):
        plan_pipeline({**node, "color": color, **model_of(tmp_path, "c", "h", "w")})
    assert caplog.messages == []


def test_the_line_names_the_node_that_decodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = {"backend": "OnnxTensor", **model_of(tmp_path, 3, "h", "w")}
    nodes: dict[str, Any] = {"a": {"backend": "DecodeMat", "next": "b,c"}, "b": model, "c": model}
    plan_pipeline(nodes)
    (line,) = caplog.messages
    assert line.startswith("config: node 'a': key 'color': DecodeMat gives BGR")
    caplog.clear()
    plan_pipeline({**nodes, "global": {"color": "bgr"}})
    assert caplog.messages == []


@pytest.mark.parametrize(
    "backend",
    [
        "S[DecodeTensor,OnnxTensor]",
        "S[DecodeMat,Own,OnnxTensor]",
        "S[DecodeMat,(or)CropMat,OnnxTensor]",
        "S[FirstAvailable[DecodeTensor,DecodeMat],OnnxTensor]",
        "S[Mat2Tensor,OnnxTensor]",
        "S[DecodeMat,cvtColorMat,OnnxTensor]",
        "S[DecodeMat,Mat2Tensor,cvtColorTensor,OnnxTensor]",
        "S[DecodeMat,Mat2Tensor]",
    ],
)
def test_where_the_order_is_said_or_unknown_or_no_model_gets_it_there_is_no_line(
    backend: str, tmp_path: Path, restored: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    class Own:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

    restored.register_backend(Own)
    color = {f"{name}::color": "bgr" for name in ("cvtColorMat", "cvtColorTensor") if name in backend}
    model = model_of(tmp_path, 3, "h", "w") if "Onnx" in backend else {}
    plan_pipeline({"backend": backend, **color, **model})
    assert caplog.messages == []


@pytest.mark.parametrize("color", ["bgr", "rgb"])
@pytest.mark.parametrize("backend", ["S[Own,OnnxTensor]", "S[DecodeMat,Python[Own],OnnxTensor]"])
def test_the_color_of_a_plain_class_is_its_own(
    backend: str, color: str, tmp_path: Path, restored: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    class TakesAny:
        def init(self, config: dict[str, Any]) -> None: ...

        def forward(self, items: list[dict[str, Any]]) -> None: ...

    class Annotated:
        color: str = "bgr"

        def forward(self, items: list[dict[str, Any]]) -> None: ...

    model = model_of(tmp_path, 3, "h", "w")
    restored.register_backend(TakesAny)
    plan_pipeline({"backend": backend.replace("Own", "TakesAny"), "TakesAny::color": color, **model})
    restored.register_backend(Annotated)
    plan_pipeline({"backend": backend.replace("Own", "Annotated"), **model})
    assert caplog.messages == []

"""Backends that do not take what the one before them gives: refused before anything starts, and only these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encode, picture, save_model
from kit.refusals import refusal
from onnx import helper

from torchpipe_py import InvalidRequest, pipe
from torchpipe_py.backends.image.mat import cvtColorMat
from torchpipe_py.backends.image.ops import ResizeMat
from torchpipe_py.backends.signature import ENCODED, MAT, NUMBERS, TENSOR
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.registry import BUILT_IN_BACKENDS, Registry, default

SIZE = {"resize_h": 8, "resize_w": 8}


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
    "mean": 127.5,
    "std": "50, 60, 70",
    "align": 8,
    "widths": 16,
    "box": [0, 0, 8, 8],
}
OF_KINDS = [name for name in BUILT_IN_BACKENDS if (cls := default.find_backend(name)) and (cls.takes or cls.gives)]


def kind_of(result: Any) -> str:
    kinds = {torch.Tensor: TENSOR, np.ndarray: MAT, list: NUMBERS, bytes: ENCODED}
    return kinds.get(type(result), type(result).__name__)


@pytest.mark.parametrize("name", [name for name in OF_KINDS if name != "DecodeTensor"])
def test_declared_kinds_match_behaviour_of_built_in_backends(name: str, tmp_path: Path) -> None:
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
            elif (name, kind) != ("DecodeMat", MAT):  # it lets an image through that is decoded already
                assert isinstance(data["error"], InvalidRequest)
                assert "result" not in data


# -- what is refused --------------------------------------------------------------------------------------------------


def model_of(path: Path, *shape: int | str) -> dict[str, Any]:
    """The keys of a node with a model that takes images of this shape."""
    inputs: dict[str, Any] = {"x": ["N", *shape]}
    save_model(path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], inputs, {"y": ["N", *shape]})
    return {"model": str(path / "m.onnx")}


def node(backend: str, path: Path, shape: Any = None, **keys: Any) -> dict[str, Any]:
    """A node; one that resizes makes 96x80, its model takes images of ``shape``."""
    sizes = {
        f"{name}::resize_{side}": size for name in RESIZE if name in backend for side, size in (("h", 96), ("w", 80))
    }
    return {"backend": backend, **sizes, **({} if shape is None else model_of(path, *shape)), **keys}


RESIZE = ("PillowResizeMat", "ResizeMat", "PillowResizeTensor", "ResizeTensor")
DECODE = {"backend": "DecodeMat", "next": "b"}
RESIZES = "ResizeMat takes a Mat, and "
AGAIN = "DecodeMat takes encoded bytes, and {} before it gives a Mat; the image is decoded already: leave DecodeMat out"
NEXT = "ResizeTensor takes a Tensor, and "


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (
            "S[DecodeMat,Mat2Tensor,ResizeMat]",
            f"{RESIZES}Mat2Tensor before it gives a Tensor; ResizeTensor takes a Tensor",
        ),
        ("S[DecodeMat,ResizeTensor,SyncTensor]", f"{NEXT}DecodeMat before it gives a Mat; ResizeMat takes a Mat, or"),
        ("S[ResizeMat,DecodeMat]", AGAIN.format("ResizeMat")),
        ("S[ResizeTensor,Mat2Tensor]", "Mat2Tensor takes a Mat, and ResizeTensor before it gives a Tensor; leave Mat2"),
        ("S[Tensor2Vector,ResizeTensor]", f"{NEXT}Tensor2Vector before it gives a list of numbers"),
        ("S[DecodeMat,Identity,CopyMakeBorderTensor]", "CopyMakeBorderTensor takes a Tensor, and DecodeMat before it"),
        ("S[DecodeMat,Process[Mat2Tensor],ResizeMat]", RESIZES),
        ("S[DecodeMat,FirstAvailable[Mat2Tensor,S[Identity,Mat2Tensor]],ResizeMat]", RESIZES),
        ("S[DecodeMat,Mat2Tensor,FirstAvailable[ResizeMat,PillowResizeMat]]", RESIZES),
        (
            {"a": {**DECODE, "filter": "Run"}, "b": {"backend": "S[DecodeMat,Identity]"}},
            AGAIN.format("DecodeMat of 'a'"),
        ),
        ({"a": DECODE, "b": {"backend": "ResizeTensor&PillowResizeTensor", **SIZE}}, f"{NEXT}DecodeMat of 'a'"),
        (
            {"a": DECODE, "b": {"backend": "ResizeMat", "next": "a.2", **SIZE}, "a.2": {}},
            AGAIN.format("ResizeMat of 'b'"),
        ),
    ],
)
def test_refuses_backend_that_cannot_take_previous_output(nodes: Any, told: str, tmp_path: Path) -> None:
    nodes = {"node": node(nodes, tmp_path)} if isinstance(nodes, str) else nodes
    assert refusal(nodes).startswith(f"config: node '{list(nodes)[-1]}': key 'backend': {told}")


@pytest.mark.parametrize(
    "backend", ["OnnxTensor", "TensorrtTensor", "SyncTensor[FirstAvailable[TensorrtTensor,OnnxTensor]]"]
)
def test_refuses_size_that_differs_from_model(backend: str, tmp_path: Path) -> None:
    backend = f"S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,{backend}]"
    keys = {"backend": backend, "color": "rgb", **model_of(tmp_path, 3, 64, 48)}
    told = refusal({**keys, "ResizeMat::resize_h": 96, "resize_w": 49}).split("\n")
    assert told == [
        f"config: node 'node': key 'ResizeMat::resize_h': 96, but {keys['model']} takes 1x3x64x48: a height of 64",
        f"config: node 'node': key 'resize_w': 49, but {keys['model']} takes 1x3x64x48: a width of 48",
    ]
    plan_pipeline({**keys, "resize_h": 64, "resize_w": 48})
    with pipe({"backend": "OnnxTensor", "model": keys["model"]}) as run:
        error = str(run({"data": picture(64, 49)})["error"])
        assert "takes 1x3x64x48, got" in error, "what is refused is what the model would refuse"


@pytest.mark.parametrize("resize", ["LetterBoxMat,Mat2Tensor", "ResizePadMat", "Mat2Tensor,LetterBoxTensor"])
def test_refuses_misfit_between_nodes(resize: str, tmp_path: Path) -> None:
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
    ("backend", "color", "shape", "told"),
    [
        ("S[DecodeMat,OnnxTensor]", "gray", (3, 64, 64), "gray is 1 channel, but {} takes 1x3x64x64: 3 channels"),
        ("S[DecodeMat,CropMat,OnnxTensor]", "rgb", (1, 64, 64), "rgb is 3 channels, but {} takes 1x1x64x64: 1 channel"),
        ("S[DecodeMat,OnnxTensor]", None, (1, 64, 64), "bgr, the default, is 3 channels, but {} takes 1x1x64x64: 1 "),
    ],
)
def test_refuses_channels_that_differ_from_model(
    backend: str, color: str | None, shape: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    keys = node(backend, tmp_path, shape, **({} if color is None else {"color": color}))
    assert refusal(keys).startswith(f"config: node 'node': key 'color': {told.format(keys['model'])}")
    plan_pipeline({**keys, **model_of(tmp_path, *(4 - side if side < 4 else side for side in shape))})


# -- what is not ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(restored: Registry) -> None:
    """Backends and a filter of the user's, of whose results nothing is known."""

    class Own:
        def forward(self, items: list[dict[str, Any]]) -> None: ...

    class OwnResize(ResizeMat):
        """Takes Tensors, whatever it inherits."""

    class OwnColor(cvtColorMat):
        """Gives other channels than it inherits."""

    class TakesAny(Own):
        def init(self, config: dict[str, Any]) -> None: ...

    class Annotated(Own):
        color: str = "bgr"

    for cls in (Own, OwnResize, OwnColor, TakesAny, Annotated):
        restored.register_backend(cls)
    restored.register_filter(lambda data: None, "mine")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("S[FirstAvailable[DecodeTensor,DecodeMat],ResizeMat]", None),
        ("S[DecodeMat,FirstAvailable[ResizeTensor,ResizeMat]]", None),
        ("S[DecodeMat,(or)ResizeTensor]", None),
        ("S[DecodeMat,Python[Own],ResizeTensor]", None),
        ("S[OwnResize,ResizeTensor]", None),
        ("S[ResizeMat,OnnxTensor]", (3, "height", "width")),
        ("S[ResizeMat,OnnxTensor]", (96, 80, 3)),
        ("S[ResizeMat,CropMat,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,DynamicResizeMat,OnnxTensor]", (3, 64, 64)),
        ("S[ResizeMat,FirstAvailable[CropMat,Identity],OnnxTensor]", (3, 64, 64)),
        ("S[cvtColorMat,OnnxTensor]", ("channels", 64, 64)),
        ("S[cvtColorMat,OnnxTensor]", (64, 64, 1)),
        ("S[cvtColorMat,OnnxTensor]", (3, 64, "width")),  # an image H×W×C of three rows
        ("S[cvtColorMat,OwnColor,OnnxTensor]", (3, 64, 64)),
    ],
)
def test_accepts_unknown_kinds(backend: str, shape: Any, tmp_path: Path) -> None:
    keys = {"color": "gray"} if "Color" in backend else {}
    keys |= {"OwnResize::resize_h": 8, "OwnResize::resize_w": 8} if "OwnResize" in backend else {}
    plan_pipeline(node(backend, tmp_path, shape, **keys))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "nodes",
    [
        {"a": DECODE, "b": {"backend": "ResizeTensor&ResizeMat", **SIZE}},
        {"a": DECODE, "b": {"backend": "DecodeMat", "map": "a[data:data]"}},
        *({"a": DECODE, "b": {"backend": "DecodeMat", "filter": name}} for name in ("or", "run", "mine")),
        {"a": {**DECODE, "filter": "mine"}, "b": {"backend": "DecodeMat"}},
        {"x": {"next": "y"}, "y": {"filter": "SerialSkip", "next": "a"}, "a": DECODE, "b": {"backend": "DecodeMat"}},
    ],
)
def test_accepts_misfits_after_map_filter_or_jump(nodes: dict[str, Any]) -> None:
    plan_pipeline(nodes)


# -- the order of channels --------------------------------------------------------------------------------------------

WARNING = (
    "key 'color': DecodeMat outputs BGR, and the model cannot tell; one that was trained on RGB, like nearly all in "
    'PyTorch, needs color = "rgb" here; set color = "bgr" if BGR is right'
)


@pytest.mark.parametrize(
    "backend",
    [
        "S[DecodeMat,Mat2Tensor,OnnxTensor]",
        "S[DecodeMat,CropMat,FirstAvailable[TensorrtTensor,OnnxTensor]]",
        "Process[S[DecodeMat,OnnxTensor]]",
    ],
)
def test_warns_once_of_unset_channel_order(backend: str, tmp_path: Path, caplog: Any) -> None:
    keys = node(backend, tmp_path, (3, "h", "w"))
    plan_pipeline(keys)
    assert caplog.messages == [f"config: node 'node': {WARNING}"]
    caplog.clear()
    for color in ("rgb", "bgr", "gray"):
        plan_pipeline({**keys, "color": color, **model_of(tmp_path, "c", "h", "w")})
    assert caplog.messages == []


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "backend",
    [
        "S[DecodeTensor,OnnxTensor]",
        "S[FirstAvailable[DecodeTensor,DecodeMat],OnnxTensor]",
        "S[Mat2Tensor,OnnxTensor]",
        "S[DecodeMat,cvtColorMat,OnnxTensor]",
        "S[DecodeMat,Mat2Tensor]",
        "S[TakesAny,OnnxTensor]",
        "S[DecodeMat,Python[Annotated],OnnxTensor]",
    ],
)
def test_no_warning_if_channel_order_is_set_or_unknown(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    color = {f"{name}::color": "bgr" for name in ("cvtColorMat", "TakesAny") if name in backend}
    plan_pipeline(node(backend, tmp_path, (3, "h", "w") if "Onnx" in backend else None, **color))
    assert caplog.messages == []

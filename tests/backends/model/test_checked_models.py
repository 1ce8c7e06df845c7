"""Whatever ``pipe`` refuses at setup for its model and keys, ``torchpipe check`` refuses before: generated models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from torchpipe_py import ConfigError, pipe
from torchpipe_py.cli import main
from torchpipe_py.plan.build import plan_pipeline

LAYOUTS: list[Any] = [
    *[["N", 3, 8, 6], ["N", 3, "H", "W"], ["N", 8, 6, 3], ["N", "H", "W", 3], ["N", "C", "H", "W"], ["N", 7]] * 3,
    *(["N", 6, 8, 6], ["N", 1, 8, 6], [1, 3, 8, 6], [2, 3, 8, 6], [3, 8, 6], [8, 6, 3], ["N", "W", 3]),
    *(["N", 4, 3, 8, 6], ["N", "F"], ["N"], [1], [7], [], None),
]
TYPES = [
    *([TensorProto.FLOAT] * 10 + [TensorProto.UINT8] * 4 + [TensorProto.FLOAT16, TensorProto.BFLOAT16] * 2),
    *(TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING),
    *(TensorProto.UINT64, TensorProto.COMPLEX64),
]
KEYS: dict[str, list[Any]] = {
    "max": [1, 2, 4, 4, 4, "2x3x8x6", "4x8x6x3", "2;4", "2x3x8x6,2x7"],
    "min": [1, 1, 1, 2, "1x3x8x6", "1;2"],
    "mean": [127.5, "1, 2, 3", "1, 2, 3", "1, 2", "1, 2, 3, 4, 5, 6", 0],
    "std": [127.5, "1, 2, 3", "1, 2, 3", "1, 2"],
    "postprocessor": ["cpu", "cpu", "SoftmaxMax", "ArgMax", "TopK", "Sigmoid", "SoftmaxArgMax", "SoftmaxCpu"],
}
NAMED = {"mean::{}": [127.5, "1, 2, 3", "1, 2, 3, 4"], "std::{}": [127.5, "1, 2, 3"]}


def value_info(name: str, dtype: int, dims: Any) -> Any:
    return helper.make_tensor_value_info(name, dtype, dims)


def write_model(path: Path, rng: random.Random) -> None:
    """A model of one to three inputs, each handed on as an output of its own, as it is, moved or cast."""
    nodes, inputs, outputs = [], [], []
    for name in "abc"[: rng.choice([1, 1, 1, 2, 2, 3])]:
        dims, dtype = rng.choice(LAYOUTS), rng.choice(TYPES)
        out, kind, made = f"{name}_out", dtype, dims
        way = rng.choice(["as it is", "cast", "moved", "both"])
        if way != "as it is" and dtype not in (TensorProto.COMPLEX64, TensorProto.STRING):
            kind = TensorProto.FLOAT
            nodes.append(helper.make_node("Identity", [name], [f"{name}_moved"]))
            nodes.append(helper.make_node("Cast", [name if way == "cast" else f"{name}_moved"], [out], to=kind))
            if way == "both":
                nodes.append(helper.make_node("Identity", [f"{name}_moved"], [f"{name}_own"]))
                outputs.append(value_info(f"{name}_own", dtype, dims))
        else:
            nodes.append(helper.make_node("Identity", [name], [out]))
        if made and made[0] == "N" and rng.random() < 0.2:
            made = [rng.choice([1, 2]), *made[1:]]
        inputs.append(value_info(name, dtype, dims))
        outputs.append(value_info(out, kind, made))
    if rng.random() < 0.05:
        outputs = [inputs[0]]
        nodes = []
    graph = helper.make_graph(nodes, "generated", inputs, outputs)
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    cut = rng.random() < 0.05
    path.write_bytes(content[: rng.randrange(len(content))] if cut else content)


def keys_of(rng: random.Random) -> dict[str, Any]:
    """Some keys of a node; those of inputs by name mostly have the name of one."""
    keys = {key: rng.choice(values) for key, values in KEYS.items() if rng.random() < 0.3}
    named = {key.format(rng.choice("aaaabbz")): rng.choice(values) for key, values in NAMED.items()}
    keys |= {key: value for key, value in named.items() if rng.random() < 0.15}
    return keys | ({"k": rng.choice([1, 50])} if keys.get("postprocessor") == "TopK" else {})


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_check_refuses_whatever_setup_would_refuse(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    outcomes = {"refused": 0, "served": 0}
    for index in range(20):
        path = tmp_path / f"m{index}.onnx"
        write_model(path, rng)
        for _ in range(4):
            config = {"backend": "OnnxTensor", "model": str(path), **keys_of(rng)}
            try:
                plan = plan_pipeline(config)
            except ConfigError:
                outcomes["refused"] += 1
                continue
            try:
                pipe(plan).close()
            except Exception as error:
                pytest.fail(f"check accepts {config}, and setup refuses it: {error}")
            outcomes["served"] += 1
    assert min(outcomes.values()) > 5, outcomes


# -- configurations that a new user writes ----------------------------------------------------------------------------


def identity(path: Path, inputs: dict[str, Any], dtype: int = TensorProto.FLOAT) -> str:
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in inputs]
    given, made = ([value_info(name + end, dtype, dims) for name, dims in inputs.items()] for end in ("", "_out"))
    graph = helper.make_graph(nodes, "model", given, made)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


IMAGE = {"x": ["N", 64, 64, 3]}


@pytest.mark.parametrize(
    ("backend", "inputs", "dtype", "keys", "said"),
    [
        ("S[DecodeMat,OnnxTensor]", IMAGE, 1, {"mean": 127.5, "std": 127.5}, ""),
        ("OnnxTensor", {"a": ["N", 3, 8, 8], "b": ["N", 1, 8, 8]}, 1, {"std": 255}, 'write "std::a" and so on'),
        ("S[DecodeMat,OnnxTensor]", {"x": ["N", 1]}, TensorProto.STRING, {}, "1x1 of texts, not an image: leave out"),
        ("S[DecodeMat,Mat2Tensor,OnnxTensor]", IMAGE, 1, {}, "takes 1x64x64x3; give it a Mat, which is laid out"),
        (
            "S[DecodeMat,OnnxTensor]",
            {"a": ["N", 3, 8, 8], "b": ["N", 4]},
            1,
            {},
            "has 2 inputs: data must be a list or",
        ),
        ("S[DecodeMat,OnnxTensor]", {"x": ["N", 7]}, 1, {}, "takes 1x7, which is not an image"),
    ],
)
def test_check_says_what_to_do(
    backend: str, inputs: dict[str, Any], dtype: int, keys: dict[str, Any], said: str, tmp_path: Path, capsys: Any
) -> None:
    model = identity(tmp_path / "m.onnx", inputs, dtype)
    lines = [
        f'"{key}" = {value!r}' for key, value in {"backend": backend, "color": "rgb", "model": model, **keys}.items()
    ]
    lines = [line for line in lines if "DecodeMat" in backend or not line.startswith('"color"')]
    (tmp_path / "p.toml").write_text("[a]\n" + "\n".join(lines), encoding="utf-8")
    assert main(["check", str(tmp_path / "p.toml")]) == bool(said)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"no model\n", b"", b"\x08\x07", b"<html>"])
@pytest.mark.parametrize("backend", ["OnnxTensor", "TensorrtTensor"])
def test_check_refuses_file_that_is_no_model(backend: str, content: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    (tmp_path / "p.toml").write_text(f'[a]\nbackend = "{backend}"\nmodel = "m.onnx"\n', encoding="utf-8")
    assert main(["check", str(tmp_path / "p.toml")]) == 1
    assert "not an ONNX file" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["OnnxTensor", "TensorrtTensor", "FirstAvailable[TensorrtTensor,OnnxTensor]"])
def test_refuses_tensor_of_another_layout_between_nodes(to: str, tmp_path: Path) -> None:
    model = identity(tmp_path / "m.onnx", IMAGE)
    nodes = {"a": {"backend": "S[DecodeMat,Mat2Tensor]", "next": "b"}, "b": {"backend": to, "model": model}}
    with pytest.raises(
        ConfigError, match=r"node 'b': key 'backend': Mat2Tensor of 'a' before .* 1xCxHxW, but .* takes"
    ):
        plan_pipeline(nodes)
    nodes["a"]["backend"] = "S[DecodeMat,Mat2Tensor,Tensor2Mat]"
    plan_pipeline(nodes)


def test_refuses_floats_for_input_of_integers(tmp_path: Path) -> None:
    model = identity(tmp_path / "m.onnx", IMAGE, TensorProto.UINT8)
    config = {"backend": "S[NormalizeMat,OnnxTensor]", "model": model, "NormalizeMat::mean": 9, "NormalizeMat::std": 9}
    with pytest.raises(ConfigError, match=r"of float32, but .* takes 1x64x64x3 of uint8: leave"):
        plan_pipeline(config)

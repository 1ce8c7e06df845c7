"""``torchpipe from-triton``: its files run like the models, and unsupported or unreadable settings are reported."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_model
from kit.models import answer, reference, torch_model
from onnx import helper

from torchpipe_py import BackendError, parse_toml, pipe
from torchpipe_py.cli import main
from torchpipe_py.tools.from_triton.pbtxt import read_pbtxt

ONNX = 'backend: "onnxruntime" max_batch_size: 4'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def scale(name: str, factor: float, version: str = "1") -> str:
    """A model of the repository that multiplies ``x``, and gives ``y``."""
    (path := Path("models", name, version)).mkdir(parents=True, exist_ok=True)
    node, constants = helper.make_node("Mul", ["x", "factor"], ["y"]), {"factor": np.array(factor, np.float32)}
    return save_model(path / "model.onnx", [node], {"x": ["n", 3]}, {"y": ["n", 3]}, constants)


def both(name: str) -> str:
    """One with two inputs and two outputs: the sum and the difference."""
    configured(name, "", "1")
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    path, dims = Path("models", name, "1", "model.onnx"), ["n", 3]
    return save_model(path, nodes, {"a": dims, "b": dims}, {"sum": dims, "difference": dims})


def configured(name: str, text: str, version: str = "") -> None:
    Path("models", name, version).mkdir(parents=True, exist_ok=True)
    Path("models", name, "config.pbtxt").write_text(text, encoding="utf-8")


def tensors(kind: str, *names: str, dims: str = "3", of: str = "TYPE_FP32") -> str:
    return "\n".join([f'{kind} {{ name: "{name}" data_type: {of} dims: [ {dims} ] }}' for name in names])


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [("input_map", inputs), ("output_map", outputs)]
    pairs = [f'{kind} {{ key: "{key}" value: "{value}" }}' for kind, map_ in maps for key, value in map_.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(pairs)} }}'


def ensemble(name: str, inputs: str, outputs: str, *steps: str) -> None:
    scheduling = "ensemble_scheduling { step [\n" + ",\n".join(steps) + "\n] }"
    configured(name, f'platform: "ensemble" max_batch_size: 8\n{inputs}\n{outputs}\n{scheduling}', "1")


def converted(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> str:
    """The notes on ``models``, converted to ``out``."""
    assert main(["from-triton", "models", "--out", "out", *options]) == status
    return "".join(capsys.readouterr())


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    return converted(capsys, status=1)


X, Y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, 7.0, 11.0]])


def test_a_model_answers_as_onnx_runtime_does(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale("net.v2", 3.0)
    model = scale("net.v2", 5.0, "10")
    batching = "dynamic_batching { max_queue_delay_microseconds: 1500 }\ninstance_group [{ count: 2 kind: KIND_CPU }]"
    configured("net.v2", f"{ONNX}\n{tensors('input', 'x')}\n{tensors('output', 'y')}\n{batching}")
    assert converted(capsys).splitlines() == ["out/net_v2/10.toml", "torchpipe-serve out serves them"]
    assert parse_toml("out/net_v2/10.toml")["net_v2"] == {
        **{"backend": "OnnxTensor", "model": "../../models/net.v2/10/model.onnx", "max": 4},
        **{"batching_timeout": 1.5, "instance_num": 2, "providers": "CPUExecutionProvider"},
    }
    expected = [reference(model, x=value)[0] for value in (X, Y)]
    monkeypatch.chdir("/")
    results = [item["result"].numpy() for item in answer(str(folder / "out/net_v2/10.toml"), X, Y)]
    np.testing.assert_array_equal(results, expected)


def test_an_ensemble_of_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = scale("double", 2.0), scale("third", 1 / 3)
    configured("double", ONNX)  # the other one has no configuration: its file says enough
    steps = step("third", {"x": "between"}, {"y": "OUT"}), step("double", {"x": "IN"}, {"y": "between"})
    ensemble("chain", tensors("input", "IN"), tensors("output", "OUT"), *steps)
    printed = converted(capsys)
    assert "models/chain/config.pbtxt:2: input IN: clients of /v2 name it x here" in printed
    assert "double: a node of chain, not a model by itself" in printed
    assert [path.name for path in Path("out").iterdir()] == ["chain.toml"]
    assert parse_toml("out/chain.toml")["double"]["next"] == "third"
    expected = reference(second, x=reference(first, x=X)[0])[0]
    np.testing.assert_array_equal(answer("out/chain.toml", X)["result"], expected)


def test_tensors_that_branch_and_join(capsys: pytest.CaptureFixture[str]) -> None:
    both("pair"), scale("double", 2.0)
    configured("pair", f"{ONNX} {tensors('input', 'b', 'a')} {tensors('output', 'difference', 'sum')}")
    configured("double", ONNX)
    steps = (
        step("pair", {"a": "P", "b": "Q"}, {"sum": "s", "difference": "d"}),
        step("double", {"x": "d"}, {"y": "dd"}),
        step("pair", {"b": "dd", "a": "P"}, {"difference": "R"}),
    )
    ensemble("joined", tensors("input", "P", "Q"), tensors("output", "R", "s"), *steps)
    assert "torchpipe-serve out --import out/joined_backends.py serves them" in converted(capsys)
    with pipe("out/joined.toml") as run:
        run(item := {"data": {"P": X, "Q": Y}})
        signature = run.signature()
    assert [spec.name for spec in signature.inputs + signature.outputs] == ["P", "Q", "R", "s"]
    torch.testing.assert_close(item["result"], [X - 2 * (X - Y), X + Y])


def test_a_step_that_only_triton_runs(capsys: pytest.CaptureFixture[str]) -> None:
    image, pixels = tensors("input", "I", dims="-1", of="TYPE_UINT8"), tensors("output", "O", dims="3, 8, 9")
    configured("pre", f'backend: "dali" {image}\n{pixels}', "1")
    scale("net", 2.0)
    steps = step("pre", {"I": "IMAGE"}, {"O": "pixels"}), step("net", {"x": "pixels"}, {"y": "OUT"})
    ensemble("stubbed", tensors("input", "IMAGE"), tensors("output", "OUT"), *steps)
    printed = converted(capsys)
    assert "pre/config.pbtxt:1: backend dali: fill in class triton_stubbed_pre in out/stubbed_backends.py" in printed
    assert 'S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]", color = "rgb", resize_h = 8, resize_w = 9' in printed
    assert f"# {printed.splitlines()[1].strip()}\n" in Path("out/stubbed.toml").read_text("utf-8")
    with pipe("out/stubbed.toml") as run, pytest.raises(BackendError, match=r"set the result to what .*models/pre"):
        run({"data": X})


def test_labels_belong_to_the_named_output(capsys: pytest.CaptureFixture[str]) -> None:
    scale("net", 2.0)
    configured("net", f'{ONNX} output {{ name: "y" label_filename: "l.txt" }}')
    Path("models/net/l.txt").write_text("a\nb\nc\n")
    assert "differs" not in converted(capsys)
    with pipe("out/net.toml") as run:
        assert run.signature().outputs[0].labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("sequence_batching { oldest { } }", "sequence_batching: no sequences"),
        ("model_transaction_policy { decoupled: True }", "model_transaction_policy: a request has one answer"),
        ('model_warmup { name: "w" inputs { key: "x" value: { dims: 1 dims: 2 } } }', "model_warmup: made-up items"),
        ("response_cache { enable: true }", "response_cache: answers are not kept"),
        ("dynamic_batching { preferred_batch_size: [2, 4] }", "preferred_batch_size: no size is preferred"),
        ("dynamic_batching { default_queue_policy { max_queue_size: 1 } }", "default_queue_policy: --deadline-ms"),
        ("instance_group { gpus: [0, 1] }", "gpus [0, 1]: --devices of torchpipe-serve"),
        ("instance_group { rate_limiter { priority: 2 } }", "rate_limiter: nothing here does that"),
        ('input { name: "x" data_type: TYPE_STRING dims: 3 }', "TYPE_STRING: OnnxTensor takes numbers"),
        ('input { name: "x" data_type: TYPE_FP32 allow_ragged_batch: true }', "allow_ragged_batch: items of different"),
        (f'output {{ name: "y" label_filename: "l.txt" }} {tensors("output", "z")}', 'labels = "../models/net/l.txt" '),
        ("response_cache { enable: false }", ""),
    ],
)
def test_notes_settings_that_are_not_converted(capsys: pytest.CaptureFixture[str], text: str, note: str) -> None:
    scale("net", 2.0)
    configured("net", f"{ONNX}\n{text}")
    notes = [line for line in converted(capsys).splitlines() if line.startswith(" ")]
    assert [line.startswith("  models/net/config.pbtxt:2: ") and note in line for line in notes] == [True] * bool(note)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_torchscript_takes_its_tensors_by_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    class Minus(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a - b, a + b

    given, made = tensors("input", "I__1", "I__0"), tensors("output", "O__1", "O__0")
    configured("minus", f'platform: "pytorch_libtorch" max_batch_size: 2\n{given}\n{made}', "1")
    torch_model(Path("models/minus/1/model.pt"), Minus())
    maps = {"I__0": "P", "I__1": "Q"}, {"O__0": "R"}
    ensemble("numbered", tensors("input", "P", "Q"), tensors("output", "R"), step("minus", *maps))
    assert "minus/config.pbtxt:1: trusted = true: loading the file runs the code in it" in converted(capsys)
    torch.testing.assert_close(answer("out/numbered.toml", {"P": X, "Q": Y})["result"].cpu(), X - Y)


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["10", "2"]),
        ("version_policy: { all { }}", ["1", "10", "2"]),
        ("version_policy: { specific: { versions: [1, 2] } }", ["1", "2"]),
    ],
)
def test_converts_each_version(capsys: pytest.CaptureFixture[str], policy: str, written: list[str]) -> None:
    for version in ("1", "2", "10", "02", "x"):
        scale("net", 2.0, version)
    configured("net", f"{ONNX}\n{policy}")
    converted(capsys)
    paths = [path.relative_to("out").as_posix() for path in Path("out").rglob("*.toml")]
    assert sorted(paths) == sorted("net.toml" if version == "1" else f"net/{version}.toml" for version in written)


def test_keeps_existing_files_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    scale("net", 2.0)
    converted(capsys)
    assert refused(capsys) == "torchpipe: out/net.toml: there already; --force replaces, --out FOLDER takes another\n"
    converted(capsys, "--force")


def test_keeps_classes_that_the_user_completed(capsys: pytest.CaptureFixture[str]) -> None:
    configured("own", f'backend: "python" {tensors("input", "x")} {tensors("output", "y")}', "1")
    converted(capsys)
    assert "kept" not in converted(capsys, "--force")
    code = Path("out/own_backends.py")
    code.write_text(code.read_text("utf-8").replace("raise NotImplementedError", "print"), encoding="utf-8")
    filled = code.read_bytes()
    assert "out/own_backends.py: kept, because it was changed" in converted(capsys, "--force")
    assert code.read_bytes() == filled


def test_each_model_and_version_has_its_own_class(capsys: pytest.CaptureFixture[str]) -> None:
    for name, version in (("a-b", "1"), ("a_b", "1"), ("a_b", "2")):
        text = f'backend: "python" version_policy {{ all {{ }} }} {tensors("input", "x")} {tensors("output", "y")}'
        configured(name, text, version)
    assert "--import out/a-b_backends.py,out/a_b_v1_backends.py,out/a_b_v2_backends.py" in converted(capsys)
    files = "a-b.toml", "a_b.toml", "a_b/2.toml"
    assert [parse_toml(f"out/{file}")[file[:3]]["backend"] for file in files] == [
        "triton_a_b",
        "triton_a_b_v1",
        "triton_a_b_v2",
    ]


def test_refuses_models_whose_names_make_one_class(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("c-d", "c_d"):
        configured(name, f'backend: "python" {tensors("input", "x")} {tensors("output", "y")}', "1")
    converted(capsys)
    assert [parse_toml(f"out/{name}.toml")[name]["backend"] for name in ("c-d", "c_d")] == ["triton_c_d", "triton_c_d_"]


def test_refuses_models_whose_names_make_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    scale("net.a", 2.0), scale("net a", 3.0)
    problem = (
        "torchpipe: models/net.a/config.pbtxt:1: name: 'net.a' and 'net a' would both be out/net_a.toml; rename one"
    )
    assert refused(capsys) == f"{problem}\n"
    assert not Path("out").exists()


STEP = step("net", {"x": "IN"}, {"y": "OUT"})


def test_an_ensemble_of_ensembles_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    scale("net", 2.0), scale("alone", 3.0)
    ensemble("inner", tensors("input", "IN"), tensors("output", "OUT"), STEP)
    steps = step("inner", {"IN": "IN"}, {"OUT": "mid"}), step("alone", {"x": "mid"}, {"y": "OUT"})
    ensemble("outer", tensors("input", "IN"), tensors("output", "OUT"), *steps)
    problem = "models/outer/config.pbtxt:5: 'inner' is an ensemble; write its steps here"
    assert f"outer: not written\n  {problem}\nnet: a node of inner" in converted(capsys)
    assert sorted(path.name for path in Path("out").iterdir()) == ["alone.toml", "inner.toml"]


def test_nothing_serves_an_ensemble_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    ensemble("loop", tensors("input", "IN"), tensors("output", "OUT"), step("loop", {"IN": "IN"}, {"OUT": "OUT"}))
    assert "models: no model that can be written by itself" in refused(capsys)


@pytest.mark.parametrize(
    ("config", "steps", "problem"),
    [
        ('backend: "onnxruntime"\nmax_batch: 4', "", ":2: unknown field 'max_batch'; did you mean 'max_batch_size'?"),
        ('\nmax_batch_size: "8"', "", ":2: max_batch_size: expected a whole number, got '8'"),
        ("max_batch_size: 8\nmax_batch_size: 8", "", ":2: max_batch_size appears twice"),
        ('name: "other"', "", ":1: name: 'other' is in the folder of 'net', as Triton calls it"),
        ("instance_group { count: 1\n", "", ":2: expected a field, or the '}' of line 1, found the end"),
        ('\nname: "net', "", ":2: a text without its closing quote"),
        (r'name: "n\\\777"', "", r":1: '\\777': not an escape of a text; octal ones end at '\\377'"),
        ('name: "n\ret"', "", ":1: a text without its closing quote"),
        ("# \xff", "", ":1: not UTF-8"),
        ("optimization {" + "graph {" * 60, "", ":1: more than 50 nested messages"),
        (f"max_batch_size: 0x{'f' * 5000}", "", ":1: max_batch_size: expected a whole number, got '0xff"),
        ('name: "n\\000t"', "", r":1: name: expected at most 4096 printable characters, got 'n\x00t'"),
        (f'name: "{"t" * 5000}"', "", ":1: name: expected at most 4096 printable characters, got 'ttt"),
        ("n" * 5000, "", ":1: unknown field 'nnn"),
        ("#" * (2**20 + 1), "", ": more than 1048576 bytes"),
        ("version_policy { specific { versions: 3 } }", "", ":1: specific: no '3'; valid: 1"),
        ('default_model_filename: "a.onnx"', "", ":1: no such file: models/net/1/a.onnx"),
        ("", STEP.replace('"net"', '"nett"'), ":5: model_name: no 'nett'; did you mean 'net'?"),
        ("", STEP.replace('"IN"', '"INN"'), ":5: input_map: no 'INN'; did you mean 'IN'?"),
        ("", STEP.replace('"OUT"', '"IN"'), ":5: output_map: 'IN' is an output of another step, or an input"),
        ("", STEP.replace('"OUT"', '"OTHER"'), ":3: name: no 'OUT'; did you mean 'OTHER'?"),
        ("", step("net", {}, {"y": "OUT"}), ":5: input_map: 'net' takes 'x', which is missing"),
    ],
)
def test_refuses_malformed_input(capsys: pytest.CaptureFixture[str], config: str, steps: str, problem: str) -> None:
    scale("net", 2.0)
    Path("models/net/config.pbtxt").write_bytes(config.encode("latin-1"))
    if steps:
        ensemble("ens", tensors("input", "IN"), tensors("output", "OUT"), steps)
    said = refused(capsys)
    assert said.startswith(f"torchpipe: models/{'ens' if steps else 'net'}/config.pbtxt{problem}")
    assert (said.count("\n"), Path("out").exists()) == (1, False)


def test_refuses_folders_that_are_not_repositories(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys) == "torchpipe: models: No such file or directory\n"
    Path("models/.git").mkdir(parents=True)
    Path("models/notes").mkdir()
    assert refused(capsys).startswith("torchpipe: models: no model in it, as NAME/config.pbtxt with ")
    os.mkdir("models/net")
    os.mkfifo("models/net/config.pbtxt")  # would be waited for
    assert refused(capsys) == "torchpipe: models/net/config.pbtxt: not a regular file\n"
    os.rename("models/net", "models/net\x1b")
    assert refused(capsys) == "torchpipe: 'models/net\\x1b': expected a name of printable characters in UTF-8\n"
    shutil.rmtree("models/net\x1b")
    configured("net", ONNX)
    assert refused(capsys).startswith("torchpipe: models/net/config.pbtxt:1: no version in models/net, a folder with")


def test_reads_protobuf_text_format(folder: Path) -> None:
    text = "max_batch_size: 0x10; name: 'a\\'\\x42' \"\\103 # d\" # e\n, dynamic_batching < preserve_ordering: t >"
    Path("config.pbtxt").write_text(text, encoding="utf-8")
    message = read_pbtxt("config.pbtxt")
    assert (message.number("max_batch_size", 0), message.text("name")) == (16, "a'BC # d")
    assert message.message("dynamic_batching").one("preserve_ordering", bool, False)
    assert message.at("dynamic_batching") == "config.pbtxt:2"
    Path("config.pbtxt").write_text("name: " + "'a' " * 4000, encoding="utf-8")
    assert read_pbtxt("config.pbtxt").text("name") == "a" * 4000

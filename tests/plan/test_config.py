"""The configuration language: equivalent forms, errors with place and advice, and folders."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import Register
from kit.refusals import refusal

from torchpipe_py import Backend, ConfigError, UnknownNode, parse_folder, parse_toml, pipe
from torchpipe_py.backends.control.python import declared
from torchpipe_py.backends.model.postprocess import YoloBoxes
from torchpipe_py.errors import MOST_PROBLEMS
from torchpipe_py.plan import build
from torchpipe_py.plan.build import NodePlan, plan_pipeline
from torchpipe_py.plan.config import MOST_CHARACTERS, MOST_NODES, NODE_KEYS, PIPELINE_KEYS, load_config, used_backends
from torchpipe_py.plan.folder import read_folder
from torchpipe_py.plan.graph import build_graph
from torchpipe_py.plan.unknown import ELSEWHERE, SERVICE_FLAGS
from torchpipe_py.registry import default

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a TOML file; returns its path."""

    def write_toml(text: str) -> str:
        path = tmp_path / "test.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_toml


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread is an error."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise AssertionError(f"{thread.name} was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def plans(config: Any) -> dict[str, NodePlan]:
    return dict(plan_pipeline(config).plans)


# -- files --------------------------------------------------------------------------------------------------------


def test_skips_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbfbatching_timeout = 2\r\n[a]\r\nbackend = "Identity"\r\n')
    assert plans(path)["a"].spec.batching_timeout == 2


def test_accepts_documented_defaults_of_node_keys() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "configuration.md").read_text(encoding="utf-8")
    written: dict[str, Any] = dict(re.findall(r'^\| `(\w+)` \|.*; default `?"?(\w+)"?`? \|$', page, re.MULTILINE))
    assert written.keys() >= {"batching_timeout", "device_id", "decode_isolation", "shared", "max_inflight"}
    top = {"max_inflight": written.pop("max_inflight")}
    first, second = (load_config(config) for config in ({"a": {}}, {**top, "a": {**written, "backend": "Identity"}}))
    assert first.max_inflight == second.max_inflight
    for key in ("calls", *written):
        assert getattr(first.nodes["a"], key) == getattr(second.nodes["a"], key)


def test_reports_every_unknown_backend_of_an_expression(write: Write) -> None:
    said = refusal(write('[a]\nbackend = "S[DecodeMat,Resize,OnnxModel,Resize]"'), pipe)
    assert re.findall(r"node 'a': key 'backend': no backend '(\w+)'; ", said) == ["Resize", "OnnxModel"]


def test_warns_of_unused_device_id(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    on_device = register(type("OnDevice", (Backend,), {"uses_device": True, "__doc__": "_"}))
    for backend in ("DecodeTensor", "S[DecodeMat,Mat2Tensor]", f"Process[{on_device}]", "Identity&SyncTensor"):
        plan_pipeline({"backend": backend, "device_id": 1})
    plan_pipeline({"backend": "Identity", "device_id": 0})
    plan_pipeline({"global": {"device_id": 1}, "a": {"backend": "Identity"}})
    assert caplog.messages == []
    plan_pipeline({"backend": "S[DecodeMat,Isolated[DecodeMat]]&DecodeMat", "device_id": 1})
    assert caplog.messages == [
        "config: node 'node': key 'device_id': nothing uses it: no backend here works on a CUDA device "
        "(a custom Backend declares uses_device = True)"
    ]


def test_several_roots_without_entry_hint_at_missing_next(caplog: pytest.LogCaptureFixture) -> None:
    resize = {"backend": "ResizeMat", "resize_h": 8, "resize_w": 8}
    plan_pipeline({"decode": {"backend": "DecodeMat"}, "resize": resize})
    assert caplog.messages == [
        "config: node 'resize': nothing comes before it, and 'decode' ends with a Mat; "
        "if one should follow the other, 'decode' needs next = 'resize'"
    ]
    caplog.clear()
    plan_pipeline({"one": {"backend": "DecodeMat"}, "two": {"backend": "DecodeMat"}, "three": {}})
    caplog.clear()
    plan_pipeline({"decode": {"next": "model"}, "model": {"backend": "Jump", "jump": "inner"}, "inner": {}})
    with pytest.raises(ConfigError, match="no node 'iner'"):
        plan_pipeline({"a": {"backend": "Jump", "jump": "iner"}, "inner": {}})
    assert caplog.messages == [], "a jump leads to the other root, or should"


def test_syntax_error_names_the_line_and_what_is_expected(tmp_path: Path) -> None:
    """A newcomer's lines, from other languages; the place of all is line 2."""
    path, wrong = tmp_path / "pipe.toml", []
    for line, expected in (
        ("backend = Identity", 'put quotes around text: backend = "Identity"'),
        ('backend: "Identity"', "a key has '=' after it, as backend = …"),
        ("decode:", "this is YAML; in TOML a table is [decode]"),
        ("- backend", "this is YAML; in TOML a list is key = [1, 2]"),
        ('{"backend": "Identity"}', "this is JSON; in TOML a table is [name], with a line key = value for each key"),
        ("// decode", "a comment begins with #"),
        ("[b", "a table's name ends with ], as [name]"),
        ("[a]", "the table [a] occurs twice"),
        ('a = "x"\na = 1', "'a' is set twice"),
        ('backend = "Identity', 'the text has no quote at its end; expected backend = "Identity"'),
        ("backend = “Identity”", "quotes are plain: \" or '"),
        ("shared = True", "true and false are written small"),
        ("next = None", "TOML has no empty value; leave the key out"),
        ("mean = (1, 2)", "a list is in brackets, as mean = [1, 2]"),
        ('next = ["b" "c"]', "elements of a list have a comma between them, and ] at the end"),
        (r'model = "C:\models"', r"in double quotes a backslash is written \\; in single quotes it stays as it is"),
        ("resize_h = 64px", "after a value the line ends; put quotes around text"),
        ("backend", "expected a table, as [name], or a key with its value, as key = value"),
    ):
        path.write_text(f"[a]\n{line}\n", encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            load_config(path)
        number, shown = 2 + line.count("\n"), line.splitlines()[-1]
        if str(error.value) != f"{path}: not valid TOML: line {number}, {shown!r}: {expected}":
            wrong.append(str(error.value))
    assert wrong == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, f"no such file (working directory: {os.getcwd()})"),
        (b'[a]\nbackend = "x"\nbackend = "y"\n', "not valid TOML: "),
        (b"a = 1\nb = 2\nc = \n", "not valid TOML: line 3, 'c =': a value is missing after c ="),
        (b"[a]\nx = " + b"9" * 5000, "not valid TOML: "),
        (b"[a]\nx = " + b"[" * 3000 + b"]" * 3000, "not valid TOML: "),
        (b"[a]\nx = " + b"{a = " * 3000 + b"1" + b"}" * 3000, "not valid TOML: "),
        (b'\xef\xbb\xbf[a]\r\nname = "\xe9"', "not UTF-8, as TOML is: byte 0xe9 in line 2; save it as UTF-8"),
        ("[a]".encode("utf-16"), "not UTF-8, as TOML is: byte 0xff in line 1"),
        (b"#" * (MOST_CHARACTERS + 1), "more than 1048576 characters"),
        (Path.mkdir, "a folder; expected a path ending in .toml"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
    ids=range(12),
)
def test_refuses_missing_or_invalid_files(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "a.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    for read in (parse_toml, pipe):
        assert refusal(path, read).startswith(f"{path}: {problem}")


@pytest.mark.parametrize("read", [parse_toml, pipe])
def test_names_the_file_that_is_meant(tmp_path: Path, read: Any) -> None:
    (tmp_path / "m3" / "seg").mkdir(parents=True)
    for name in ("det.toml", "det.onnx", "other.toml", "seg/2.toml", ".dett.toml"):
        (tmp_path / "m3" / name).touch()
    m3 = tmp_path / "m3"
    for path, problem in (
        (m3 / "dett.toml", f"no such file; did you mean {str(m3 / 'det.toml')!r}?"),
        (m3 / "set.toml", f"no such file; did you mean {str(m3 / 'det.toml')!r}?"),
        (m3 / "far-away.toml", f"no such file (working directory: {os.getcwd()})"),
        (m3, f"a folder; name one file of it: {m3}/det.toml, {m3}/other.toml, {m3}/seg/2.toml"),
        (m3 / "seg", f"a folder; name one file of it: {m3}/seg/2.toml"),
    ):
        assert refusal(path, read) == f"{path}: {problem}"
    assert refusal(m3 / "det", pipe) == f"{m3}/det: no such file or folder; did you mean {str(m3 / 'det.toml')!r}?"
    assert refusal(f"{m3}4", pipe) == f"{m3}4: no such file or folder; did you mean {str(m3)!r}?"
    for name in "abcd":
        (m3 / f"{name}.toml").touch()
    assert refusal(m3, read).endswith(f"{m3}/a.toml, {m3}/b.toml, {m3}/c.toml, …")


@pytest.mark.parametrize("read", [parse_toml, pipe, parse_folder])
@pytest.mark.parametrize("path", ["a\0.toml", "a\ud800.toml"])
def test_refuses_paths_that_no_file_can_have(path: str, read: Any) -> None:
    assert refusal(path, read).startswith(f"{path!r}: cannot be read: ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("config.yaml", "config.yaml: no such file or folder; expected a path ending in .toml"),
        (3, "config: expected a path or a dict, got int"),
        ({"a": {3: "x"}}, "config: node 'a': key 3: a key is a string"),
        ({0: {}}, "config: node 0: a node's name is letters from a to z, digits, '_' and '-', with one '.' before"),
        (
            {"a": {"backend": None}},
            "config: node 'a': key 'backend': expected a string, number, bool or list, got None",
        ),
    ],
)
def test_refuses_values_that_are_not_a_configuration(config: Any, message: str) -> None:
    assert refusal(config, pipe).startswith(message)


# -- refusals -----------------------------------------------------------------------------------------------------

RESIZE = 'backend = "ResizeMat"\nresize_h = 1\nresize_w = 1\n'

REFUSED = [
    # unknown names
    (f'[a]\n{RESIZE}"ResizeMat::resize_hh" = 1', "a: ResizeMat::resize_hh", "'ResizeMat::resize_h'?"),
    ('[a]\nbackend = "S[Identity,decodemat]"', "a: backend", "did you mean 'DecodeMat'?"),
    ('[a]\nbackend = "DecodeMat"\ncolor = "green"', "a: color", "expected one of bgr, rgb, gray, got 'gr"),
    ("[a]\nresize_h = 1\nresize_w = 1", "a: backend", "missing; without it the node is Identity, which does not take"),
    # options of the service, keys and backends of other servers, transforms of torchvision
    ("engines = 2\n[a]", "global: engines", "no node takes it; --engines is an option of torchpipe-serve"),
    (f"[a]\n{RESIZE}workers = 2", "a: workers", "unknown key; --workers is an option of torchpipe-serve"),
    ("[a]\nhttp-port = 1", "a: http-port", "unknown key; --http-port is an option of torchpipe-serve"),
    (f"[a]\n{RESIZE}max_batch = 2", "a: max_batch", "unknown key; the largest batch is 'max' here; "),
    (f"[a]\n{RESIZE}pad_value = 2", "a: pad_value", "unknown key; it belongs to ResizePadMat or LetterBoxMat or Resiz"),
    ("max-wait-time = 2\n[a]", "global: max-wait-time", "no node takes it; it is 'batching_timeout' here, in mi"),
    (f'[a]\n{RESIZE}"ResizeMat::batch_timeout" = 0.05', "a: ResizeMat::batch_timeout", "unknown key; it is 'batching_"),
    ('[a]\ninstance_group = [{kind = "KIND_CPU"}]', "a: instance_group", "it is 'instance_num' here"),
    ('[a]\nbackend = "tensorrt"', "a: backend", "no backend 'tensorrt'; it is 'TensorrtTensor' here"),
    ('[a]\nbackend = "S[DecodeMat,Normalize]"', "a: backend", "no backend 'Normalize'; 'mean' and 'std' of the model'"),
    # keys at a wrong level
    (
        '[a]\nbackend = "Identity"\n"Identity::instance_num" = 2',
        "a: Identity::instance_num",
        "'instance_num' belongs to the node, not to a backend: write it without Identity::",
    ),
    ('[[a]]\nbackend = "Identity"\n[b]', "global: a", "expected one table, [a], got a list of tables, [[a]]"),
    ('[a]\nfilter = "run"\n[a.more]\nresize_h = 2', "a.more: resize_h", "shares the instances of 'a'"),
    ("max_inflite = 1\n[a]", "global: max_inflite", "did you mean 'max_inflight'?"),
    ("max_inflight = 0\n[a]", "global: max_inflight", "expected at least 1, got 0"),
    ("[a]\nmax_inflight = 1", "a: max_inflight", "belongs to the top level"),
    ('resize_h = "x"\n[a]\nbackend = "ResizeMat"\nresize_w = 1', "global: resize_h", "expected an integer, got"),
    ('batching_timeout = "x"\n[a]', "global: batching_timeout", "expected a finite number, got 'x'"),
    # wrong types of the node keys
    ("[a]\nbackend = 3", "a: backend", 'expected a backend expression in quotes, as "DecodeMat", got 3'),
    ("[a]\nnext = true", "a: next", "expected a string, got True"),
    ('[a]\nmap = "b"', "a: map", "expected source[key:newkey,…] at column 1 of 'b'"),
    ('[a]\nmap = ""', "a: map", "is empty"),
    ("[a]\nshared = 2\n[b]", "a: shared", "expected true or false"),
    ("[a]\ninstance_num = 100000", "a: instance_num", "expected at most 1024, got 100000: each instance"),
    ('[a]\nbackend = "Identity&Identity"\ninstance_num = "1&2000"', "a: instance_num", "at most 1024"),
    ("[a]\ninstance_num = 0", "a: instance_num", "expected at least 1, got 0"),
    ("[a]\nbatching_timeout = inf", "a: batching_timeout", "expected a finite number, got inf"),
    (f"[a]\nbatching_timeout = {10**400}", "a: batching_timeout", "expected a finite number, got 1000"),
    ("[a]\ndevice_id = -1", "a: device_id", "expected at least 0, got -1"),
    ('[a]\ndecode_isolation = "maybe"', "a: decode_isolation", "expected one of "),
    # parameters
    ('[a]\nbackend = "DecodeMat"\nmax_pixels = 0', "a: max_pixels", "expected at least 1, got 0"),
    ('[a]\nbackend = "ResizeMat"\nresize_h = 1048577', "a: resize_h", "at most 1048576, got 1"),
    ('[a]\nbackend = "OnnxTensor"\nmodel = "no.onnx"', "a: model", "no such file: no.onnx"),
    ('model = "no.onnx"\n[a]\nbackend = "OnnxTensor"\n[b]\nbackend = "OnnxTensor"', "global: model", "no such"),
    ('[a]\nbackend = "ResizeMat"\nresize_w = 1\nresize_h = "1|2"', "a: resize_h", "expected an integer"),
    # brackets, tables, names
    ('[a]\nbackend = "DecodeMat[Identity]"', "a: backend", "DecodeMat takes no brackets, found 1"),
    ('[a]\nbackend = "Python[Identity,Identity]"', "a: backend", "at most 1 in its brackets, found 2"),
    ("[a]\n[a.b.c]\nx = 1", "a.b: c", "expected a string, number, bool or list, got dict"),
    ("[a]\nx = 2020-01-01", "a: x", "expected a string, number, bool or list, got date"),
    ('["a b"]', "a b", "a node's name is letters from a to z, digits, '_' and '-'"),
    ('"Interpreter::backend" = "Pipeline"\n[a]', "global: Interpreter::backend", "did you mean 'PipelineV3'?"),
]


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("key", ELSEWHERE)
def test_unknown_key_of_another_server_names_its_equivalent(key: str) -> None:
    backends = [default.find_backend(name) for name in ("LetterBoxMat", "ResizeMat", "TensorrtTensor")]
    of_backends = {param.key for cls in backends if cls is not None for param in cls.parameters().values()}
    named = set(re.findall(r"'(\w+)'", ELSEWHERE[key]))
    assert named <= {*NODE_KEYS, *PIPELINE_KEYS, *of_backends, *declared(YoloBoxes)}
    assert set(re.findall(r"--([\w-]+)", ELSEWHERE[key])) <= set(SERVICE_FLAGS)
    with pytest.raises(ConfigError, match=f"key '{key}': unknown key; .*( here|torchpipe-serve|in flight)"):
        pipe({"backend": "Identity", key: 1})


@pytest.mark.parametrize(("text", "place", "problem"), REFUSED, ids=[f"{row[1]}: {row[2]}" for row in REFUSED])
def test_refuses_with_place_before_starting_threads(write: Write, text: str, place: str, problem: str) -> None:
    path = write(text)
    said = refusal(path, pipe)
    node, _, key = place.partition(": ")
    where = ("global" if node == "global" else f"node {node!r}") + (f": key {key!r}" if key else "")
    assert said.startswith(f"{path}: {where}")
    assert problem in said


LONG = "y" * 5000


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize(
    "node",
    [
        {"backend": LONG},
        {"backend": f"A[{LONG}"},
        {"backend": "Identity", LONG: 1},
        {LONG: 1},
        {"filter": LONG},
        {"next": LONG},
        {"map": LONG},
        {"instance_num": 10**5000},
        {"batching_timeout": LONG},
        {"or": True, "filter": LONG},
        {"backend": "Identity&Identity", "instance_num": f"{LONG}&1&1"},
        {"backend": "ResizeMat", "resize_w": 1, "resize_h": LONG},
        {"backend": "OnnxTensor", "model": "x.onnx", "mean": [1.0] * 5000},
        {"max_inflight": LONG},
    ],
)
def test_shortens_long_values_in_messages(node: dict[str, Any]) -> None:
    said = refusal({"a": {"backend": "Identity", **node}}, pipe)
    assert len(said) < 1000
    assert "node 'a'" in said


def test_errors_of_edited_tables_name_their_file(tmp_path):
    path = tmp_path / "edited.toml"
    path.write_text('[one]\nbackend = "Identity"\n')
    tables = parse_toml(path)
    tables["one"]["nonsense"] = 1
    with pytest.raises(ConfigError, match=re.escape(f"{path}: node 'one': key 'nonsense'")):
        pipe(pickle.loads(pickle.dumps(tables)))


TWO_ROOTS = '[one]\nnext = "end"\n[end]\nbackend = "Identity"\n[two]\nbackend = "Identity"\n'
JUMPING = '[outer]\nbackend = "S[Jump]"\n"Jump::jump" = "inner"\n[inner]\nbackend = "Identity"\n'


def written(folder: Path, **files: str) -> Path:
    """``files`` by name, in which ``__`` stands for the slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nbackend = "Identity"\n' + "".join(f"key{index} = 1\n" for index in range(40_000)),
        "".join(f"key{index} = 1\n" for index in range(40_000)) + "[a]\n",
        "".join(f'[n{index}]\nnext = "m{index}"\n' for index in range(MOST_NODES)),
        "".join(f'[n{index}]\nbackend = "X{index}"\n' for index in range(MOST_NODES)),
        '[a]\nnext = "' + ",".join(f"m{index}" for index in range(40_000)) + '"',
    ],
    ids=["keys of a node", "keys at the top", "next", "backends", "one next"],
)
def test_reports_the_first_of_thousands_of_mistakes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        pipe(file)
    assert str(caught.value).count("\n") == MOST_PROBLEMS
    assert str(caught.value).endswith(f"\nchecked no further after {MOST_PROBLEMS} mistakes")


def test_names_the_first_of_thousands_of_keys_without_a_backend(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[a]\n" + "".join(f"key{index} = 1\n" for index in range(40_000)))
    with pytest.raises(ConfigError, match=r"Identity, which does not take 'key0', .*'key15', …$"):
        pipe(file)


def test_refuses_more_nodes_than_any_machine_runs(tmp_path: Path) -> None:
    file = tmp_path / "many.toml"
    file.write_text("".join(f"[n{index}]\n" for index in range(MOST_NODES + 1)))
    with pytest.raises(ConfigError, match=f"{MOST_NODES + 1} nodes; the limit is {MOST_NODES}"):
        pipe(file)


def test_finds_models_and_versions_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path, a='[n]\nbackend = "Identity"\n', b__2=JUMPING, b__10=JUMPING, c=TWO_ROOTS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "labels.txt").write_text("nothing for a model")
    (tmp_path / ".hidden.toml").write_text("not read")
    with pipe(parse_folder(tmp_path)) as run:
        assert [(model.name, model.version, model.root) for model in run.models] == [
            ("a", "1", "a/1/n"),
            ("b", "2", "b/2/outer"),
            ("b", "10", "b/10/outer"),
            ("c.one", "1", "c/1/one"),
            ("c.two", "1", "c/1/two"),
        ]
        for name in ("a", "a/1", "b", "b/2", "b/10", "c.one", "c.two/1"):
            assert run({"data": name, "node_name": name})["result"] == name
        nodes = run.stats()["nodes"]
        assert {name: nodes[name]["requests"] for name in ("b/2/inner", "b/10/inner")} == {
            "b/2/inner": 1,
            "b/10/inner": 2,
        }
        for wrong in ("a/1/n", "n", "b/3", "../a"):
            with pytest.raises(UnknownNode, match="no root"):
                run({"data": 1, "node_name": wrong})
    only = parse_folder(tmp_path).without("a").without("c")
    with pipe(only) as run:
        run({"data": 1})
        assert run.stats()["nodes"]["b/10/outer"]["requests"] == 1, "the one model, its last version"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no model in it; expected TOML files: NAME.toml"),
        ({"a\n": "[n]"}, r"a\\n.toml': the name of a model is at most 200 printable characters"),
        ({"a" * 201: "[n]"}, "the name of a model is at most 200 printable characters"),
        ({"a__x": "[n]"}, "x.toml: a version is a number from 1"),
        ({"a__0": "[n]"}, "0.toml: a version is a number from 1"),
        ({"a": "[n]", "a__1": "[n]"}, "version 1 of 'a' is .*, too"),
        ({"a": "[n"}, "a.toml: not valid TOML"),
        ({"a": '[n]\nnext = "m"', "b": "[m]"}, "a.toml: node 'n': key 'next': no node .*m"),
        ({"a": "maximum = 3\n[n]", "b": "[m]"}, "a.toml: global: key 'maximum': no node takes it"),
    ],
)  # fmt: skip
def test_refuses_invalid_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe(parse_folder(written(tmp_path, **files)))


@pytest.mark.parametrize("name", ["yolo-v8.1", "a.b.c", "my model", "模型", "a+b", "a%20b", "Ü?#&='\"<>:;,[]{}|\\^`~"])
def test_serves_a_file_of_any_printable_name(tmp_path: Path, name: str) -> None:
    text = '[outer]\nbackend = "Jump"\njump = "inner"\nnext = "outer.again"\n["outer.again"]\n[inner]\n'
    with pipe(parse_folder(written(tmp_path, **{name: text, f"{name}__2": text}))) as run:
        assert [(model.name, model.version, model.root) for model in run.models] == [
            (name, version, f"{name}/{version}/outer") for version in "12"
        ]
        assert run({"data": 1, "node_name": f"{name}/2"})["result"] == 1
        assert run.stats()["nodes"][f"{name}/2/outer"]["requests"] == 2
        assert run.stats()["nodes"][f"{name}/2/inner"]["requests"] == 2


def test_reads_valid_models_beside_invalid_ones(tmp_path: Path) -> None:
    folder = read_folder(written(tmp_path, a="[n]", b="[n", c__x="[n]", d="[n]", d__1="[n]"))
    assert list(folder) == ["a/1", "d/1"]
    assert list(folder.problems) == ["c/x", "d/1", "b/1"]
    for problem, text in zip(
        folder.problems.values(), ("a version is", "version 1 of 'd' is", "not valid"), strict=True
    ):
        assert text in problem
    written(tmp_path, b="[n]")
    assert [*folder.having("b").problems] == ["c/x", "d/1"], "that of b is solved"
    assert [*folder.without("c").problems] == ["d/1", "b/1"]
    with pytest.raises(ConfigError, match=r"x\.toml: a version is a number"):
        folder.having("c")


def test_rereads_one_model_of_a_folder(tmp_path: Path) -> None:
    served = parse_folder(written(tmp_path, a="[n]", b="[m]"))
    written(tmp_path, a="not read", b__2="[m]")
    assert list(served.having("b")) == ["a/1", "b/1", "b/2"]
    with pytest.raises(ConfigError, match=r"no model '\.\./b' in .*; "):
        served.having("../b")
    with pytest.raises(ConfigError, match=r"a\.toml: not valid TOML"):
        served.having("a")
    with pytest.raises(ConfigError, match=f"no model 'c' in {tmp_path}; "):
        read_folder(f"{tmp_path}/").having("c")


def test_plans_long_chain_without_recursion() -> None:
    nodes = {f"n{index}": {"next": f"n{index + 1}"} for index in range(1200)}
    made = build_graph(load_config({**nodes, "n1200": {}}))
    assert (made.order[0], made.order[-1], len(made.upstream["n1200"])) == ("n0", "n1200", 1200)


# -- how many instances a node has that does not say so ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "cores", "processes", "expected"),
    [
        ({"backend": "Identity"}, 16, 1, 1),
        ({"backend": "DecodeMat"}, 4, 1, 4),
        ({"backend": "S[DecodeMat,ResizeMat]", "resize_h": 8, "resize_w": 8, "filter": "or"}, 16, 8, 2),
        ({"backend": "DecodeMat"}, 2, 8, 1),
        ({"backend": "CheckJpeg"}, 64, 1, 8),
        ({"backend": "CheckJpeg", "instance_num": 3}, 64, 1, 3),
    ],
)
def test_decoding_and_checking_nodes_use_all_cores(
    node: dict[str, object], cores: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    tables = {"first": {"backend": "Identity", "next": "node"}, "node": node}
    assert plan_pipeline(tables, processes=processes).plans["node"].spec.instance_num == (expected,)


def test_used_backends_of_nested_and_alternative_expressions_of_a_broken_file() -> None:
    config = {
        "a": {"backend": "S[DecodeMat,SyncTensor[TensorrtTensor]]", "next": "b"},
        "b": {"backend": "Own&Identity"},
    }
    names = {"S", "DecodeMat", "SyncTensor", "TensorrtTensor", "Own", "Identity"}
    assert used_backends({**config, "c": {"backend": "X["}}) == names

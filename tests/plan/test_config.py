"""The configuration language: what means the same, and what is refused, where, and with which advice."""

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

from torchpipe_py import Backend, ConfigError, parse_toml, pipe
from torchpipe_py.plan.build import NodePlan, plan_pipeline
from torchpipe_py.plan.config import MOST_CHARACTERS, NODE_KEYS, PIPELINE_KEYS, load_config
from torchpipe_py.plan.unknown import ELSEWHERE, SERVICE_FLAGS

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


def test_a_byte_order_mark_at_the_start_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbfbatching_timeout = 2\r\n[a]\r\nbackend = "Identity"\r\n')
    assert plans(path)["a"].spec.batching_timeout == 2


def test_the_documented_defaults_of_node_keys_may_be_written_out() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "configuration.md").read_text(encoding="utf-8")
    written: dict[str, Any] = dict(re.findall(r'^\| `(\w+)` \|.*; default `?"?(\w+)"?`? \|$', page, re.MULTILINE))
    assert written.keys() >= {"batching_timeout", "device_id", "decode_isolation", "shared", "max_inflight"}
    top = {"max_inflight": written.pop("max_inflight")}
    first, second = (load_config(config) for config in ({"a": {}}, {**top, "a": {**written, "backend": "Identity"}}))
    assert first.max_inflight == second.max_inflight
    for key in ("calls", *written):
        assert getattr(first.nodes["a"], key) == getattr(second.nodes["a"], key)


def test_all_names_of_an_expression_that_are_no_backends_are_told(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe(write('[a]\nbackend = "S[DecodeMat,Resize,OnnxModel,Resize]"'))
    assert re.findall(r"node 'a': key 'backend': no backend '(\w+)'; ", str(caught.value)) == ["Resize", "OnnxModel"]


def test_a_device_that_nothing_uses_is_told(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    on_device = register(type("OnDevice", (Backend,), {"uses_device": True, "__doc__": "_"}))
    for backend in ("DecodeTensor", "S[DecodeMat,Mat2Tensor]", f"Process[{on_device}]", "Identity&SyncTensor"):
        plan_pipeline({"backend": backend, "device_id": 1})
    plan_pipeline({"backend": "Identity", "device_id": 0})
    plan_pipeline({"global": {"device_id": 1}, "a": {"backend": "Identity"}})
    assert caplog.messages == []
    plan_pipeline({"backend": "S[DecodeMat,Isolated[DecodeMat]]&DecodeMat", "device_id": 1})
    assert caplog.messages == [
        "config: node 'node': key 'device_id': nothing uses it: no backend here works on a CUDA device "
        "(a Backend of your own says uses_device = True)"
    ]


def test_several_roots_may_be_a_forgotten_next(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, f"no such file (working directory: {os.getcwd()})"),
        (b'[a]\nbackend = "x"\nbackend = "y"\n', "not valid TOML: "),
        (b"a = 1\nb = 2\nc = \n", "not valid TOML: Invalid value (at line 3, column 5): 'c ='"),
        (
            b"[a]\nbackend = Identity\n",
            "not valid TOML: Invalid value (at line 2, column 11): 'backend = Identity'; a text stands in quotes",
        ),
        (b"[a]\n[a]\n", "not valid TOML: Cannot declare ('a',) twice (at line 2, column 3): '[a]'"),
        (b"[a]\nx = " + b"9" * 5000, "not valid TOML: "),
        (b"[a]\nx = " + b"[" * 3000 + b"]" * 3000, "not valid TOML: "),
        (b"[a]\nx = " + b"{a = " * 3000 + b"1" + b"}" * 3000, "not valid TOML: "),
        (b'\xef\xbb\xbf[a]\r\nname = "\xe9"', "not UTF-8, as TOML is: byte 0xe9 in line 2; save it as UTF-8"),
        ("[a]".encode("utf-16"), "not UTF-8, as TOML is: byte 0xff in line 1"),
        (b"#" * (MOST_CHARACTERS + 1), "more than 1048576 characters"),
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
    ids=range(14),
)
def test_files_that_are_none(tmp_path: Path, content: Any, problem: str) -> None:
    path = tmp_path / "a.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    for read in (parse_toml, pipe):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("config.yaml", "config.yaml: no such file or folder; expected a path ending in .toml"),
        (3, "config: expected a path or a dict, got int"),
        ({}, "config: no node in it"),
        ({"global": {"instance_num": 1}}, "config: no node in it"),
        ({"a": {3: "x"}}, "config: node 'a': key 3: a key is a string"),
        ({0: {}}, "config: node 0: a node's name is letters from a to z, digits, '_' and '-', with one '.' before"),
        (
            {"a": {"backend": None}},
            "config: node 'a': key 'backend': expected a string, number, bool or list, got None",
        ),
    ],
)
def test_things_that_are_no_configuration(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe(config)
    assert str(caught.value).startswith(message)


# -- refusals -----------------------------------------------------------------------------------------------------

RESIZE = 'backend = "ResizeMat"\nresize_h = 1\nresize_w = 1\n'

REFUSED = [
    # unknown names
    (f"[a]\n{RESIZE}resize_hh = 1", "a: resize_hh", "unknown key; did you mean 'resize_h'?"),
    (f'[a]\n{RESIZE}"ResizeMat::resize_hh" = 1', "a: ResizeMat::resize_hh", "'ResizeMat::resize_h'?"),
    ('[a]\nbackend = "S[Identity,decodemat]"', "a: backend", "did you mean 'DecodeMat'?"),
    ('[a]\nbackend = "S[(brake)Identity]"', "a: backend", "no filter 'brake'; did you mean 'break'?"),
    ('[a]\nbackend = "DecodeMat"\ncolor = "green"', "a: color", "expected one of bgr, rgb, gray, got 'gr"),
    ('[a]\nbackend = "Mat2Tensor"\ndevice = "cuda:0"', "a: device", "expected one of '', cpu, cuda, got "),
    ('[a]\nbackend = "zzz"', "a: backend", "no backend 'zzz'; none of the "),
    ("[a]\nresize_h = 1\nresize_w = 1", "a: backend", "missing; without it the node is Identity, which does not take"),
    ("[a]\nmax = 4", "a: backend", "missing; without it the node is Identity, which does not take 'max'"),
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
    ("resize_h = 1\n[a]", "global: resize_h", "no node takes it"),
    ("max_inflite = 1\n[a]", "global: max_inflite", "did you mean 'max_inflight'?"),
    ("or = true\n[a]", "global: or", "belongs into a node's table"),
    ("max_inflight = 0\n[a]", "global: max_inflight", "expected at least 1, got 0"),
    ("[a]\nmax_inflight = 1", "a: max_inflight", "belongs to the top level"),
    ('resize_h = "x"\n[a]\nbackend = "ResizeMat"\nresize_w = 1', "global: resize_h", "expected an integer, got"),
    ('batching_timeout = "x"\n[a]', "global: batching_timeout", "expected a finite number, got 'x'"),
    # wrong types of the node keys
    ("[a]\nbackend = 3", "a: backend", "expected a backend expression, got 3"),
    ('[a]\nbackend = "A["', "a: backend", "found the end at column 3 of 'A['"),
    ("[a]\nnext = true", "a: next", "expected a string, got True"),
    ("[a]\nfilter = true", "a: filter", "expected a string, got True"),
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
    ('[a]\nbackend = "ResizeMat"\nresize_w = 1', "a: resize_h", "ResizeMat needs it: output height"),
    (f"[a]\n{RESIZE}interpolation = true", "a: interpolation", "expected a string, got True"),
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
def test_what_another_server_has_is_named_as_it_is_here(key: str) -> None:
    assert set(re.findall(r"'(\w+)'", ELSEWHERE[key])) <= {*NODE_KEYS, *PIPELINE_KEYS, "max", "resize_h", "resize_w"}
    assert set(re.findall(r"--([\w-]+)", ELSEWHERE[key])) <= set(SERVICE_FLAGS)
    with pytest.raises(ConfigError, match=f"key '{key}': unknown key; .*( here|torchpipe-serve|in flight)"):
        pipe({"backend": "Identity", key: 1})


@pytest.mark.parametrize(("text", "place", "problem"), REFUSED, ids=[f"{row[1]}: {row[2]}" for row in REFUSED])
def test_refused_with_its_place_before_any_thread(write: Write, text: str, place: str, problem: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        pipe(path)
    node, _, key = place.partition(": ")
    where = ("global" if node == "global" else f"node {node!r}") + (f": key {key!r}" if key else "")
    assert str(caught.value).startswith(f"{path}: {where}")
    assert problem in str(caught.value)


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
def test_what_is_long_is_not_repeated_whole(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe({"a": {"backend": "Identity", **node}})
    assert len(str(caught.value)) < 1000
    assert "node 'a'" in str(caught.value)


def test_errors_of_an_edited_file_name_the_file(tmp_path):
    path = tmp_path / "edited.toml"
    path.write_text('[one]\nbackend = "Identity"\n')
    tables = parse_toml(path)
    tables["one"]["nonsense"] = 1
    with pytest.raises(ConfigError, match=re.escape(f"{path}: node 'one': key 'nonsense'")):
        pipe(pickle.loads(pickle.dumps(tables)))

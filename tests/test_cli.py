"""The command ``torchpipe``: checking and drawing configurations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import encode, picture
from kit.waits import PROGRAM_WAIT, run

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.cli import DEPENDENCIES, main
from torchpipe_py.plan.folder import NO_MODEL
from torchpipe_py.tools.options import ELSEWHERE

GOOD = """
[decode]
backend = "DecodeMat"
next = "each"
[each]
backend = "MapReduce"
jump = "small"
[small]
backend = "S[ResizeMat,Identity]"
resize_h = 8
resize_w = 8
instance_num = 3
next = "left, right"
["left"]
filter = "SubGraphSkip"
next = "join"
["right"]
next = "join"
["join"]
map = "left[result:data],right[result:other]"
"""

BAD = """
resize_h = "x"
colour = "rgb"
[a]
backend = "ResizeMat"
resize_w = 0
resize_ww = 1
next = "b"
[b]
backend = "DecodMat"
[c]
instance_num = 0
batching_timeout = -1
[d]
filter = "swop"
"""


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.toml"
    path.write_text(GOOD, encoding="utf-8")
    return str(path)


def test_check_takes_a_folder_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    (folder / "b").mkdir(parents=True)
    assert main(["check", str(folder)]) == 1
    assert capsys.readouterr().err == f"torchpipe: {folder}: {NO_MODEL}\n"
    for name in ("a.toml", "b/2.toml"):
        (folder / name).write_text(GOOD, encoding="utf-8")
    assert main(["check", str(folder / "a.toml"), str(folder / "b")]) == 0
    printed = capsys.readouterr().out
    assert all(f"{folder / name}: ok, " in printed for name in ("a.toml", "b/2.toml"))
    (folder / "a.toml").write_text("[", encoding="utf-8")
    (folder / "b" / "2.toml").write_text(BAD, encoding="utf-8")
    assert main(["check", str(folder)]) == 1
    printed = capsys.readouterr().err
    assert all(f"torchpipe: {folder / name}: " in printed for name in ("a.toml", "b/2.toml"))


def test_check_reports_all_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(BAD, encoding="utf-8")
    assert main(["check", str(path)]) == 1
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert all(line.startswith(f"torchpipe: {path}: ") for line in lines)
    places = [line.removeprefix(f"torchpipe: {path}: ").split(": ", 2)[:2] for line in lines]
    assert sorted(places) == [
        ["global", "key 'resize_h'"],
        ["node 'a'", "key 'resize_w'"],
        ["node 'a'", "key 'resize_ww'"],
        ["node 'b'", "key 'backend'"],
        ["node 'c'", "key 'batching_timeout'"],
        ["node 'c'", "key 'instance_num'"],
        ["node 'd'", "key 'filter'"],
    ]


def test_graph_prints_mermaid(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", good]) == 0
    text = capsys.readouterr().out
    assert text.startswith("flowchart LR")
    for part in ("decode", "MapReduce", "x3", "SubGraphSkip", "split data, merge result", "result:other"):
        assert part in text


@pytest.mark.parametrize("name", ["graph.svg", "graph.html", "graph.mmd"])
def test_graph_writes_files(good: str, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    assert main(["graph", good, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert all(part in text for part in ("decode", "each", "small", "left", "right", "join"))
    if name == "graph.svg":
        ElementTree.fromstring(text)


def test_graph_refuses_invalid_arguments(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, problem in (("graph.png", "expected a name that ends in"), ("no/folder.svg", "no such folder")):
        with pytest.raises(SystemExit) as caught:
            main(["graph", good, "--out", str(tmp_path / out)])
        assert caught.value.code == 2
        assert problem in capsys.readouterr().err
    assert main(["graph", str(tmp_path / "none.toml")]) == 1
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *(
            ([*command, "--img_dir=x", flag], f"unrecognized arguments: {flag}; did you mean '--total_number'?")
            for command in (["bench", "x.toml"], ["load"])
            for flag in ("--total_numbr=5", "--total_num=5")
        ),
        *((["load", "--img_dir", "x", flag, "4"], f"{flag} 4; {instead}\n") for flag, instead in ELSEWHERE.items()),
        *((["load", flag, "4"], f"{flag}, {instead}\n") for flag, instead in ELSEWHERE.items()),
        *(
            (["load", "--img_dir", "x", flag, str(value)], flag)
            for flag, value in (
                *(("--request_client", 0), ("--port", 70000), ("--timeout", 0), ("--total_number", "x")),
                *(("--json", "/nowhere/x.json"), ("--html", "/nowhere/x.html")),
                *((flag, 10**20) for flag in ("--total_number", "--request_batch", "--warmup")),
            )
        ),
        *(
            (["parity", "a.toml", "b.toml", "--img_dir", ".", flag, value], flag)
            for flag, value in (
                *(("--torchvision", "any"), ("--worst", "-1"), ("--max-mean", "nan")),
                *(("--max-mean", "-1"), ("--min-agreement", "1.1"), ("--max-drop", "101")),
                *(("--html", "no/such/folder/x.html"), ("--json", ".")),
                *(("--against", "net.py:predict"), ("--tolerance", "top=0.9")),
            )
        ),
        (["parity", "a.toml", "b.toml"], "--img_dir"),
        *(
            (["quantize", "pipe.toml", "--img_dir", ".", *options], said)
            for options, said in (
                (["--max-drop", "101"], "argument --max-drop: expected points of accuracy, 0 to 100, got '101'"),
                (["--out", "model.trt"], "expected a name that ends in .onnx, got 'model.trt'; for example model.onnx"),
                (["--keep", "-1"], "expected a whole number, at least 0, got '-1'"),
                (["--max_dorp", "1"], "unrecognized arguments: --max_dorp 1; did you mean '--max-drop'?"),
            )
        ),
        (["quantise"], "argument COMMAND: invalid choice: 'quantise'; did you mean 'quantize'?"),
        (["load", "--transport", "frame"], "argument --transport: invalid choice: 'frame'; did you mean 'framed'?"),
        (
            ["quantize", "x.toml", "--img-dri", "y"],
            "LABEL_name.jpg); there is --img-dri, did you mean ",
        ),
        (["quantize", "--keep", "3", "--img_dir", "images"], "the following arguments are required: CONFIG.toml ("),
        (
            ["load", "--img-dir=.", "--labels-from-names", "--slo_p99=5", "--no_progress", "--request-batch=0"],
            "argument --request_batch: expected a whole number from 1",
        ),
    ],
)
def test_wrong_argument_names_nearest_valid(command: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--nonsense", "5"], ["--nonsense=5", "x"], ["--number", "3", "--nonsense", "5"]])
def test_unknown_flag_is_named_without_its_value(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("name", choices=["schedule"])
    parser.add_argument("--number")
    with pytest.raises(SystemExit):
        parser.parse_args([*given, "schedule"])
    flag = next(each for each in given if each.startswith("--nonsense"))
    assert f"error: unrecognized arguments: {flag}; valid: " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--img_dir=a_b", "--img-dir=a_b"])
@pytest.mark.parametrize("port", ["--http-port", "--http_port"])
def test_a_flag_has_dashes_or_underscores(given: str, port: str) -> None:
    parser = ArgumentParser()
    parser.add_argument("--img_dir")
    parser.add_argument_group("others").add_argument("--http-port", type=int)
    parser.add_argument("rest", nargs="*")
    parsed = parser.parse_args([given, port, "80", "--", "--img-dir", "--http_port"])
    assert vars(parsed) == {"img_dir": "a_b", "http_port": 80, "rest": ["--img-dir", "--http_port"]}


@pytest.mark.parametrize("number", ["-1", "-1e0", "-1E+0", "-.1e1"])
def test_negative_number_is_not_a_flag(number: str) -> None:
    parser = ArgumentParser()
    parser.add_argument("--ratio", type=float)
    assert parser.parse_args(["--ratio", number]).ratio == -1


@pytest.mark.parametrize(
    ("command", "closed", "status", "said"),
    [
        ("run a.toml - --out out.ndjson", "<&-", 2, "torchpipe: -: nothing in it\n"),
        ("idl", ">&-", 0, ""),
        ("watch a.toml --streams streams.toml", "<&- >&-", 0, None),
    ],
)
def test_standard_streams_that_are_closed_read_and_write_nothing(
    command: str, closed: str, status: int, said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text('backend = "Identity"\n')
    (tmp_path / "streams.toml").write_text('[a]\nsource = "pictures"\n')
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(encode(picture(8, 8), ".png"))
    tool = "import sys; from torchpipe_py.cli import main; sys.exit(main())"
    ended = run("bash", "-c", f"{sys.executable} -c '{tool}' {command} {closed}", cwd=tmp_path)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr == said or said is None


def test_warnings_are_told_from_errors(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('backend = "S[DecodeMat,NormalizeMat]"\nmean = 0.5\nstd = 127.5\n')
    tool = "import sys; from torchpipe_py.cli import main; sys.exit(main())"
    ended = run(sys.executable, "-c", tool, "check", "a.toml", cwd=tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.startswith("torchpipe: warning: a.toml: node ")
    assert "key 'mean': 0.5 looks like the mean of pixels 0..1" in ended.stderr


def test_closed_stdout_causes_no_traceback():
    code = "from torchpipe_py.cli import main; raise SystemExit(main(['backends', '--markdown']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PROGRAM_WAIT) == 1


def test_missing_dependency_is_one_line(good: str) -> None:
    """As after ``pip install --no-deps``, for the client only; commands without dependencies work."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({set(DEPENDENCIES) - {'numpy'}!r}));"
        "from torchpipe_py.cli import main; assert main(['idl']) == 0; raise SystemExit(main(sys.argv[1:]))"
    )
    done = run(sys.executable, "-c", code, "check", good)
    line = "torchpipe: tomli is not installed (pip install torchpipe_py without --no-deps)\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_contracts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, line in (["idl"], "service InferenceService"), (["idl", "--grpc"], "service GRPCInferenceService"):
        assert main(arguments) == 0
        assert line in capsys.readouterr().out


def test_serve_is_the_service() -> None:
    """It becomes ``torchpipe-serve``, with its options and messages."""

    def served(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from torchpipe_py.cli import main; main()", "serve", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_WAIT, check=False)

    shown = served("--help")
    assert (shown.returncode, shown.stdout[:22]) == (0, "usage: torchpipe-serve")
    failed = served("missing.toml")
    assert failed.returncode == 1
    assert "torchpipe-serve: missing.toml: no such file" in failed.stderr


def test_sigterm_ends_a_tool_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = list[str]()

    def interrupted(*_: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0
        finally:
            ended.append("folders are removed")

    monkeypatch.setattr("torchpipe_py.cli._check", interrupted)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(["check", "a.toml"]) == 130
    assert (ended, capsys.readouterr().err) == (["folders are removed"], "torchpipe: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

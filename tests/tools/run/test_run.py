"""``torchpipe run``: sources, lines, statuses, what is refused."""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Register, encode, picture
from kit.backends import returns
from kit.services import LIGHT
from kit.videos import web_server, write_video
from kit.waits import PROGRAM_WAIT, WAIT, eventually, run

from torchpipe_py import cli, pipe
from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.errors import DecodeError, InvalidRequest, NoResult
from torchpipe_py.files import iter_matches
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run import command, lines, pictures, worker
from torchpipe_py.tools.run.lines import Job, LineMaker, Settings, StartedJob, failed_line, line_of_same_content
from torchpipe_py.tools.run.outputs import check_kind, columns_of, write_table
from torchpipe_py.tools.run.partial import LineFile, Lock
from torchpipe_py.tools.run.pictures import draw_picture, picture_name
from torchpipe_py.tools.run.progress import Progress, progress_line
from torchpipe_py.tools.run.sources import Source, Unreadable, open_source, read_item
from torchpipe_py.wire.answers import failure
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.infer import Asked, answer_of
from torchpipe_py.wire.json_values import json_line

ROOT = Path(__file__).resolve().parents[3]
DEMO = f"""
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"
resize_h = 64
resize_w = 64
color = "rgb"
model = "{ROOT}/configs/demo/model.onnx"
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "SoftmaxMax"
labels = "{ROOT}/configs/demo/labels.txt"
"""
CODE = '''
import os, signal, threading
from torchpipe_py import ItemBackend, register_backend

@register_backend
class ByText(ItemBackend):
    """The length of a text, or the parameters; ``poison`` kills the process, ``hang`` never ends."""

    def forward_item(self, item):
        text = item["data"].decode()
        with open("computed", "a") as file:
            file.write(f"{text}\\n")
        if text == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "bad":
            raise ValueError("a bad file")
        if text == "hang":
            open("hangs", "w").close()
            threading.Event().wait()
        item["result"] = item.get("parameters") or len(text)
'''

Command = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``demo.toml``, and ``text.toml`` of ``ByText``."""
    (tmp_path / "demo.toml").write_text(DEMO)
    (tmp_path / "text.toml").write_text('backend = "ByText"\ninstance_num = 1\n')
    (tmp_path / "own_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(*arguments: object, path: str = "") -> list[str]:
    python = f"import sys; sys.path.insert(0, {path!r}); from torchpipe_py.cli import main; sys.exit(main())"
    return [sys.executable, "-c", python, "run", *map(str, arguments)]


def by_text(*arguments: object) -> list[str]:
    return program("text.toml", *arguments, "--import", "own_code.py", "--workers", 1, path=LIGHT)


def write_files(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.jpg").write_text(text)
    return folder


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# --- a run with processes


def test_tars_whose_headers_lie_have_an_error_after_their_good_members(here: Path) -> None:
    def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", size: int = -1) -> bytes:
        head = tarfile.TarInfo(name)
        head.type, head.size = kind, len(content) if size < 0 else size
        return head.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)

    tars = {
        "large.tar": (member("b.jpg", size=2**80), ["a.jpg", "b.jpg", ""], "unexpected end of data"),
        "other.tar": (member("b.txt", size=2**80), ["a.jpg", ""], "unexpected end of data"),
        "deep.tar": (
            member("././@LongLink", tarfile.GNUTYPE_LONGNAME, b"b.jpg\0") * 2000,
            ["a.jpg", ""],
            "too many headers",
        ),
    }
    for name, (headers, expected, why) in tars.items():
        (here / name).write_bytes(member("a.jpg", content=b"image") + headers)
        found = []
        for item in filter(None, open_source(name).items()):
            found.append(item.path.removeprefix(name).removeprefix("/"))
            assert item.path != f"{name}/a.jpg" or (item.load is not None and item.load() == b"image")
        assert found == expected
        assert str(item.error) == f"the tar cannot be read: {why}"


def test_damaged_gzip_has_an_error_after_its_members(here: Path) -> None:
    content = bytes(range(256)) * 4
    with tarfile.open(here / "a.tgz", "w:gz", compresslevel=0) as tar:
        tar.addfile(member := tarfile.TarInfo("a.jpg"))
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    whole = (here / "a.tgz").read_bytes()
    assert [item.path for item in filter(None, open_source("a.tgz").items())] == ["a.tgz/a.jpg"] * 2
    (here / "a.tgz").write_bytes(whole.replace(content[:100], bytes(100), 1))
    *_, last = filter(None, open_source("a.tgz").items())
    assert str(last.error).startswith("the tar cannot be read: CRC check failed")


def test_download_that_ends_early_is_unreadable() -> None:
    def respond(handler: Any, _: int) -> None:
        if handler.path == "/whole":
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b"abc")
        elif handler.path == "/cut":
            handler.send_response(200)
            handler.send_header("Content-Length", "5")
            handler.end_headers()
            handler.wfile.write(b"abc")
        else:
            handler.wfile.write(b"no HTTP")

    with web_server(respond) as port:
        web = f"http://127.0.0.1:{port}"
        assert read_item(f"{web}/whole") == b"abc"
        for path, why in (
            ("cut", "the connection ended after 3 of 5 bytes"),
            ("other", "not valid HTTP: BadStatusLine"),
        ):
            with pytest.raises(Unreadable, match=why):
                read_item(f"{web}/{path}")


def test_every_kind_of_source_in_a_list(here: Path) -> None:
    pytest.importorskip("av")
    jpeg = encode(picture(60, 80))
    (here / "a.jpg").write_bytes(jpeg)
    (here / "same.jpg").write_bytes(jpeg)
    (here / "bad.jpg").write_bytes(b"no image")
    os.mkfifo(here / "fifo.jpg")
    with tarfile.open(here / "b.tar", "w") as tar:
        for name, content in {"x/1.jpg": jpeg, "x/1.txt": b"1", "x/2.png": encode(picture(9, 8, 1), ".png")}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    whole = (here / "b.tar").read_bytes()
    (here / "cut.tar").write_bytes(whole[: len(jpeg) // 2])
    write_video(here / "c.mp4", [0, 128, 255])
    (here / "no.mp4").write_bytes(b"no video")

    def respond(handler: Any, _: int) -> None:
        if handler.path == "/a.jpg":
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(jpeg)
        else:
            handler.send_error(404)

    with web_server(respond) as port:
        web = f"http://127.0.0.1:{port}"
        names = ["a.jpg", "none.jpg", "bad.jpg", "same.jpg", "a.jpg", "", "fifo.jpg", "b.tar", "cut.tar", "c.mp4"]
        names += ["no.mp4", f"{web}/a.jpg", f"{web}/b.jpg", "s3://bucket/a.jpg"]
        (here / "list.txt").write_text("".join(f"{name}\n" for name in names))
        ended = run(*program("demo.toml", "list.txt", "--out", "out.ndjson", "--ordered", "--by=content"))
    assert ended.returncode == 1, ended.stderr
    lines = lines_of(here / "out.ndjson")
    paths = [line["path"] for line in lines]
    members, frames = ["b.tar/x/1.jpg", "b.tar/x/2.png"], ["c.mp4"] * 3
    cut = ["cut.tar/x/1.jpg", "cut.tar"]
    expected = ["a.jpg", "none.jpg", "bad.jpg", "same.jpg", "fifo.jpg", *members, *cut, *frames, *names[-4:]]
    assert paths == expected
    by_path = {line["path"]: line for line in lines}
    assert {path: line["code"] for path, line in by_path.items() if "error" in line} == {
        "none.jpg": "unreadable",
        "bad.jpg": "decode_error",
        "fifo.jpg": "unreadable",
        "cut.tar/x/1.jpg": "unreadable",
        "cut.tar": "unreadable",
        "no.mp4": "unreadable",
        f"{web}/b.jpg": "unreadable",
        "s3://bucket/a.jpg": "unreadable",
    }
    assert by_path["none.jpg"]["error"] == "No such file or directory"
    assert by_path[f"{web}/b.jpg"]["error"] == "the server answered 404 Not Found"
    assert by_path["s3://bucket/a.jpg"]["error"] == "s3 URLs are not supported: http and https are"
    assert [line["frame"] for line in lines if line["path"] == "c.mp4"] == [0, 1, 2]
    with pipe(str(here / "demo.toml")) as bare:
        label, score = bare({"data": jpeg})["result"]
    for path in ("a.jpg", "same.jpg", "b.tar/x/1.jpg", f"{web}/a.jpg"):
        assert (by_path[path]["label"], by_path[path]["score"]) == (label, score)
        assert by_path[path]["sha256"] == by_path["a.jpg"]["sha256"]


def test_same_content_is_computed_once(here: Path) -> None:
    write_files(here / "files", a="one", b="two", c="one", d="one", e="bad", f="bad")
    ended = run(*by_text("files", "--out", "out.csv", "--by", "content"))
    assert ended.returncode == 1, ended.stderr
    assert sorted((here / "computed").read_text().split()) == ["bad", "one", "two"]
    with open(here / "out.csv", newline="", encoding="utf-8") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    assert [rows[f"files/{name}.jpg"]["result"] for name in "abcdef"] == ["3", "3", "3", "3", "", ""]
    assert "a bad file" in rows["files/e.jpg"]["error"]
    assert {rows[f"files/{name}.jpg"]["code"] for name in "ef"} == {"backend_error"}


@pytest.mark.parametrize("odd", ["\r", "\n", "\r\n", '"', ","])
def test_csv_has_a_row_for_each_line_whatever_the_texts(odd: str, tmp_path: Path) -> None:
    rows = [{"path": f"{odd}a{odd}b", "result": odd}, {"path": "c", "result": 1}]
    write_table("csv", lambda: (json.dumps(row).encode() for row in rows), tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        read = list(csv.reader(file))
    assert read[0] == ["path", "result", "error", "code"]
    assert read[1:] == [[f"{odd}a{odd}b", odd, "", ""], ["c", "1", "", ""]]


def test_file_that_kills_its_worker_fails_alone(here: Path) -> None:
    texts = {f"f{number:02}": "x" * number for number in range(1, 20)}
    write_files(here / "files", **texts, f10a="poison")
    ended = run(*by_text("files", "--out", "out.ndjson"))
    assert ended.returncode == 1, ended.stderr
    lines = {line["path"]: line for line in lines_of(here / "out.ndjson")}
    assert len(lines) == 20
    assert lines.pop("files/f10a.jpg")["code"] == "worker_died"
    assert {line["result"] for line in lines.values()} == set(range(1, 20))


def test_worker_that_hangs_is_replaced(here: Path) -> None:
    write_files(here / "files", a="x", b="hang", c="xx")
    ended = run(*by_text("files", "--out", "out.ndjson", "--timeout", 1))
    assert ended.returncode == 1, ended.stderr
    lines = {line["path"]: line for line in lines_of(here / "out.ndjson")}
    assert lines["files/b.jpg"]["code"] == "worker_died"
    assert (lines["files/a.jpg"]["result"], lines["files/c.jpg"]["result"]) == (1, 2)


def test_interrupted_run_goes_on(here: Path) -> None:
    write_files(here / "files", a="x", b="xx", c="hang")
    command = by_text("files", "--out", "out.ndjson")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: (here / "hangs").exists() or process.poll() is not None, seconds=PROGRAM_WAIT)
        eventually(lambda: (here / "out.ndjson.partial").read_bytes().count(b"\n") == 2)
        second = run(*command)
        assert (second.returncode, second.stderr) == (
            2,
            "torchpipe: --out out.ndjson: another run is writing it\n",
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PROGRAM_WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted after 2 lines" in errors
    assert not (here / "out.ndjson").exists()
    (here / "files" / "c.jpg").write_text("xxx")
    assert run(*command).returncode == 0
    assert sorted(line["result"] for line in lines_of(here / "out.ndjson")) == [1, 2, 3]
    assert sorted((here / "computed").read_text().split()) == ["hang", "x", "xx", "xxx"]


def test_parameters_and_outputs_reach_the_lines(here: Path) -> None:
    write_files(here / "files", a="x")
    given = ("--param", "threshold=0.5", "--param", "name=cat", "--outputs", "result,color")
    assert run(*by_text("files/*.jpg", "--out", "out.ndjson", *given)).returncode == 1
    (line,) = lines_of(here / "out.ndjson")
    assert line["error"].startswith("the request has no 'color'")
    assert run(*by_text("files", "--out", "b.ndjson", *given[:4])).returncode == 0
    (line,) = lines_of(here / "b.ndjson")
    assert line == {"path": "files/a.jpg", "result": {"threshold": 0.5, "name": "cat"}}


def test_draws_results_on_pictures(here: Path) -> None:
    folder = here / "images"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.png").write_bytes(encode(picture(60, 80), ".png"))
    (folder / "deep" / "b.jpg").write_bytes(encode(picture(60, 80, 1)))
    (folder / "c.jpg").write_bytes(b"no image")
    ended = run(*program("demo.toml", "images", "--out", "images/drawn", "--draw", "--workers", 1))
    assert ended.returncode == 1, ended.stderr
    drawn = folder / "drawn"
    lines = {line["path"]: line for line in lines_of(drawn / "results.ndjson")}
    assert {path: line.get("picture") for path, line in lines.items()} == {
        "images/a.png": "a.png",
        "images/c.jpg": None,
        "images/deep/b.jpg": "deep/b.jpg",
    }
    assert cv2.imread(str(drawn / "a.png")).shape == (60, 80, 3)
    assert (cv2.imread(str(drawn / "a.png")) != cv2.imread(str(folder / "a.png"))).any()


def test_pictures_are_in_color_and_decoded_as_the_configuration_says(tmp_path: Path) -> None:
    decoders = Decoders.of(plan_pipeline({"backend": "DecodeMat", "formats": "tiff", "color": "gray"})).in_color("bgr")
    mat = picture(9, 8)
    draw_picture(str(tmp_path), "a.png", encode(mat, ".tiff"), "", [], decoders)
    assert np.array_equal(cv2.imread(str(tmp_path / "a.png")), mat)
    with pytest.raises(DecodeError, match="not a TIFF image"):
        draw_picture(str(tmp_path), "b.png", encode(mat), "", [], decoders)


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (errno.ENOSPC, ToolError, "drawn: cannot be written: No space left on device; start it again to go on"),
        (errno.EISDIR, NoResult, "its picture cannot be written as a.png: Is a directory"),
    ],
)
def test_picture_that_cannot_be_written(
    number: int, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
    monkeypatch.setattr(pictures, "replace_file", full)
    with pytest.raises(error) as raised:
        draw_picture("drawn", "a.png", picture(9, 8), "bgr", [], Decoders((), "bgr"))
    assert str(raised.value) == said


def test_worker_that_can_write_no_picture_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have no lines, so that they are computed once there is room on the disk."""

    def full(*_: object) -> None:
        raise ToolError("no room")

    sent: list[Any] = []
    at_work: Any = object.__new__(worker._Worker)
    at_work._finished, at_work._send = SimpleQueue(), sent.append
    at_work._maker = maker = object.__new__(LineMaker)
    maker._settings, maker._decoders = Settings(Tables.of({"backend": "Identity"})), Decoders((), "bgr")
    monkeypatch.setattr(lines, "draw_picture", full)
    root: Any = SimpleNamespace(output=lambda data, key: data[key])
    job = Job(0, {"path": '"a"'}, "a", picture="a.png")
    at_work._finished.put(StartedJob(job, job.head, root, b"x", {"result": []}))
    at_work._send_lines()
    assert sent == [[], ("failed", "no room")]


def test_configuration_that_cannot_be_set_up_ends_the_run(here: Path) -> None:
    write_files(here / "files", a="x")
    (here / "bad.onnx").write_bytes(b"\x08\x01")
    (here / "bad.toml").write_text('backend = "S[DecodeMat,Mat2Tensor,OnnxTensor]"\nmodel = "bad.onnx"\n')
    ended = run(*program("bad.toml", "files", "--out", "out.ndjson", "--workers", 1))
    assert ended.returncode == 2
    assert "bad.onnx" in ended.stderr
    assert not list(here.glob("out*"))


def test_refuses_a_usual_parameter_that_no_backend_reads(here: Path) -> None:
    write_files(here / "images", a="x")
    ended = run(*program("demo.toml", "images", "--out", "out.ndjson", "--workers", 1, "--param", "conf=0.6"))
    assert (ended.returncode, list(here.glob("out*"))) == (2, [])
    assert "unknown parameter 'conf'; the model reads none" in ended.stderr


# --- what is refused, before any process is started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("imags --out a.csv", "imags: no such file or folder; did you mean 'images'?"),
        ("none/x --out a.csv", "none/x: no such file or folder (working directory: "),
        ("images --out a.txt", "--out a.txt: expected a name that ends in .ndjson, .csv or .parquet, or a folder"),
        ("images --out none/a.csv", "--out none/a.csv: no such folder: none"),
        ("images --out images --draw", "--out images: there is a folder images; give another name"),
        ("images --out b --draw --restart", "--out b: there is a folder b.partial; give another name"),
        ("images --out a.csv --draw", "--draw: --out is the folder of the pictures then, not a.csv"),
        ("images --out there.csv", "there.csv: there already; --restart begins anew and replaces there.csv"),
        ("images --out a.csv --node_name b", "--node_name b: not a root; valid: node"),
        ("images --out a.csv --outputs path", "--outputs: 'path' is a member of each line already"),
        ("images --out a.csv --param sequence_id=3", "parameter 'sequence_id': a pipe keeps no state"),
        ("binary --out a.csv", "binary: not a list of paths in text"),
        ("long --out a.csv", "long: not a list of paths: line 2 has 65536 bytes or more"),
    ],
)
def test_refuses_mistakes(here: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(here / "images", a="x")
    (here / "there.csv").write_text("x")
    (here / "binary").write_bytes(b"\0\1")
    (here / "long").write_bytes(b"a.jpg\n" + bytes([65]) * 70_000)
    (here / "b.partial").mkdir()
    assert cli.main(["run", "demo.toml", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(here.glob("a.csv*"))
    assert (here / "there.csv").read_text() == "x"


class Interrupted:
    """Workers that are interrupted before anything ends."""

    has_room, is_idle, most = True, False, 9

    def add(self, job: Any) -> None:
        pass

    def take(self) -> Any:
        raise KeyboardInterrupt

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("changed", "flags", "named"),
    [
        ("demo.toml", "", "configuration demo.toml"),
        ("labels.txt", "", "file {here}/labels.txt"),
        ("empty.py", "", "file {here}/empty.py"),
        ("", "--ordered", "argument --ordered"),
        ("", "--param a=1", "argument --param"),
        ("", "--by content", "argument --by"),
    ],
)
def test_refuses_to_resume_another_run(
    here: Path, changed: str, flags: str, named: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "_workers", lambda *_: Interrupted())
    write_files(here / "files", a="x")
    monkeypatch.delitem(sys.modules, "empty", raising=False)
    (here / "empty.py").write_text("")
    (here / "labels.txt").write_text("\n".join("abcdefgh"))
    (here / "demo.toml").write_text(DEMO.replace(f"{ROOT}/configs/demo/labels.txt", "labels.txt"))
    arguments = ["run", "demo.toml", "files", "--out", "a.csv", "--import", str(here / "empty.py")]
    assert cli.main(arguments) == 130
    if changed:
        more = {"demo.toml": "max_pixels = 1000000\n", "labels.txt": "x", "empty.py": "# more\n"}
        with open(here / changed, "a") as file:
            file.write(more[changed])
    arguments += flags.split()
    sys.modules.pop("empty", None)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert f"a run with another {named.format(here=here)} is unfinished" in error
    assert "--restart to begin anew" in error
    sys.modules.pop("empty", None)
    assert cli.main([*arguments, "--restart"]) == 130


def test_run_of_another_process_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(here / "files", a="x")
    with open(here / "a.csv.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cli.main(["run", "demo.toml", "files", "--out", "a.csv"]) == 2
    assert "another run is writing it" in capsys.readouterr().err


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"pip install 'torchpipe_py\[parquet\]'"):
        check_kind(tmp_path / "a.parquet", draws=False)


# --- parts


@pytest.mark.parametrize(
    "result",
    [
        ("cat", 0.1 + 0.2),
        np.float32([[1, 2.5]]),
        [{"box": [1, 2, 3, 4], "label": "ü", "score": 0.5}],
        [np.int64([1]), np.zeros((2, 2), np.uint8)],
        float("nan"),
    ],
)
def test_line_has_the_members_of_an_answer_to_infer(result: Any, register: Register) -> None:
    ended: SimpleQueue[StartedJob] = SimpleQueue()
    maker = LineMaker(Settings(Tables.of({"backend": register(returns(result))})), 1, ended.put)
    try:
        maker.start(Job(0, {"path": '"a"'}, "a"), b"x", "")
        request = ended.get(timeout=WAIT)
        line = json.loads(maker.line(request))
    finally:
        maker.close()
    try:
        answer = answer_of({"result": result}, Asked([], ["result"], None), Bound(2**20, "limit"))
    except NoResult as error:
        answer = json.dumps(failure(error).body).encode()
    assert line == {"path": "a", **json.loads(answer)}


@pytest.mark.parametrize(
    "pattern", ["*.jpg", "a/*.jpg", "**/*.jpg", "a/**/*.jpg", "*/b?.jpg", "**/[bc]*", "a/**", "**/b/**/*.jpg", ".h/*"]
)
def test_pattern_matches_as_glob_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    for name in ("x.jpg", "a/b1.jpg", "a/c.png", "a/b/b2.jpg", "a/b/c/b3.jpg", ".h/x.jpg", "a/.x.jpg", "b/b.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    found = list(dict.fromkeys(iter_matches(pattern)))
    assert sorted(found) == sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    absolute = list(dict.fromkeys(iter_matches(f"{tmp_path}/{pattern}")))
    assert absolute == [f"{tmp_path}/{name}" for name in found]


def test_standard_input_lists_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    given = b"a.jpg\r\n\nb \xff.jpg\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    source = open_source("-")
    assert source.count() is None
    assert [item.path for item in source.items() if item is not None] == ["a.jpg", "b \udcff.jpg"]


def test_items_have_an_order_and_a_count(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/z.jpg", "a/b/y.png", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    source = open_source(str(tmp_path))
    assert [item.path for item in source.items()] == [
        f"{tmp_path}/{name}" for name in ("a/b/y.png", "a/z.jpg", "b.jpg")
    ]
    assert source.count() == 3


@pytest.mark.parametrize(
    "tail", [b'{"path": "c", "resu', b'{"path": "c"}', b"\0\0\0\0\n", b'{"x": 1}\n{"path": "c"}\n']
)
def test_torn_end_of_the_lines_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.partial"
    whole = b'{"path": "a", "result": 1}\n{"path": "b", "error": "x", "code": "y"}\n'
    path.write_bytes(whole + tail)
    line_file = LineFile(path)
    assert (line_file.files, line_file.errors, len(line_file.done)) == (2, 1, 2)
    line_file.add(b"k", b'{"path": "d"}\n', False)
    line_file.close()
    assert path.read_bytes() == whole + b'{"path": "d"}\n'


def test_pictures_of_different_items_have_different_names() -> None:
    items = [("d/a.jpg", None), ("d/a.png", None), ("d/a.tif", None), ("d/v.mp4", 3), ("/d/a.jpg", None)]
    items += [("../a.jpg", None), ("_/a.jpg", None), ("http://h/a.jpg?b", None), ("http://h/a.jpg?c", None)]
    names = [picture_name(path, "d", frame) for path, frame in items]
    assert [names[0], names[1], names[3]] == ["a.jpg", "a.png", "v.mp4/000003.jpg"]
    assert picture_name("d/a.tif", "d", None) != picture_name("d/a.tif.jpg", "d", None) == "a.tif.jpg"
    assert len(set(names)) == len(names)
    assert not any(name.startswith(("/", "../")) or "/../" in name for name in names)


def test_picture_of_a_long_name_can_be_written(tmp_path: Path) -> None:
    name = picture_name(f"d/{'é' * 120}.jpg", "d", None)
    draw_picture(str(tmp_path), name, np.zeros((4, 4, 3), np.uint8), "bgr", [], Decoders((), "bgr"))
    assert os.listdir(tmp_path) == [name]


def test_list_in_a_pipe_is_read_once(tmp_path: Path) -> None:
    """Counting its items would take them away."""
    os.mkfifo(fifo := tmp_path / "list")
    source = open_source(str(fifo))
    paths = [f"{number}.jpg" for number in range(5000)]
    writer = threading.Thread(target=lambda: fifo.write_text("".join(f"{path}\n" for path in paths)))
    writer.start()
    assert source.count() is None
    assert [os.path.basename(item.path) for item in source.items() if item is not None] == paths
    writer.join(WAIT)


class Echo:
    """Workers that have each job's line at once."""

    has_room, most = True, 4

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    def add(self, job: Job) -> None:
        self.jobs.append(job)

    def take(self) -> list[Any]:
        jobs, self.jobs = self.jobs, []
        return [(job.number, json_line(job.head)) for job in jobs]

    def finish(self) -> None: ...

    def close(self) -> None: ...


def test_outcomes_are_taken_while_a_list_in_a_pipe_stays_open(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_workers", lambda *_: Echo())
    os.mkfifo("list")
    status: list[int] = []
    running = threading.Thread(
        target=lambda: status.append(cli.main(["run", "demo.toml", "list", "--out", "a.ndjson"]))
    )
    running.start()
    with open("list", "wb", buffering=0) as pipe_of_paths:
        for count in (1, 2):
            pipe_of_paths.write(b"%d.jpg\n" % count)
            eventually(lambda count=count: Path("a.ndjson.partial").read_bytes().count(b"\n") == count)
    running.join(WAIT)
    assert status == [0]


def test_errors_of_files_name_the_file_and_the_operation(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(here / "files", a="x")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any) -> Any:
        raise full

    def broken(self: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    monkeypatch.setattr(command, "_workers", lambda *_: Echo())
    places = {
        "files: cannot be read: Input/output error": (Source, "items", broken),
        "a.csv.partial: cannot be written: No space left on device": (os, "fsync", fail),
        "a.csv.tmp: cannot be written: No space left on device": (command, "write_table", fail),
        "a.csv: cannot be written: No space left on device": (command.os, "replace", fail),
    }
    for message, (place, name, function) in places.items():
        with monkeypatch.context() as patch:
            if name == "fsync":
                patch.setattr(Lock, "begin", lambda self: None)
            patch.setattr(place, name, function)
            assert cli.main(["run", "demo.toml", "files", "--out", "a.csv", "--restart"]) == 2
        assert message in capsys.readouterr().err


def test_warning_of_the_configuration_is_given_once(here: Path) -> None:
    (here / "std.toml").write_text('backend = "S[DecodeMat,NormalizeMat]"\nmean = 0.5\nstd = 0.2\n')
    write_files(here / "files", a="a")
    ended = run(*program("std.toml", "files", "--out", "a.ndjson", "--workers", 2, path=LIGHT))
    assert ended.stderr.count("key 'std'") == 1, ended.stderr


def test_run_that_cannot_begin_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(os.listdir())
    monkeypatch.setattr(os, "ftruncate", full)
    assert cli.main(["run", "demo.toml", "images", "--out", "a.csv"]) == 2
    assert set(os.listdir()) == before


def test_refused_restart_leaves_the_unfinished_run(here: Path) -> None:
    """A folder stands where the output is to be written."""
    out = here / "out.ndjson"
    begun = Lock(out, {"run": {"a": 1}}, restart=False)
    begun.begin()
    begun.close()
    out.mkdir()
    refused = run(*program("demo.toml", ".", "--out", out, "--restart"))
    assert refused.returncode == 2
    again = Lock(out, {"run": {"a": 1}}, restart=False)
    assert not again.is_new
    again.close()


def test_failed_line_serves_other_items_with_the_same_content() -> None:
    failed = failed_line(Job(0, {"path": '"a.jpg"'}, "a.jpg").hashed("00").head, InvalidRequest("gone"))
    same = json.loads(line_of_same_content(failed, {"path": '"b.jpg"'}))
    assert same == {"path": "b.jpg", "sha256": "00", "error": "gone", "code": "invalid_request"}


def test_progress_shows_rate_and_time_left() -> None:
    assert progress_line(1200, 1, 50.0, 10_000) == "1,200 of 10,000 files, 1 error, 50.0/s, 2 min 56 s left"
    assert progress_line(1200, 0, 50.0, None) == "1,200 files, 50.0/s"


def test_progress_without_a_terminal_is_silent_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(True, lambda: 3, 0)
    progress.show(1, 0)
    progress.close()
    assert capsys.readouterr().err == ""


ROWS = [
    {"path": "a\ud800", "result": {"dtype": "float32", "shape": [3], "data": [1, 2.5, 3]}, "score": 0.5, "n": 1},
    {"path": "b", "error": "x", "code": "y"},
    {"path": "c", "result": {"dtype": "float32", "shape": [3], "data": [4, 5, 6]}, "score": 1, "boxes": [{"box": [1]}]},
]


def rows() -> Any:
    return iter([json.dumps(row).encode() + b"\n" for row in ROWS])


def test_csv_has_a_column_for_each_member(tmp_path: Path) -> None:
    write_table("csv", rows, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "path,result,score,n,boxes,error,code",
        r'a\ud800,"{""dtype"": ""float32"", ""shape"": [3], ""data"": [1, 2.5, 3]}",0.5,1,,,',
        "b,,,,,x,y",
        r'c,"{""dtype"": ""float32"", ""shape"": [3], ""data"": [4, 5, 6]}",1,,"[{""box"": [1]}]",,',
    ]


@pytest.mark.parametrize(
    ("values", "kept"), [([2**60 + 1, 1.5], False), ([2**53, 1.5], True), ([2**60 + 1, 3], True), ([2**63, 1], False)]
)
def test_numbers_of_a_column_stay_exact(values: list[Any], kept: bool) -> None:
    column = columns_of(iter([json.dumps({"path": "a", "n": value}).encode() for value in values]))["n"]
    assert column.is_number == kept


def test_parquet_has_lists_for_arrays_of_one_shape(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table("parquet", rows, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column("result").to_pylist() == [[1.0, 2.5, 3.0], None, [4.0, 5.0, 6.0]]
    assert table.schema.field("result").metadata == {b"shape": b"[3]"}
    assert table.column("score").to_pylist() == [0.5, None, 1.0]
    assert table.column("boxes").to_pylist() == [None, None, '[{"box": [1]}]']
    assert table.column("error").to_pylist() == [None, "x", None]

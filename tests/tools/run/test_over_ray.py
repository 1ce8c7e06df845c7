"""``torchpipe run --ray``: what actors do, called without Ray, and the whole where Ray is installed."""

from __future__ import annotations

import json
import pickle
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from conftest import encode, picture

from torchpipe_py import cli, pipe
from torchpipe_py.plan.config import parse_toml
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.lines import Job, Settings
from torchpipe_py.tools.run.over_ray import RayWorkers, _hashes, _Lines

CONFIG = 'backend = "S[DecodeMat,ResizeMat]"\nresize_h = 1\nresize_w = 1\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.toml").write_text(CONFIG)
    (tmp_path / "files").mkdir()
    for number in range(9):
        (tmp_path / "files" / f"{number}.jpg").write_bytes(encode(picture(20, 30, number)))
    (tmp_path / "files" / "9.jpg").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block_of(paths: list[str]) -> dict[str, np.ndarray]:
    jobs = [pickle.dumps(Job(number, {"path": json.dumps(path)}, path)) for number, path in enumerate(paths)]
    column = np.empty(len(jobs), object)
    column[:] = jobs
    return {"job": column}


def test_actor_makes_the_line_of_each_job(here: Path) -> None:
    paths = [f"files/{number}.jpg" for number in range(10)] + ["files/none.jpg"]
    actor = _Lines(Settings(parse_toml("a.toml")), str(here))
    try:
        made = actor(block_of(paths))
    finally:
        actor.close()
    lines = {int(number): json.loads(line) for number, line in zip(made["number"], made["outcome"], strict=True)}
    assert [lines[number]["path"] for number in range(11)] == paths
    with pipe("a.toml") as run:
        expected = [run({"data": Path(path).read_bytes()})["result"].ravel().tolist() for path in paths[:9]]
    assert [lines[number]["result"]["data"] for number in range(9)] == expected
    assert [lines[number]["code"] for number in (9, 10)] == ["decode_error", "unreadable"]


def test_hashes_of_files(here: Path) -> None:
    made = _hashes(block_of(["files/0.jpg", "files/none.jpg"]))
    assert made["outcome"][0].decode() == sha256((here / "files" / "0.jpg").read_bytes()).hexdigest()
    assert json.loads(made["outcome"][1])["code"] == "unreadable"


def test_missing_ray_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ToolError, match=r"pip install 'torchpipe_py\[ray\]'"):
        RayWorkers("local", Settings(parse_toml("a.toml")), 1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--by content --ordered"])
def test_lines_are_those_of_a_run_without_ray(here: Path, flags: str) -> None:
    pytest.importorskip("ray.data")  # not "ray", which might be a folder of tests
    (here / "files" / "same.jpg").write_bytes((here / "files" / "0.jpg").read_bytes())
    arguments = ["run", "a.toml", "files", "--workers", "1", *flags.split()]
    assert cli.main([*arguments, "--out", "a.ndjson"]) == 1
    assert cli.main([*arguments, "--out", "b.ndjson", "--ray", "local"]) == 1
    first, second = ((here / name).read_bytes().splitlines() for name in ("a.ndjson", "b.ndjson"))
    assert sorted(first) == sorted(second)
    assert len(first) == 11

"""``torchpipe run`` is killed, and started again with the same arguments: no file is lost, and none is there twice."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import encode, picture
from kit.waits import PROGRAM_WAIT, eventually, run

ROOT = Path(__file__).resolve().parents[3]
DRIVER = Path(__file__).with_name("killed_run.py")
MOST_STEPS = 100


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text('backend = "Identity"\n')
    return path


def rows_of(out: Path) -> list[dict[str, str]]:
    if out.suffix == ".csv":
        with open(out, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    lines = (out / "results.ndjson" if out.is_dir() else out).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "flags"), [("out.ndjson", ""), ("out.ndjson", "--ordered"), ("out.csv", ""), ("out", "--draw")]
)
def test_killed_at_each_step_gives_each_file_once(config: Path, tmp_path: Path, name: str, flags: str) -> None:
    folder, out = tmp_path / "images", tmp_path / name
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes(b"%d" % number)
    kills = 0
    command = [sys.executable, DRIVER, "run", config, folder, "--out", out, *flags.split()]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        for _ in range(MOST_STEPS):
            print(file=driver.stdin, flush=True)
            status = driver.stdout.readline()
            if status != f"{-signal.SIGKILL}\n":
                break
            kills += 1
            assert not out.exists() or len(rows_of(out)) == 5
        driver.stdin.close()
    assert status == "0\n"
    assert kills > 4
    rows = rows_of(out)
    assert sorted(row["path"] for row in rows) == [f"{folder}/{number}.jpg" for number in range(5)]
    assert all(row["path"].endswith(f"/{row['result']}") for row in rows)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {config.name}
    pictures = {f"{number}.jpg" for number in range(5)}
    assert left == {*pictures, "results.ndjson" if name == "out" else name}


@pytest.mark.slow
def test_killed_at_random_moments_gives_each_file_once(tmp_path: Path) -> None:
    folder, out, most = tmp_path / "images", tmp_path / "out.ndjson", 4000
    folder.mkdir()
    for number in range(most):  # so many that most runs are killed long before their end
        path = folder / f"{number:04}.jpg"
        if number < 50:
            path.write_bytes(encode(picture(32 + number % 7, 40, number)))
        else:
            path.hardlink_to(folder / f"{number % 50:04}.jpg")
    partial = tmp_path / "out.ndjson.partial"
    chance = random.Random(0)

    def lines() -> int:
        return partial.read_bytes().count(b"\n") if partial.exists() else 0

    demo = ROOT / "configs" / "demo.toml"
    command = [sys.executable, "-c", "import sys; from torchpipe_py.cli import main; sys.exit(main())"]
    command += ["run", str(demo), str(folder), "--out", str(out), "--workers", "1"]
    for _ in range(10):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            goal = lines() + chance.randint(1, 30)
            eventually(lambda: lines() >= goal or process.poll() is not None, seconds=PROGRAM_WAIT)  # noqa: B023
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:  # it was faster than this test
            assert process.returncode == 0
            break
    assert out.exists() or run(*command, cwd=ROOT).returncode == 0
    paths = Counter(json.loads(line)["path"] for line in out.read_bytes().splitlines())
    assert paths == {f"{folder}/{number:04}.jpg": 1 for number in range(most)}

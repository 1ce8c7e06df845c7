"""A short run of the fuzzer for images, what longer ones have found, and that it finds what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kit.waits import PROGRAM_WAIT

FUZZER = Path(__file__).parent / "images.py"
SEEDS = sorted((FUZZER.parent / "seeds" / "images").iterdir())


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_WAIT, check=False)


def test_mutants(tmp_path: Path) -> None:
    done = fuzz("--mutants", "1500", "--jobs", "1", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1500 mutants in ")
    assert list(tmp_path.iterdir()) == []


def test_what_was_found_is_refused_or_decoded() -> None:
    done = fuzz("--decoder", "every-format", "--replay", *map(str, SEEDS))
    assert (done.returncode, done.stdout) == (0, "".join(f"{path}: ok\n" for path in SEEDS)), done.stderr


HARMFUL = """
import os, sys, runpy
sys.argv[0] = {path!r}
fuzzer = runpy.run_path({path!r}, run_name="fuzzer")
from torchpipe_py.backends.image.decode import MatDecoder
decode = MatDecoder.__call__

def harmful(self, data, *start):
    if {when}:
        os.kill(os.getpid(), 11)
    return decode(self, data, *start)

MatDecoder.__call__ = harmful
sys.exit(fuzzer["main"]())
"""


def test_it_finds_what_there_is(tmp_path: Path) -> None:
    """A decoder that ends its process at one of the mutants."""
    me, found = tmp_path / "harmful.py", tmp_path / "found"
    found.mkdir()
    when = "bytes(data[:2]) == b'BM' and len(data) < 60"
    me.write_text(HARMFUL.format(path=str(FUZZER), when=when))
    command = [sys.executable, str(me), "--mutants", "400", "--jobs", "1", "--save", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_WAIT, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ends the process with status -11" in done.stdout
    assert {path.stat().st_size < 60 for path in found.iterdir()} == {True}

"""The counting script, on a checkout of four modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import structure

FILES = {
    "README.md": "12345",
    "torchpipe_py/__init__.py": "from torchpipe_py.pipe import pipe\n",
    "torchpipe_py/pipe.py": "from torchpipe_py.plan import graph\n\n\ndef pipe(one):\n    return graph.Graph(one)\n",
    "torchpipe_py/plan/graph.py": "class Base: ...\nclass Graph(Base): ...\n",
    "torchpipe_py/plan/other.py": "import torchpipe_py.plan.graph as g\n\nclass Other(g.Graph):\n    found = 1\n",
    "scripts/chaos/faults.py": "from torchpipe_py import pipe\n",
    "tests/test_pipe.py": "def test() -> None: ...\n",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_what_it_counts(tmp_path: Path) -> None:
    table = structure.measure(written(tmp_path, FILES))
    expected = {
        "lines: package": 12,
        "lines: chaos": 1,
        "lines: all but tests": 13,
        "lines: tests": 1,
        "files in a folder: largest 1": "2 torchpipe_py",
        "modules": 5,
        "modules, arrows": 4,
        "package: modules": 4,
        "package: modules, arrows": 3,
        "package: modules, floors": 3,
        "package: units": 3,
        "package: units, arrows": 2,
        "package: units, cycles": 0,
        "function: largest 1": "2 torchpipe_py/pipe.py:4 pipe",
        "inheritance: largest 1": "3 torchpipe_py.plan.other.Other",
        "bytes: README.md": 5,
    }
    assert {name: table[name] for name in expected} == expected


def test_modules_that_import_each_other_are_named(tmp_path: Path) -> None:
    ring = {"torchpipe_py/plan/graph.py": "from torchpipe_py.plan import other\n\n\ndef f() -> None: ...\n"}
    table = structure.measure(written(tmp_path, FILES | ring))
    assert table["package: modules, cycles"] == "torchpipe_py.plan.graph torchpipe_py.plan.other"
    assert table["package: modules, floors"] == 3
    assert table["package: units, cycles"] == 0


def test_checkouts_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path / "first", FILES)
    second = written(tmp_path / "second", FILES | {"docs/gpu.md": "words"})
    structure.main([str(first), str(second)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lines:", "package", "12", "12"] in lines
    assert ["bytes:", "docs/gpu.md", "-", "5"] in lines

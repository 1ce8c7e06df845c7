"""``torchpipe doctor`` names what is installed, what is missing, and what is broken."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from torchpipe_py.cli import main
from torchpipe_py.tools import doctor


def test_reports_versions_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^numpy +{re.escape(metadata.version('numpy'))} ", printed, re.MULTILINE)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cores"] >= 1
    assert "CPU" in report["providers"]
    assert {entry["name"] for entry in report["libraries"]} == {entry[1] for entry in doctor.LIBRARIES}


def test_a_missing_required_library_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", (("no_such_module", "no-such-distribution", doctor.REQUIRED, "all"),))
    assert main(["doctor"]) == 1
    assert "pip install no-such-distribution" in capsys.readouterr().out


def test_a_library_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_library.py").write_text('raise RuntimeError("operator nms does not exist\\nmore")')
    monkeypatch.syspath_prepend(str(tmp_path))
    found = doctor._library("broken_library", "broken-library", "train", "nothing")
    assert found.remedy == "cannot be imported: RuntimeError: operator nms does not exist"
    assert "broken_library" not in sys.modules

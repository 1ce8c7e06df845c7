"""torchpipe_py.files: where a file can be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchpipe_py.files import output_problem


def test_where_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert output_problem("folder") == "is a directory"
    for folder in ("none", "file", "loop", "folder/none"):
        assert output_problem(f"{folder}/new") == f"no such folder: {folder}"
    for path in ("new", "file", "folder/new", tmp_path / "new", "n" * 300):
        assert output_problem(path) == ""


def test_what_is_written_to_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the user were not root, who may write everywhere."""
    writable: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK and Path(path) in writable)
    there, new = tmp_path / "there", tmp_path / "new"
    there.touch()
    for path in (there, new):
        assert output_problem(path) == output_problem(path, replaces=True) == "Permission denied"
    writable = [there]
    assert (output_problem(there), output_problem(there, replaces=True)) == ("", "Permission denied")
    writable = [tmp_path]
    assert (output_problem(there), output_problem(there, replaces=True)) == ("Permission denied", "")
    assert output_problem(new) == output_problem(new, replaces=True) == ""

"""The benchmarks of Ray where it is not installed."""

from __future__ import annotations

import sys

import pytest
from benchmarks.command import main


def test_each_says_that_it_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray_serve", "ray_faults", "ray_data"):
        assert main([name]) == 0
        assert "Ray is not installed" in capsys.readouterr().out

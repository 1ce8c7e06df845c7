"""A short run of the fuzzer for the wire, what was found before, and mutants through a real service."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from service import Client, connect, eventually, serving

FUZZER = Path(__file__).parent / "wire.py"
SEEDS = sorted((FUZZER.parent / "seeds" / "wire").iterdir())


def load_fuzzer() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_wire", FUZZER)
    module = sys.modules["fuzz_wire"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzzer = load_fuzzer()


def test_two_thousand_mutants() -> None:
    tally = fuzzer.fuzz(seed=7, mutants=2000, seconds=60)
    assert tally.findings == []
    assert tally.mutants == 2000
    assert tally.calls > 400


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.stem)
def test_what_was_found_before(seed: Path) -> None:
    judge, data = fuzzer.Judge(), seed.read_bytes()
    rng = random.Random(1)
    assert judge.wrong(data, rng) == ""
    times = []
    for _ in range(5):
        judge.wrong(data, rng)
        times.append(judge.seconds)
    assert min(times) < fuzzer.MOST_SECONDS


def test_a_defect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatch(self: Any, data: dict[str, object], on_done: object, timeout: float | None = None) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(fuzzer.EchoPipe, "dispatch", dispatch)
    assert any("a defect" in problem for problem, _ in fuzzer.fuzz(seed=7, mutants=200, seconds=60).findings)


def test_mutants_to_a_real_service_harm_nobody() -> None:
    rng = random.Random(5)
    maker = fuzzer.Maker(rng)
    with serving("Identity") as server, Client(server.port) as other:
        for index in range(120):
            with connect(server.port) as sock:
                sock.sendall(fuzzer.mutate(rng, maker.message(), maker.message()))
            if index % 20 == 0:
                other.ping()
        other.ping()
        eventually(lambda: len(server.server._connections) == 1)
    assert server.error is None

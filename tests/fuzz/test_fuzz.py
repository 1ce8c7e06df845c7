"""A short run of each fuzzer, what longer ones have found, and mutants through a real service."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fuzz import wire as fuzzer
from kit.clients import Client, connect
from kit.services import serving
from kit.waits import PROGRAM_WAIT, WAIT, eventually, run

SEEDS = sorted((Path(fuzzer.__file__).parent / "seeds" / "wire").iterdir())


@pytest.mark.parametrize("protocol", fuzzer.MAKERS)
def test_mutants(protocol: str) -> None:
    mutants = 1000
    tally = fuzzer.fuzz(7, mutants, PROGRAM_WAIT, protocol)
    assert tally.findings == []
    assert tally.mutants == mutants
    assert tally.calls > mutants / 5


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.stem)
def test_handles_saved_findings(seed: Path) -> None:
    judge, data = fuzzer.Judge(), seed.read_bytes()
    rng = random.Random(1)
    assert judge.wrong(data, rng) == ""
    times = []
    for _ in range(5):
        judge.wrong(data, rng)
        times.append(judge.seconds)
    assert min(times) < fuzzer.MOST_SECONDS


@pytest.mark.parametrize("protocol", fuzzer.MAKERS)
def test_a_defect_is_found(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    def dispatch(self: Any, data: dict[str, object], on_done: object, timeout: float | None = None) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(fuzzer.EchoPipe, "dispatch", dispatch)
    assert any("a defect" in problem for problem, _ in fuzzer.fuzz(7, 200, PROGRAM_WAIT, protocol).findings)


@pytest.mark.parametrize("protocol", sorted(fuzzer.MAKERS.keys() - {"grpc"}))
def test_mutants_to_a_real_service_harm_nobody(protocol: str) -> None:
    maker = fuzzer.MAKERS[protocol](random.Random(5))
    with serving("Identity") as server, Client(server.port) as other:
        for index in range(120):
            with connect(server.port) as sock:
                sock.sendall(maker.mutant(maker.message(), maker.message()))
            if index % 20 == 0:
                other.ping()
        other.ping()
        eventually(lambda: server.server.connections == 1)
    assert server.error is None


@pytest.mark.skipif("grpc" not in fuzzer.MAKERS, reason="grpcio is not installed")
def test_mutants_to_a_real_grpc_port_harm_nobody() -> None:
    import grpc

    maker = fuzzer.MAKERS["grpc"](random.Random(5))
    with serving("Identity", grpc_port=0) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for path in ("ModelInfer", "ModelStreamInfer"):
            ask = channel.stream_stream(f"/inference.GRPCInferenceService/{path}")
            for _ in range(100):
                with suppress(grpc.RpcError):
                    list(ask(iter([maker.mutant(maker.message(), maker.message())]), timeout=WAIT))
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=WAIT) == b"\x08\x01"
        eventually(lambda: server.rpc.limits.held_bytes == 0)
    assert server.error is None


# -- images -----------------------------------------------------------------------------------------------------------


FUZZER = Path(__file__).parent / "images.py"
IMAGE_SEEDS = sorted((FUZZER.parent / "seeds" / "images").iterdir())


def test_mutants_of_images(tmp_path: Path) -> None:
    done = run(sys.executable, FUZZER, "--mutants", "1500", "--jobs", "1", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1500 mutants in ")
    assert list(tmp_path.iterdir()) == []


def test_saved_images_are_refused_or_decoded() -> None:
    done = run(sys.executable, FUZZER, "--decoder", "every-format", "--replay", *map(str, IMAGE_SEEDS))
    assert (done.returncode, done.stdout) == (0, "".join(f"{path}: ok\n" for path in IMAGE_SEEDS)), done.stderr

"""The limits of ``Process``: seconds for a batch, memory for its process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import process_backends
import pytest
import torch
from conftest import Register
from kit.waits import WAIT, eventually, outcome

from torchpipe_py import BackendError, WorkerDied, pipe
from torchpipe_py.proc import backends

Data = dict[str, Any]


@pytest.mark.parametrize("cls", [process_backends.Obedient, process_backends.Single])
def test_a_batch_that_takes_too_long_is_ended(register: Register, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, the process would never answer; what is to be answered has a minute, on a busy machine too."""
    monkeypatch.setattr(backends, "loaded_torch", lambda: None)  # importing it takes each process two seconds
    with pipe({"backend": f"Process[{register(cls)}]", "max_seconds": WAIT}) as p:
        backend = p._runtime.nodes["node"].instances[0].backend
        assert backend._keeper.max_seconds == WAIT
        p(item := {"data": "pid"})
        os.kill(item["result"][0], signal.SIGSTOP)
        backend._keeper.max_seconds = 0.2
        with pytest.raises(WorkerDied, match=r"took longer than 0\.2 s and was ended"):
            p({"data": "pid"})
        backend._keeper.max_seconds = WAIT
        p(other := {"data": "pid"})
        assert other["result"][0] != item["result"][0]


def test_memory_beyond_the_limit_is_refused(register: Register) -> None:
    """PyTorch is imported before the limit holds: it maps more than any limit that suits a backend."""
    with pipe({"backend": f"Process[{register(process_backends.Obedient)}]", "max_memory": 64}) as p:
        p(item := {"data": "plain", "tensor": torch.ones(2)})
        assert item["tensor"].tolist() == [1, 1]
        p({"data": "allocate", "mebibytes": 16})
        with pytest.raises(BackendError, match="MemoryError"):
            p({"data": "allocate", "mebibytes": 128})
        p(item := {"data": "plain"})
        assert item["result"][2] == "plain"


def test_the_start_of_another_process_is_no_batch_that_hangs(register: Register, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with pipe({"backend": f"Process[{register(process_backends.StartsSlowly)}]", "hold": str(hold)}) as p:
        p(item := {"data": 0})
        hold.touch()
        os.kill(item["result"], signal.SIGKILL)
        future = p.submit(other := {"data": 0})
        eventually(hold.read_text)
        node = p.stats()["nodes"]["node"]
        assert (node["busy"], node["oldest_batch_s"]) == (1, 0.0)
        hold.unlink()
        outcome(future)
    assert other["result"] != item["result"]


def test_a_start_that_takes_too_long(register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = tmp_path / "hold"
    monkeypatch.setattr(backends, "START_SECONDS", 0.05)
    with pipe({"backend": f"Process[{register(process_backends.StartsSlowly)}]", "hold": str(hold)}) as p:
        p(item := {"data": 0})
        hold.touch()
        os.kill(item["result"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"cannot be started again: .* took longer than 0\.05 s and was ended"):
            p({"data": 0})

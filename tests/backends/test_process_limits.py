"""The limits of ``Process``: seconds for a batch, memory for its process."""

from __future__ import annotations

import os
import signal
from typing import Any

import process_backends
import pytest
from conftest import Register

from torchpipe_py import BackendError, WorkerDied, pipe

Data = dict[str, Any]


def test_a_batch_that_takes_too_long_is_ended(register: Register) -> None:
    """Stopped, the process would never answer."""
    with pipe({"backend": f"Process[{register(process_backends.Obedient)}]", "max_seconds": 1}) as p:
        p(item := {"data": "pid"})
        os.kill(item["result"][0], signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="took longer than 1 s and was ended"):
            p({"data": "pid"})
        p(other := {"data": "pid"})
        assert other["result"][0] != item["result"][0]


def test_memory_beyond_the_limit_is_refused(register: Register) -> None:
    with pipe({"backend": f"Process[{register(process_backends.Obedient)}]", "max_memory": 64}) as p:
        p({"data": "allocate", "mebibytes": 16})
        with pytest.raises(BackendError, match="MemoryError"):
            p({"data": "allocate", "mebibytes": 128})
        p(item := {"data": "plain"})
        assert item["result"][2] == "plain"

"""What the supervisor does about its workers, where it once did something else: one test for each defect."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from service import IDL, Client, Process, eventually

BACKENDS = '''
import os, pathlib, subprocess, time
from torchpipe_py import Backend, register_backend

HERE = pathlib.Path(__file__).parent

@register_backend
class Steered(Backend):
    """The data comes back as label; `block` waits for ever, `keep` leaves a process that holds all descriptors."""

    def forward(self, items):
        for item in items:
            data = item["data"]
            if data == b"keep":
                child = subprocess.Popen(["sleep", "60"], close_fds=False)
                (HERE / "kept").write_text(str(child.pid))
            if data == b"block":
                (HERE / f"blocked-{os.getpid()}").touch()
                time.sleep(60)
            item["result"] = (data.decode(), 1.0)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steered.py").write_text(BACKENDS)
    (tmp_path / "steered.toml").write_text('[node]\nbackend = "Steered"\ninstance_num = 4\n')
    return tmp_path


def serve(folder: Path, *args: str) -> Process:
    return Process("--import-code", str(folder / "steered.py"), *args, config=str(folder / "steered.toml"))


def test_a_lost_request_is_answered_once_though_the_next_worker_dies_as_well(folder):
    """The second worker is stopped, so that it never sees the connection it is given; what the first one had noted of
    it must not be taken for the second one's."""
    with serve(folder, "--workers", "2") as process, Client(process.wait_started().port) as client:
        seqid = client.send_batch(b"block")
        eventually(lambda: list(folder.glob("blocked-*")))
        first = int(next(folder.glob("blocked-*")).name.partition("-")[2])
        (second,) = {*process.workers} - {first}
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert caught.value.code == "worker_died"
        os.kill(second, signal.SIGKILL)
        client.ping()
        client.ping()

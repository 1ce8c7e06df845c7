"""A service with ``--require-certificate``: it starts, reloads, and replaces workers by, only what is certified."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.certified import certify
from kit.clients import Client
from kit.services import LIGHT, Process
from kit.waits import eventually
from torchpipe_server import cli

from torchpipe_py import Registry, import_code

OWN = """
import os

from torchpipe_py import BackendUnavailable, ItemBackend, Param, register_backend
from torchpipe_py.values import to_str


@register_backend
class Reads(ItemBackend):
    words = Param(to_str, file=True, doc="a text file")

    def setup(self):
        with open(self.words) as file:
            file.read()

    def forward_item(self, item):
        item["result"] = item["data"]


@register_backend
class Rare(Reads):
    def setup(self):
        if "HAS_RARE" not in os.environ:
            raise BackendUnavailable("it is rare")
"""
RARE = "FirstAvailable[Rare,Reads]"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: Registry) -> Iterator[Path]:
    """Custom code, which is imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "own_certified.py"
    path.write_text(OWN, encoding="utf-8")
    (tmp_path / "words.txt").write_text("certified", encoding="utf-8")
    import_code(str(path))
    yield path
    del sys.modules[path.stem]


def started(config: Path, certificate: Path, own: Path, *flags: str, **env: str) -> Process:
    given = ["--require-certificate", str(certificate), "--import", str(own), *flags]
    return Process(*given, config=str(config), env={"PYTHONPATH": LIGHT, **env})


def test_reloads_what_is_certified_alone(tmp_path: Path, own: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[n]\nbackend = "Reads"\nwords = "words.txt"\n', encoding="utf-8")
    path = certify(config, [str(own)])
    kept = "not reloaded, keeping the old configuration: certificate "
    with started(config, path, own) as process:
        with Client(process.wait_started().port) as client:
            client.ping()
            (tmp_path / "words.txt").write_text("other", encoding="utf-8")
            process.signal(signal.SIGHUP)
            eventually(lambda: "node 'n': key 'words': words.txt is not the certified file" in process.stderr)
            eventually(lambda: process.stderr.count(kept) == 1)
            client.ping()
            (tmp_path / "words.txt").write_text("certified", encoding="utf-8")
            process.signal(signal.SIGHUP)
            eventually(lambda: f"reloaded {config}" in process.stderr)
            with open(config, "a", encoding="utf-8") as file:
                file.write("max_inflight = 5\n")
            process.signal(signal.SIGHUP)
            eventually(lambda: "c.toml is not the certified file" in process.stderr)
            client.ping()
        process.signal()
        assert process.wait() == 0
    assert process.stderr.count(kept) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_process_that_is_replaced_loads_what_is_certified_alone(tmp_path: Path, own: Path, shared: bool) -> None:
    """An engine process, if it has the file: then workers need not."""
    config, words = tmp_path / "c.toml", tmp_path / "words.txt"
    text = f'[n]\nbackend = "Reads"\nwords = "words.txt"\nshared = {str(shared).lower()}\n'
    config.write_text(text, encoding="utf-8")
    path = certify(config, [str(own)])
    role = "engine process" if shared else "worker"
    with started(config, path, own, "--workers=2") as process:
        process.wait_started()
        pids = {psutil.Process(pid).pid for pid in process.workers}
        words.write_text("other", encoding="utf-8")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        refused = (
            f"{role} 0 ended while it started: certificate {path}: node 'n': key 'words': words.txt is not the cert"
        )
        eventually(lambda: refused in process.stderr)
        assert "; renew it: torchpipe compile own.toml" in process.stderr
        words.write_text("certified", encoding="utf-8")
        eventually(lambda: all(f"{name} is back" in process.stderr for name in ("worker 0", "worker 1", f"{role} 0")))
        process.signal()
        process.wait()
    if shared:
        assert "worker 0 ended while it started" not in process.stderr


@pytest.mark.parametrize("workers", ["--workers=1", "--workers=2"])
def test_refuses_what_chooses_another_backend(tmp_path: Path, own: Path, workers: str) -> None:
    """In a worker, or with two of them in the engine process."""
    config = tmp_path / "c.toml"
    config.write_text(f'[n]\nbackend = "{RARE}"\nwords = "words.txt"\nshared = true\n', encoding="utf-8")
    path = certify(config, [str(own)], {"n": [f"{RARE}: Rare"]})
    with started(config, path, own, workers) as process:
        assert process.wait() == 1
    stated = f"node 'n' uses {RARE}: Reads here, {RARE}: Rare in the certificate; renew it: torchpipe compile own.toml"
    assert f"torchpipe-serve: certificate {path}: {stated}" in process.stderr
    with started(config, path, own, workers, HAS_RARE="1") as process:
        process.wait_started()
        process.signal()
        assert process.wait() == 0


def test_refuses_to_start_what_is_not_certified(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    restored_logging: None,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the service would set it for good
    config = tmp_path / "c.toml"
    config.write_text('[n]\nbackend = "Identity"\n', encoding="utf-8")
    flags = ["--require-certificate", str(certify(config)), "--port", "0"]
    config.write_text('[n]\nbackend = "Identity"\nbatching_timeout = 1\n', encoding="utf-8")
    assert cli.main([str(config), *flags]) == 1
    refused = capfd.readouterr().err
    assert "c.toml is not the certified file: SHA-256 " in refused
    assert refused.endswith("; renew it: torchpipe compile own.toml\n")
    assert cli.main([str(tmp_path), *flags]) == 1
    assert "--require-certificate: certifies one TOML file, and " in capfd.readouterr().err

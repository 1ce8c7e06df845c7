"""A service with ``--require-certificate``: it starts, and reloads, only what is certified."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kit.clients import Client
from kit.services import LIGHT, Process
from kit.waits import eventually
from torchpipe_server import cli

from torchpipe_py.certificate import DIGEST, SCHEMA, described, digest, versions
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import parse_toml


@pytest.fixture
def certified(tmp_path: Path) -> tuple[str, str]:
    """A TOML file, and its certificate."""
    config, path = str(tmp_path / "c.toml"), tmp_path / "c.certificate.json"
    Path(config).write_text('[n]\nbackend = "Identity"\n', encoding="utf-8")
    commands = {"renew": "torchpipe compile own.toml"}
    content = {
        **{"schema": SCHEMA, "commands": commands, "versions": versions(parse_toml(config))},
        "compiled": described(plan_pipeline(config), config, []),
    }
    path.write_text(json.dumps({**content, DIGEST: digest(content)}), encoding="utf-8")
    return config, str(path)


def test_serves_and_reloads_what_is_certified_alone(certified: tuple[str, str]) -> None:
    config, path = certified
    with Process("--require-certificate", path, config=config, env={"PYTHONPATH": LIGHT}) as process:
        with Client(process.wait_started().port) as client:
            client.ping()
            with open(config, "a", encoding="utf-8") as file:
                file.write("max_inflight = 5\n")
            process.signal(signal.SIGHUP)
            eventually(lambda: "c.toml is not the certified file" in process.stderr)
            client.ping()
        process.signal()
        assert process.wait() == 0
    assert "not reloaded, keeping the old configuration: certificate " in process.stderr


def test_refuses_to_start_what_is_not_certified(
    certified: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    restored_logging: None,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the service would set it for good
    config, path = certified
    flags = ["--require-certificate", path, "--port", "0"]
    Path(config).write_text('[n]\nbackend = "Identity"\nbatching_timeout = 1\n', encoding="utf-8")
    assert cli.main([config, *flags]) == 1
    refused = capfd.readouterr().err
    assert "c.toml is not the certified file: SHA-256 " in refused
    assert refused.endswith("; renew it: torchpipe compile own.toml\n")
    assert cli.main([str(Path(config).parent), *flags]) == 1
    assert "--require-certificate: certifies one TOML file, and " in capfd.readouterr().err

"""The flags of the service."""

from __future__ import annotations

import re

import pytest
from torchpipe_server.options import Options, markdown_table, parse_options

from torchpipe_py.plan.config import NODE_KEYS, PIPELINE_KEYS
from torchpipe_py.plan.unknown import SERVICE_FLAGS


def test_configuration_errors_name_existing_flags() -> None:
    flags = {row.split("`")[1].removeprefix("--") for row in markdown_table()}
    assert set(SERVICE_FLAGS) == flags - {key.replace("_", "-") for key in (*NODE_KEYS, *PIPELINE_KEYS)}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--config", "x.toml"], "--config; the TOML file is given without a flag"),
        (["x.toml", "--gpus", "0"], "--gpus 0; CUDA devices are --devices here, their numbers"),
        (["x.toml", "--http", "80"], "--http 80; --port takes HTTP and Thrift, --http-port is for monitoring"),
    ],
)
def test_flag_of_another_server_names_ours(given: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(given)
    assert hint in capsys.readouterr().err


WRONG = {
    "--port": ["-1", "65536", "x", "1.5", ""],
    "--http-port": ["-2", "65536", "x"],
    "--grpc-port": ["-2", "65536", "x"],
    "--queue-target-ms": ["-2", "x"],
    "--workers": ["-1", "1025", "two"],
    "--devices": ["a", "0,", ",0", "0;1", "-1", "0,,1", " "],
    "--engines": ["-1", "65", "two"],
    "--max-connections": ["0", "-5"],
    "--max-connections-per-address": ["-1", "x"],
    "--max-calls-per-connection": ["0", "x"],
    "--max-message-bytes": ["63", "16M"],
    "--max-text-bytes": ["63", "1M"],
    "--max-reply-bytes": ["4095"],
    "--max-held-bytes": ["63", "1e9"],
    "--max-items": ["15"],
    "--max-batch": ["0"],
    "--max-depth": ["1", "129"],
    "--message-seconds": ["0", "-1", "nan", "inf"],
    "--idle-seconds": ["-1", "nan", "inf"],
    "--max-inflight": ["-1", "1.5"],
    "--deadline-ms": ["-1", "nan", "inf"],
    "--drain-seconds": ["-1", "nan", "inf"],
    "--hang-seconds": ["-0.1", "nan"],
    "--start-seconds": ["-0.1", "nan"],
    "--decode-isolation": ["thread"],
    "--trace-ratio": ["-1.5", "1.1", "nan", "1%"],
    "--log-level": ["loud", "INFO", ""],
    "--log-format": ["xml"],
    "--log-requests": ["some", "slow", "slow:", "slow:x", "slow:MS", "slow:-1"],
    "--server-timing": ["none"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in WRONG.items() for value in values])
def test_invalid_value_error_names_the_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(["x.toml", f"{flag}={value}"])
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("torchpipe-serve: error: ")
    assert flag in last


def _help(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        parse_options(["--help", *given])
    return capsys.readouterr().out


def test_every_flag_has_a_default_a_check_and_a_help_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # words with a dash are cut at the end of a line
    assert parse_options(["x.toml"]) == Options(config="x.toml")
    text = " ".join(_help(capsys, "all").split())
    for row in markdown_table():
        flag, default, meaning = re.fullmatch(r"\| `(--[a-z-]+)` \| `?(.*?)`? \| (.+) \|", row).groups()
        assert any(f"{flag} {value}{meaning}" in text for value in ("N ", "TEXT ", ""))
        assert default in ("", *["127.0.0.1"]) or flag in WRONG, "a limit without a check"
    assert "--max_batch" not in text


def test_help_fits_a_terminal_and_has_the_ten_flags_that_matter(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = _help(capsys).splitlines()
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    first = ["--version", "--host", "--port", "--http-port", "--grpc-port", "--workers", "--devices", "--import"]
    assert shown == [*first, "--deadline-ms", "--decode-isolation", "--log-requests"]


def test_error_is_one_line_that_says_what_is_expected(capsys):
    wrong = []
    for given, said in (
        (
            [],
            "are required: CONFIG (TOML file of a pipeline, or folder of such files); torchpipe-serve --help says more",
        ),
        (["x.toml", "--port", "a"], "argument --port: expected a whole number, from 0 to 65535, got 'a'"),
        (["x.toml", "--deadline-ms", "1s"], "expected a number of milliseconds, at least 0, got '1s'"),
        (["x.toml", "--max-message-bytes", "16M"], "bytes, at least 64, got '16M'; 16M is 16777216"),
        (["x.toml", "y.toml"], "arguments: y.toml; one CONFIG is served; for several, give a folder of TOML files"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_options(given)
        printed = capsys.readouterr().err
        if not (printed.endswith(said + "\n") and printed.count("\n") == 1):
            wrong.append(printed)
    assert wrong == []


def test_flags_with_underscores_and_former_names_work_and_wrong_ones_name_the_nearest(capsys):
    former = "--import-code"
    made = parse_options(["x.toml", "--max_connections", "3", "--log_format", "json", "--import=a", former, "b"])
    assert (made.max_connections, made.log_format, made.import_code) == (3, "json", "a,b")
    for flag, said in (
        ("--batch-size", r"; the nearest of \d+: --max-batch\n$"),
        ("--engine", r"unrecognized arguments: --engine 2; did you mean '--engines'\?\n$"),
    ):
        with pytest.raises(SystemExit) as end:
            parse_options(["x.toml", flag, "2"])
        assert end.value.code == 2
        assert re.search(said, capsys.readouterr().err)

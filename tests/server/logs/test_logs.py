"""Log lines, what is counted, and the settings they come from."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timezone
from typing import Any

import pytest
from conftest import Register
from kit.clients import IDL, Client
from kit.services import LocalServer, serving
from kit.waits import eventually
from torchpipe_server.logs import set_up_logging
from torchpipe_server.options import Options, markdown_table, parse_options

from torchpipe_py import Backend
from torchpipe_py.errors import DecodeError

# -- lines ----------------------------------------------------------------------------------------------------------


class Lines:
    """What was written on stderr."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text = capfd, ""

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        self._text += self._capfd.readouterr().err
        return self._text


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str], restored_logging: None) -> Lines:
    logging.getLogger().handlers[:] = []
    return Lines(capfd)


def set_up(**options: Any) -> logging.Logger:
    set_up_logging(Options(config="x", **options))
    return logging.getLogger("torchpipe_server")


def test_a_json_line_has_the_documented_keys(lines):
    logger = set_up(log_format="json")
    logger.warning("größe %d\nand more", 5)
    (line,) = lines.getvalue().splitlines()
    said = json.loads(line)
    assert list(said) == ["time", "level", "logger", "pid", "message"]
    assert datetime.fromisoformat(said["time"]).tzinfo == timezone.utc
    assert (said["level"], said["logger"], said["message"]) == ("warning", "torchpipe_server", "größe 5\nand more")
    assert isinstance(said["pid"], int)


# -- counts ---------------------------------------------------------------------------------------------------------


class Mixed(Backend):
    """Fails as the data says."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if item["data"] == b"decode":
                item["error"] = DecodeError("no image")
            else:
                item["result"] = ("a", 1.0)


def batch(client: Client, data: bytes, uuid: str) -> None:
    try:
        client.call("infer_batch", params=IDL.InferenceParams(uuid=uuid, data=data))
    except IDL.InferenceError:
        pass


def wait_settled(server: LocalServer, count: int) -> None:
    """Answers are counted, and logged, just after they are written."""
    eventually(lambda: total(server.server.counters.summary()["by_method"]) == count)


def total(by_method: dict[str, dict[str, int]]) -> int:
    return sum(sum(outcomes.values()) for outcomes in by_method.values())


@pytest.mark.parametrize(
    ("logged", "wanted"),
    [
        ("none", []),
        ("failed", ['"second" infer_batch decode_error', '"many,of it" infer_many decode_error']),
        (
            "all",
            [
                '"first" infer_batch ok',
                '"second" infer_batch decode_error',
                '"" ping ok',
                '"third" infer ok',
                '"many,of it" infer_many decode_error',
            ],
        ),
    ],
)
def test_requests_are_logged_with_their_names(register: Register, caplog, logged, wanted):
    caplog.set_level("INFO")
    with serving(register(Mixed), log_requests=logged) as server, Client(server.port) as client:
        batch(client, b"x", "first")
        batch(client, b"decode", "second")
        client.ping()
        client.call("infer", request=IDL.InferRequest(uuid="third", inputs={"data": IDL.Value(bytes=b"x")}))
        client.call(
            "infer_many",
            params=[IDL.InferenceParams(uuid="many", data=b"x"), IDL.InferenceParams(uuid="of it", data=b"decode")],
        )
        wait_settled(server, 5)
    found = [one for one in caplog.records if one.name == "torchpipe_server.requests"]
    assert [one.getMessage().rsplit(" ", 2)[0] for one in found] == wanted
    assert [one for one in caplog.records if one not in found] == []


# -- options --------------------------------------------------------------------------------------------------------

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
    "--decode-isolation": ["thread"],
    "--trace-ratio": ["-1.5", "1.1", "nan", "1%"],
    "--log-level": ["loud", "INFO", ""],
    "--log-format": ["xml"],
    "--log-requests": ["some", "slow", "slow:", "slow:x", "slow:MS", "slow:-1"],
    "--server-timing": ["none"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in WRONG.items() for value in values])
def test_a_wrong_value_ends_with_a_line_that_names_the_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(["x.toml", f"{flag}={value}"])
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("torchpipe-serve: error: ")
    assert flag in last


def test_every_flag_has_a_default_a_check_and_a_help_text(capsys):
    assert parse_options(["x.toml"]) == Options(config="x.toml")
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for row in markdown_table():
        flag, default, meaning = re.fullmatch(r"\| `(--[a-z-]+)` \| `?(.*?)`? \| (.+) \|", row).groups()
        assert f"{flag} X {meaning}" in text or f"{flag} {meaning}" in text
        assert default in ("", *["127.0.0.1"]) or flag in WRONG, "a limit without a check"
    assert "--max_batch" not in text


def test_flags_with_underscores_work_as_well_and_wrong_ones_name_the_nearest(capsys):
    made = parse_options(["x.toml", "--max_connections", "3", "--log_format", "json", "--import=a"])
    assert (made.max_connections, made.log_format, made.import_code) == (3, "json", "a")
    for flag, said in (
        ("--batch-size", r"; the nearest of \d+: --max-batch\n$"),
        ("--engine", r"unrecognized arguments: --engine 2; did you mean '--engines'\?\n$"),
    ):
        with pytest.raises(SystemExit) as end:
            parse_options(["x.toml", flag, "2"])
        assert end.value.code == 2
        assert re.search(said, capsys.readouterr().err)

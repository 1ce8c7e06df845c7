"""Log lines, what is counted, and the settings they come from."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timezone
from typing import Any

import pytest
from conftest import Register
from kit.clients import IDL, Client, HttpClient, pack_batch
from kit.services import LocalServer, serving
from kit.waits import eventually
from thriftpy2.thrift import TApplicationException
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.logs import set_up_logging
from torchpipe_server.options import Options, markdown_table, parse_options

from torchpipe_py import Backend
from torchpipe_py.errors import DecodeError
from torchpipe_py.runtime.statistics import COUNTS

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


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_the_level(lines, level, count):
    logger = set_up(log_level=level)
    logger.debug("x")
    logger.info("x")
    logger.warning("x")
    assert len(lines.getvalue().splitlines()) == count


def test_the_counters_lines(lines):
    set_up(log_format="json")
    counters = RequestCounters("all")
    counters.add("infer_batch", "ok", 0.0125, "my name")
    said = json.loads(lines.getvalue())
    assert list(said)[4:] == ["message", "request", "method", "outcome", "ms"]
    assert said["message"] == '"my name" infer_batch ok 12.500 ms'
    assert {key: said[key] for key in ("request", "method", "outcome", "ms")} == {
        **{"request": "my name", "method": "infer_batch", "outcome": "ok", "ms": 12.5}
    }


@pytest.mark.parametrize("kind", ["text", "json"])
@pytest.mark.parametrize(
    "name",
    ["a\nb", "\r", "x\x1b[2J", "\u2028", "\x00", "n" * 2**20, "\U0001f600" * 2**20],
    ids=lambda name: ascii(name[:5]),
)
def test_a_name_cannot_begin_a_line_of_its_own_nor_fill_one(lines, kind, name):
    set_up(log_format=kind)
    RequestCounters("all").add("ping", "ok", 0.0, name)
    (line,) = lines.getvalue().splitlines()
    assert line.isprintable()
    assert len(line) < 4095
    assert kind == "text" or json.loads(line)["request"] == name[:200]


def test_a_name_looks_like_nothing_else_on_the_line(lines):
    set_up()
    counters = RequestCounters("all")
    for name in ("0 infer_batch ok 0.1 ms", 'a" infer_batch ok 0.1 ms', 'a\\" infer_batch ok 0.1 ms'):
        counters.add("ping", "failed", 0.0, name)
    for line in lines.getvalue().splitlines():
        name, rest = json.JSONDecoder().raw_decode(line.partition("]: ")[2])
        assert name.endswith("infer_batch ok 0.1 ms")
        assert line.endswith('" ping failed 0.000 ms'), rest


# -- counts ---------------------------------------------------------------------------------------------------------


def test_a_summary_counts_and_times():
    counters = RequestCounters("none", {"infer"})
    assert counters.summary() == {"by_method": {}, "latency": {"counts": [0] * COUNTS, "sum_ms": 0.0}}
    for outcome in ("ok", "ok", "overloaded"):
        counters.add("infer", outcome, 0.001, "")
    counters.add("infer", "failed", 1e6, "")
    counters.add("ping", "ok", 1.0, "")
    found = counters.summary()
    assert found["by_method"] == {"infer": {"ok": 2, "overloaded": 1, "failed": 1}, "ping": {"ok": 1}}
    assert (found["latency"]["counts"][10], found["latency"]["counts"][-1]) == (3, 1)
    assert found["latency"]["sum_ms"] == pytest.approx(1e9 + 3)
    assert counters.summary() == found


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


def status_of(client: HttpClient, line: bytes, body: bytes = b"") -> int:
    client.send(b"%s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (line, len(body), body))
    return client.read().status


def test_the_time_is_that_of_calls_that_run_the_pipe(register: Register):
    paths = (b"GET /v2", b"GET /openapi.json", b"GET /v2/models/stats", b"POST /v2/repository/index", b"GET /none")
    with serving(register(Mixed)) as server, Client(server.port) as client, HttpClient(server.port) as http:
        for _ in range(20):
            client.ping()
            assert status_of(http, b"GET /v2/health/ready") == 200
        assert [status_of(http, path) for path in paths] == [200, 200, 200, 200, 404]
        with pytest.raises(TApplicationException):
            client.call("no_such_method")
        wait_settled(server, 46)
        assert sum(server.server.counters.summary()["latency"]["counts"]) == 0
        batch(client, b"x", "")
        batch(client, b"decode", "")
        assert [status_of(http, b"POST /infer", data) for data in (b"x", b"decode")] == [200, 400]
        wait_settled(server, 50)
        found = server.server.counters.summary()["latency"]
    assert sum(found["counts"]) == 4
    assert found["sum_ms"] > 0


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


def test_a_message_that_fails_before_it_has_a_name_is_not_logged_under_another(register: Register, caplog):
    caplog.set_level("INFO")
    with serving(register(Mixed), log_requests="all") as server, Client(server.port) as client:
        batch(client, b"x", "first")
        with pytest.raises(TApplicationException):
            client.call("no_such_method")
        client.sock.sendall(pack_batch(b"x").replace(b"raw", b"\xff\xff\xff"))
        with pytest.raises(TApplicationException):
            client.receive()
        wait_settled(server, 3)
    found = [one.getMessage().rsplit(" ", 2)[0] for one in caplog.records]
    assert found == ['"first" infer_batch ok', '"" unknown unknown_method', '"" infer_batch bad_arguments']


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
    "--max-depth": ["1"],
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


@pytest.mark.parametrize("value", ["0", "0,1", "3, 0", "0,0,1", ""])
def test_devices(value):
    assert parse_options(["x.toml", f"--devices={value}"]).devices == value


def test_every_flag_has_a_default_a_check_and_a_help_text(capsys):
    assert parse_options(["x.toml"]) == Options(config="x.toml")
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for row in markdown_table():
        flag, default, meaning = re.fullmatch(r"\| `(--[a-z-]+)` \| `?(.*?)`? \| (.+) \|", row).groups()
        assert f"{flag} X {meaning}" in text
        assert default in ("", *["127.0.0.1"]) or flag in WRONG, "a limit without a check"
    assert "--max_batch" not in text


@pytest.mark.parametrize("flags", [("--import", "a,b.py"), ("--import=a", "--import-code=b.py")])
def test_code_of_ones_own_is_named_as_by_the_other_command(flags):
    assert parse_options(["x.toml", *flags]).import_code == "a,b.py"
    assert parse_options(["x.toml", "--import-code", "c", *flags]).import_code == "c,a,b.py"


def test_flags_with_underscores_work_as_well_and_wrong_ones_name_the_nearest(capsys):
    made = parse_options(["x.toml", "--max_connections", "3", "--log_format", "json", "--import_code=a"])
    assert (made.max_connections, made.log_format, made.import_code) == (3, "json", "a")
    for flag, said in (
        ("--batch-size", r"; the nearest of \d+: --max-batch, --max-items, --\S+\n$"),
        ("--engine", r"unrecognized arguments: --engine 2; did you mean '--engines'\?\n$"),
    ):
        with pytest.raises(SystemExit) as end:
            parse_options(["x.toml", flag, "2"])
        assert end.value.code == 2
        assert re.search(said, capsys.readouterr().err)


def test_at_the_edges():
    made = parse_options(
        ["x.toml", "--port=65535", "--http-port=0", "--workers=1024", "--max-depth=2", "--max-items=16"]
    )
    assert (made.port, made.http_port, made.workers, made.max_depth, made.max_items) == (65535, 0, 1024, 2, 16)

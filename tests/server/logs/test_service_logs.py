"""The log of a whole service."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import zlib
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path

import pytest
from kit.clients import IDL, Client
from kit.pictures import IEND, idat, ihdr, png_of
from kit.services import DEMO, LIGHT, Process, steered
from kit.waits import eventually

import torchpipe_py

FORGED = '\n{"level":"critical","logger":"torchpipe_server","message":"forged"}\n'

PLUGIN = '''
import logging, os, sys, warnings
from torchpipe_py import Backend, register_backend

class Noisy(Backend):
    """Writes on stderr in every way there is; ends its process where the data say so."""

    def forward(self, items):
        for item in items:
            os.write(2, b"native\\x1b[2J\\n")
            print("printed\\n\\u2028", file=sys.stderr)
            logging.getLogger("mine").warning("logged")
            if item["data"] == b"raise":
                raise KeyError("weights")
            if item["data"] == b"die":
                os.write(2, b"the last words")
                os.abort()
            item["result"] = ("a", 1.0)

register_backend(Noisy, "Noisy")
'''


def png_with_a_profile_called(name: str) -> bytes:
    """libpng would warn of the profile and write its name, and warns of the other chunk."""
    profile = struct.pack(">I", 200) + b"lcms\2\1\0\0mntrRGB XYZ " + b"\0" * 12 + b"acsp" + b"\0" * 160
    named = name.encode() + b"\0\0" + zlib.compress(profile)
    return png_of([ihdr(31, 24), (b"iCCP", named), (b"sRGB", b"\x09"), idat(24 * (1 + 3 * 31)), IEND])


def ask(client: Client, data: bytes, uuid: str = "mine") -> None:
    client.call("infer_batch", params=IDL.InferenceParams(uuid=uuid, data=data))


def test_every_line_is_json_and_no_client_forges_one():
    """libpng would write a name from the image on stderr; a request's name is the client's as well."""
    with Process("--log-format", "json", "--log-requests", "all", "--workers", "2") as process:
        process.wait_started()
        first, second = process.workers
        with ExitStack() as stack:
            for index in range(4):  # open at the same time: connections of both workers
                ask(stack.enter_context(Client(process.port)), png_with_a_profile_called(FORGED), f"{index}{FORGED!r}")
        eventually(lambda: process.stderr.count('"infer_batch"') == 4)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: "died" in process.stderr)
        process.signal()
        process.wait()
        lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert all(list(line)[:5] == ["time", "level", "logger", "pid", "message"] for line in lines)
    assert {datetime.fromisoformat(line["time"]).tzinfo for line in lines} == {timezone.utc}
    assert lines[0]["message"] == f"torchpipe_py {torchpipe_py.__version__} starts {DEMO} with 2 workers"
    requests = [line for line in lines if line["logger"] == "torchpipe_server.requests"]
    assert sorted(line["request"] for line in requests) == [f"{index}{FORGED!r}" for index in range(4)]
    assert {(line["method"], line["outcome"]) for line in requests} == {("infer_batch", "ok")}
    assert all(line["ms"] >= 0 for line in requests)
    said = [line for line in lines if line["logger"] == "stderr"]
    assert any(line["message"].startswith("| libpng warning: sRGB: invalid") for line in said)
    assert all(line["message"].startswith("| ") for line in said)
    assert not any("forged" in line["message"] for line in said)
    for found in (requests, said):
        assert {line["pid"] for line in found} == {first, second}
    assert {line["level"] for line in said} == {"warning"}
    assert [line["level"] for line in lines if "died" in line["message"]] == ["error"]
    assert "critical" not in {line["level"] for line in lines}
    assert lines[-1]["pid"] == process.pid


def test_each_line_of_a_worker_on_stderr_becomes_a_record(tmp_path: Path):
    """Of the worker itself, of a backend's own process, and its last words."""
    (tmp_path / "noisy_plugin.py").write_text(PLUGIN)
    config = tmp_path / "noisy.toml"
    config.write_text('[own]\nbackend = "Noisy"\ndevice_id = 1\nnext = "other"\n[other]\nbackend = "Process[Noisy]"\n')
    args = "--import", str(tmp_path / "noisy_plugin.py"), "--hang-seconds", "0"
    with Process(*args, config=str(config), env={"PYTHONPATH": LIGHT}) as process:
        with Client(process.wait_started().port) as client:
            (worker,) = process.workers
            ask(client, b"x")
            native = f"WARNING stderr[{worker}]: | native\\x1b[2J\n"
            eventually(lambda: process.stderr.count(native) == 2)  # by both processes
            eventually(lambda: f"WARNING mine[{worker}]: logged\n" in process.stderr)
            eventually(lambda: len(re.findall(r"WARNING stderr\[\d+\]: \| logged\n", process.stderr)) == 1)
            with pytest.raises(IDL.InferenceError, match="died"):
                ask(client, b"die")
        eventually(lambda: "died" in process.stderr)
        process.signal()
        process.wait()
    (died,) = [line for line in process.stderr.splitlines() if " died" in line]
    assert died.endswith(" / the last words")
    doubts = [line for line in process.stderr.splitlines() if "nothing uses it" in line]
    assert len([line for line in doubts if f"torchpipe_py[{worker}]" in line]) == 1, "a worker tells each doubt once"
    undated = [line for line in process.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert not undated
    assert process.stderr.replace("\n", "").isprintable()


FIRST, FAILED = '"first" infer_batch ok', ['"second" infer_batch decode_error', '"many,of it" infer_many decode_error']


@pytest.mark.parametrize(
    ("logged", "wanted"),
    [
        ("none", []),
        ("failed", FAILED),
        ("all", [FIRST, FAILED[0], '"" ping ok', '"third" infer ok', FAILED[1]]),
    ],
)
def test_logs_requests_with_their_names(caplog, logged, wanted):
    caplog.set_level("INFO")
    with steered(log_requests=logged) as server, Client(server.port) as client:
        ask(client, b"x", "first")
        with suppress(IDL.InferenceError):
            ask(client, b"corrupt", "second")
        client.ping()
        client.call("infer", request=IDL.InferRequest(uuid="third", inputs={"data": IDL.Value(bytes=b"x")}))
        images = (("many", b"x"), ("of it", b"corrupt"))
        client.call("infer_many", params=[IDL.InferenceParams(uuid=uuid, data=data) for uuid, data in images])
        # Answers are counted, and logged, just after they are written.
        eventually(lambda: sum(sum(each.values()) for each in server.by_method.values()) == 5)
    found = [one for one in caplog.records if one.name == "torchpipe_server.requests"]
    assert [one.getMessage().rsplit(" ", 2)[0] for one in found] == wanted
    assert [one for one in caplog.records if one not in found] == []

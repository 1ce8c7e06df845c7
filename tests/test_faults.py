"""Who dies or hangs, and what the client sees: its own request fails with a code, all others are answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kit.clients import IDL, Client, HttpClient
from kit.services import SteeredProcess
from kit.waits import eventually

TABLES = """
[own]
backend = "Steered"
FOLDER

[engine]
backend = "Steered"
shared = true
FOLDER

[child]
backend = "Process[Steered]"
FOLDER

[decoder]
backend = "SteeredDecoder"
decode_isolation = "process"
max_seconds = 1
"""
WAYS = {"thrift": Client, "http": HttpClient}
FAULTS = {"exits": b"die", "crashes": b"abort", "hangs": b"block"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredProcess]:
    folder = tmp_path_factory.mktemp("faults")
    with SteeredProcess(folder, "--workers", "2", "--hang-seconds", "4", tables=TABLES) as process:
        yield process.wait_started()


def code_of(client: Any, root: str, text: bytes) -> str:
    try:
        if isinstance(client, Client):
            client.infer({"data": IDL.Value(bytes=text)}, node_name=root)
        else:
            client.send(HttpClient.pack(text).replace(b"/infer", f"/infer?node_name={root}".encode(), 1))
            client.receive()
    except IDL.InferenceError as error:
        return str(error.code)
    return "ok"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("root", ["own", "engine", "child", "decoder"])
def test_a_death_or_hang_costs_its_own_request_only(service: SteeredProcess, root: str, fault: str, way: str) -> None:
    """Connections that wait for nothing go on, on another worker if need be; a child or a decoder costs no worker."""
    eventually(lambda: len(service.workers) == 3)
    workers = service.workers  # two of them, and the engine process
    with Client(service.port) as neighbour, WAYS[way](service.port) as client:
        neighbour.ping()
        assert code_of(client, root, FAULTS[fault]) == "worker_died"
        (service.folder / "open").touch()  # a process that is not killed goes on
        eventually(lambda: code_of(neighbour, root, b"x") == "ok")
        eventually(lambda: code_of(neighbour, "own", b"x") == "ok")
    (service.folder / "open").unlink()
    stay = root == "decoder" or (root == "child" and fault != "hangs")
    eventually(lambda: (service.workers == workers) == stay)

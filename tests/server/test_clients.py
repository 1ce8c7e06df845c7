"""Clients of a service of two workers: Apache Thrift's, one written by hand, a thousand that are silent."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import in_threads
from service import FRAMINGS, IDL, ROOT, Client, Process, connect, pack_call
from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolAccelerated
from thrift.protocol.TCompactProtocol import TCompactProtocol, TCompactProtocolAccelerated
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TBufferedTransport, TFramedTransport
from thriftpy2.thrift import TApplicationException

IMAGES = sorted((ROOT / "configs/demo/images").glob("*.jpg"))
SILENT, BUSY = 1000, 20


@pytest.fixture(scope="module")
def service() -> Iterator[Process]:
    with Process("--workers", "2", "--max-connections", str(SILENT + BUSY + 50)) as process:
        yield process.wait_started()


@pytest.fixture(scope="module")
def wanted(service: Process) -> dict[Path, tuple[str, float]]:
    """What one client on one connection is told."""
    with Client(service.port) as client:
        return {path: client.infer_batch(path.read_bytes()) for path in IMAGES}


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_apache_clients_on_both_workers(service: Process, wanted, framed, compact):
    clients = [Client(service.port, framed, compact) for _ in range(4)]
    for client in clients:
        client.ping()
        for path in IMAGES[::5]:
            label, score = client.infer_batch(path.read_bytes())
            assert (label, score) == (wanted[path][0], pytest.approx(wanted[path][1], abs=1e-4))
        outcomes = client.infer_many([IMAGES[0].read_bytes(), b"x"])
        assert [one.result is None for one in outcomes] == [False, True]
        assert client.infer({"data": IDL.Value(bytes=IMAGES[0].read_bytes())})["label"].text == wanted[IMAGES[0]][0]
        assert client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"x")).code == "decode_error"
        with pytest.raises(TApplicationException):
            client.call("no_such_method")
        client.ping()
        client.close()


@pytest.mark.parametrize("transport", [TBufferedTransport, TFramedTransport])
@pytest.mark.parametrize(
    "protocol", [TBinaryProtocol, TBinaryProtocolAccelerated, TCompactProtocol, TCompactProtocolAccelerated]
)
def test_every_protocol_of_the_apache_library(service: Process, transport: Any, protocol: Any):
    opened = transport(TSocket("127.0.0.1", service.port))
    spoken = protocol(opened)
    opened.open()
    for seqid in (1, -1, 2**31 - 1):
        spoken.writeMessageBegin("ping", 1, seqid)
        spoken.writeStructBegin("ping_args")
        spoken.writeFieldStop()
        spoken.writeStructEnd()
        spoken.writeMessageEnd()
        opened.flush()
        assert spoken.readMessageBegin() == ("ping", 2, seqid)
        spoken.readStructBegin()
        assert spoken.readFieldBegin()[1] == 0
        spoken.readStructEnd()
        spoken.readMessageEnd()
    opened.close()


def ask(*args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts/socket_client.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_with_nothing_but_a_socket(service: Process, wanted):
    done = ask(IMAGES[3], "--port", service.port)
    label, score = wanted[IMAGES[3]]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{label} {score:.4f}\n"


def test_what_it_says_of_errors(service: Process, tmp_path):
    (tmp_path / "none.jpg").write_bytes(b"no image")
    done = ask(tmp_path / "none.jpg", "--port", service.port)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("socket_client: decode_error: ")
    assert len(done.stderr.splitlines()) == 1
    done = ask(tmp_path / "nowhere.jpg", "--port", service.port)
    assert (done.returncode, "nowhere.jpg" in done.stderr) == (1, True)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        done = ask(IMAGES[0], "--port", bound.getsockname()[1])
    assert (done.returncode, "refused" in done.stderr) == (1, True)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SILENT + 500:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SILENT + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_silent_connections_beside_busy_ones(service: Process, wanted):
    silent = [connect(service.port) for _ in range(SILENT)]
    for sock in silent[::2]:  # half of them have said something before
        sock.sendall(pack_call("ping"))
    for sock in silent[::2]:
        assert read_reply(sock).startswith(b"\x80\x01\0\x02\0\0\0\x04ping")

    def work(index: int) -> None:
        framed, compact = FRAMINGS[index % 4]
        with Client(service.port, framed, compact) as client:
            for path in IMAGES[index % 5 :: 5]:
                label, score = client.infer_batch(path.read_bytes())
                assert (label, score) == (wanted[path][0], pytest.approx(wanted[path][1], abs=1e-4))

    in_threads(BUSY, work)
    for sock in silent:
        sock.sendall(pack_call("ping", seqid=9))
    for sock in silent:
        assert read_reply(sock).startswith(b"\x80\x01\0\x02\0\0\0\x04ping\0\0\0\x09")
        sock.close()


REPLY_BYTES = 4 + 4 + 4 + 4 + 1


def read_reply(sock: socket.socket) -> bytes:
    """Of a ping."""
    reply = b""
    while len(reply) < REPLY_BYTES:
        piece = sock.recv(REPLY_BYTES - len(reply))
        assert piece, "closed"
        reply += piece
    return reply

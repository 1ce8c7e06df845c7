"""What a client names, counts and asks for is bounded before it is used."""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.clients import IDL, Client, narrow, pack_call, pack_string
from kit.services import LocalServer, serving
from kit.waits import eventually

from torchpipe_py import Backend
from torchpipe_py.wire.errors import describe_error

MEBIBYTE = 2**20
LONG = "x" * 2000


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("Identity", max_batch=3) as server:
        yield server


def value(data: bytes = b"x") -> Any:
    return IDL.Value(bytes=data)


def infer_error(client: Client, inputs: dict[str, Any], uuid: str = "u", **options: Any) -> Any:
    error = client.error_of("infer", request=IDL.InferRequest(uuid=uuid, inputs=inputs, **options))
    assert len(error.message) < 1200
    return error


def dimensions(*shape: int) -> dict[str, Any]:
    return {"data": IDL.Value(tensor=IDL.Tensor(dtype="uint8", shape=shape, data=b"x"))}


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (dimensions(*[2**63 - 1] * 4000), {}),  # counted before they are multiplied
        (dimensions(*[0] * 33), {}),
        ({"data": value()}, {"uuid": LONG}),
        ({"data": value()}, {"node_name": LONG}),
        ({"data": value(), "node_name": value(b"\0" * MEBIBYTE)}, {}),
        ({"data": value(), LONG: value()}, {}),
        ({"data": value(), **{str(index): value() for index in range(300)}}, {}),
        ({"data": value()}, {"outputs": [str(index) for index in range(300)]}),
        ({"data": value()}, {"outputs": [LONG]}),
        ({"data": IDL.Value(tensors=[IDL.Tensor(dtype="uint8", shape=[0], data=b"")] * 300)}, {}),
        ({LONG[:1000] + str(index): value() for index in range(100)}, {}),
    ],
)
def test_names_and_numbers_of_things_are_bounded(server: LocalServer, inputs: Any, options: Any):
    with Client(server.port) as client:
        assert infer_error(client, inputs, **options).code in ("invalid_request", "unknown_node")
        client.ping()


def test_the_images_of_one_call_are_bounded(server: LocalServer):
    with Client(server.port) as client:
        params = [IDL.InferenceParams(uuid="u", data=b"")] * 4
        error = client.error_of("infer_many", params=params)
        assert (error.code, error.message) == ("invalid_request", "4 images in one call; the limit is 3 (--max-batch)")


def test_the_texts_of_a_message_are_smaller_than_it_is():
    with serving("Identity", max_text_bytes=1000) as server, Client(server.port) as client:
        assert client.infer({"data": IDL.Value(text="x" * 900)})["result"].text == "x" * 900
        assert client.infer({"data": value(b"x" * 5000)})["result"].bytes == b"x" * 5000
        for sizes in ([1001], [600, 600], [100] * 10):
            error = infer_error(client, {f"{index:04}": IDL.Value(text="x" * size) for index, size in enumerate(sizes)})
            assert error.code == "too_large"
            assert re.fullmatch(r"text of 1\d{3} bytes or more; the limit is 1000 \(--max-text-bytes\)", error.message)


def test_a_text_in_work_counts_as_python_keeps_it(register: Register):
    gate, text = Gate(), "\U0001f600" + "x" * 2**18
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client:
        client.send_infer({"data": IDL.Value(text=text)})
        gate.wait_entered()
        eventually(lambda: server.server.held_bytes > sys.getsizeof(text))
        gate.open()


class Long(Backend):
    """A result of so many bytes."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = bytes(int(item["data"]))


def test_replies_that_nobody_reads_count_among_the_held_bytes(register: Register):
    size = 8 * MEBIBYTE
    with serving(register(Long), max_held_bytes=2 * size, message_seconds=60) as server, Client(server.port) as other:
        socks = [narrow(server.port) for _ in range(10)]
        body = struct.pack(">I", 4) + b"data" + pack_string(2, str(size).encode()) + b"\0"
        inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 1) + body
        message = pack_call("infer", struct.pack(">bh", 12, 1) + pack_string(1, b"u") + inputs + b"\0\0")
        for sock in socks:
            sock.sendall(message)
            other.ping()
            assert other.infer({"data": value(b"1")})["result"].bytes == b"\0"
        other.ping()
        # The system takes some of each reply, of 8 MiB up to four.
        kept = sum(is_whole(sock, size) for sock in socks)
        assert 1 <= kept <= 5


def is_whole(sock: socket.socket, least: int) -> bool:
    """Whether so many bytes of a reply come; they do not where the connection was closed."""
    with sock:
        while least > 0:
            try:
                data = sock.recv(2**20)
            except ConnectionError:
                return False
            if not data:
                return False
            least -= len(data)
    return True


def test_what_an_error_says_is_short_and_names_no_folder():
    secret = ValueError("no such file: '/srv/my models/a.onnx' or /home/me/b.trt:12\nTraceback: /home/me/code.py")
    assert describe_error(secret) == "no such file: 'a.onnx' or b.trt:12"
    assert describe_error(ValueError("<BytesIO object at 0x7f3bd4a1c2e0>")) == "<BytesIO object at 0x…>"
    assert describe_error(ValueError("a/b and 3/4 km/h")) == "a/b and 3/4 km/h"
    assert len(describe_error(ValueError("/" * 5_000_000))) < 1100
    assert len(describe_error(ValueError("é" * 5_000_000))) < 1100

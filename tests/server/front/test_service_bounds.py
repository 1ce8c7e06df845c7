"""Texts and replies are bounded as memory that is held, and errors say little."""

from __future__ import annotations

import re
import socket
import sys

import pytest
from kit.clients import IDL, Client, ask, infer_rpc, narrow, pack_infer
from kit.contract import HAS_GRPC, Asked, as_rpc
from kit.services import steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from torchpipe_server.front import services

from torchpipe_py.wire.errors import describe_error

MEBIBYTE = 2**20


def test_texts_are_bounded_by_their_message():
    with steered(max_text_bytes=1000) as server, Client(server.port) as client:
        assert client.infer({"data": IDL.Value(text="x" * 900)})["score"].number == 900
        assert client.infer({"data": IDL.Value(bytes=b"x" * 5000)})["score"].number == 5000
        for sizes in ([1001], [600, 600], [100] * 10):
            inputs = {f"{index:04}": IDL.Value(text="x" * size) for index, size in enumerate(sizes)}
            error = client.error_of("infer", request=IDL.InferRequest(uuid="u", inputs=inputs))
            assert error.code == "too_large"
            assert re.fullmatch(r"text of 1\d{3} bytes or more; the limit is 1000 \(--max-text-bytes\)", error.message)


def test_text_in_work_counts_with_its_size_in_memory():
    text = "block \U0001f600" + "x" * 2**18
    with steered() as server, Client(server.port) as client:
        client.send_infer({"data": IDL.Value(text=text)})
        assert Steered.entered.acquire(timeout=WAIT)
        eventually(lambda: server.server.held_bytes > sys.getsizeof(text))


def test_replies_that_nobody_reads_count_among_the_held_bytes():
    size = 8 * MEBIBYTE
    with steered(max_held_bytes=2 * size, message_seconds=60) as server, Client(server.port) as other:
        Steered.values = {"large": bytes(size)}
        socks = [narrow(server.port) for _ in range(10)]
        for sock in socks:
            sock.sendall(pack_infer(b"value large"))
            other.ping()
            assert other.infer_batch(b"small") == ("small", 5.0)
        # The system takes some of each reply, of 8 MiB up to four.
        assert 1 <= sum(is_whole(sock, size) for sock in socks) <= 5


def is_whole(sock: socket.socket, least: int) -> bool:
    """Whether so many bytes of a reply come; they do not where the connection was closed."""
    with sock, sock.makefile("rb") as file:
        try:
            return len(file.read(least)) == least
        except ConnectionError:
            return False


def test_error_text_is_short_and_names_no_folder():
    secret = ValueError("no such file: '/srv/my models/a.onnx' or /home/me/b.trt:12\nTraceback: /home/me/code.py")
    assert describe_error(secret) == "no such file: 'a.onnx' or b.trt:12"
    assert describe_error(ValueError("<BytesIO object at 0x7f3bd4a1c2e0>")) == "<BytesIO object at 0x…>"
    assert describe_error(ValueError("a/b and 3/4 km/h")) == "a/b and 3/4 km/h"
    for letter in "/é":
        assert len(describe_error(ValueError(letter * 5_000_000))) < 1100


def raises_once(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> None:
    """The function of the module raises when it is called for the first time."""
    given, is_first = getattr(module, name), [True]

    def function(*args: object) -> object:
        if is_first and is_first.pop():
            raise RuntimeError("on request")
        return given(*args)

    monkeypatch.setattr(module, name, function)


def test_answer_that_cannot_be_encoded_is_an_error(monkeypatch, caplog):
    with steered() as server:
        raises_once(monkeypatch, services, "error_answer")
        status, answer = ask(server.port, b"none")
        assert (status, answer["code"]) == (500, "internal")
        assert "the answer cannot be encoded: RuntimeError: on request" in answer["error"]
        assert "an answer cannot be encoded" in caplog.text
        assert ask(server.port, b"none")[1]["code"] == "no_result"


@pytest.mark.skipif(not HAS_GRPC, reason="no grpc")
def test_answer_over_grpc_that_cannot_be_encoded_is_an_error(monkeypatch):
    import grpc

    from torchpipe_py.methods.rpc import wire

    with steered(grpc_port=0) as server:
        raises_once(monkeypatch, wire, "_refusal")
        for code in ("internal", "no_result"):
            with pytest.raises(grpc.RpcError) as caught:
                infer_rpc(server.grpc_port, as_rpc(Asked(b"none")), WAIT)
            assert dict(caught.value.trailing_metadata())["error-code"] == code

"""Calls of many images: they enter the pipe in turns, and each image is answered once, whatever ends its call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.clients import IDL, Client
from kit.services import serving
from kit.waits import eventually

from torchpipe_py.methods.many import ROUNDS


def images(data: bytes, count: int) -> list[Any]:
    return [IDL.InferenceParams(uuid="x", data=data) for _ in range(count)]


def test_what_others_send_does_not_wait_for_all_images_of_a_call(register: Register):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client, Client(server.port) as other:
        large = client.send("infer_many", params=images(b"large", 256))
        gate.wait_entered()
        single = other.send_batch(b"single")
        eventually(lambda: server.run.stats()["admitted"] == ROUNDS + 1)
        gate.open()
        with pytest.raises(IDL.InferenceError):  # bytes are no label
            other.receive(single)
        assert len(client.receive(large)) == 256
    assert len(gate.batches) == 257
    assert gate.batches.index([b"single"]) == ROUNDS


def test_what_waits_ends_with_its_call(register: Register):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client, Client(server.port) as leaving:
        leaving.send("infer_many", params=images(b"abandoned", 256))
        gate.wait_entered()
        assert {one.error.code for one in client.infer_many([b"late"] * 256, deadline_ms=100)} == {"deadline_exceeded"}
        leaving.close()
        eventually(lambda: server.run.stats()["inflight"] == 0)
        gate.open()
        assert len(client.infer_many([b"y"] * 256)) == 256
    assert Counter(batch[0] for batch in gate.batches) == {b"abandoned": 1, b"y": 256}

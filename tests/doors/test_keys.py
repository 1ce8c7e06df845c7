"""Keys of the dict beside ``data``: a text or a number means the same, whichever door it comes through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kit import doors
from kit.clients import IDL, Client, ask, infer_rpc
from kit.contract import HAS_GRPC
from kit.doors import datatype_of, to_raw, to_texts
from kit.services import LocalServer, serving
from kit.waits import WAIT

from torchpipe_py import register_backend

Key = str | int


class CountedByKey:
    """How many requests of its key there were."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["state"] = {"count": item["state"].get("count", 0) + 1}
            item["result"] = item["state"]["count"]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    register_backend(CountedByKey, "CountedByKey")
    config = {"node": {"backend": "CountedByKey", "ordered_by": "camera"}}
    with serving(config, grpc_port=0 if HAS_GRPC else -1) as server:
        yield server


def array_of(key: Key) -> np.ndarray:
    return to_texts([key], (1,)) if isinstance(key, str) else np.array([key])


def infer(server: LocalServer, key: Key) -> Any:
    return ask(
        server.port, json.dumps({"inputs": {"data": "x", "camera": key}}).encode(), Content_Type="application/json"
    )[1]


def infer_array(server: LocalServer, key: Key) -> Any:
    dtype = "string" if isinstance(key, str) else "int64"
    given = {"data": "x", "camera": {"dtype": dtype, "shape": [1, 1], "data": [key]}}
    return ask(server.port, json.dumps({"inputs": given}).encode(), Content_Type="application/json")[1]


def oip(server: LocalServer, key: Key) -> Any:
    camera = {"name": "camera", "datatype": datatype_of(array_of(key)), "shape": [1], "data": [key]}
    data = {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    answer = ask(server.port, json.dumps({"inputs": [data, camera]}).encode(), "/v2/models/test/infer")[1]
    return {"result": answer["outputs"][0]["data"][0]} if "outputs" in answer else answer


def rpc(server: LocalServer, key: Key) -> Any:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    arrays = {"data": to_texts(["x"], (1,)), "camera": array_of(key)}
    request = message("inference.ModelInferRequest")(
        model_name="test",
        inputs=[{"name": name, "datatype": datatype_of(value), "shape": [1]} for name, value in arrays.items()],
        raw_input_contents=[to_raw(value) for value in arrays.values()],
    )
    try:
        answer = infer_rpc(server.grpc_port, request, WAIT)
    except grpc.RpcError as error:
        return {"code": dict(error.trailing_metadata())["error-code"]}
    return {"result": int(np.frombuffer(answer.raw_output_contents[0], np.int64)[0])}


def thrift(server: LocalServer, key: Key) -> Any:
    camera = IDL.Value(text=key) if isinstance(key, str) else IDL.Value(integer=key)
    with Client(server.port) as client:
        try:
            return {"result": client.infer({"data": IDL.Value(text="x"), "camera": camera})["result"].integer}
        except IDL.InferenceError as error:
            return {"code": error.code}


WAYS: list[Callable[[LocalServer, Key], Any]] = [infer, infer_array, oip, thrift, *([rpc] if HAS_GRPC else [])]


@pytest.mark.parametrize("key", ["door", "Tür", "", 7, 1 - 2**63])
def test_key_is_the_same_at_every_door(server: LocalServer, key: Key) -> None:
    assert [way(server, key)["result"] for way in WAYS] == list(range(1, len(WAYS) + 1))


@pytest.mark.parametrize("way", WAYS)
def test_other_key_is_refused(server: LocalServer, way: Callable[[LocalServer, Key], Any]) -> None:
    assert way(server, "x" * 257)["code"] == "invalid_request"


RGB = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)


def test_color_is_read_at_every_door() -> None:
    with doors.house({"turned": {"backend": "cvtColorTensor", "color": "rgb"}}) as house:
        for color, expected in (("bgr", RGB[:, ::-1]), ("rgb", RGB)):
            asked = doors.Asked("turned", {"data": RGB, "color": to_texts([color], (1,))}, ["result"])
            for name in [name for name in doors.DOORS if name != "python"]:
                answer = doors.DOORS[name](house, asked)
                assert answer.code == "ok", (name, answer.message)
                assert np.array_equal(answer.values["result"], expected), name
        other = asked._replace(inputs={"data": RGB, "color": to_texts(["x"], (1,))})
        assert doors.DOORS["oip"](house, other).code == "invalid_request"

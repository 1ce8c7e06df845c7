"""Parameters and headers of a request reach its backends, through every door that has them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import http2
from kit.clients import IDL, Client, HttpClient, connect
from kit.contract import HAS_GRPC, Asked
from kit.contract import as_rpc as as_rpc_message
from kit.services import LocalServer
from kit.waits import WAIT

from torchpipe_py import pipe, register_backend
from torchpipe_py.wire.parameters import HEADER_BYTES, MOST_HEADERS, MOST_PARAMETER_DEPTH

CONFIG = {"main": {"backend": "Python[Told]"}}
FORWARDED = "x-user-*,X-Tenant"


class Told:
    """Answers with the parameters of the request, as JSON."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for data in items:
            value = data["data"]
            text = value.decode() if isinstance(value, bytes) else np.asarray(value).tolist()
            data["result"] = json.dumps({"data": text, "parameters": data.get("parameters")})


class Refused(Exception):
    pass


Ask = Callable[..., dict[str, Any]]
Headers = Mapping[str, str] | Sequence[tuple[str, str]]


def pairs(headers: Headers) -> list[tuple[str, str]]:
    return list(headers.items()) if isinstance(headers, Mapping) else list(headers)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    register_backend(Told, "Told")
    port = 0 if HAS_GRPC else -1
    with pipe(CONFIG) as run, LocalServer(run, grpc_port=port, forward_headers=FORWARDED) as server:
        yield server


def post(server: LocalServer, path: str, body: Any, headers: Headers) -> Any:
    with HttpClient(server.port) as client:
        text = json.dumps(body).encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in pairs(headers))
        client.send(
            f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n{lines}\r\n".encode()
            + text
        )
        answer = json.loads(client.read().body)
    if "error" in answer:
        raise Refused(answer["error"])
    return answer


def over_infer(server: LocalServer, parameters: dict[str, Any], headers: Headers = ()) -> Any:
    body = {"inputs": {"data": {"b64": "eA=="}}, "parameters": parameters}
    return json.loads(post(server, "/infer", body, headers)["result"])["parameters"]


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "data", "datatype": "BYTES", "shape": [1], "data": ["x"], **more}


def over_oip(server: LocalServer, parameters: dict[str, Any], headers: Headers = ()) -> Any:
    answer = post(server, "/v2/models/test/infer", {"inputs": [tensor()], "parameters": parameters}, headers)
    return json.loads(answer["outputs"][0]["data"][0])["parameters"]


def rpc_of(server: LocalServer, asked: dict[str, Any], headers: Headers = ()) -> Any:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=message("inference.ModelInferResponse").FromString,
        )
        try:
            given = message("inference.ModelInferRequest")(model_name="test", **asked)
            answer = infer(given, timeout=WAIT, metadata=[(name.lower(), text) for name, text in pairs(headers)])
        except grpc.RpcError as error:
            raise Refused(error.details()) from None
    return json.loads(answer.raw_output_contents[0][4:])


KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def as_rpc(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: {KINDS[type(value)]: value} for name, value in parameters.items()}


def rpc_input(**more: Any) -> dict[str, Any]:
    return {"name": "data", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"x"]}, **more}


def over_grpc(server: LocalServer, parameters: dict[str, Any], headers: Headers = ()) -> Any:
    return rpc_of(server, {"inputs": [rpc_input()], "parameters": as_rpc(parameters)}, headers)["parameters"]


DOORS: list[Ask] = [over_infer, over_oip, *([over_grpc] if HAS_GRPC else [])]
every_door = pytest.mark.parametrize("door", DOORS)
NAMES = st.from_regex(r"(?:my|x\.a|ü|user|content|headers)[a-z_]{0,12}", fullmatch=True)
VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(st.characters(codec="utf-8"), max_size=50))  # fmt: skip


@every_door
@given(parameters=st.dictionaries(NAMES, VALUES, max_size=8))
def test_other_parameters_reach_the_backend(server: LocalServer, door: Ask, parameters: dict[str, Any]) -> None:
    assert door(server, parameters) == (parameters or None)


@every_door
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sequence_id", "keeps no state"), ("sequence_start", "keeps no state"),
        ("shared_memory_region", "shared memory is not served"), ("deadline", "did you mean 'deadline_ms'"),
        ("deadlineMs", "did you mean 'deadline_ms'"), ("prioritiy", "did you mean 'priority'"),
        ("Node-Name", "did you mean 'node_name'"), ("sequenceid", "keeps no state"), ("x-user-id", "--forward-headers"),
        ("X-TENANT", "--forward-headers"),
    ],
)  # fmt: skip
def test_refuses_names_that_mean_something_else(server: LocalServer, door: Ask, name: str, said: str) -> None:
    with pytest.raises(Refused) as raised:
        door(server, {name: 1})
    assert said in str(raised.value)


@pytest.mark.parametrize("door", DOORS[1:])
def test_short_timeout_that_is_exceeded_names_its_unit(server: LocalServer, door: Ask) -> None:
    with pytest.raises(Refused, match=r"; timeout is in microseconds: 1 is 0\.001 ms$"):
        door(server, {"timeout": 1})
    with pytest.raises(Refused) as raised:
        door(server, {"deadline_ms": 0.001})
    assert "microseconds" not in str(raised.value)


@pytest.mark.parametrize("name", ["my_priority", "time", "user", "note", "headers", "content_type", "model", "conf"])
@every_door
def test_takes_names_that_are_only_similar(server: LocalServer, door: Ask, name: str) -> None:
    assert door(server, {name: 1}) == {name: 1}


@pytest.mark.parametrize("door", DOORS[:2])
def test_parameters_may_be_objects_within_a_bound(server: LocalServer, door: Ask) -> None:
    given = {"headers": {"a": "b"}, "note": [1, None, {"c": [True]}]}
    assert door(server, given) == given
    for large in (
        {"note": [1] * 5000},
        {"note": ["a"] * 5000},
        {"note": "a" * (2**20 + 1)},
        {"note": [0.125] * 50_000},
    ):
        with pytest.raises(Refused, match="parameters of more than"):
            door(server, large)


def nested(depth: int) -> Any:
    """Lists in each other, so many levels."""
    return [nested(depth - 1)] if depth else 1


def over_thrift(server: LocalServer, parameters: dict[str, Any]) -> Any:
    with Client(server.port) as client:
        try:
            outputs = client.infer({"data": IDL.Value(text="x")}, parameters=json.dumps(parameters))
        except IDL.InferenceError as error:
            raise Refused(error.message) from None
        return json.loads(outputs["result"].text)["parameters"]


@pytest.mark.parametrize("size", [1, 70_000])
@pytest.mark.parametrize("door", [over_infer, over_oip, over_thrift])
def test_json_of_parameters_is_read_alike(server: LocalServer, door: Ask, size: int) -> None:
    more = "a" * size
    for value in (nested(MOST_PARAMETER_DEPTH - 1), "\ud800", {"\ud800": -0.0}, 2**70, "\0"):
        assert door(server, {"note": value, "more": more}) == {"note": value, "more": more}
    for depth in (MOST_PARAMETER_DEPTH + 1, 400):
        with pytest.raises(Refused, match=r"levels of objects and lists|nested too deeply"):
            door(server, {"note": nested(depth), "more": more})


@every_door
def test_headers_that_match_are_parameters(server: LocalServer, door: Ask) -> None:
    headers = {"X-User-Id": "7", "x-tenant": "a b", "X-Other": "no", "Authorization": "no"}
    assert door(server, {"my": 1}, headers) == {"my": 1, "x-user-id": "7", "x-tenant": "a b"}
    assert door(server, {}, {"X-User": "no"}) is None


@every_door
def test_refuses_too_many_headers_to_forward(server: LocalServer, door: Ask) -> None:
    fits = {f"x-user-{index}": "a" for index in range(MOST_HEADERS)}
    assert len(door(server, {}, fits)) == MOST_HEADERS
    for more in ({**fits, "x-user-a": "a"}, {"x-user-a": "a" * HEADER_BYTES}):
        with pytest.raises(Refused, match="headers to forward"):
            door(server, {}, more)


@every_door
def test_values_of_one_header_are_joined(server: LocalServer, door: Ask) -> None:
    assert door(server, {}, [("x-tenant", "a"), ("x-tenant", "b")]) == {"x-tenant": "a, b"}


@pytest.mark.skipif(not HAS_GRPC, reason="no grpc")
@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\0b", b"\x1b[31m", b"\x7f"])
def test_refuses_metadata_with_control_characters(server: LocalServer, value: bytes) -> None:
    """Clients do not send it, but what they have in hand may."""
    asked = as_rpc_message(Asked(b"x")).SerializeToString()
    with connect(server.grpc_port) as sock:
        path = "/inference.GRPCInferenceService/ModelInfer"
        answer = http2.ask(sock, path, asked, "", False, {"x-user-id": value})
    assert b"header 'x-user-id': its value has a control character" in answer.trailers


@every_door
@given(value=st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=300))
def test_headers_of_any_text_are_the_same_through_every_door(server: LocalServer, door: Ask, value: str) -> None:
    text = value.strip()
    assert door(server, {}, {"x-user-id": text}) == {"x-user-id": text}


def test_raw_bodies_have_headers_too(server: LocalServer) -> None:
    with HttpClient(server.port) as client:
        client.send(b"POST /infer HTTP/1.1\r\nHost: a\r\nX-Tenant: t\r\nContent-Length: 1\r\n\r\nx")
        assert json.loads(json.loads(client.read().body)["result"])["parameters"] == {"x-tenant": "t"}


def test_items_have_dicts_of_their_own(server: LocalServer) -> None:
    asked = {"inputs": [tensor(shape=[2], data=["x", "y"])], "parameters": {"my": 1}}
    answer = post(server, "/v2/models/test/infer", asked, {})
    assert [json.loads(text)["parameters"] for text in answer["outputs"][0]["data"]] == [{"my": 1}] * 2


def test_refuses_an_input_of_the_key_beside_parameters(server: LocalServer) -> None:
    with pytest.raises(Refused, match="both an input 'parameters' and"):
        post(server, "/infer", {"inputs": {"data": "x", "parameters": "a"}, "parameters": {"my": 1}}, {})


# -- parameters of inputs and outputs ---------------------------------------------------------------------------------


def data_of(answer: Any) -> Any:
    return json.loads(answer["outputs"][0]["data"][0])["data"]


@given(parameters=st.dictionaries(NAMES, VALUES, max_size=4))
def test_those_of_inputs_and_outputs_are_ignored(server: LocalServer, parameters: dict[str, Any]) -> None:
    asked = {"inputs": [tensor(parameters=parameters)], "outputs": [{"name": "result", "parameters": parameters}]}
    assert data_of(post(server, "/v2/models/test/infer", asked, {})) == "x"
    if HAS_GRPC:
        given = as_rpc(parameters)
        asked = {"inputs": [rpc_input(parameters=given)], "outputs": [{"name": "result", "parameters": given}]}
        assert rpc_of(server, asked) == {"data": "x", "parameters": None}


@pytest.mark.parametrize("place", ["inputs", "outputs"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("shared_memory_region", "shared memory is not served"), ("shared_memory_offset", "shared memory is not served")],
)
def test_shared_memory_is_refused_at_tensors(server: LocalServer, place: str, name: str, said: str) -> None:
    asked: Any = {"inputs": [tensor()], "outputs": [{"name": "result"}]}
    asked[place][0]["parameters"] = {name: "a"}
    with pytest.raises(Refused, match=said):
        post(server, "/v2/models/test/infer", asked, {})
    if HAS_GRPC:
        asked = {"inputs": [rpc_input()], "outputs": [{"name": "result"}]}
        asked[place][0]["parameters"] = as_rpc({name: "a"})
        with pytest.raises(Refused, match=said):
            rpc_of(server, asked)


@pytest.mark.parametrize(("name", "place"), [("binary_data_size", "an input"), ("classification", "an output")])
def test_names_the_place_of_a_misplaced_parameter(server: LocalServer, name: str, place: str) -> None:
    with pytest.raises(Refused, match=f"'{name}' is one of {place}, not of the request"):
        over_oip(server, {name: 1})


# -- bodies of MLServer's codecs: what they make is written out here ---------------------------------------------------

PHOTO = bytes(range(256))
CODECS: dict[str, tuple[dict[str, Any], Any]] = {
    "np": ({"datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.0]}, [[0.5, 1.0]]),
    "str": ({"datatype": "BYTES", "shape": [1, 1], "data": ["größe"]}, "größe"),
    "base64": ({"datatype": "BYTES", "shape": [1, 1], "data": ["Z3LDtsOfZQ=="]}, "größe"),
    "pillow_image": ({"datatype": "BYTES", "shape": [1], "data": ["Z3LDtsOfZQ=="]}, "größe"),
}


@pytest.mark.parametrize("codec", CODECS)
def test_bodies_of_mlservers_codecs(server: LocalServer, codec: str) -> None:
    made, expected = CODECS[codec]
    given = {"name": "data", "parameters": {"content_type": codec}, **made}
    asked = {"id": "a", "inputs": [given], "parameters": {"content_type": codec, "headers": {}}}
    assert data_of(post(server, "/v2/models/test/infer", asked, {})) == expected


def test_text_that_is_not_base64_is_refused(server: LocalServer) -> None:
    given = tensor(parameters={"content_type": "base64"}, data=["***"])
    with pytest.raises(Refused, match="input 'data': b64 is not base64"):
        post(server, "/v2/models/test/infer", {"inputs": [given]}, {})


@pytest.mark.skipif(not HAS_GRPC, reason="no grpc")
def test_base64_over_grpc(server: LocalServer) -> None:
    text = base64.b64encode("größe".encode())
    more = {"parameters": as_rpc({"content_type": "base64"}), "contents": {"bytes_contents": [text]}}
    assert rpc_of(server, {"inputs": [rpc_input(**more)]})["data"] == "größe"


def written(server: LocalServer, path: str, body: Any, indent: int) -> Any:
    """The answer to a long body, which is read in another way than a short one, with indented lists."""
    text = json.dumps(body, indent=indent) + " " * 2**17
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with HttpClient(server.port) as client:
        client.send(head.encode() + text.encode())
        answer = client.read()
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_lists_among_parameters_of_long_bodies_are_lists(server: LocalServer) -> None:
    parameters = {"classes": list(range(200)), "nested": {"numbers": [0.5] * 100}}
    answer = written(server, "/infer", {"inputs": {"data": {"b64": "eA=="}}, "parameters": parameters}, 8)
    assert json.loads(answer["result"])["parameters"] == parameters
    answer = written(server, "/v2/models/test/infer", {"inputs": [tensor()], "parameters": parameters}, 8)
    assert json.loads(answer["outputs"][0]["data"][0])["parameters"] == parameters


def test_shape_may_be_indented_in_long_bodies(server: LocalServer) -> None:
    shape = [1, 3, 8, 8]
    values = {"dtype": "float32", "shape": shape, "data": [0.5] * 192}
    assert written(server, "/infer", {"inputs": {"data": values}}, 32)["result"]
    given = tensor(datatype="FP32", shape=shape, data=[0.5] * 192)
    assert written(server, "/v2/models/test/infer", {"inputs": [given]}, 32)["outputs"]

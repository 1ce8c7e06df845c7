"""HTTP on the port of the service: what is asked and answered, what is refused, and what becomes of the connection."""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
import torch
from conftest import Register
from kit.clients import Client, connect, read_all
from kit.services import ROOT, LocalServer, serving
from kit.waits import WAIT, eventually
from torchpipe_server.methods.oip.http import HEADER_LENGTH
from torchpipe_server.methods.oip.tensors import DATATYPES
from torchpipe_server.options import Options
from torchpipe_server.worker.worker import usual_service

import torchpipe_py
from torchpipe_py import Backend
from torchpipe_py.wire.answers import STATUSES

IMAGE = (ROOT / "configs/demo/images/ring_00.jpg").read_bytes()
JSON = {"Content_Type": "application/json"}
OK = b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def fetch(port: int, path: str, verb: str = "GET", body: Any = b"", **headers: str) -> httpx.Response:
    """The answer, on a connection of its own; a body that is no bytes goes as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.request(verb, url, content=content, headers=fields, timeout=WAIT, trust_env=False)


def ask(port: int, body: Any, path: str = "/infer", verb: str = "POST", **headers: str) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    answer = fetch(port, path, verb, body, **headers)
    assert answer.headers["Content-Type"] == "application/json"
    return answer.status_code, answer.json()


def ask_json(port: int, body: Any, path: str = "/infer") -> tuple[int, Any]:
    return ask(port, body, path, Content_Type="application/json")


BF16 = torch.bfloat16
RESULTS: dict[str, tuple[Any, Any]] = {
    "array": (
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        {"dtype": "float32", "shape": [2, 3], "data": [0, 1, 2, 3, 4, 5]},
    ),
    "arrays": (
        [torch.tensor(0.1, dtype=BF16, requires_grad=True), torch.tensor([True])],
        [{"dtype": "float32", "shape": [], "data": [205 / 2048]}, {"dtype": "bool", "shape": [1], "data": [True]}],
    ),
    "bfloat16": (torch.tensor([1.5, 2**127], dtype=BF16), {"dtype": "float32", "shape": [2], "data": [1.5, 2**127]}),
    "big end first": (np.array([1.5], ">f4"), {"dtype": "float32", "shape": [1], "data": [1.5]}),
    "bytes": (b"\x00\xff", {"b64": "AP8="}),
    "text": ("größe", "größe"),
    "number": (1.5, 1.5),
    "boxes": ([{"box": (1, 2), "score": torch.tensor(0.5)}], [{"box": [1, 2], "score": 0.5}]),
    "float8": (
        torch.zeros(2).to(torch.float8_e5m2),
        "'result' is an array of torch.float8_e5m2, which has no form on the wire",
    ),
    "texts": (np.array(["a"]), "'result' is an array of <U1, which has no form on the wire"),
    "nan": (torch.tensor([float("nan")]), "'result' contains NaN or infinity, which JSON cannot represent"),
    "object": (object(), "'result' holds a object that has no form in JSON: a object in it"),
}


class Values(Backend):
    """The result is what ``RESULTS`` has under the name that ``data`` is, else the data."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            data = item["data"]
            item["result"] = RESULTS[data][0] if isinstance(data, str) and data in RESULTS else data
            item["kind"] = type(data).__name__


@pytest.fixture
def values(register: Register) -> Iterator[LocalServer]:
    with serving(register(Values)) as server:
        yield server


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image/jpeg", "application/octet-stream", "application/x-www-form-urlencoded", ""])
def test_an_image_as_it_is(demo: LocalServer, kind: str):
    status, answer = ask(demo.port, IMAGE, **({"Content_Type": kind} if kind else {}))
    assert (status, answer["label"]) == (200, "ring")
    assert answer["score"] == pytest.approx(1, abs=0.05)
    with Client(demo.port) as client:
        assert client.infer_batch(IMAGE) == ("ring", answer["score"])


def form(*parts: tuple[str, str | None, bytes]) -> tuple[bytes, str]:
    body = b""
    for name, filename, content in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        body += f'--xyz\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return body + b"--xyz--\r\n", "multipart/form-data; boundary=xyz"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.3", 0.3),
        ("-2e1\r\n", -20.0),
        ("7", 7),
        ("true", True),
        ("[1, 1, 3, 3]", [1, 1, 3, 3]),
        (' [[1, 2.5], ["a", false], []]\n', [[1, 2.5], ["a", False], []]),
        ("[]", []),
        *((text, text) for text in ("", "a cat", "007", ".5", "+1", "1_0", "NaN", "-Infinity", "null", "True", '"1"')),
        *((text, text) for text in ("1,1,3,3", "[1, 1", "[a]", "[", "]", '{"a": 1}', " größe ", "٣", "０")),
    ],
)
def test_a_field_of_a_form_is_a_key(values: LocalServer, text: str, value: Any):
    body, kind = form(("y", None, text.encode()), ("outputs", None, b"y,kind"), ("file", "a.jpg", b"x"))
    assert ask(values.port, body, Content_Type=kind) == (200, {"y": value, "kind": "bytes"})


def test_a_box_in_a_form_and_in_json():
    image = cv2.imencode(".png", np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3))[1].tobytes()
    with serving("S[DecodeMat,CropMat]") as server:
        body, kind = form(("data", "a.png", image), ("box", None, b"[1, 1, 3, 4]"))
        cropped = ask(server.port, body, Content_Type=kind)
        assert (cropped[0], cropped[1]["result"]["shape"]) == (200, [3, 2, 3])
        inputs: dict[str, Any] = {"data": {"b64": base64.b64encode(image).decode()}, "box": [1, 1, 3, 4]}
        assert ask_json(server.port, {"inputs": inputs}) == cropped
        inputs["box"] = {"dtype": "int32", "shape": [1, 4], "data": [1, 1, 3, 4]}
        assert ask_json(server.port, {"inputs": inputs}) == cropped
        inputs["box"] = "[1, 1, 3, 4]"
        status, answer = ask_json(server.port, {"inputs": inputs})
        assert (status, answer["code"]) == (400, "invalid_request"), "in JSON a text is a text"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), "form"),
        ((("a", None, b"x"),), "form: 0 files"),
        ((("a", "1", b"x"), ("b", "2", b"x")), "form: 2 files"),
        ((("a", "1", b"x"), ("data", None, b"x")), "a field 'data'; 'data' is the file"),
        ((("a", "1", b"x"), ("", None, b"x")), "a field ''; 'data' is the file"),
        ((("a", "1", b"x"), ("conf", None, b"1"), ("conf", None, b"2")), "'conf' is there twice; a list is one field"),
        ((("a", "1", b"x"), ("outputs", None, b"kind"), ("outputs", None, b"result")), "'outputs' is there twice"),
        ((("a", "1", b"x"), ("b" * 1025, None, b"x")), "inputs: a name of 1025 characters; the limit is 1024"),
        ((("a", "1", b"x"), ("box", None, b"x" * 5000)), "'box' has more than 4096 bytes"),
        ((("a", "1", b"x"), ("box", None, b"[" * 2000 + b"]" * 2000)), "'box'"),  # Python 3.12 reads it
        ((("a", "1", b"x"), ("box", None, b"[" * 33 + b"]" * 33)), "'box': a list of 33 or more dimensions"),
        ((("a", "1", b"x"), ("box", None, b'[{"x": 1}, 2]')), "'box': a list with objects; a list holds texts"),
        ((("a", "1", b"x"), ("box", None, b"[null]")), "'box': a list with null"),
        ((("a", "1", b"x"), ("conf", None, b"1e400")), "'conf': a number that is NaN or beyond float64"),
        ((("a", "1", b"x"), ("conf", None, b"9" * 4000)), "'conf': a number that is NaN"),
        ((("a", "1", b"x"), ("conf", None, b"[NaN]")), "'conf': a number that is NaN"),
        ((("a", "1", b"x"), *((key, None, b"[0" + b",0" * 2000 + b"]") for key in "xyz")), "more than 4096 elements"),
        ((("a", "1", b"x"), ("deadline_ms", None, b"soon")), "a deadline of 'soon'"),
        ((("a", "1", b"x"), ("outputs", None, b"x" * 5000)), "'outputs' has more than 4096 bytes"),
        ((("a", "1", b"x"), ("outputs", None, b"\xff")), "not UTF-8"),
        ((("a", "1", b"x"),) * 40, "form"),
        ("multipart/form-data", "form"),
    ],
)
def test_forms_that_are_wrong(values: LocalServer, parts: Any, said: str):
    body, kind = (b"", parts) if isinstance(parts, str) else form(*parts)
    status, answer = ask(values.port, body, Content_Type=kind)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert said in answer["error"]


@pytest.mark.parametrize("name", RESULTS)
def test_results(values: LocalServer, name: str):
    status, answer = ask_json(values.port, {"inputs": {"data": name}})
    if status == 422:
        assert answer == {"error": RESULTS[name][1], "code": "no_result"}
    else:
        assert (status, answer) == (200, {"result": RESULTS[name][1]})


ARRAY = {"dtype": "uint8", "shape": [1, 2], "data": [1, 2]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *(({"b64": "AP8="}, "bytes"), (3, "int"), (2.5, "float"), (-(2**70), "int"), (True, "bool"), (ARRAY, "Tensor")),
        *((value, "list") for value in ([], [1, 2.5, True, "größe"], [[[1]], [], [["a"], 2]], ["a"], [0] * 4096)),
    ],
)
def test_values(values: LocalServer, value: Any, kind: str):
    asked = {"inputs": {"data": "text", "x": value}, "outputs": ["x"]}
    assert ask_json(values.port, asked) == (200, {"x": value})
    status, answer = ask_json(values.port, {"inputs": {"data": value}, "outputs": ["kind"]})
    assert (status, answer) == (200, {"kind": kind})


def test_texts_are_utf_8_and_half_a_character_is_escaped(values: LocalServer):
    for text, written in (("größe …", "größe …"), ("猫\ud83d\\", r"猫\ud83d\\"), ("\udc80\ud800", r"\udc80\ud800")):
        answer = fetch(values.port, "/infer", "POST", {"inputs": {"data": text}}, **JSON).content
        assert answer == f'{{"result": "{written}"}}\n'.encode()
        assert json.loads(answer) == {"result": text}


WRONG_JSON = {
    "nothing": (b"", "JSON: "),
    "half": (b'{"inputs": ', "JSON: "),
    "not utf-8": (b'"\xff"', "JSON: "),
    "a list": (b"[]", 'no object with "inputs"'),
    "no inputs": (b"{}", 'no object with "inputs"'),
    "deep": (b"[" * 60_000, "JSON: nested too deeply"),
    "deep objects": (b'{"inputs":' * 50_000, "JSON: nested too deeply"),
    "unknown member": (b'{"inputs": {}, "x": 1}', "unknown member 'x'"),
    "no data": (b'{"inputs": {}}', "data"),
    "many inputs": (json.dumps({"inputs": {str(number): {} for number in range(300)}}).encode(), "300 inputs"),
    "null": (b'{"inputs": {"data": null}}', "expected a text"),
    "another name for base64": (b'{"inputs": {"data": {"base64": "aGk="}}}', 'expected a text, a number, {"b64": '),
    "base64": (b'{"inputs": {"data": {"b64": "%%"}}}', "b64 is not base64: Only base64 data is allowed"),
    "base64 in lines": (b'{"inputs": {"data": {"b64": "aGk=\\n"}}}', "b64 is not base64: "),
    "base64 that is cut off": (b'{"inputs": {"data": {"b64": "aGk"}}}', "b64 is not base64: Incorrect padding"),
    "base64 of a URL": (b'{"inputs": {"data": {"b64": "data:image/png;base64,aGk="}}}', "leave out what is before its"),
    "base64 of a number": (b'{"inputs": {"data": {"b64": 3}}}', "b64 is not base64: argument should be"),
    "dtype": (b'{"inputs": {"data": {"dtype": "uint9", "shape": [], "data": []}}}', "uint8"),
    "object dtype": (b'{"inputs": {"data": {"dtype": "O", "shape": [], "data": []}}}', "datatype 'O'"),
    "shape": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [-1], "data": [1]}}}', "no list of sizes"),
    "a shape that none can have": (
        b'{"inputs": {"data": {"dtype": "uint8", "shape": [0, 9223372036854775808], "data": []}}}',
        "'data': the shape is no list of sizes",
    ),
    "sizes": (
        b'{"inputs": {"data": {"dtype": "uint8", "shape": [3], "data": [1]}}}',
        "shape [3] does not fit 1 number",
    ),
    "ragged": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [3], "data": [[1], 2]}}}', "lists of several depths"),
    "too large": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [1], "data": [256]}}}', "256"),
    "words": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [1], "data": ["a"]}}}', "has texts"),
    "fractions": (b'{"inputs": {"data": {"dtype": "int32", "shape": [1], "data": [1.5]}}}', "has fractions, not int32"),
    "nothing for a number": (b'{"inputs": {"data": {"dtype": "float32", "shape": [1], "data": [null]}}}', "null"),
    "negative": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [1], "data": [-1]}}}', "-1..-1, uint8 has 0..255"),
    "too large a float": (
        b'{"inputs": {"data": {"dtype": "float32", "shape": [1], "data": [1e300]}}}',
        "numbers beyond those of float32",
    ),
    "a huge number": (b'{"inputs": {"data": ' + b"9" * 10_000 + b"}}", "JSON: "),
    "dimensions": (json.dumps({"inputs": {"data": {**ARRAY, "shape": [1] * 33}}}).encode(), "33 dimensions"),
    "a list with null": (b'{"inputs": {"data": [1, null]}}', "'data': a list with null; a list holds texts"),
    "a list with bytes": (b'{"inputs": {"data": [{"b64": ""}, 1]}}', "'data': a list with objects; a list holds"),
    "bytes in lists": (b'{"inputs": {"data": [[{"b64": ""}]]}}', "'data': a list with objects; a list holds"),
    "a deep list": (b'{"inputs": {"data": ' + b"[" * 33 + b"]" * 33 + b"}}", "33 or more dimensions; the limit is 32"),
    "a long list": (b'{"inputs": {"data": [0' + b",0" * 4096 + b"]}}", "lists of more than 4096 elements; numbers may"),
    "long lists": (
        json.dumps({"inputs": {key: [[]] * 2000 for key in "abc"}}).encode(),
        "'c': lists of more than 4096 elements",
    ),
    "no number": (b'{"inputs": {"data": NaN}}', "'data': a number that is NaN"),
    "no number in a list": (b'{"inputs": {"data": [1, [-Infinity]]}}', "'data': a number that is NaN"),
    "a number beyond float64": (b'{"inputs": {"data": [1e400]}}', "NaN or beyond float64"),
    "an integer beyond float64": (b'{"inputs": {"data": 1' + b"0" * 400 + b"}}", "NaN or beyond float64"),
    "outputs": (b'{"inputs": {"data": "text"}, "outputs": [3]}', "outputs are names"),
    "node_name": (b'{"inputs": {"data": "text"}, "node_name": 3}', "node_name is not a text"),
    "deadline": (b'{"inputs": {"data": "text"}, "deadline_ms": -1}', "a deadline of '-1'"),
    "a late deadline": (b'{"inputs": {"data": "text"}, "deadline_ms": 1' + b"0" * 400 + b"}", "a deadline of '1000"),
}


@pytest.mark.parametrize("name", WRONG_JSON)
def test_json_that_is_wrong(values: LocalServer, name: str):
    body, said = WRONG_JSON[name]
    status, answer = ask(values.port, body, Content_Type="application/json")
    assert (status, answer["code"]) == (400, "invalid_request")
    assert said in answer["error"]


# -- errors -----------------------------------------------------------------------------------------------------------

MANY_LISTS = b'{"inputs": {"data": {"dtype": "uint8", "shape": [100000], "data": [' + b"[1]," * 99_999 + b"[1]]}}}"


@pytest.mark.parametrize(
    ("body", "path", "fields", "status", "code", "said"),
    [
        (b"x", "/infer", {"Content_Encoding": "gzip"}, 415, "unsupported_encoding", "'gzip': send the body as it is"),
        (b"x", "/infer?" + "a=1&" * 17, {}, 400, "invalid_request", "the query has more than 16 parameters"),
        (b"x", "/infer?node=one", {}, 400, "invalid_request", "unknown parameter 'node'"),
        (b"x", "/infer", {"X_Deadline_Ms": "soon"}, 400, "invalid_request", "a deadline of 'soon'; expected milli"),
        (MANY_LISTS, "/infer", JSON, 413, "too_large", "JSON of more than 65536 lists and objects: write arrays flat"),
        (b'"' + bytes(2**20), "/infer", JSON, 413, "too_large", "--max-text-bytes"),
        (b"", "/infr", {}, 404, "not_found", "no /infr; did you mean '/infer'?"),
        (b"", "/metrics", {}, 404, "not_found", "--http-port opens a port for monitoring"),
    ],
)
def test_errors(values: LocalServer, body: bytes, path: str, fields: Any, status: int, code: str, said: str):
    answer = ask(values.port, body, path, **fields)
    assert (answer[0], answer[1]["code"]) == (status, code)
    assert said in answer[1]["error"]


def test_what_curl_leaves_out_is_told(demo: LocalServer):
    """``curl -d @ring.jpg`` sends no line ends and no NUL bytes; ``--data-binary`` has the same type."""
    form, hint = (
        "application/x-www-form-urlencoded",
        "; curl -d leaves out line ends and NUL bytes: send it with --data-binary",
    )
    stripped = IMAGE.translate(None, b"\r\n\0")
    status, answer = ask(demo.port, stripped, "/infer?outputs=result", Content_Type=form)
    assert (status, answer["code"]) == (400, "decode_error")
    assert answer["error"].endswith(hint)
    for body, kind in ((stripped, "image/jpeg"), (IMAGE[:2000], form), (b"no image", form)):
        status, answer = ask(demo.port, body, Content_Type=kind)
        assert (status, hint in answer["error"]) == (400, False)


def test_methods(demo: LocalServer):
    answer = fetch(demo.port, "/infer")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    answer = fetch(demo.port, "/openapi.json", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 1000


def test_the_document_names_every_path_and_its_method(demo: LocalServer):
    status, document = ask(demo.port, b"", "/openapi.json", "GET")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == torchpipe_py.__version__
    served = set(usual_service(Options(config="demo.toml"), demo.run).routes._paths)
    assert set(document["paths"]) == served - {"/openapi.json"}
    for path, operations in document["paths"].items():
        (method,) = operations
        other = {"get": "DELETE", "post": "GET"}[method]
        for asked, is_allowed in ((method.upper(), True), (other, False)):
            answer = fetch(demo.port, path.format(model="test", version="1"), asked, b"{}" if is_allowed else b"")
            assert (answer.status_code != 405) == is_allowed, (asked, path)


def test_the_document_holds_to_the_code(demo: LocalServer):
    document = ask(demo.port, b"", "/openapi.json", "GET")[1]
    statuses = {str(status) for status in (200, 400, 414, 431, *STATUSES.values())}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            named = re.findall(r"{(\w+)}", path)
            assert [one["name"] for one in operation["parameters"] if one["in"] == "path"] == named
            assert set(operation["responses"]) == statuses, path
    schemas = document["components"]["schemas"]
    assert tuple(schemas["Tensor"]["properties"]["datatype"]["enum"]) == tuple(DATATYPES)
    for reference in set(re.findall(r'"\$ref": "#/([^"]*)"', json.dumps(document))):
        assert isinstance(functools.reduce(dict.__getitem__, reference.split("/"), document), dict)
    (infer,) = document["paths"]["/v2/models/{model}/infer"].values()
    assert HEADER_LENGTH in [one["name"] for one in infer["parameters"]]


def test_statistics_know_the_route(values: LocalServer):
    ask(values.port, b"x")
    ask(values.port, b"x", "/infer?outputs=none")
    ask(values.port, b"x", "/" + "a" * 500)
    counted = {"POST /infer": {"ok": 1, "no_result": 1}, "http": {"not_found": 1}}
    eventually(lambda: values.server.counters.summary()["by_method"] == counted)


# -- connections ------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_their_order(values: LocalServer):
    requests = b""
    for index in range(50):
        body = json.dumps({"inputs": {"data": index}}).encode()
        head = f"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        requests += head.encode() + (b"Connection: close\r\n" if index == 49 else b"") + b"\r\n" + body
    with connect(values.port) as sock:
        sock.sendall(requests + OK)
        answers = read_all(sock).split(b"HTTP/1.1 200 OK")[1:]
    assert [json.loads(answer.rpartition(b"\r\n\r\n")[2])["result"] for answer in answers] == list(range(50))


def test_a_client_that_waits_to_be_asked_for_the_body(values: LocalServer):
    head = b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    with connect(values.port) as sock:
        sock.sendall(OK + head)  # behind a request that may still be in work
        received = b""
        while b" 100 " not in received:
            received += sock.recv(4096)
        assert received.count(b"HTTP/1.1 200 OK") == 1, "not before the answer to the request before it"
        sock.sendall(b"ok")
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 1


# -- the whole service ------------------------------------------------------------------------------------------------

"""HTTP on the port of the service: what is asked and answered, what is refused, and what becomes of the connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kit.clients import Client, ask, fetch
from kit.services import ROOT, LocalServer, serving
from torchpipe_server.options import Options
from torchpipe_server.worker.service import usual_service

import torchpipe_py
from torchpipe_py import Backend, Signature, TensorSpec, pipe, registry
from torchpipe_py.backends.signature import BYTES

IMAGE = (ROOT / "configs/demo/images/ring_00.jpg").read_bytes()
JSON = {"Content_Type": "application/json"}


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def ask_json(port: int, body: Any, path: str = "/infer") -> tuple[int, Any]:
    return ask(port, body, path, **JSON)


class Values(Backend):
    """The result is the data, and ``kind`` its type."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"], item["kind"] = item["data"], type(item["data"]).__name__


@pytest.fixture(scope="module")
def values() -> Iterator[LocalServer]:
    with registry.default.restored() as default:
        default.register_backend(Values, "Values")
        with serving("Values") as server:
            yield server


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image/jpeg", "application/octet-stream", "application/x-www-form-urlencoded", ""])
def test_infer_takes_raw_image(demo: LocalServer, kind: str):
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
def test_form_fields_become_keys(values: LocalServer, text: str, value: Any):
    body, kind = form(("y", None, text.encode()), ("outputs", None, b"y,kind"), ("file", "a.jpg", b"x"))
    assert ask(values.port, body, Content_Type=kind) == (200, {"y": value, "kind": "bytes"})


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((("a", None, b"x"),), "form: no file"),
        ([("a", "1", b"x")] * 257, "form: more than 256 files (max_batch)"),
        ((("a", "1", b"x"), *((str(key), None, b"") for key in range(17))), "form: more than 16 fields beside files"),
        ((("a", "1", b"x"), ("data", None, b"x")), "a field 'data'; 'data' is the file"),
        ((("a", "1", b"x"), *[("conf", None, b"1")] * 2), "'conf' appears twice; send a list as one field"),
        ((("a", "1", b"x"), ("box", None, b"x" * 5000)), "'box' has more than 4096 bytes"),
        ((("a", "1", b"x"), ("box", None, b"[" * 2000 + b"]" * 2000)), "'box'"),  # Python 3.12 reads it
        ((("a", "1", b"x"), *((key, None, b"[0" + b",0" * 2000 + b"]") for key in "xyz")), "more than 4096 elements"),
        ((("a", "1", b"x"), ("outputs", None, b"\xff")), "not UTF-8"),
        ("multipart/form-data", "form"),
    ],
)
def test_refuses_invalid_forms(values: LocalServer, parts: Any, said: str):
    body, kind = (b"", parts) if isinstance(parts, str) else form(*parts)
    status, answer = ask(values.port, body, Content_Type=kind)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert said in answer["error"]


class Weighed(Backend):
    """A model of a picture and a vector."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = sorted(item["data"])

    def signature(self) -> Signature:
        return Signature((TensorSpec("image", (), BYTES, is_image=True), TensorSpec("vec", (None, 1), "float32")))


def test_errors_of_several_inputs_say_what_became_data() -> None:
    image, vec = ("image", "a.jpg", b"x"), ("vec", None, b"[1]")
    as_file = "the file of the form's field 'image' is 'data': send several inputs as JSON"
    as_body = "send several as JSON, with the header Content-Type: application/json"
    text = json.dumps({"inputs": {"image": {"b64": "eA=="}, "vec": [1]}}).encode()
    with registry.default.restored() as default:
        default.register_backend(Weighed, "Weighed")
        with pipe({"main": {"backend": "Weighed"}}) as run, LocalServer(run) as server:
            for (body, kind), said in (
                (form(image, vec), f"both 'data', which is the whole input, and its part 'vec'; {as_file}"),
                (form(image), f"the model has 2 inputs, image, vec; {as_file}"),
                ((text, "text/plain"), f"the model has 2 inputs, image, vec; the body is one value: {as_body}"),
            ):
                status, answer = ask(server.port, body, Content_Type=kind)
                assert (status, answer["error"]) == (400, said)
            answer = ask(server.port, text, Content_Type="application/json")
            assert answer == (200, {"result": ["image", "vec"]})


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


WRONG_JSON = {
    "a list": (b"[]", 'expected an object with "inputs"'),
    "deep": (b"[" * 60_000, "JSON: "),  # Python 3.14 reads so deep
    "unknown member": (b'{"inputs": {}, "x": 1}', "unknown member 'x'"),
    "a batch of many inputs": (
        json.dumps({"inputs": [{str(number): 1 for number in range(17)}] * 250}).encode(),
        "4250 inputs in one call; the limit is 4096",
    ),
    "a long batch": (json.dumps({"inputs": [{"data": 1}] * 257}).encode(), "257 items in one call; the limit is 256"),
    "no data": (b'{"inputs": {}}', "data"),
    "many inputs": (json.dumps({"inputs": {str(number): {} for number in range(600)}}).encode(), "600 inputs"),
    "null": (b'{"inputs": {"data": null}}', "expected a text"),
    "another name for base64": (b'{"inputs": {"data": {"base64": "aGk="}}}', 'expected a text, a number, {"b64": '),
    "base64 that is cut off": (b'{"inputs": {"data": {"b64": "aGk"}}}', "b64 is not base64: Incorrect padding"),
    "a data URI of another coding": (
        b'{"inputs": {"data": {"b64": "data:image/svg+xml,hi"}}}',
        "'data': a data URI that is not base64: 'data:image/svg+xml'",
    ),
    "dtype": (b'{"inputs": {"data": {"dtype": "uint9", "shape": [], "data": []}}}', "uint8"),
    "shape": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [-1], "data": [1]}}}', "not a list of sizes"),
    "a shape that none can have": (
        b'{"inputs": {"data": {"dtype": "uint8", "shape": [0, 9223372036854775808], "data": []}}}',
        "'data': the shape is not a list of sizes",
    ),
    "sizes": (
        b'{"inputs": {"data": {"dtype": "uint8", "shape": [3], "data": [1]}}}',
        "shape [3] does not fit 1 number",
    ),
    "ragged": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [3], "data": [[1], 2]}}}', "lists of several depths"),
    "too large": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [1], "data": [256]}}}', "256"),
    "fractions": (b'{"inputs": {"data": {"dtype": "int32", "shape": [1], "data": [1.5]}}}', "has fractions, not int32"),
    "negative": (b'{"inputs": {"data": {"dtype": "uint8", "shape": [1], "data": [-1]}}}', "-1..-1, uint8 has 0..255"),
    "too large a float": (
        b'{"inputs": {"data": {"dtype": "float32", "shape": [1], "data": [1e300]}}}',
        "numbers beyond those of float32",
    ),
    "a huge number": (b'{"inputs": {"data": ' + b"9" * 10_000 + b"}}", "JSON: "),
    "dimensions": (json.dumps({"inputs": {"data": {**ARRAY, "shape": [1] * 33}}}).encode(), "33 dimensions"),
    "a list with null": (b'{"inputs": {"data": [1, null]}}', "'data': a list with null; a list holds texts"),
    "a deep list": (b'{"inputs": {"data": ' + b"[" * 33 + b"]" * 33 + b"}}", "33 or more dimensions; the limit is 32"),
    "a long list": (b'{"inputs": {"data": [0' + b",0" * 4096 + b"]}}", "lists of more than 4096 elements; numbers may"),
    "long lists": (
        json.dumps({"inputs": {key: [[]] * 2000 for key in "abc"}}).encode(),
        "'c': lists of more than 4096 elements",
    ),
    "no number": (b'{"inputs": {"data": NaN}}', "'data': a number that is NaN"),
    "a number beyond float64": (b'{"inputs": {"data": [1e400]}}', "NaN or beyond float64"),
    "outputs": (b'{"inputs": {"data": "text"}, "outputs": [3]}', "outputs are names"),
    "node_name": (b'{"inputs": {"data": "text"}, "node_name": 3}', "node_name is not a text"),
    "deadline": (b'{"inputs": {"data": "text"}, "deadline_ms": -1}', "a deadline of '-1'"),
    "a late deadline": (b'{"inputs": {"data": "text"}, "deadline_ms": 1' + b"0" * 400 + b"}", "a deadline of '1000"),
}


@pytest.mark.parametrize("name", WRONG_JSON)
def test_refuses_invalid_json(values: LocalServer, name: str):
    body, said = WRONG_JSON[name]
    status, answer = ask_json(values.port, body)
    assert (status, answer["code"]) == (400, "invalid_request")
    assert said in answer["error"]


# -- errors -----------------------------------------------------------------------------------------------------------

LONG_TEXT = b'{"inputs": {"data": "' + b"a" * (2**20 + 1) + b'"}}'
MANY_LISTS = b'{"inputs": {"data": {"dtype": "uint8", "shape": [100000], "data": [' + b"[1]," * 99_999 + b"[1]]}}}"


@pytest.mark.parametrize(
    ("body", "path", "fields", "status", "code", "said"),
    [
        (b"x", "/infer", {"Content_Encoding": "br"}, 415, "unsupported_encoding", "'br'; expected gzip, deflate"),
        (b"x", "/infer?" + "a=1&" * 17, {}, 400, "invalid_request", "the query has more than 16 parameters"),
        (b"x", "/infer?node=one", {}, 400, "invalid_request", "unknown parameter 'node'"),
        (b"x", "/infer", {"X_Deadline_Ms": "soon"}, 400, "invalid_request", "a deadline of 'soon'; expected milli"),
        (b'{"inputs": {"data": 1}, "parameters": []}', "/infer", JSON, 400, "invalid_request", "is not an object"),
        (MANY_LISTS, "/infer", JSON, 413, "too_large", "JSON of more than 65536 lists and objects: write arrays flat"),
        (LONG_TEXT, "/infer", JSON, 413, "too_large", "text of 1048577 characters or more; the limit is 1048576"),
        (b"", "/infr", {}, 404, "not_found", "no /infr; did you mean '/infer'?"),
        (b"", "/infer/det", {}, 404, "not_found", "no /infer/det; a model is named in the query: /infer?node_name=det"),
        (IMAGE, "/infer", JSON, 400, "invalid_request", "a picture, not JSON: send it without Content-Type"),
        (IMAGE, "/v2/models/test/infer", {}, 400, "invalid_request", "a picture, not JSON: POST /infer takes one"),
        (b"\xff", "/v2/models/test/infer", {}, 400, "invalid_request", "JSON: 'utf-8' codec"),
        (b"", "/metrics", {}, 404, "not_found", "--http-port opens a port for monitoring"),
    ],
)
def test_errors(values: LocalServer, body: bytes, path: str, fields: Any, status: int, code: str, said: str):
    answer = ask(values.port, body, path, **fields)
    assert (answer[0], answer[1]["code"]) == (status, code)
    assert said in answer[1]["error"]


def test_openapi_names_every_path_and_method(demo: LocalServer):
    status, document = ask(demo.port, b"", "/openapi.json", "GET")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"] == torchpipe_py.__version__
    served = set(usual_service(Options(config="demo.toml"), demo.run).routes._paths)
    left_out = {path for path in served if "sharedmemory" in path} | {"/openapi.json", "/", "/try", "/docs"}
    assert set(document["paths"]) == served - left_out, "the page is for people, and no memory is shared"
    for path, operations in document["paths"].items():
        (method,) = operations
        other = {"get": "DELETE", "post": "GET"}[method]
        for asked, is_allowed in ((method.upper(), True), (other, False)):
            answer = fetch(demo.port, path.format(model="test", version="1"), asked, b"{}" if is_allowed else b"")
            assert (answer.status != 405) == is_allowed, (asked, path)
        if path.endswith("/infer"):
            parameters = [
                document["components"]["parameters"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each
                for each in operations["post"]["parameters"]
            ]
            names = {each["name"] for each in parameters if each["in"] != "path"}
            assert {"X-Deadline-Ms", "X-Priority", "X-Request-Id", "X-Timing", "timing", "traceparent"} <= names, path

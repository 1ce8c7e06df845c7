"""The Open Inference Protocol on the port of the service, without a client of Triton's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Register
from kit.backends import Gate
from kit.services import ROOT, LocalServer, serving, steered
from kit.steered import Steered
from test_service_http import ask

from torchpipe_py import Overloaded, pipe
from torchpipe_py.errors import UnknownNode
from torchpipe_py.methods.oip.core import UNKNOWN_MODEL

IMAGES = [(ROOT / f"configs/demo/images/{name}_00.jpg").read_bytes() for name in ("ring", "checker", "circle")]
DEMO = "/v2/models/demo"
TEST = "/v2/models/test/infer"


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def get(server: LocalServer, path: str) -> tuple[int, Any]:
    return ask(server.port, b"", path, "GET")


def texts(*data: str, **members: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [len(data)], "data": list(data)}], **members}


def images(count: int) -> list[dict[str, Any]]:
    """The input ``data`` of so many images, as JSON."""
    data = [{"b64": base64.b64encode(image).decode()} for image in IMAGES[:count]]
    return [{"name": "data", "datatype": "BYTES", "shape": [count], "data": data}]


def ask_binary(port: int, path: str, *elements: bytes, **members: Any) -> tuple[int, Any]:
    binary = b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    given = {"name": "data", "datatype": "BYTES", "shape": [len(elements), 1]}
    head = json.dumps({"inputs": [{**given, "parameters": {"binary_data_size": len(binary)}}], **members}).encode()
    return ask(port, head + binary, path, Inference_Header_Content_Length=str(len(head)))


# -- what is known --------------------------------------------------------------------------------------------------


def test_metadata(demo: LocalServer):
    status, said = get(demo, "/v2")
    assert (status, said["name"]) == (200, "torchpipe_py")
    assert "binary_tensor_data" in said["extensions"]
    expected = {
        "name": "demo",
        "versions": ["1"],
        "platform": "torchpipe_py",
        "inputs": [{"name": "data", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "score", "datatype": "FP32", "shape": [-1]},
        ],
    }
    assert get(demo, DEMO) == get(demo, f"{DEMO}/versions/1") == (200, expected)
    status, said = get(demo, f"{DEMO}/config")
    assert (status, said["max_batch_size"]) == (200, 256)
    assert said["input"] == [{"name": "data", "data_type": "TYPE_STRING", "dims": [1], "format": "FORMAT_NONE"}]
    index = [{"name": "demo", "version": "1", "state": "READY", "reason": ""}]
    assert ask(demo.port, b"{}", "/v2/repository/index") == (200, index)


@pytest.mark.parametrize("backend", ["OnnxTensor", "S[OnnxTensor,Identity]"])
def test_metadata_of_roots(classifier: str, backend: str):
    model = {"backend": backend, "model": classifier}
    config = {"model": model, "other": {"backend": "Identity"}}
    with pipe(config) as run, LocalServer(run, config="folder/a b.toml") as server:
        path = "/v2/models/a%20b"
        assert get(server, path)[1]["inputs"] == [], "of several roots, none is meant"
        status, said = get(server, f"{path}?node_name=model")
        assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
        assert said["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 5]}]
        status, said = get(server, f"{path}?node_name=modle")
        assert (status, said["code"]) == (404, "unknown_node")


@pytest.mark.parametrize(
    ("verb", "path", "said"),
    [
        ("GET", "/v2/models/dem", f"{UNKNOWN_MODEL}: 'dem' is not found; did you mean 'demo'?"),
        ("POST", "/v2/models/x/infer", f"{UNKNOWN_MODEL}: 'x' is not found; valid: demo"),
        ("GET", f"{DEMO}/versions/2", f"{UNKNOWN_MODEL}: 'demo' version '2' is not found; valid: 1"),
        ("POST", f"{DEMO}/versions/latest/infer", f"{UNKNOWN_MODEL}: 'demo' version 'latest' is not found; valid: 1"),
        ("GET", "/v2/health/liv", "no /v2/health/liv; did you mean '/v2/health/live'?"),
        ("GET", f"{DEMO}/redy", f"no {DEMO}/redy; did you mean '/v2/models/{{model}}/ready'?"),
        ("GET", "/v2/model/demo", "no /v2/model/demo; did you mean '/v2/models/…'?"),
        ("GET", "/nothing", "no /nothing; valid: /, /infer, /openapi.json, /try, /v2, /v2/…"),
    ],
)
def test_what_there_is_not(demo: LocalServer, verb: str, path: str, said: str):
    assert ask(demo.port, b"", path, verb) == (404, {"error": said, "code": "not_found"})


# -- inference ------------------------------------------------------------------------------------------------------


def test_images(demo: LocalServer):
    requests = [{"data": image} for image in IMAGES]
    demo.run(requests)
    status, answer = ask_binary(demo.port, f"{DEMO}/infer", *IMAGES, id="7")
    assert (status, answer["id"], answer["model_name"], answer["model_version"]) == (200, "7", "demo", "1")
    label, score = answer["outputs"]
    assert label == {
        "name": "label",
        "datatype": "BYTES",
        "shape": [3],
        "data": [request["result"][0] for request in requests],
    }
    assert score["data"] == pytest.approx([request["result"][1] for request in requests], abs=1e-5)
    assert ask_binary(demo.port, f"{DEMO}/versions/1/infer", IMAGES[0])[1]["outputs"][0]["data"] == ["ring"]


def test_a_batch_is_one_of_the_pipe(register: Register):
    gate = Gate(most=4)
    config = {"node": {"backend": register(gate.backend), "batching_timeout": 60_000}}
    with gate, serving(config) as server:
        gate.open()
        status, answer = ask(server.port, texts("a", "b", "c", "d"), TEST)
    assert (status, answer["outputs"][0]["data"]) == (200, ["a", "b", "c", "d"])
    assert gate.batches == [[b"a", b"b", b"c", b"d"]]


def test_tensors(classifier: str):
    with serving({"backend": "OnnxTensor", "model": classifier, "max": 4}) as server:
        images = torch.arange(3 * 3 * 4 * 4, dtype=torch.float32).reshape(3, 3, 4, 4) / 100
        expected = [server.run({"data": image[None]})["result"] for image in images]
        given = {"name": "x", "datatype": "FP32", "shape": [3, 3, 4, 4], "data": images.tolist()}
        status, answer = ask(server.port, {"inputs": [given]}, TEST)
        (output,) = answer["outputs"]
        assert (status, output["name"], output["datatype"], output["shape"]) == (200, "y", "FP32", [3, 5])
        assert output["data"] == pytest.approx(torch.cat(expected).ravel().tolist())
        status, answer = ask(server.port, {"inputs": [{**given, "name": "y"}]}, TEST)
        assert (status, answer["error"]) == (400, "unknown input 'y'; valid: x")
        status, answer = ask(server.port, {"inputs": [{**given, "shape": [9, 16]}]}, TEST)
        assert (status, answer["code"]) == (400, "invalid_request")
        assert answer["error"].startswith("item [0] of 9: input 'x' takes 1x3x?x?")


def test_errors_of_items_and_figures():
    """Of an item that failed the number is told; a request that failed counts as a failure."""
    with steered({"node": {"backend": "Steered", "most": 4}}, max_batch=8) as server:
        Steered.values = {"later": Overloaded("later", 70)}
        status, answer = ask(server.port, texts("a", "raise"), TEST)
        assert (status, answer["code"]) == (500, "backend_error")
        assert answer["error"].startswith("item [1] of 2: ")
        status, answer = ask(server.port, texts("a", "error later", "none"), TEST)
        expected = {"error": "item [1] of 3: later", "code": "overloaded", "retry_after_ms": 70}
        assert (status, answer) == (429, expected)
        status, answer = ask(server.port, texts(*"abcdefghi"), TEST)
        assert (status, answer["error"]) == (400, "input 'data': a batch of 9; the limit is 8 (max_batch)")
        assert ask(server.port, texts("x"), TEST, Content_Encoding="gzip")[0] == 415
        assert ask(server.port, texts("a", "b"), TEST)[0] == 200
        for path in ("/v2/models/test/stats", "/v2/models/stats", "/v2/models/test/versions/1/stats"):
            status, said = get(server, path)
            (stats,) = said["model_stats"]
            assert (status, stats["name"], stats["inference_count"]) == (200, "test", 2)
            found = {kind: count["count"] for kind, count in stats["inference_stats"].items()}
            assert (found["success"], found["fail"]) == (1, 2)
            assert found["compute_input"] == found["compute_infer"] == found["compute_output"]


@pytest.mark.parametrize(
    ("path", "wish", "code"),
    [
        *[(path, "", "overloaded") for path in ("/infer", TEST)],
        *[(path, '"deadline_ms": 5, ', "overloaded") for path in ("/infer", f"{TEST} parameters")],
        *[(path, '"priority": 1, ', "invalid_request") for path in ("/infer", f"{TEST} parameters")],
        *[(path, r'"\u0070riority": 1, ', "invalid_request") for path in ("/infer", f"{TEST} parameters")],
        *[(path, '"node_name": "other", ', "unknown_node") for path in ("/infer", f"{TEST} parameters")],
        (f"{TEST} parameters", '"timeout": 5000, ', "overloaded"),
        ("/infer?priority=1", "", "invalid_request"),
        ("/infer?priority=1", '"priority": 0, ', "overloaded"),
        ("/infer?outputs=,", '"outputs": ["result"], ', "overloaded"),
        ("/infer", '"priority": "often", ', "invalid_request"),
        ("/infer", '"priority": [], ', "invalid_request"),
        ("/infer", "NaN, ", "invalid_request"),
    ],
)
def test_while_requests_are_refused_json_is_judged_before_its_inputs_are_read(path, wish, code, monkeypatch):
    """These inputs are wrong, which is the answer to whoever is let in."""

    def check_delay(run: pipe, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        if node_name == "other":
            raise UnknownNode("other")
        if not priority:
            raise Overloaded("too many", 7)

    with steered({"node": {"backend": "Steered"}}) as server:
        monkeypatch.setattr(pipe, "is_refusing", True)
        monkeypatch.setattr(pipe, "check_delay", check_delay)
        path, *is_oip = path.split()
        wishes = f'"parameters": {{{wish.rstrip(", ")}}}, ' if is_oip else wish
        inputs = (
            '{"data": {"b64": "%"}}' if path.startswith("/infer") else '[{"name": "", "datatype": "", "shape": []}]'
        )
        body = f'{{{wishes}"inputs": {inputs}}}'.encode()
        assert ask(server.port, body, path, Content_Type="application/json")[1]["code"] == code


def test_a_dead_instance_is_not_ready(demo: LocalServer, monkeypatch: pytest.MonkeyPatch):
    dead = {"nodes": {"node": {"alive": 0}}}
    monkeypatch.setattr(pipe, "stats", lambda self: dead)
    assert get(demo, "/v2/health/ready") == (503, {"ready": False})

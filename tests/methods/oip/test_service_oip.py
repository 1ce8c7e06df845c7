"""The Open Inference Protocol on the port of the service, without a client of Triton's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.clients import IDL, Client, HttpClient, ask, fetch, get_json
from kit.monitored import Monitored
from kit.services import LIGHT, LocalServer, serving, steered
from kit.steered import FILE, Steered
from torchpipe_server.options import Options
from torchpipe_server.worker.service import usual_service

from torchpipe_py import Overloaded, parse_folder, pipe
from torchpipe_py.errors import UnknownNode
from torchpipe_py.methods.oip.core import UNKNOWN_MODEL

DEMO = "/v2/models/demo"
TEST = "/v2/models/test/infer"


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


def texts(*data: str, **members: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [len(data)], "data": list(data)}], **members}


# -- what is known --------------------------------------------------------------------------------------------------


def test_describes_server_and_model(demo: LocalServer):
    status, said = get_json(demo.port, "/v2")
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
    assert get_json(demo.port, DEMO) == get_json(demo.port, f"{DEMO}/versions/1") == (200, expected)
    status, said = get_json(demo.port, f"{DEMO}/config")
    assert (status, said["max_batch_size"]) == (200, 256)
    assert said["input"] == [{"name": "data", "data_type": "TYPE_STRING", "dims": [1], "format": "FORMAT_NONE"}]
    index = [{"name": "demo", "version": "1", "state": "READY", "reason": ""}]
    assert ask(demo.port, b"{}", "/v2/repository/index") == (200, index)


@pytest.mark.parametrize("backend", ["OnnxTensor", "S[OnnxTensor,Identity]"])
def test_metadata_is_of_the_named_root(classifier: str, backend: str):
    model = {"backend": backend, "model": classifier}
    config = {"model": model, "other": {"backend": "Identity"}}
    with pipe(config) as run, LocalServer(run, config="folder/a b.toml") as server:
        path = "/v2/models/a%20b"
        assert get_json(server.port, path)[1]["inputs"] == [], "of several roots, none is meant"
        status, said = get_json(server.port, f"{path}?node_name=model")
        assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
        assert said["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 5]}]
        status, said = get_json(server.port, f"{path}?node_name=modle")
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
        ("GET", "/nothing", "no /nothing; valid: /, /docs, /infer, /openapi.json, /try, /v2, /v2/…"),
    ],
)
def test_unknown_models_and_methods(demo: LocalServer, verb: str, path: str, said: str):
    code = "unknown_node" if said.startswith(UNKNOWN_MODEL) else "not_found"
    assert ask(demo.port, b"", path, verb) == (404, {"error": said, "code": code})


# -- inference ------------------------------------------------------------------------------------------------------


def test_request_batch_is_one_batch_of_the_pipe():
    with steered({"node": {"backend": "Steered", "most": 4, "batching_timeout": 60_000}}) as server:
        status, answer = ask(server.port, texts("a", "b", "c", "d"), TEST)
        assert (status, answer["outputs"][0]["data"]) == (200, ["a", "b", "c", "d"])
        assert server.run.stats()["nodes"]["node"]["batch_sizes"] == {4: 1}


def test_infers_tensors_of_a_model(classifier: str):
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
        assert ask(server.port, texts("x"), TEST, Content_Encoding="br")[0] == 415
        assert ask(server.port, texts("a", "b"), TEST)[0] == 200
        for path in ("/v2/models/test/stats", "/v2/models/stats", "/v2/models/test/versions/1/stats"):
            status, said = get_json(server.port, path)
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
def test_refuses_by_head_of_json_before_reading_inputs(path, wish, code, monkeypatch):
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


def test_model_with_dead_instance_is_not_ready(demo: LocalServer, monkeypatch: pytest.MonkeyPatch):
    dead = {"nodes": {"node": {"alive": 0}}}
    monkeypatch.setattr(pipe, "stats", lambda self: dead)
    assert get_json(demo.port, "/v2/health/ready") == (503, {"ready": False})


# -- models by name and version: each root of a file, the files of a folder -------------------------------------------


IDENTITY = '[node]\nbackend = "Identity"\n'
INDEX = "/v2/repository/index"
UNDECLARED = {"declared": False, "content_type": "application/json"}


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def infer(server: Any, path: str, text: str = "a", **members: Any) -> Any:
    """The model's name, version and result, or the error."""
    status, said = ask(server.port, texts(text, **members), f"/v2/models/{path}/infer")
    return (said["model_name"], said["model_version"], said["outputs"][0]["data"]) if status == 200 else said["error"]


def test_each_root_is_a_model() -> None:
    with serving({"one": {"backend": "Identity"}, "two": {"backend": "Identity"}}) as server:
        assert [model["name"] for model in ask(server.port, b"", "/v2/repository/index")[1]] == ["one", "two"]
        assert infer(server, "two") == ("two", "1", ["a"])
        assert infer(server, "test", parameters={"node_name": "one"}) == ("test", "1", ["a"]), "the file's name"
        assert "model 'two' is the root 'two', not 'one'" in infer(server, "two", parameters={"node_name": "one"})
        shown = {"datatype": "BYTES", "parameters": UNDECLARED}
        said = get_json(server.port, "/v2/models/two")[1]
        assert said["inputs"] == [{"name": "data", "shape": [-1, 1], **shown}]
        assert said["outputs"] == [{"name": "result", "shape": [-1], **shown}]
        assert get_json(server.port, "/v2/models/test")[1]["inputs"] == [], "a request has to name a root"
        (stats,) = get_json(server.port, "/v2/models/two/stats")[1]["model_stats"]
        assert (stats["inference_count"], stats["inference_stats"]["queue"]["count"]) == (1, 1)
        (stats,) = get_json(server.port, "/v2/models/one/stats")[1]["model_stats"]
        assert (stats["inference_count"], stats["inference_stats"]["queue"]["count"]) == (0, 1)


def test_versions_of_a_folder(tmp_path: Path) -> None:
    folder = parse_folder(written(tmp_path, a=IDENTITY, b__2=IDENTITY, b__10=IDENTITY))
    with serving(folder) as server:
        assert infer(server, "b") == ("b", "10", ["a"]), "the largest is the default"
        assert infer(server, "b/versions/2") == ("b", "2", ["a"])
        assert infer(server, "b/versions/3") == f"{UNKNOWN_MODEL}: 'b' version '3' is not found; valid: 10, 2"
        assert infer(server, "b%2F2") == f"{UNKNOWN_MODEL}: 'b/2' is not found; did you mean 'b'?"
        assert get_json(server.port, "/v2/models/b/ready") == (200, {"name": "b", "ready": True})
        request = IDL.InferRequest(uuid="", inputs={"data": IDL.Value(text="c")}, node_name="b/2")
        with Client(server.port) as client:
            assert client.call("infer", request=request).outputs["result"].text == "c"
        assert server.run.stats()["nodes"]["b/2/node"]["requests"] == 2
        status, said = ask(server.port, b"x", "/v2/repository/models/a/unload")
        assert (status, "loaded and unloaded on --http-port" in said["error"]) == (404, True)


def served(name: str) -> dict[str, str]:
    return {"name": name, "version": "1", "state": "READY", "reason": ""}


def index(service: Monitored, body: bytes = b"") -> list[dict[str, str]]:
    """What the service's own port lists, which without a wish is what the monitoring port does."""
    found: list[dict[str, str]] = ask(service.port, body, INDEX)[1]
    assert body or ask(service.http_port, b"", INDEX)[1] == found
    return found


def test_data_port_loads_models_with_repository_control(tmp_path: Path) -> None:
    folder = written(tmp_path, a=IDENTITY, b=IDENTITY)
    unloaded = {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    with Monitored("--import", FILE, "--repository-control", config=str(folder), env={"PYTHONPATH": LIGHT}) as service:
        service.wait_started()
        assert index(service) == [served("a"), served("b")]
        path = "/v2/repository/models/b"
        assert ask(service.port, b"{}", f"{path}/unload")[0] == 200
        assert infer(service, "b") == "model 'b' is not loaded"
        assert index(service) == [served("a"), unloaded]
        written(tmp_path, b="[node")
        status, said = ask(service.port, b"{}", f"{path}/load")
        assert (status, said["error"].startswith("failed to load 'b': ")) == (400, True)
        assert "b.toml: not valid TOML" in said["error"]
        for parameters, problem in (
            ({"config": "{}"}, "failed to load 'b': no parameter 'config'; change its TOML file"),
            ([], "the request: Expected `object`, got `array` - at `$.parameters`"),
        ):
            status, said = ask(service.port, json.dumps({"parameters": parameters}).encode(), f"{path}/load")
            assert (status, said["error"]) == (400, problem)
        assert infer(service, "a") == ("a", "1", ["a"]), "everything stays as it is"
        (_, failed) = index(service)
        assert (failed["state"], failed["reason"].startswith("b.toml: not valid TOML")) == ("UNAVAILABLE", True)
        assert index(service, b'{"ready": true}') == [served("a")]
        assert ask(service.port, b'{"ready": 1}', INDEX)[0] == ask(service.port, b"[" * 10_000, INDEX)[0] == 400
        for port in (service.port, service.http_port):
            for fields in ({"Origin": "http://other.example"}, {"Host": "other.example"}):
                assert fetch(port, f"{path}/load", "POST", **fields).status == 403
            assert fetch(port, INDEX, "POST", Origin="http://other.example").status == 200


def test_a_list_that_the_supervisor_cannot_make_is_an_error(tmp_path: Path) -> None:
    """The models that are served alone would look as if all of the folder were."""

    def control(action: str, name: str, done: Any) -> None:
        done(503, {"error": "its storage hangs", "code": "unavailable", "retry_after_ms": 1000})

    with pipe(parse_folder(written(tmp_path, a=IDENTITY))) as run:
        options = Options(str(tmp_path))
        with LocalServer(run, make_served=lambda loop: usual_service(options, run, control)) as server:
            for _ in range(2):
                status, said = ask(server.port, b"", INDEX)
                assert (status, said["error"], said["code"]) == (503, "its storage hangs", "unavailable")
            assert ask(server.port, b'{"ready": true}', INDEX) == (200, [served("a")]), "which reads no folder"


def test_answers_repository_requests_after_supervisor_died(tmp_path: Path) -> None:
    arguments = "--import", FILE, "--repository-control", "--drain-seconds", "1000"
    folder, env = str(written(tmp_path, a=IDENTITY)), {"PYTHONPATH": LIGHT}
    with Monitored(*arguments, config=folder, env=env) as service, HttpClient(service.wait_started().port) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.read().status == 200, "a worker has the connection"
        os.kill(service.pid, signal.SIGSTOP)
        for path in (INDEX, INDEX, "/v2/repository/models/a/load"):
            client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        os.kill(service.pid, signal.SIGKILL)
        for _ in range(2):
            assert json.loads(client.read().body) == [served("a")], "what this worker serves"
        assert json.loads(client.read().body)["error"] == "the supervisor is gone"


@pytest.mark.parametrize("start", ["ffd8ffe0", "89504e470d0a1a0a", "524946460000000057454250", "0000001c66747970"])
def test_picture_is_refused_with_the_path_that_takes_it(start: str) -> None:
    config = {name: {"backend": "Identity"} for name in ("det", "other")}
    with pipe(config) as run, LocalServer(run) as server:
        for size in (100, 2**17):
            body = bytes.fromhex(start).ljust(size, b"\0")
            status, answer = ask(server.port, body, "/v2/models/det/infer")
            path = "/infer?node_name=det"
            assert (status, answer["error"]) == (
                400,
                f"the body is a picture, not JSON: POST {path} takes one as it is",
            )
            assert ask(server.port, body, path)[0] == 200

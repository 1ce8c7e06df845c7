"""Models by name and version over HTTP and Thrift: each root of a file, the files of a folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from kit.clients import IDL, Client, HttpClient
from kit.monitored import Monitored
from kit.services import LIGHT, serving
from kit.steered import FILE
from test_service_http import ask
from test_service_oip import get, texts

from torchpipe_py import parse_folder
from torchpipe_py.methods.oip.core import UNKNOWN_MODEL

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


def test_each_root_of_a_file_is_a_model() -> None:
    with serving({"one": {"backend": "Identity"}, "two": {"backend": "Identity"}}) as server:
        assert [model["name"] for model in ask(server.port, b"", "/v2/repository/index")[1]] == ["one", "two"]
        assert infer(server, "two") == ("two", "1", ["a"])
        assert infer(server, "test", parameters={"node_name": "one"}) == ("test", "1", ["a"]), "the file's name"
        assert "model 'two' is the root 'two', not 'one'" in infer(server, "two", parameters={"node_name": "one"})
        shown = {"datatype": "BYTES", "parameters": UNDECLARED}
        said = get(server, "/v2/models/two")[1]
        assert said["inputs"] == [{"name": "data", "shape": [-1, 1], **shown}]
        assert said["outputs"] == [{"name": "result", "shape": [-1], **shown}]
        assert get(server, "/v2/models/test")[1]["inputs"] == [], "a request has to name a root"
        (stats,) = get(server, "/v2/models/two/stats")[1]["model_stats"]
        assert (stats["inference_count"], stats["inference_stats"]["queue"]["count"]) == (1, 1)
        (stats,) = get(server, "/v2/models/one/stats")[1]["model_stats"]
        assert (stats["inference_count"], stats["inference_stats"]["queue"]["count"]) == (0, 1)


def test_versions_of_a_folder(tmp_path: Path) -> None:
    folder = parse_folder(written(tmp_path, a=IDENTITY, b__2=IDENTITY, b__10=IDENTITY))
    with serving(folder) as server:
        assert infer(server, "b") == ("b", "10", ["a"]), "the largest is the default"
        assert infer(server, "b/versions/2") == ("b", "2", ["a"])
        assert infer(server, "b/versions/3") == f"{UNKNOWN_MODEL}: 'b' version '3' is not found; valid: 10, 2"
        assert infer(server, "b%2F2") == f"{UNKNOWN_MODEL}: 'b/2' is not found; did you mean 'b'?"
        assert get(server, "/v2/models/b/ready") == (200, {"name": "b", "ready": True})
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
    assert body or ask(int(service.address.split(":")[2].strip("/")), b"", INDEX)[1] == found
    return found


def test_the_data_port_loads_models_if_the_operator_wants_it(tmp_path: Path) -> None:
    folder = written(tmp_path, a=IDENTITY, b=IDENTITY)
    unloaded = {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    with Monitored("--import", FILE, "--repository-control", config=str(folder), env={"PYTHONPATH": LIGHT}) as service:
        service.wait_started()
        assert index(service) == [served("a"), served("b")]
        path = "/v2/repository/models/b"
        assert ask(service.port, b"{}", f"{path}/unload")[0] == 200
        assert infer(service, "b") == f"{UNKNOWN_MODEL}: 'b' is not found; valid: a"
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
        assert ask(service.port, b"{}", f"{path}/load", Origin="http://other.example")[0] == 404


def test_requests_that_need_the_supervisor_are_answered_once_it_is_gone(tmp_path: Path) -> None:
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

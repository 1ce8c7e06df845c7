"""A folder of models: what cannot be served is listed with its reason, the others are served; loads and unloads."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from kit.clients import IDL, Client, ask
from kit.monitored import Monitored
from kit.services import LIGHT, Process, reserved_port, turn
from kit.steered import FILE
from kit.virtual_loop import VirtualLoop
from kit.waits import WAIT, eventually
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor import repository
from torchpipe_server.supervisor.generation import RETRY_MS
from torchpipe_server.supervisor.messages import Committed, Control, Prepared
from torchpipe_server.supervisor.model_change import COMMIT_SECONDS, ModelChange
from torchpipe_server.supervisor.repository import LIST_SECONDS, Repository
from torchpipe_server.supervisor.supervisor import Supervisor
from torchpipe_server.worker import models
from torchpipe_server.worker.worker import Worker

from torchpipe_py.plan import folder as plan_folder
from torchpipe_py.plan.folder import NO_MODEL, Folder, list_models
from torchpipe_py.wire.answers import failure

INDEX = "/v2/repository/index"
GOOD = '[node]\nbackend = "Identity"\n'


def steered(**keys: object) -> str:
    return '[node]\nbackend = "Steered"\n' + "".join(f'{key} = "{value}"\n' for key, value in keys.items())


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def folder_service(folder: Path, *args: str) -> Monitored:
    return Monitored("--import", FILE, *args, config=str(folder), env={"PYTHONPATH": LIGHT})


def infer(port: int, name: str, text: str = "a") -> Any:
    """The result, or the error."""
    data = {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    status, said = ask(port, data, f"/v2/models/{quote(name, safe='')}/infer")
    return said["outputs"][0]["data"][0] if status == 200 else said["error"]


def index(port: int) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["state"], each["reason"]) for each in ask(port, b"", INDEX)[1]}


def control(service: Monitored, action: str, name: str) -> tuple[int, Any]:
    return ask(service.http_port, b"", f"/v2/repository/models/{quote(name, safe='')}/{action}")


BAD = {
    "text": "[node",
    "backend": '[node]\nbackend = "Nonesuch"\n',
    "missing": '[node]\nbackend = "OnnxTensor"\nmodel = "/srv/secret/nowhere.onnx"\n',
    "setup": steered(mark="fail"),
    "nodes": "[node]\nnext = 'other'\n",
}
SHARED_NULL = '[node]\nbackend = "OnnxTensor"\nmodel = "a\\u0000b"\nshared = true\n'


def test_serves_models_that_can_be_set_up(tmp_path: Path) -> None:
    folder = written(tmp_path / "models", **BAD, **{"yolo-v8.1": GOOD, "my model": GOOD})
    with folder_service(folder, "--workers", "2") as service:
        service.wait_started()
        for port in (service.port, service.http_port):
            listed = index(port)
            assert {name for name, (state, _) in listed.items() if state == "READY"} == {"yolo-v8.1", "my model"}
            assert all(listed[name][0] == "UNAVAILABLE" and listed[name][1] for name in BAD)
            assert not any(str(tmp_path) in reason or "/srv" in reason for _, reason in listed.values())
            assert "no such model" in listed["setup"][1]
        assert infer(service.port, "yolo-v8.1") == infer(service.port, "my model") == "a"
        assert infer(service.port, "setup").startswith("model 'setup' could not be loaded: ")
        written(folder, setup=steered())
        assert control(service, "load", "setup")[0] == 200
        assert index(service.port)["setup"] == ("READY", "")
        assert infer(service.port, "setup") == "a"


@pytest.mark.parametrize("name", BAD)
def test_starts_with_every_model_or_not_at_all_with_exit_on_error(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, good=GOOD, bad=BAD[name])
    with folder_service(folder, "--exit-on-error") as service:
        assert service.wait() == 1
        assert "bad" in service.stderr.splitlines()[-1]


@pytest.mark.parametrize(("files", "text"), [({}, NO_MODEL), ({"a": "[n"}, "not valid TOML"), (BAD, "Nonesuch")])
def test_does_not_start_with_nothing_to_serve(tmp_path: Path, files: dict[str, str], text: str) -> None:
    with Process("--import", FILE, config=str(written(tmp_path, **files)), env={"PYTHONPATH": LIGHT}) as process:
        assert process.wait() == 1
        assert text in process.stderr


def test_an_empty_folder_is_served_with_repository_control(tmp_path: Path) -> None:
    with folder_service(tmp_path, "--repository-control") as service:
        service.wait_started()
        workers = service.pids()
        assert index(service.port) == {}
        assert ask(service.port, b"", "/v2/health/ready", "GET") == (200, {"ready": True})
        assert ask(service.port, b"", "/v2/models/stats", "GET") == (200, {"model_stats": []})
        assert infer(service.port, "a").startswith("Request for unknown model: 'a' is not found")
        assert "no model is loaded; a file that was added" in ask(service.port, {"data": "a"})[1]["error"]
        written(tmp_path, a=GOOD)
        assert control(service, "load", "a")[0] == 200
        assert infer(service.port, "a") == "a"
        assert control(service, "unload", "a")[0] == 200
        assert index(service.port) == {"a": ("UNAVAILABLE", "unloaded")}
        assert control(service, "load", "a")[0] == 200
        assert (infer(service.port, "a"), service.pids()) == ("a", workers)


def test_the_last_model_stays_without_repository_control(tmp_path: Path) -> None:
    with folder_service(written(tmp_path, a=GOOD)) as service:
        service.wait_started()
        status, said = control(service, "unload", "a")
        assert (status, "without --repository-control" in said["error"]) == (400, True)
        assert infer(service.port, "a") == "a"


def test_a_load_sets_up_that_model_only(tmp_path: Path) -> None:
    folder, state = written(tmp_path / "models", a=steered(), b=steered()), tmp_path / "state"
    state.mkdir()
    with folder_service(folder, "--workers", "2") as service, ThreadPoolExecutor(2) as pool:
        workers = service.wait_started().pids()
        (state / "hold").touch()
        written(folder, b=steered(mark="!", folder=state))
        loading = pool.submit(control, service, "load", "b")
        eventually((state / "entered").exists, "nothing is set up")
        assert [infer(service.port, name) for name in ("a", "b")] == ["a", "a"], "requests go on meanwhile"
        written(folder, a=steered(mark="not read"))
        (state / "hold").unlink()
        assert loading.result()[0] == 200
        assert [infer(service.port, name) for name in ("a", "b")] == ["a", "a!"]
        assert service.pids() == workers
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: len(service.pids()) == 2 and workers[0] not in service.pids())
        assert {infer(service.port, "b") for _ in range(8)} == {"a!"}, "the next worker serves the same models"
        assert service.stats["reloads"] == {"ok": 1, "failed": 0}


def test_a_load_that_was_given_up_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    """A worker is still setting up the one when the other begins, and ends while that is set up."""
    folder, states = written(tmp_path / "models", a=GOOD), [tmp_path / "first", tmp_path / "next"]
    for state in states:
        state.mkdir()
        (state / "hold").touch()
    with folder_service(folder, "--workers", "2") as service, ThreadPoolExecutor(2) as pool:
        killed, stays = service.wait_started().pids()
        written(folder, b=steered(mark="b", folder=states[0]), c=steered(mark="c", folder=states[1]))
        given_up = pool.submit(control, service, "load", "b")
        eventually((states[0] / "entered").exists)
        os.kill(killed, signal.SIGKILL)
        assert "a worker ended while it set the model up" in given_up.result()[1]["error"]
        eventually(lambda: len(service.pids()) == 2)
        loading = pool.submit(control, service, "load", "c")
        eventually((states[1] / "entered").exists)
        (states[0] / "hold").unlink()
        given_up_why = "model 'b' could not be loaded: a worker ended while it set the model up"
        assert {infer(service.port, "b") for _ in range(8)} == {given_up_why}, "also the worker that started since"
        (states[1] / "hold").unlink()
        assert loading.result()[0] == 200
        assert {infer(service.port, "c") for _ in range(8)} == {"ac"}
        assert infer(service.port, "b") == given_up_why
        assert stays in service.pids()


def test_serves_what_an_engine_process_can_set_up(tmp_path: Path) -> None:
    shared = "shared = true\n"
    files = {"good": steered() + shared, "plan": BAD["missing"] + shared, "setup": BAD["setup"] + shared, "own": GOOD}
    with folder_service(written(tmp_path, **files), "--workers", "2") as service:
        service.wait_started()
        ready = {name for name, (state, _) in index(service.port).items() if state == "READY"}
        assert ready == {"good", "own"}
        assert infer(service.port, "good") == infer(service.port, "own") == "a"
        engines, workers = service.pids("engines"), service.pids()
        assert control(service, "unload", "own")[0] == control(service, "load", "own")[0] == 200
        assert (service.pids("engines"), service.pids()) == (engines, workers)
        written(tmp_path, setup=steered() + shared)
        assert control(service, "load", "setup")[0] == 200
        assert infer(service.port, "setup") == infer(service.port, "good") == "a"
        assert not set(service.pids()) & set(workers), "a model with shared nodes is a reload"


@pytest.mark.parametrize("wrong", ["missing", "setup"])
def test_serves_the_others_if_the_engine_process_can_run_nothing(tmp_path: Path, wrong: str) -> None:
    shared = "shared = true\n"
    with folder_service(written(tmp_path, bad=BAD[wrong] + shared, own=GOOD), "--workers", "2") as service:
        service.wait_started()
        assert [state for state, _ in index(service.port).values()] == ["READY", "UNAVAILABLE"]
        assert infer(service.port, "own") == "a"
        assert "could not be loaded" in infer(service.port, "bad")
        written(tmp_path, bad=steered() + shared)
        assert control(service, "load", "bad")[0] == 200
        assert infer(service.port, "bad") == infer(service.port, "own") == "a"


def test_a_request_in_work_is_answered_by_a_model_that_is_unloaded(tmp_path: Path) -> None:
    folder, state = written(tmp_path / "models", a=GOOD, b=steered(folder=tmp_path / "state")), tmp_path / "state"
    state.mkdir()
    with folder_service(folder) as service, ThreadPoolExecutor(1) as pool:
        service.wait_started()
        asked = pool.submit(infer, service.port, "b", "block")
        eventually((state / "entered").exists, "nothing blocks")
        assert control(service, "unload", "b")[0] == 200
        assert infer(service.port, "b") == "model 'b' is not loaded"
        (state / "open").touch()
        assert asked.result() == "block"


def test_statistics_are_totals_of_all_workers_across_loads_and_reloads(tmp_path: Path) -> None:
    def ask_all(times: int) -> None:
        for _ in range(times):
            assert infer(service.port, "a") == "a"  # each on a connection of its own, so by any worker

    def totals() -> list[tuple[int, ...]]:
        found = []
        for _ in range(4):
            (stats,) = ask(service.port, b"", "/v2/models/a/stats", "GET")[1]["model_stats"]
            each = stats["inference_stats"]
            found.append((stats["inference_count"], each["success"]["count"], each["queue"]["count"]))
            found[-1] += (stats["execution_count"],)
        return found

    with folder_service(written(tmp_path, a=GOOD, b=GOOD), "--workers", "2") as service:
        workers = service.wait_started().pids()
        ask_all(10)
        assert totals() == [(10,) * 4] * 4
        assert control(service, "load", "a")[0] == 200
        ask_all(10)
        assert totals() == [(20,) * 4] * 4
        service.signal(signal.SIGHUP)
        eventually(lambda: not set(workers) & set(service.pids()) and not set(workers) & set(service.workers))
        ask_all(10)
        assert totals() == [(30,) * 4] * 4


@pytest.mark.parametrize("text", [*BAD.values(), SHARED_NULL], ids=[*BAD, "null in a shared node"])
def test_a_load_that_fails_changes_nothing(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path / "models", a=GOOD, b=GOOD)
    with folder_service(folder, "--workers", "2") as service:
        workers = service.wait_started().pids()
        written(folder, b=text)
        status, said = control(service, "load", "b")
        assert (status, said["code"], str(tmp_path) in said["error"]) == (400, "config", False)
        assert (infer(service.port, "b"), service.pids()) == ("a", workers)
        service.signal(signal.SIGHUP)
        eventually(lambda: service.stats["reloads"] == {"ok": 0, "failed": 2}, "a mistake must not take a model away")
        assert (infer(service.port, "b"), service.pids()) == ("a", workers)
        assert 'torchpipe_reloads_total{outcome="failed"} 2.0' in service.get("metrics")[1]
        assert "torchpipe_reload_successful 0.0" in service.get("metrics")[1]


def of_every_protocol(service: Monitored, grpc_port: int, name: str) -> dict[str, tuple[str, str]]:
    """Code and message of a request to a model that is not served, over each protocol."""
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    messages = pytest.importorskip("torchpipe_py.methods.rpc.messages")
    given = {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    of_model, body = f"/v2/models/{name}", json.dumps({"inputs": {"data": "a"}, "node_name": name}).encode()
    asked = {
        "infer": ask(service.port, b"abc", f"/infer?node_name={name}"),
        "infer, JSON": ask(service.port, body, "/infer", Content_Type="application/json"),
        "infer, version": ask(service.port, b"abc", f"/infer?node_name={name}/1"),
        "OIP": ask(service.port, given, f"{of_model}/infer"),
        "OIP, version": ask(service.port, given, f"{of_model}/versions/1/infer"),
        "metadata": ask(service.port, b"", of_model, "GET"),
        "statistics": ask(service.port, b"", f"{of_model}/stats", "GET"),
    }
    assert {status for status, _ in asked.values()} == {503}
    found = {door: (said["code"], said["error"]) for door, (_, said) in asked.items()}
    assert ask(service.port, b"", f"{of_model}/ready", "GET") == (503, {"name": name, "ready": False})
    for door, text in (("Thrift", name), ("Thrift, version", f"{name}/1")):
        with Client(service.port) as client, pytest.raises(IDL.InferenceError) as raised:
            client.infer({"data": IDL.Value(text="a")}, node_name=text)
        found[door] = raised.value.code, raised.value.message
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as on:
        tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"a"]}}
        infer = messages.message("inference.ModelInferRequest")(model_name=name, inputs=[tensor]).SerializeToString()
        path = "/inference.GRPCInferenceService/"
        with pytest.raises(grpc.RpcError) as failed:
            on.unary_unary(f"{path}ModelInfer")(infer, timeout=WAIT, wait_for_ready=True)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        found["gRPC"] = dict(failed.value.trailing_metadata())["error-code"], failed.value.details()
        ready = messages.message("inference.ModelReadyRequest")(name=name).SerializeToString()
        assert on.unary_unary(f"{path}ModelReady")(ready, timeout=WAIT) == b"", "not ready"
    return found


def test_every_protocol_says_why_a_known_model_is_not_served(tmp_path: Path) -> None:
    folder = written(tmp_path / "models", good=GOOD, gone=GOOD, text=BAD["text"], setup=BAD["setup"])
    with reserved_port() as port, folder_service(folder, "--grpc-port", str(port), "--workers", "2") as service:
        service.wait_started()
        written(folder, late=BAD["missing"])
        assert control(service, "load", "late")[0] == 400
        assert control(service, "unload", "gone")[0] == 200
        reasons = index(service.port)
        for name in ("text", "setup", "late", "gone"):
            reason = f"could not be loaded: {reasons[name][1]}" if name != "gone" else "is not loaded"
            found = of_every_protocol(service, port, name)
            for door, (code, said) in found.items():
                named = f"{name}/1" if door.endswith("version") else name
                assert (code, said) == ("unavailable", f"model {named!r} {reason}"), door
            assert str(tmp_path) not in str(found)
        assert ask(service.port, b"abc", "/infer?node_name=other")[1]["code"] == "unknown_node"
        workers = service.pids()
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: len(service.pids()) == 2 and workers[0] not in service.pids())
        for name in ("late", "gone"):
            said = {ask(service.port, b"abc", f"/infer?node_name={name}")[1]["code"] for _ in range(8)}
            assert said == {"unavailable"}, "the next worker knows it, too"
        written(folder, late=GOOD)
        assert control(service, "load", "late")[0] == control(service, "load", "gone")[0] == 200
        assert infer(service.port, "late") == infer(service.port, "gone") == "a"


def test_a_file_that_was_added_is_listed_and_its_model_has_to_be_loaded(tmp_path: Path) -> None:
    hint = "; a file that was added to the folder has to be loaded"
    with folder_service(written(tmp_path, a=GOOD)) as service:
        service.wait_started()
        written(tmp_path, new=GOOD)
        assert index(service.port) == {
            "a": ("READY", ""), "new": ("UNAVAILABLE", "added to the folder, not loaded yet"),
        }  # fmt: skip
        for path, method in (("infer", "POST"), ("", "GET"), ("ready", "GET"), ("versions/1/ready", "GET")):
            status, said = ask(service.port, b"{}", f"/v2/models/new/{path}".rstrip("/"), method)
            assert (status, said["code"], said["error"].endswith(hint)) == (404, "unknown_node", True), said
        status, said = ask(service.port, b"abc", "/infer?node_name=new")
        assert (status, said["code"], said["error"].endswith(hint)) == (404, "unknown_node", True), said
        with Client(service.port) as client, pytest.raises(IDL.InferenceError) as raised:
            client.infer({"data": IDL.Value(text="a")}, node_name="new")
        assert raised.value.message.endswith(hint)
        assert control(service, "load", "new")[0] == 200
        assert infer(service.port, "new") == "a"


def test_a_load_that_fails_has_one_code_over_http_and_grpc(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    messages = pytest.importorskip("torchpipe_py.methods.rpc.messages")
    folder = written(tmp_path / "models", a=GOOD, b="[node")
    with reserved_port() as port, folder_service(folder, "--repository-control", "--grpc-port", str(port)) as service:
        service.wait_started()
        status, said = ask(service.port, b"", "/v2/repository/models/b/load")
        assert (status, said["code"]) == (400, "config")
        load = messages.message("inference.RepositoryModelLoadRequest")(model_name="b").SerializeToString()
        path = "/inference.GRPCInferenceService/RepositoryModelLoad"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as on, pytest.raises(grpc.RpcError) as raised:
            on.unary_unary(path)(load, timeout=WAIT, wait_for_ready=True)
        assert (raised.value.code().name, raised.value.details()) == ("INVALID_ARGUMENT", said["error"])
        assert dict(raised.value.trailing_metadata())["error-code"] == "config"
        methods = "POST /v2/repository/models/{model}/load", "gRPC RepositoryModelLoad"
        counted = [f'torchpipe_requests_total{{method="{method}",model="",outcome="config",' for method in methods]
        eventually(lambda: all(line in service.get("metrics")[1] for line in counted))


def test_a_list_over_grpc_of_a_folder_that_vanished_is_an_error(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    folder, path = written(tmp_path / "models", a=GOOD), "/inference.GRPCInferenceService/RepositoryIndex"
    with reserved_port() as port, folder_service(folder, "--grpc-port", str(port)) as service:
        service.wait_started()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as on:
            assert b"READY" in on.unary_unary(path)(b"", timeout=WAIT, wait_for_ready=True)
            folder.rename(tmp_path / "gone")
            with pytest.raises(grpc.RpcError) as raised:
                on.unary_unary(path)(b"", timeout=WAIT)
        assert raised.value.code().name == "UNAVAILABLE"
        assert "the folder of models cannot be listed" in raised.value.details()


def test_a_model_of_two_files_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, **{"a": "[b]\n[c]\n", "a.b": GOOD})
    with folder_service(folder) as service:
        service.wait_started()
        assert index(service.port)["a.b"] == ("UNAVAILABLE", "model 'a.b' is a root of 'a' and of 'a.b': rename one")
        assert infer(service.port, "a.c") == "a"
        workers = service.pids()
        status, said = control(service, "load", "a.b")
        assert (status, "is a root of 'a' and of 'a.b': rename one" in said["error"]) == (400, True)
        eventually(lambda: service.stats["reloads"] == {"ok": 0, "failed": 1})
        assert control(service, "load", "a")[0] == 200
        assert (infer(service.port, "a.c"), service.pids()) == ("a", workers), "none had begun to serve it"


# -- files that are read on other threads --------------------------------------------------------------------------


class Listing:
    """Lists a folder whose storage answers with each `set` of ``answers``."""

    def __init__(self) -> None:
        self.answers, self.count = SimpleQueue[None](), 0

    def list(self, folder: str) -> Any:
        self.count += 1
        self.answers.get(timeout=WAIT)
        return {"a": {"1": "a.toml"}, f"new{self.count}": {"1": "new.toml"}}, {}


def test_a_folder_that_does_not_answer_is_listed_by_one_thread_for_all_that_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, listing, fleet = new_loop(is_fast=False), Listing(), mock.Mock(problems={})
    fleet.generation.tables = Folder(source="models")
    monkeypatch.setattr(repository, "list_models", listing.list)
    subject, rows = Repository(loop, fleet, True), dict[int, list[str]]()
    for number in range(4):
        subject.index(lambda listed, number=number: rows.update({number: [row["name"] for row in listed]}))
        eventually(lambda: turn(loop) or listing.count == 1)
    assert rows == {}
    listing.answers.put(None)
    eventually(lambda: turn(loop) or rows)
    assert rows == {0: ["a", "new1"]}
    listing.answers.put(None)
    eventually(lambda: turn(loop) or len(rows) == 4)
    assert (rows[3], listing.count) == (["a", "new2"], 2), "they asked after the first listing had begun"
    loop.close()


class Listings:
    """A ``Repository`` whose storage answers when a test says so: ``answers`` has a function for each list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.answers, fleet = VirtualLoop(), list[Any](), mock.Mock(problems={})
        fleet.generation.tables = Folder(source="models")
        monkeypatch.setattr(repository, "call_on_thread", lambda loop, name, work, done: self.answers.append(done))
        loop: Any = self.loop
        self.subject, self.outcomes = Repository(loop, fleet, True), list[Any]()

    def ask(self) -> None:
        self.subject.index(lambda outcome: self.outcomes.append(outcome))


HANGS = f"the folder of models is not listed after {LIST_SECONDS:g} s: its storage hangs"


def test_a_folder_that_hangs_is_an_error_for_all_that_ask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listings = Listings(monkeypatch)
    listings.ask()
    listings.loop.advance(0.5 * LIST_SECONDS)
    listings.ask()
    assert listings.outcomes == []
    listings.loop.advance(0.5 * LIST_SECONDS)
    assert list(map(str, listings.outcomes)) == [HANGS] * 2
    for _ in range(100):
        listings.ask()
    assert list(map(str, listings.outcomes)) == [HANGS] * 102, "at once: nothing is kept for the next list"
    assert failure(listings.outcomes[-1])[:2] == (
        503, {"error": HANGS, "code": "unavailable", "retry_after_ms": RETRY_MS},
    )  # fmt: skip
    assert caplog.messages == [HANGS], "once"
    assert len(listings.answers) == 1, "one thread waits for the storage"
    listings.answers[0](({"a": {"1": "a.toml"}}, {}))
    assert len(listings.outcomes) == 102
    listings.ask()
    listings.answers[1](({"a": {"1": "a.toml"}}, {}))
    assert [row["name"] for row in listings.outcomes[-1]] == ["a"], "the storage answers again"
    assert listings.loop.waiting == 0


def test_those_that_ask_for_a_list_are_answered_when_the_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = Listings(monkeypatch)
    listings.ask()
    listings.ask()
    listings.subject.stop()
    listings.ask()
    listings.answers[0](({}, {}))
    listings.ask()
    listings.loop.advance(LIST_SECONDS)
    assert (list(map(str, listings.outcomes)), len(listings.answers)) == (["the service is stopping"] * 4, 1)


@pytest.mark.parametrize("when", ["listed", "late"])
def test_one_that_cannot_be_answered_costs_no_other_its_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    listings = Listings(monkeypatch)
    listings.ask()
    listings.subject.index(mock.Mock(side_effect=ValueError("a client that is gone")))
    listings.ask()
    if when == "late":
        listings.loop.advance(LIST_SECONDS)
    else:
        listings.answers[0](({}, {}))
        listings.answers[1](({}, {}))
    assert [str(outcome) for outcome in listings.outcomes] == [HANGS if when == "late" else "[]"] * 2
    assert caplog.messages[-1] == "internal error while a list was answered"


def test_the_list_of_a_folder_that_vanished_is_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "models", a=GOOD)
    with folder_service(folder) as service:
        service.wait_started()
        folder.rename(tmp_path / "gone")
        for port in (service.port, service.http_port):
            status, said = ask(port, b"", INDEX)
            assert (status, said["code"]) == (503, "unavailable"), port
            assert (
                said["error"]
                == "the folder of models cannot be listed: models: cannot be read: No such file or directory"
            )
        assert infer(service.port, "a") == "a"
        (tmp_path / "gone").rename(folder)
        assert index(service.port) == index(service.http_port) == {"a": ("READY", "")}


def test_a_load_lists_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lists = written(tmp_path, a=GOOD), list[str]()
    fleet, read = mock.Mock(), list_models
    fleet.generation.tables = Folder(source=str(folder))

    def count(path: str) -> Any:
        lists.append(path)
        return read(path)

    for module in (repository, plan_folder):
        monkeypatch.setattr(module, "list_models", count)
    Repository(mock.Mock(), fleet, True).control("load", "a", mock.Mock())
    load = fleet.change.call_args.args[0]
    assert (list(load()), lists) == (["a/1"], [str(folder)])


@pytest.mark.parametrize("action", ["statistics", "index", "load"])
def test_a_client_gets_an_answer_whatever_fails_in_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    folder, failing, child = Folder(source=str(tmp_path)), mock.Mock(side_effect=ValueError("a defect")), mock.Mock()
    options = Options(str(tmp_path), repository_control=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor: Any = Supervisor(listener, options, folder, lambda: folder, None)
    supervisor._fleet.has_begun = True
    for owner, name in ((supervisor, "_figures"), (supervisor.repository, "_rows"), (Folder, "having")):
        monkeypatch.setattr(owner, name, failing)
    supervisor._receive(child, Control(3, action, "a"))
    eventually(lambda: turn(supervisor.loop) or child.send.called)
    ((type_,), outcome) = child.send.call_args
    assert (type_, outcome["id"], outcome["status"]) == ("outcome", 3, 400 if action == "load" else 500)
    assert "a defect" in outcome["body"]["error"]
    supervisor.loop.close()


def test_one_that_cannot_be_answered_costs_no_other_the_statistics(caplog: pytest.LogCaptureFixture) -> None:
    answers = list[Any]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(listener, Options("test"), {"global": {}}, dict, None)
    supervisor.ask(mock.Mock(side_effect=ValueError("it is gone")))
    supervisor.ask(answers.append)
    eventually(lambda: turn(supervisor.loop) or answers)
    assert (answers[0]["state"], caplog.messages) == ("starting", ["internal error while figures were answered"])
    supervisor.loop.close()


# -- all workers or none --------------------------------------------------------------------------------------------


class Changing:
    """A change of model ``a``; ``ends`` has its outcomes."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.children = [mock.Mock(graph="before") for _ in range(2)]
        self.ends: list[tuple[str, bool]] = []
        loop: Any = self.loop
        children: list[Any] = self.children
        self.change = ModelChange(loop, Folder(), "a", children, lambda *end: self.ends.append(end), 2.0)
        self.number = self.children[0].ask_change.call_args.args[1]

    def prepare_all(self) -> None:
        for child in self.children:
            self.change.receive(child, Prepared(self.number, "", "graph"))


@pytest.fixture
def changing() -> Changing:
    return Changing()


def test_workers_serve_a_model_once_all_have_it(changing: Changing) -> None:
    change, (one, other), number = changing.change, changing.children, changing.number
    change.receive(one, Prepared(number, "", "graph"))
    change.receive(one, Prepared(number, "", "graph"))
    change.receive(other, Prepared(number - 1, "of a change that was given up", ""))
    one.ask_change.assert_called_once()
    change.receive(other, Prepared(number, "", "graph"))
    assert [each.ask_change.call_args.args for each in (one, other)] == [("commit", number)] * 2
    change.receive(one, Committed(number, ""))
    assert changing.ends == []
    change.lost(other)
    assert (changing.ends, one.graph) == ([("", False)], "graph")
    assert changing.loop.waiting == 0, "a time limit keeps no change that is over"
    change.cancel("too late")
    changing.loop.advance(2 * COMMIT_SECONDS)
    assert (len(changing.ends), one.send.call_count) == (1, 0)


@pytest.mark.parametrize("how", ["problem", "death", "cancel", "time"])
def test_no_worker_serves_a_model_that_one_cannot_set_up(changing: Changing, how: str) -> None:
    change, (one, other), number = changing.change, changing.children, changing.number
    change.receive(one, Prepared(number, "", "graph"))
    if how == "problem":
        change.receive(other, Prepared(number, "no memory", ""))
    elif how == "death":
        change.lost(other)
    elif how == "time":
        changing.loop.advance(2.0)
        assert changing.ends == [("it is not set up after 2 s (--start-seconds)", False)]
    else:
        change.cancel("the service is stopping")
    ((problem, may_differ),) = changing.ends
    assert (bool(problem), may_differ, changing.loop.waiting) == (True, False, 0)
    one.send.assert_called_once_with("abort")
    change.receive(other, Prepared(number, "", "graph"))
    change.lost(one)
    assert (len(changing.ends), one.graph) == (1, "before")


@pytest.mark.parametrize("how", ["problem", "cancel", "time"])
def test_workers_may_differ_if_one_does_not_serve_what_it_has_set_up(changing: Changing, how: str) -> None:
    change, (one, other), number = changing.change, changing.children, changing.number
    changing.loop.advance(1.9)
    changing.prepare_all()
    change.receive(one, Committed(number, ""))
    changing.loop.advance(COMMIT_SECONDS - 1)
    assert changing.ends == []
    if how == "problem":
        change.receive(other, Committed(number, "RuntimeError"))
    elif how == "cancel":
        change.cancel("interrupted by a reload")
    else:
        changing.loop.advance(1)
    ((problem, may_differ),) = changing.ends
    assert (bool(problem), may_differ, one.graph, changing.loop.waiting) == (True, True, "before", 0)
    change.receive(other, Committed(number, ""))
    changing.loop.advance(COMMIT_SECONDS)
    assert len(changing.ends) == 1


@pytest.mark.parametrize("type_", ["prepared", "committed"])
def test_a_worker_answers_whatever_a_change_raises(type_: str) -> None:
    raising = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    worker: Any = mock.Mock(_models=mock.Mock(prepare=raising, commit=raising))
    if type_ == "prepared":
        Worker._prepare(worker, 7, "a", base64.b64encode(pickle.dumps(Folder())).decode())
    else:
        Worker._commit(worker, 7)
    ((message,), _) = worker._supervisor.send.call_args
    assert (message["type"], message["change"]) == (type_, 7)
    assert message["problem"] == "RuntimeError: can't start new thread"


def test_closes_a_pipe_even_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its worker would not answer, and the pipe would keep its memory."""
    run: Any = mock.Mock()
    refuses = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(models, "threading", mock.Mock(Thread=mock.Mock(return_value=mock.Mock(start=refuses))))
    models._close_aside([run])
    run.close.assert_called_once()

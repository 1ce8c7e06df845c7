"""Triton's own client, unchanged, against the Open Inference Protocol."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from kit.services import ROOT, LocalServer, serving
from kit.waits import WAIT
from test_docs import blocks

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
utils = pytest.importorskip("tritonclient.utils")
NAMES = ["ring", "star", "checker"]
triton_grpc: Any = importlib.import_module("tritonclient.grpc") if find_spec("grpc") else None


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml", grpc_port=-1 if triton_grpc is None else 0) as server:
        yield server


@pytest.fixture
def client(demo: LocalServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{demo.port}", concurrency=4) as client:
        yield client


def labels(result: Any) -> list[str]:
    return [label.decode() for label in result.as_numpy("label")]


def test_tritonclient_reads_metadata(client: Any):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("demo")
    assert client.is_model_ready("demo", "1")
    assert not client.is_model_ready("demo", "2")
    assert not client.is_model_ready("dem")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("demo")["inputs"] == [{"name": "data", "datatype": "BYTES", "shape": [-1, 1]}]
    assert client.get_model_config("demo")["max_batch_size"] == 256
    assert [model["name"] for model in client.get_model_repository_index()] == ["demo"]
    for name in ("demo", ""):
        assert client.get_inference_statistics(name)["model_stats"][0]["name"] == "demo"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("size", [3, 3_000, 300_000])
def test_compression_of_tritonclient(size: int, is_binary: bool, coding: str) -> None:
    codings = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    array = (np.arange(size, dtype=np.float32) % 250 / 250)[None]
    data = triton.InferInput("data", array.shape, "FP32").set_data_from_numpy(array, is_binary)
    output = triton.InferRequestedOutput("result", is_binary)
    with serving("Identity") as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        for given in ({}, codings):
            result = client.infer("test", [data], outputs=[output], **given)
            assert result.as_numpy("result").tobytes() == array.tobytes()
        result = client.async_infer("test", [data], outputs=[output], **codings).get_result()
        assert result.as_numpy("result").tobytes() == array.tobytes()


def test_example_of_the_docs(demo: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    page = blocks(ROOT / "docs/protocols.md")
    code, printed = next(pair for pair in itertools.pairwise(page) if "import tritonclient" in pair[0].text)
    monkeypatch.chdir(ROOT)
    exec(code.text.replace("8888", str(demo.port)), {})
    assert capsys.readouterr().out == printed.text


@pytest.mark.skipif(triton_grpc is None, reason="tritonclient[grpc] is not installed")
def test_tritonclient_over_grpc(demo: LocalServer) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{demo.grpc_port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("demo")
        assert not client.is_model_ready("dem")
        assert "statistics" in client.get_server_metadata().extensions
        assert [tensor.name for tensor in client.get_model_metadata("demo").outputs] == ["label", "score"]
        config = client.get_model_config("demo", as_json=True)["config"]
        assert (config["max_batch_size"], config["input"][0]["data_type"]) == (256, "TYPE_STRING")
        client.unregister_system_shared_memory()
        images = [(ROOT / f"configs/demo/images/{name}_00.jpg").read_bytes() for name in NAMES]
        data = triton_grpc.InferInput("data", [3], "BYTES").set_data_from_numpy(np.array(images, object))
        for outputs, coding in ((None, None), ([triton_grpc.InferRequestedOutput("label")], "gzip")):
            result = client.infer("demo", [data], request_id="7", outputs=outputs, compression_algorithm=coding)
            assert (result.get_response().id, labels(result)) == ("7", NAMES)
        (stats,) = client.get_inference_statistics("demo").model_stats
        assert stats.inference_stats.success.count >= 2
        assert [model.name for model in client.get_model_repository_index().models] == ["demo"]
        answers: SimpleQueue[Any] = SimpleQueue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        for name in ("demo", "dem"):
            client.async_stream_infer(name, [data], request_id=name)
        (first, none), (nothing, error) = answers.get(timeout=WAIT), answers.get(timeout=WAIT)
        client.stop_stream()
        assert (labels(first), none, nothing) == (NAMES, None, None)
        assert error.message() == "Request for unknown model: 'dem' is not found; did you mean 'demo'?"
        for options, status, said in (
            ({"model_name": "dem"}, "NOT_FOUND", "Request for unknown model: 'dem' is not found; did you mean"),
            ({"model_version": "2"}, "NOT_FOUND", "unknown model: 'demo' version '2' is not found; valid: 1"),
            ({"sequence_id": 3}, "INVALID_ARGUMENT", "a pipe keeps no state between requests"),
            ({"client_timeout": 1e-6}, "DEADLINE_EXCEEDED", ""),
            ({"compression_algorithm": "deflate"}, "UNIMPLEMENTED", "'deflate' is disabled"),
        ):
            with pytest.raises(utils.InferenceServerException) as raised:
                client.infer(**{"model_name": "demo", "inputs": [data], **options})
            assert raised.value.status() == f"StatusCode.{status}"
            assert said in raised.value.message()

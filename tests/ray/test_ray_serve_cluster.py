"""The application on Ray Serve, on a cluster of this machine, asked by Triton's own clients."""

from __future__ import annotations

import importlib
import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kit.waits import WAIT, eventually

serve = pytest.importorskip("ray.serve")  # not "ray", which might be the folder of these tests
ray: Any = importlib.import_module("ray")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
NAMES = ["ring", "star", "checker"]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EXPORTER = """
import os
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

def to_file():
    return [SimpleSpanProcessor(ConsoleSpanExporter(out=open(f"{folder}/{{os.getpid()}}", "a")))]
"""


class Ports(NamedTuple):
    http: int
    grpc: int
    spans: Path
    """A folder."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    from torchpipe_py.ray import app

    code, spans = tmp_path_factory.mktemp("code"), tmp_path_factory.mktemp("spans")
    (code / "spans_of_tests.py").write_text(EXPORTER.format(folder=spans), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = Ports(one.getsockname()[1], other.getsockname()[1], spans)
    options: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False, "log_to_driver": False}
    ray.init("local", num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": f"{code}:{ROOT}"}}, **options)
    serve.start(
        http_options={"host": "127.0.0.1", "port": ports.http},
        grpc_options={"port": ports.grpc, "grpc_servicer_functions": ["torchpipe_py.ray:add_inference"]},
        tracing_config={"enabled": True, "exporter_import_path": "spans_of_tests:to_file", "sampling_ratio": 0.0},
    )
    serve.run(app({"config": str(ROOT / "configs/demo.toml")}))
    yield ports
    serve.shutdown()
    ray.shutdown()


def given(module: Any) -> Any:
    images = [(ROOT / f"configs/demo/images/{name}_00.jpg").read_bytes() for name in NAMES]
    return module.InferInput("data", [3], "BYTES").set_data_from_numpy(np.array(images, object))


def labels(result: Any) -> list[str]:
    return [label.decode() for label in result.as_numpy("label")]


def test_tritons_client_over_http(demo: Ports) -> None:
    triton = pytest.importorskip("tritonclient.http")
    with triton.InferenceServerClient(f"127.0.0.1:{demo.http}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("demo", "1")
        assert not client.is_model_ready("dem")
        assert client.get_server_metadata()["name"] == "torchpipe_py"
        assert [tensor["name"] for tensor in client.get_model_metadata("demo")["outputs"]] == ["label", "score"]
        assert client.get_model_config("demo")["max_batch_size"] == 256
        assert labels(client.infer("demo", [given(triton)], request_id="7")) == NAMES
        with pytest.raises(triton.InferenceServerException, match="'dem' is not found; did you mean 'demo'"):
            client.infer("dem", [given(triton)])
        (stats,) = client.get_inference_statistics("demo")["model_stats"]
        assert stats["inference_stats"]["success"]["count"] == 1


def test_the_path_of_infer(demo: Ports) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{demo.http}/infer?timing=1", b"no image")
    with pytest.raises(urllib.request.HTTPError) as failed, urllib.request.urlopen(request, timeout=WAIT):
        pass
    assert failed.value.code == 400
    assert json.loads(failed.value.read())["code"] == "decode_error"


def test_tritons_client_over_grpc(demo: Ports) -> None:
    triton: Any = pytest.importorskip("tritonclient.grpc")
    with triton.InferenceServerClient(f"127.0.0.1:{demo.grpc}") as client:
        assert client.is_server_live()
        assert client.is_model_ready("demo")
        assert [tensor.name for tensor in client.get_model_metadata("demo").outputs] == ["label", "score"]
        assert labels(client.infer("demo", [given(triton)])) == NAMES
        with pytest.raises(triton.InferenceServerException, match="'dem' is not found; did you mean 'demo'") as failed:
            client.infer("dem", [given(triton)])
        assert failed.value.status() == "StatusCode.NOT_FOUND"


def test_a_traceparent_arrives_at_the_pipe(demo: Ports) -> None:
    image = (ROOT / "configs/demo/images/ring_00.jpg").read_bytes()
    request = urllib.request.Request(f"http://127.0.0.1:{demo.http}/infer", image, {"traceparent": PARENT})
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        assert json.loads(answer.read())["label"] == "ring"
    eventually(lambda: "classifier: compute" in written(demo))
    assert PARENT.split("-")[1] in written(demo)


def written(demo: Ports) -> str:
    """Spans that were exported."""
    return "".join(path.read_text(encoding="utf-8") for path in demo.spans.iterdir())

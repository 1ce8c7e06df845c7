"""Triton's own client, unchanged, against the Open Inference Protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit.services import ROOT, LocalServer, serving
from test_docs import blocks

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
utils = pytest.importorskip("tritonclient.utils")

PATHS = sorted((ROOT / "configs/demo/images").glob("*_00.jpg"))
IMAGES = [path.read_bytes() for path in PATHS]
NAMES = [path.stem.partition("_")[0] for path in PATHS]


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


@pytest.fixture
def client(demo: LocalServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{demo.port}", concurrency=4) as client:
        yield client


def images(*encoded: bytes) -> Any:
    given = triton.InferInput("data", [len(encoded)], "BYTES")
    return given.set_data_from_numpy(np.array(encoded, object))


def labels(result: Any) -> list[str]:
    return [label.decode() for label in result.as_numpy("label")]


def test_what_it_asks_before_it_infers(client: Any):
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


def test_images(demo: LocalServer, client: Any):
    requests: list[dict[str, Any]] = [{"data": image} for image in IMAGES]
    demo.run(requests)
    outputs = [triton.InferRequestedOutput("score", binary_data=False), triton.InferRequestedOutput("label")]
    for asked in (None, outputs):
        result = client.infer("demo", [images(*IMAGES)], request_id="7", outputs=asked)
        assert result.get_response()["id"] == "7"
        assert labels(result) == [request["result"][0] for request in requests] == NAMES
        scores = result.as_numpy("score")
        assert (scores.dtype, scores.shape) == (np.float32, (len(IMAGES),))
        assert scores.tolist() == pytest.approx([request["result"][1] for request in requests], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({"model_name": "dem"}, "404", "no model 'dem'; did you mean 'demo'?"),
        ({"model_version": "2"}, "404", "no version '2' of model 'demo'; valid: 1"),
        ({"inputs": [images(*IMAGES, b"no image")]}, "400", "item 8 of 9: 8 bytes are no image of formats"),
        ({"sequence_id": 3}, "400", "a pipe keeps no state between requests"),
        ({"outputs": [triton.InferRequestedOutput("scor")]}, "400", "no output 'scor'; did you mean 'score'?"),
        ({"outputs": [triton.InferRequestedOutput("score", class_count=3)]}, "400", "labels classes (TopK)"),
        (
            {"parameters": {"deadline": 1}},
            "400",
            "unknown field `deadline` - at `$.parameters`; did you mean 'deadline_ms'?",
        ),
        ({"request_compression_algorithm": "gzip"}, "415", "Content-Encoding 'gzip': send the body as it is"),
    ],
)
def test_errors(client: Any, options: dict[str, Any], status: str, said: str):
    with pytest.raises(utils.InferenceServerException) as raised:
        client.infer(**{"model_name": "demo", "inputs": [images(*IMAGES)], **options})
    assert raised.value.status() == status
    assert said in raised.value.message()


def test_the_example_of_the_page(
    demo: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = blocks(ROOT / "docs/protocols.md")
    code, printed = next(pair for pair in itertools.pairwise(page) if "import tritonclient" in pair[0].text)
    monkeypatch.chdir(ROOT)
    exec(code.text.replace("8888", str(demo.port)), {})
    assert capsys.readouterr().out == printed.text

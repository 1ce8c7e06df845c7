"""Triton's own client, unchanged, against the Open Inference Protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from kit.services import ROOT, LocalServer, serving
from test_docs import blocks

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
utils = pytest.importorskip("tritonclient.utils")


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalServer]:
    with serving("configs/demo.toml") as server:
        yield server


@pytest.fixture
def client(demo: LocalServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{demo.port}", concurrency=4) as client:
        yield client


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


def test_the_example_of_the_page(
    demo: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = blocks(ROOT / "docs/protocols.md")
    code, printed = next(pair for pair in itertools.pairwise(page) if "import tritonclient" in pair[0].text)
    monkeypatch.chdir(ROOT)
    exec(code.text.replace("8888", str(demo.port)), {})
    assert capsys.readouterr().out == printed.text

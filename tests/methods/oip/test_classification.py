"""Triton's classification: of an output's numbers, the best classes as texts of number, index and label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kit.clients import ask, get_json
from kit.contract import HAS_GRPC
from kit.services import LocalServer, serving
from kit.waits import WAIT

from torchpipe_py import InvalidRequest, TensorSpec
from torchpipe_py.methods.oip.requests import InferRequest, Wanted
from torchpipe_py.methods.oip.results import kept, outputs_of
from torchpipe_py.wire.errors import Bound

LABELS = (*"abc", "")  # no label is the same as an empty one
NUMBERS = [[0.5, 3, -1]]


def classified(classes: int, *values: Any, name: str = "y", labels: tuple[str, ...] = ()) -> Any:
    """The shape and the texts of the answer to items with these results."""
    request = InferRequest(None, [], [Wanted(name, False, classes)], False, None, None)
    items = [kept({"result": value}, request) for value in values]
    ((output, _),) = outputs_of(items, request, [TensorSpec("y", (None, 3), "float32", labels)])
    assert (output.name, output.datatype) == (name, "BYTES")
    return list(output.shape), json.loads(msgspec.json.encode(output.to_json(Bound(2**20, "--max-reply-bytes"))))


@pytest.mark.parametrize(
    ("values", "classes", "expected"),
    [
        ([torch.tensor(NUMBERS)], 1, [[1, 1], ["3.000000:1:b"]]),
        ([torch.tensor(NUMBERS)], 9, [[1, 3], ["3.000000:1:b", "0.500000:0:a", "-1.000000:2:c"]]),
        ([torch.tensor([[1.0, 2, 2]]), torch.tensor(NUMBERS)], 1, [[2, 1], ["2.000000:1:b", "3.000000:1:b"]]),
        ([torch.tensor(NUMBERS[0])], 1, [[1, 1], ["3.000000:1:b"]]),
        ([torch.tensor(NUMBERS)[:, :, None, None]], 1, [[1, 1], ["3.000000:1:b"]]),
        ([torch.tensor(NUMBERS, dtype=torch.bfloat16)], 1, [[1, 1], ["3.000000:1:b"]]),
        ([torch.tensor(NUMBERS, dtype=torch.float16)], 1, [[1, 1], ["3.000000:1:b"]]),
        ([np.array([[7, 255, 0]], np.uint8)], 2, [[1, 2], ["255:1:b", "7:0:a"]]),
        ([np.array([[np.nan, 1, np.inf]])], 3, [[1, 3], ["inf:2:c", "1.000000:1:b", "nan:0:a"]]),
        ([np.array([[0, 1, 2, 3.5]])], 2, [[1, 2], ["3.500000:3", "2.000000:2:c"]]),
        ([np.array([[2**53, 2**53 + 1]])], 1, [[1, 1], [f"{2**53 + 1}:1:b"]]),
        ([np.array([[True, False, True]])], 2, [[1, 2], ["1:0:a", "1:2:c"]]),
        ([np.full((1, 3), np.nan)], 2, [[1, 2], ["nan:0:a", "nan:1:b"]]),
        ([np.array([[0, 1, 2, 3, 4]])], 1, [[1, 1], ["4:4"]]),
    ],
)
def test_classification_returns_best_classes(values: list[Any], classes: int, expected: Any) -> None:
    shape, texts = expected
    assert classified(classes, *values, labels=LABELS) == (shape, texts)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("y", ["text"], "output 'y': classification takes a vector of numbers for each item, and this is BYTES of"),
        ("y", [torch.ones(1, 3, 2)], "and this is FP32 of shape [1, 3, 2]; the postprocessors SoftmaxCpu and cpu"),
        ("y", [torch.ones(1, 2, 2)] * 4, "and this is FP32 of shape [4, 2, 2]"),
        ("y", [torch.ones(1, 0)], "and this is FP32 of shape [1, 0]"),
        ("y", [0.5], "and this is FP64 of shape [1]"),
        ("score", [("a", 0.5)], "output 'score': classification takes a vector of numbers for each item, and this is"),
        ("score", [[("a", 0.5), ("b", 0.25)]], "and this is labels, not numbers of all classes"),
        ("y", [torch.ones(1, 5000)], "output 'y': classification: 5000 texts; the limit is 4096"),
    ],
)
def test_classification_refuses_outputs_without_classes(name: str, values: list[Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        classified(10_000, *values, name=name)
    assert said in str(raised.value)


@pytest.fixture(scope="module")
def server(classifier: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    labels = tmp_path_factory.mktemp("labels") / "labels.txt"
    labels.write_text("".join(f"class {index}\n" for index in range(5)))
    config = {"backend": "OnnxTensor", "model": classifier, "max": 4, "postprocessor": "cpu", "labels": str(labels)}
    with serving(config, grpc_port=0 if HAS_GRPC else -1) as server:
        yield server


def images() -> np.ndarray:
    return np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)


def test_classification_over_http(server: LocalServer) -> None:
    config = get_json(server.port, "/v2/models/test/config")[1]
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1, -1], "format": "FORMAT_NCHW"}]
    given = {"name": "x", "datatype": "FP32", "shape": [2, 3, 4, 4], "data": images().tolist()}
    raw = server.run({"data": images()[:1]})["result"][0]
    for classes in (2, 9):
        wanted = {"name": "y", "parameters": {"classification": classes}}
        status, answer = ask(server.port, {"inputs": [given], "outputs": [wanted]}, "/v2/models/test/infer")
        (output,) = answer["outputs"]
        assert (status, output["datatype"], output["shape"]) == (200, "BYTES", [2, min(classes, 5)])
        best = int(raw.argmax())
        assert output["data"][0] == f"{raw[best]:f}:{best}:class {best}"
        assert len(output["data"]) == 2 * min(classes, 5)


@pytest.mark.skipif(not HAS_GRPC, reason="grpcio is not installed")
@pytest.mark.parametrize("classes", [1, 2, 0, -1, "x"])
def test_classification_over_grpc(server: LocalServer, classes: Any) -> None:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    service, kind = "/inference.GRPCInferenceService", "string_param" if classes == "x" else "int64_param"
    asked = message("inference.ModelInferRequest")(
        model_name="test",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [2, 3, 4, 4]}],
        outputs=[{"name": "y", "parameters": {"classification": {kind: classes}}}],
        raw_input_contents=[images().tobytes()],
    )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        raw = channel.unary_unary(f"{service}/ModelConfig")(b"\n\x04test", timeout=WAIT)
        (given,) = message("inference.ModelConfigResponse").FromString(raw).config.input
        assert (given.name, given.format) == ("x", 2)
        call = channel.unary_unary(f"{service}/ModelInfer")
        if classes in (0, -1, "x"):
            with pytest.raises(grpc.RpcError, match=r"output 'y': Expected `int.*\$.parameters.classification`"):
                call(asked.SerializeToString(), timeout=WAIT)
            return
        answer = message("inference.ModelInferResponse").FromString(call(asked.SerializeToString(), timeout=WAIT))
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [2, classes])
    assert answer.raw_output_contents[0].count(b":class ") == 2 * classes


@pytest.mark.parametrize("memory", ["system", "cuda"])
def test_shared_memory_is_not_served_and_has_no_regions(server: LocalServer, memory: str) -> None:
    path, said = f"/v2/{memory}sharedmemory", "shared memory is not served: send tensors in the request"
    assert get_json(server.port, f"{path}/status") == (200, [])
    assert ask(server.port, b"", f"{path}/unregister") == (200, {})
    for action in ("register", "unregister"):
        refused = (400, {"error": said, "code": "not_served"})
        assert ask(server.port, b"{}", f"{path}/region/a/{action}") == refused
    assert get_json(server.port, f"{path}/region/a/status")[0] == 400

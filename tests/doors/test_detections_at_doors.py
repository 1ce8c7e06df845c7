"""What a detector found, through every door: the same numbers, in a batch and alone, with parameters of the request."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from kit.clients import ask
from kit.doors import DOORS, HAS_GRPC, LIMITS, Asked, House, from_raw, house
from kit.services import LocalServer
from torchpipe_client import AsyncClient, Client, InferenceError, NoResult

from torchpipe_py import Backend, Detections, InvalidRequest, Signature, TensorSpec, pipe, registry
from torchpipe_py.backends.signature import detection_outputs
from torchpipe_py.wire.values import split_texts

NAMES = ("cat", "größe")
PNG = cv2.imencode(".png", np.eye(4, dtype=np.uint8) * 255)[1].tobytes()


def found(count: int, seed: int = 0, **more: Any) -> Detections:
    """So many detections with numbers of all digits that float32 has."""
    random = np.random.default_rng(seed)
    scores = np.sort(random.random(count, np.float32))[::-1]
    return Detections(random.random((count, 4), np.float32) * 1000, scores, random.integers(0, 3, count), NAMES, **more)


class Finds(Backend):
    """As many detections as the first number of its data, which are the score's parameter or more; -1 fails."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            count = int(np.asarray(item["data"]).ravel()[0])
            least = item.get("parameters", {}).get("threshold", 0.0)
            if not isinstance(least, (int, float)) or not 0 <= least <= 1:
                item["error"] = InvalidRequest(f"threshold {least!r}: expected 0 to 1")
            elif count < 0:
                item["error"] = InvalidRequest("nothing to find")
            else:
                detections = found(count)
                item["result"] = detections[detections.scores >= least]

    def signature(self) -> Signature:
        return Signature((TensorSpec("data", (None, 1), "float32"),), detection_outputs(), ("threshold",))


class Undeclared(Backend):
    """Masks and keypoints, if the number is not 0; it declares nothing."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            data = item["data"]
            count = int(data if isinstance(data, bytes) else np.asarray(data).ravel()[0])
            masks = tuple(np.eye(4, dtype=bool) if index else PNG for index in range(count))
            points = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
            item["result"] = found(count, keypoints=points, masks=masks) if count else found(0)


@pytest.fixture(scope="module")
def table() -> Iterator[House]:
    with registry.default.restored() as default:
        default.register_backend(Finds, "Finds")
        default.register_backend(Undeclared, "Undeclared")
        with house({"finds": {"backend": "Finds"}, "undeclared": {"backend": "Undeclared"}}) as made:
            yield made


def data_of(*counts: float) -> np.ndarray:
    return np.array(counts, "f4").reshape(-1, 1)


def rows_like(rows: Any, expected: Detections) -> bool:
    """Whether rows of JSON are these detections, each number the same ``float32``."""
    assert all(set(row) <= {"box", "score", "class", "label"} for row in rows)
    return (
        np.array_equal(np.array([row["box"] for row in rows], "f4").reshape(-1, 4), expected.boxes)
        and np.array_equal(np.array([row["score"] for row in rows], "f4"), expected.scores)
        and [row["class"] for row in rows] == expected.classes.tolist()
        and [row.get("label", row["class"]) for row in rows] == expected.labels
    )


every_door = pytest.mark.parametrize("door", DOORS)


@every_door
@pytest.mark.parametrize("count", [0, 1, 600])
def test_each_number_is_the_same_at_every_door(table: House, door: str, count: int) -> None:
    names = ["boxes", "scores", "classes", "labels", "offsets"]
    answer = DOORS[door](table, Asked("finds", {"data": data_of(count)}, names))
    expected = found(count)
    assert (answer.code, list(answer.values)) == ("ok", names)
    for name in names[:3]:
        assert np.array_equal(answer.values[name], getattr(expected, name)), name
        assert answer.values[name].dtype == getattr(expected, name).dtype
    assert answer.values["labels"].tolist() == [str(label) for label in expected.labels]
    assert answer.values["offsets"].tolist() == [0, count]


@pytest.mark.parametrize("door", [name for name in DOORS if "oip" not in name and "grpc" not in name])
def test_result_is_a_list_of_objects(table: House, door: str) -> None:
    answer = DOORS[door](table, Asked("finds", {"data": data_of(20)}, ["result"]))
    if door == "python":
        assert answer.values["result"] == found(20)
    else:
        assert rows_like(answer.values["result"], found(20))


@every_door
def test_parameters_reach_the_backend(table: House, door: str) -> None:
    asked = Asked("finds", {"data": data_of(20)}, ["scores"])
    answer = DOORS[door](table, asked._replace(parameters={"threshold": 0.5}))
    expected = found(20).scores
    assert np.array_equal(answer.values["scores"], expected[expected >= 0.5])
    for wrong, said in (({"threshold": 1.5}, "expected 0 to 1"), ({"treshold": 0.5}, "did you mean 'threshold'?")):
        if door != "python" or "threshold" in wrong:
            answer = DOORS[door](table, asked._replace(parameters=wrong))
            assert answer.code == "invalid_request"
            assert said in answer.message


@every_door
def test_too_many_detections_are_too_large(table: House, door: str) -> None:
    if door == "python":
        pytest.skip("a call has no limit")
    answer = DOORS[door](table, Asked("finds", {"data": data_of(LIMITS["max_reply_bytes"])}, ["result"]))
    assert (answer.code, answer.values) == ("too_large", {})


# -- several items --------------------------------------------------------------------------------------------------


def oip_batch(run: House, model: str, counts: list[int], form: str) -> dict[str, np.ndarray]:
    """The tensors of all items by name, as ``form`` has them."""
    data = data_of(*counts)
    tensor = {"name": "data", "datatype": "FP32", "shape": list(data.shape)}
    if form == "grpc":
        from kit.clients import infer_rpc

        from torchpipe_py.methods.rpc.messages import message

        request = message("inference.ModelInferRequest")(
            model_name=model, inputs=[tensor], raw_input_contents=[data.tobytes()]
        )
        answer = infer_rpc(run.server.grpc_port, request, run.seconds)
        pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return {
            each.name: from_raw(each.datatype, list(each.shape), raw) if each.name != "masks" else split_texts("", raw)
            for each, raw in pairs
        }
    body = {"inputs": [{**tensor, "data": data.ravel().tolist()}]}
    status, answer = ask(run.server.port, json.dumps(body).encode(), f"/v2/models/{model}/infer")
    assert status == 200, answer
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in answer["outputs"]}


@pytest.mark.parametrize("form", ["json", *["grpc"] * HAS_GRPC])
def test_batch_has_all_rows_and_the_offset_of_each_item(table: House, form: str) -> None:
    counts = [3, 0, 5, 1]
    tensors = oip_batch(table, "finds", counts, form)
    assert list(tensors) == ["boxes", "scores", "classes", "labels", "offsets"]
    offsets = tensors["offsets"].tolist()
    assert offsets == [0, 3, 3, 8, 9]
    for index, count in enumerate(counts):
        own = slice(offsets[index], offsets[index + 1])
        assert np.array_equal(tensors["boxes"][own].astype("f4"), found(count).boxes)
        assert np.array_equal(tensors["scores"][own].astype("f4"), found(count).scores)
        assert tensors["labels"][own].tolist() == [str(label) for label in found(count).labels]


@pytest.mark.skipif(not HAS_GRPC, reason="no grpc")
def test_items_without_a_detection_need_no_keypoints_and_masks(table: House) -> None:
    tensors = oip_batch(table, "undeclared", [0, 2], "grpc")
    assert tensors["keypoints"].tolist() == np.arange(12, dtype=np.float32).reshape(2, 2, 3).tolist()
    assert tensors["masks"][0] == PNG
    assert tensors["offsets"].tolist() == [0, 0, 2]
    assert list(oip_batch(table, "undeclared", [0, 0], "grpc")) == ["boxes", "scores", "classes", "labels", "offsets"]


def test_error_of_one_item_leaves_the_others(table: House) -> None:
    inputs = [{"data": {"dtype": "float32", "shape": [1, 1], "data": [count]}} for count in (2, -1, 3)]
    body = json.dumps({"inputs": inputs, "node_name": "finds"}).encode()
    status, answer = ask(table.server.port, body, "/infer", Content_Type="application/json")
    first, failed, last = answer["outcomes"]
    assert status == 200
    assert failed["code"] == "invalid_request"
    assert rows_like(first["outputs"]["result"], found(2))
    assert rows_like(last["outputs"]["result"], found(3))
    with Client(f"127.0.0.1:{table.server.port}") as client:
        first, failed, last = client.infer_many([{"data": data_of(count)} for count in (2, -1, 3)], node_name="finds")
        assert isinstance(failed, InferenceError)
        assert rows_like(first["result"], found(2))
        assert rows_like(last["result"], found(3))


# -- the client -----------------------------------------------------------------------------------------------------


def test_client_has_detections(table: House) -> None:
    expected = found(2, keypoints=np.arange(12, dtype=np.float32).reshape(2, 2, 3))
    with Client(f"127.0.0.1:{table.server.port}") as client:
        detections = client.infer({"data": data_of(2)}, node_name="undeclared")["result"]
        none = client.infer({"data": data_of(0)}, node_name="undeclared")["result"]
    for one in (detections, asyncio.run(from_async_client(table))):
        for name in ("boxes", "scores", "classes", "keypoints"):
            assert np.array_equal(getattr(one, name), getattr(expected, name)), name
            assert getattr(one, name).dtype == getattr(expected, name).dtype
        assert one.labels == expected.labels
        assert one.masks[0] == PNG
        pixels = cv2.imdecode(np.frombuffer(one.masks[1], np.uint8), cv2.IMREAD_GRAYSCALE)
        assert np.array_equal(pixels > 0, np.eye(4))
    assert (none, none.boxes.shape, none.scores.shape, none.labels) == ([], (0, 4), (0,), [])
    assert (none.keypoints, none.masks) == (None, None)


async def from_async_client(table: House) -> Any:
    async with AsyncClient(f"127.0.0.1:{table.server.port}") as client:
        return (await client.infer({"data": data_of(2)}, node_name="undeclared"))["result"]


def test_client_sends_parameters(table: House) -> None:
    expected = found(20)[found(20).scores >= 0.5]
    with Client(f"127.0.0.1:{table.server.port}") as client:
        options: Any = {"node_name": "finds", "parameters": {"threshold": 0.5}}
        assert rows_like(client.infer({"data": data_of(20)}, **options)["result"], expected)
        (answer,) = client.infer_many([{"data": data_of(20)}], **options)
        assert rows_like(answer["result"], expected)


def test_calls_for_classifiers_say_what_to_call() -> None:
    with registry.default.restored() as default:
        default.register_backend(Undeclared, "Undeclared")
        with (
            pipe({"undeclared": {"backend": "Undeclared"}}) as run,
            LocalServer(run) as server,
            Client(f"127.0.0.1:{server.port}") as client,
            pytest.raises(NoResult, match="call infer"),
        ):
            client.infer_batch(b"2")


# -- masks over HTTP, and parameters of a query ------------------------------------------------------------------------


def infer_json(run: House, count: float, path: str = "/infer", **more: Any) -> tuple[int, Any]:
    inputs = {"data": {"dtype": "float32", "shape": [1, 1], "data": [count]}}
    body = json.dumps({"inputs": inputs, "node_name": "finds", **more}).encode()
    return ask(run.server.port, body, path, Content_Type="application/json")


def test_masks_are_files_in_json(table: House) -> None:
    status, answer = infer_json(table, 2, node_name="undeclared")
    first, second = (base64.b64decode(row["mask"]["b64"]) for row in answer["result"])
    assert (status, first) == (200, PNG)
    assert np.array_equal(cv2.imdecode(np.frombuffer(second, np.uint8), cv2.IMREAD_GRAYSCALE) > 0, np.eye(4))
    assert answer["result"][1]["keypoints"] == [[6, 7, 8], [9, 10, 11]]


def test_json_has_the_fewest_digits(table: House) -> None:
    _, answer = infer_json(table, 50)
    for row, expected in zip(answer["result"], found(50), strict=True):
        assert [repr(number) for number in row["box"]] == [str(np.float32(number)) for number in expected["box"]]


def test_query_has_parameters_that_backends_declare(table: House) -> None:
    expected = found(20)[found(20).scores >= 0.5]
    assert rows_like(infer_json(table, 20, "/infer?threshold=0.5")[1]["result"], expected)
    assert rows_like(
        infer_json(table, 20, "/infer?threshold=0.9", parameters={"threshold": 0.5})[1]["result"], expected
    )
    for query, said in (("treshold=1", "did you mean 'threshold'?"), ("threshold=a", "'a'"), ("iou=1", "'iou'")):
        status, answer = infer_json(table, 20, f"/infer?{query}")
        assert (status, answer["code"]) == (400, "invalid_request"), query
        assert said in answer["error"]


@pytest.mark.parametrize("path", ["/infer", "/infer?node_name=undeclared"])
def test_form_has_parameters_of_the_model_that_it_names(table: House, path: str) -> None:
    fields = {"threshold": "1.5", "node_name": "finds"}
    parts = [b'name="file"; filename="a"\r\n\r\n20', *(f'name="{k}"\r\n\r\n{v}'.encode() for k, v in fields.items())]
    body = b"".join(b"--xyz\r\nContent-Disposition: form-data; %b\r\n" % part for part in parts) + b"--xyz--\r\n"
    _, answer = ask(table.server.port, body, path, Content_Type="multipart/form-data; boundary=xyz")
    assert answer["error"] == "threshold 1.5: expected 0 to 1"

"""Kinds of models as people have them: each TOML passes the check, and answers the same at every door.

A picture goes in where the TOML decodes, else tensors by the names of the model's inputs. ``torchpipe export`` writes a
TOML for each of these files, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from kit import doors
from kit.doors import DOORS, Asked
from kit.model_kinds import KINDS, LABELS, Kind
from torchpipe_client import Client

from torchpipe_py import Detections, parse_toml, pipe
from torchpipe_py.cli import main

Data = dict[str, Any]
BY_NAME = {kind.name: kind for kind in KINDS}
PICTURES = [kind.name for kind in KINDS if not kind.tensors]
DETECTORS = ("yolo", "yolo_seg", "yolo_pose")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and a TOML beside each."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")
    for kind in KINDS:
        kind.make(folder / f"{kind.name}.onnx")
        (folder / f"{kind.name}.toml").write_text(kind.toml.replace("NAME", kind.name), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def photo() -> bytes:
    """A JPEG of 96×48 pixels."""
    pixels = np.random.default_rng(2).integers(0, 256, (6, 12, 3), np.uint8)
    done, encoded = cv2.imencode(".jpg", cv2.resize(pixels, (96, 48), interpolation=cv2.INTER_NEAREST))
    assert done
    return bytes(encoded.tobytes())


def request(kind: Kind, photo: bytes) -> Data:
    if not kind.tensors:
        return {"data": photo}
    tensors = {
        name: value if value.dtype == object else torch.from_numpy(value) for name, value in kind.tensors.items()
    }
    return {"data": tensors if len(tensors) > 1 else next(iter(tensors.values()))}


def asked_in_python(path: Path, data: Data) -> Any:
    with pipe(str(path)) as run:
        run(data)
    assert "result" in data, data.get("error")
    return data["result"]


def plain(result: Any) -> Any:
    """A result as JSON has it, floats to five digits."""
    if isinstance(result, Detections):
        result = result.to_list()
    if isinstance(result, (torch.Tensor, np.ndarray)):
        result = result.tolist()
    if isinstance(result, dict):
        if result.keys() == {"dtype", "shape", "data"}:
            return plain(np.reshape(np.array(result["data"], object), result["shape"]))
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(each) for each in result]
    return float(f"{result:.5g}") if isinstance(result, float) else result


@pytest.mark.parametrize("name", BY_NAME)
def test_passes_the_check(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder / f"{name}.toml")]) == 0
    assert "ok" in capsys.readouterr().out


@pytest.mark.parametrize("name", BY_NAME)
def test_answers_in_python(name: str, folder: Path, photo: bytes) -> None:
    kind = BY_NAME[name]
    result = asked_in_python(folder / f"{name}.toml", request(kind, photo))
    if name in DETECTORS:
        assert result.labels == (["dog", "car"] if name != "yolo_pose" else ["person"])
        # 96×48 is 64×32 in the model's 64×64, 16 pixels of padding above.
        np.testing.assert_allclose(result.boxes[0], [12, 12, 48, 36], atol=1e-3)
        assert (result.keypoints is not None) == (name == "yolo_pose")
        assert (result.masks is not None) == (name == "yolo_seg")
    elif kind.tensors:
        session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        feed = {each.name: kind.tensors[each.name].reshape(each.shape) if each.name in ("orig_im_size", "threshold")
                else kind.tensors[each.name] for each in session.get_inputs()}  # fmt: skip
        (expected,) = session.run(None, feed)
        assert plain(result) == plain(expected)
    elif name == "embeddings":
        assert result.shape == (1, 128)
        assert float(result.norm()) == pytest.approx(1)
    elif name == "several_outputs":
        assert [tuple(each.shape) for each in result] == [(1, 5), (1, 2)]
    else:
        assert (result if isinstance(result, str) else result[0]) in LABELS


@pytest.fixture(scope="module")
def house(folder: Path) -> Iterator[doors.House]:
    """One service that has all models, each TOML under its own prefix."""
    nodes: Data = {}
    for kind in KINDS:
        for node, table in parse_toml(folder / f"{kind.name}.toml").items():
            if node == "global":
                continue
            files = {key: str(folder / table[key]) for key in ("model", "labels") if key in table}
            own = {**table, **files}
            if "next" in own:
                own["next"] = f"{kind.name}_{own['next']}"
            nodes[f"{kind.name}_{node}"] = own
    with doors.house(nodes) as house:
        yield house


def root(kind: Kind) -> str:
    return f"{kind.name}_{'model' if kind.tensors else 'decode'}"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [kind.name for kind in KINDS if kind.tensors])
def test_tensors_get_one_answer_at_every_door(name: str, door: str, house: doors.House) -> None:
    kind = BY_NAME[name]
    expected = DOORS["python"](house, Asked(root(kind), kind.tensors, kind.outputs))
    answer = DOORS[door](house, Asked(root(kind), kind.tensors, kind.outputs))
    assert expected.code == answer.code == "ok", answer.message
    for output in kind.outputs:
        assert doors.same(answer.values[output], expected.values[output])


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_get_one_answer_over_infer_and_the_open_protocol_and_by_the_client(
    name: str, photo: bytes, house: doors.House
) -> None:
    kind = BY_NAME[name]
    house.pipe(data := {"data": photo, "node_name": root(kind)})
    expected = plain(data["result"])

    said = json.loads(post(house, f"/infer?node_name={root(kind)}", "Content-Type: image/jpeg\r\n", photo))
    assert plain(said["result"] if "result" in said else [said["label"], said["score"]]) == expected

    with Client(f"127.0.0.1:{house.server.port}") as client:
        result = client.infer({"data": photo}, node_name=root(kind))["result"]
    assert plain(json.loads(result) if isinstance(result, str) and result[:1] in "[{" else result) == expected

    head = {"name": "data", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 4 + len(photo)}}
    header = json.dumps({"inputs": [head]}).encode()
    body = header + struct.pack("<I", len(photo)) + photo
    path, size = f"/v2/models/{root(kind)}/infer", f"Inference-Header-Content-Length: {len(header)}\r\n"
    outputs = {each["name"]: each["data"] for each in json.loads(post(house, path, size, body))["outputs"]}
    if name in DETECTORS:
        assert plain(outputs["boxes"]) == [side for row in expected for side in row["box"]]
        assert plain(outputs["scores"]) == [row["score"] for row in expected]
    else:
        numbers = [number for values in outputs.values() for number in values]
        assert plain(numbers) == flat(expected)


def post(house: doors.House, path: str, fields: str, body: bytes) -> bytes:
    """The body of a good answer."""
    with house.connect(doors.HttpClient) as client:
        client.send(f"POST {path} HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = client.read()
    assert answer.status == 200, answer.body
    return bytes(answer.body)


def flat(values: Any) -> list[Any]:
    return [each for value in values for each in flat(value)] if isinstance(values, list) else [values]

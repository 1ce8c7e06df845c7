"""NaN among a model's scores is an error of its item, whichever postprocessor reads them and whichever door answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import save_model
from kit import doors
from kit.doors import DOORS, Asked, House
from onnx import helper

from torchpipe_py.backends.model.postprocess import BUILT_IN, Cpu, Detector

ROW = np.array([[1.5, 20, 0.5, 3]], "f4")
MAP = np.arange(1, 13, dtype="f4").reshape(1, 3, 2, 2)
YOLO = np.array([[[8, 9], [8, 9], [4, 4], [4, 4], [0.9, 0.8], [0.1, 0.3]]], "f4").repeat(4, 2)
CLASSES = [cls for cls in BUILT_IN if not issubclass(cls, (Cpu, Detector))]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, dict[str, Any]]]:
    """A pipe with a root for each postprocessor of classes, for two of maps and for a detector, and good inputs."""
    folder = tmp_path_factory.mktemp("scored")
    logarithm = [helper.make_node("Log", ["x"], ["logits"])]
    inputs = {cls.__name__: ROW for cls in CLASSES} | {"ArgMaxMap": MAP, "SoftmaxArgMaxMap": MAP}
    nodes = {}
    for name, value in inputs.items():
        form = ["n", *value.shape[1:]]
        path = save_model(folder / f"{name}.onnx", logarithm, {"x": form}, {"logits": form})
        nodes[name] = {"backend": "OnnxTensor", "model": path, "max": 4, "postprocessor": name.removesuffix("Map")}
    constant = [
        helper.make_node("Log", ["x"], ["logarithm"]),
        helper.make_node("ReduceMean", ["logarithm"], ["each"], axes=[2, 3], keepdims=0),
        helper.make_node("Reshape", ["each", "to"], ["flat"]),
        helper.make_node("Add", ["flat", "found"], ["boxes"]),
    ]
    constants = {"to": np.array([-1, 1, 1]), "found": YOLO}
    path = save_model(
        folder / "yolo.onnx", constant, {"x": ["n", 1, 16, 16]}, {"boxes": ["n", 6, 8]}, constants=constants
    )
    nodes["YoloBoxes"] = {"backend": "OnnxTensor", "model": path, "max": 4, "postprocessor": "YoloBoxes"}
    inputs["YoloBoxes"] = np.ones((1, 1, 16, 16), "f4")
    with doors.house(nodes) as house:
        yield house, inputs


def spoilt(value: np.ndarray) -> np.ndarray:
    value = value.copy()
    value.reshape(-1)[2] = -1  # has no logarithm
    return value


def test_nan_is_an_error_that_names_node_and_output_at_every_door(scored: tuple[House, dict[str, Any]]) -> None:
    house, inputs = scored
    failures = []
    for name, value in inputs.items():
        output = "boxes" if name == "YoloBoxes" else "logits"
        said = f"output {output!r} has {'values' if name == 'L2Normalize' else 'scores'} that are not finite numbers"
        outputs = [spec.name for spec in house.pipe.signature(name).outputs]
        for door, ask in DOORS.items():
            answer = ask(house, Asked(name, {"x": spoilt(value)}, outputs))
            if answer.code != "backend_error" or said not in answer.message or f"node {name!r}" not in answer.message:
                failures.append((name, door, answer))
    assert failures == []


def test_other_items_of_the_batch_keep_their_results(scored: tuple[House, dict[str, Any]]) -> None:
    house, inputs = scored
    for name, value in inputs.items():
        house.pipe(alone := {"data": value, "node_name": name})
        house.pipe(items := [{"data": each, "node_name": name} for each in (value, spoilt(value), value)])
        assert ["error" in item for item in items] == [False, True, False]
        assert "result" not in items[1]
        for item in (items[0], items[2]):
            assert repr(item["result"]) == repr(alone["result"])


def test_infinity_is_a_score_only_where_it_has_a_probability(scored: tuple[House, dict[str, Any]]) -> None:
    house, _ = scored
    for number, refused in ((0, ()), (np.inf, ("SoftmaxMax", "SoftmaxArgMax", "SoftmaxCpu", "TopK", "ArgMax"))):
        logits = ROW.copy()
        logits[0, 1] = number
        for cls in CLASSES:
            if cls.__name__ != "L2Normalize":
                house.pipe(item := {"data": logits, "node_name": cls.__name__})
                assert ("error" in item) == (cls.__name__ in refused), (number, cls)

"""The benchmark of other images and numbers of clients, without running it."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import cv2
import numpy as np
import pytest
from benchmarks.common import Load, Report
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.sharing import CPU, GPU, add_choice, choice_of, services_of
from benchmarks.gpu.sizes import CORRUPT, Case, Measured, config_of, image_sets, judge
from benchmarks.service.sharing import Service

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.sharing import sections


def measured(qps: float, failed: float = 0.0) -> Measured:
    return Measured(Load(qps, 5, 9), failed)


def test_each_round_is_held_against_that_of_the_other_service() -> None:
    report = Report("")
    services = [Service("separate", {}, 4, False), Service("shared", {}, 8, True)]
    rounds = {"separate": [measured(1000), measured(2000)], "shared": [measured(900), measured(2000)]}
    judge(report, services, {Case("640x480", 7): rounds})
    assert [(name, round(ratio, 3), met) for name, ratio, _, met in report.targets] == [
        ("640x480, 7 clients: QPS of shared against separate", 0.95, True)
    ]
    assert [row.qps for row in report.rows] == [1500, 1450]


@pytest.mark.parametrize(
    ("images", "failed", "is_missed"), [(CORRUPT, 1.0, False), (CORRUPT, 3.0, True), ("x", 1.0, True)]
)
def test_images_that_should_have_a_result_and_have_none_are_a_miss(images: str, failed: float, is_missed: bool) -> None:
    report = Report("")
    services = [Service("separate", {}, 4, False), Service("shared", {}, 8, True)]
    judge(report, services, {Case(images, 7): {"separate": [measured(1)], "shared": [measured(1, failed)]}})
    assert [met for name, _, _, met in report.targets if "without result" in name] == [False] * is_missed


def test_image_sets_are_what_they_are_called() -> None:
    with image_sets() as folders:
        mats = {
            name: [cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR) for path in paths]
            for name, paths in ((name, sorted(folder.iterdir())) for name, folder in folders.items())
        }
        pngs = [path for path in folders["one PNG of 8"].iterdir() if path.read_bytes().startswith(b"\x89PNG")]
    assert mats["640x480"][0].shape[:2] == (480, 640)
    assert mats["1920x1080"][0].shape[:2] == (1080, 1920)
    assert (len(pngs), len(mats["one PNG of 8"])) == (1, 8)
    assert [mat is None for mat in mats[CORRUPT]].count(True) == 1
    assert len(mats[CORRUPT]) == 100


@pytest.mark.parametrize(("what", "shared"), [(CPU, [("model",)]), (GPU, [("model", "fallback")])])
def test_services_can_be_planned_and_share_what_they_should(
    what: str, shared: list[tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / "resnet50.onnx").write_bytes(b"\x08")  # so that none is made
    parser = ArgumentParser()
    add_choice(parser)
    choice = choice_of(parser.parse_args([]))
    for is_shared, nodes in ((False, []), (True, shared)):
        plan = plan_pipeline(config_of(services_of(Engines(str(tmp_path)), choice, what, 2, is_shared)[0]))
        assert [section.nodes for section in sections(plan)] == nodes


def test_engines_for_the_lean_runtime_are_built_as_such_and_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "resnet50.onnx").touch()
    usual, compatible = (Engines(str(tmp_path), is_compatible).node(32) for is_compatible in (False, True))
    assert (usual.get("version_compatible"), compatible.get("version_compatible")) == (None, True)
    assert usual["model::cache"] != compatible["model::cache"]

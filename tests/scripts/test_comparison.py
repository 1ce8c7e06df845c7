"""The service's comparison with the baseline: its tables, its accuracy, and what a failure leaves of it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import bench_gpu
import pytest
from benchmarks import comparison
from benchmarks.common import Load, run
from benchmarks.comparison import Comparison, Running, Table, as_documented, labelled_images
from benchmarks.gpu import baseline
from benchmarks.gpu import comparison as on_gpu
from conftest import encode, picture
from kit.services import ROOT, serving
from test_baseline import serving as serving_baseline

from torchpipe_py import parse_toml

DEMO = ROOT / "configs" / "demo"
MODEL = {
    "backend": "SyncTensor[OnnxTensor]",
    "model": str(DEMO / "model.onnx"),
    "mean": "123.675, 116.28, 103.53",
    "std": "58.395, 57.12, 57.375",
    "model::cache": None,
}


def load(qps: float, avg: float = 1.0, **more: float) -> Load:
    return Load(qps, p50=2, p99=3, more={"avg ms": avg, "CPU cores": 2.5, "memory %": 0.5, **more})


# -- tables ---------------------------------------------------------------------------------------------------------


def test_table_is_aligned_markdown() -> None:
    table = Table("Title", ("Methods", "QPS"), [("locked", "1.0"), ("a longer name", "100.0")])
    assert table.text().splitlines() == [
        "Title",
        "| Methods       | QPS   |",
        "|---------------|-------|",
        "| locked        | 1.0   |",
        "| a longer name | 100.0 |",
    ]


def test_table_of_methods_has_a_row_for_each_that_was_measured() -> None:
    report = Comparison("title")
    report.add("locked", 10, load(100))
    report.add("pipe", 10, load(300, **{"GPU %": 42.4}))
    report.add_methods("ResNet-50", ["locked", "pipe", "failed"], (10, 20))
    (table,) = report.tables
    assert table.rows == [
        ("locked", "10", "100.0", "2.00", "3.00", "-", "250%", "0.5%"),
        ("pipe", "10", "300.0", "2.00", "3.00", "42%", "250%", "0.5%"),
    ]


def test_improvement_is_the_median_of_the_rounds_ratios() -> None:
    report = Comparison("title")
    for cpu, gpu in ((100, 110), (50, 60), (200, 400)):
        report.add("CPU", 1, load(cpu))
        report.add("GPU", 1, load(gpu))
    report.add("GPU", 5, load(100))
    table = on_gpu.decoder_table(report, "title", ["CPU", "GPU"], (1, 5))
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("CPU", "1", ""),
        ("GPU", "1", "+20.00%"),
        ("GPU", "5", ""),
    ]


def test_tables_are_printed_and_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Comparison("title")
    report.add("locked", 1, load(100))
    report.add_methods("ResNet-50", ["locked"], (1,))
    report.add_accuracies("Accuracy", [comparison.Accuracy("locked", 4, 2, 1, 4, 0.0)])
    args = bench.make_parser().parse_args(["baseline", "--json", str(tmp_path / "figures.json")])
    assert run({"baseline": lambda: report}, args) == 0
    printed = capsys.readouterr().out
    assert "| locked  | 1       | 100.0 |" in printed
    assert "| locked  | 4      | 50.00%   | 100.00% " in printed
    (figures,) = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["reports"]
    assert figures["accuracy"] == [
        {"name": "locked", "images": 4, "labelled": 2, "right": 1, "agreeing": 4, "apart": 0.0}
    ]
    assert [table["title"] for table in figures["tables"]] == ["ResNet-50", "Accuracy"]


# -- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeService:
    name: str
    fails_at: int = 0

    def load(self, images: Path, clients: int, seconds: float) -> Load:
        if clients == self.fails_at:
            raise RuntimeError("it is gone")
        return load(100)


def test_a_service_that_fails_is_a_remark_and_the_others_are_measured() -> None:
    report = Comparison("title")
    services: Any = [FakeService("bad", fails_at=5), FakeService("good")]
    comparison.measure(report, services, Path(), (1, 5, 10), 0.0, 2)
    assert {key: len(rounds) for key, rounds in report.loads.items()} == {
        ("bad", 1): 1,
        ("good", 1): 2,
        ("good", 5): 2,
        ("good", 10): 2,
    }
    assert report.remarks == ["bad, 5 clients: not measured: RuntimeError: it is gone"]


def test_a_run_without_any_figure_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoTensorRT:
        name, side = "resnet50", 224

        def node(self, most: int, **more: Any) -> Any:
            raise RuntimeError("no TensorRT")

    monkeypatch.setattr(on_gpu, "_baseline", lambda *_: {})
    monkeypatch.setattr(on_gpu, "Engines", lambda *_: NoTensorRT())
    args = bench_gpu.make_parser().parse_args(["baseline", "--img_dir", str(DEMO / "images")])
    report = on_gpu.against_baseline(NoTensorRT(), args)  # type: ignore[arg-type]
    assert report.is_open
    parts = ("the services", "CPU decode against GPU decode", "accuracy")
    assert [remark for remark in report.remarks if "no TensorRT" in remark] == [
        f"{part}: not measured: RuntimeError: no TensorRT" for part in parts
    ]


def test_cores_are_given_back_after_a_failure() -> None:
    before = os.sched_getaffinity(0)

    def fail() -> None:
        with comparison.on_cores({min(before)}):
            raise RuntimeError(os.sched_getaffinity(0))

    with pytest.raises(RuntimeError, match=re.escape(str({min(before)}))):
        fail()
    assert os.sched_getaffinity(0) == before


def test_figures_of_a_service_have_its_use_of_the_machine() -> None:
    with serving(str(ROOT / "configs" / "demo.toml")) as server:
        figures = Running("demo", server.port, os.getpid()).load(DEMO / "images", 2, 0.2)
    assert figures.qps > 0
    assert {"avg ms", "CPU cores", "memory %"} <= figures.more.keys()
    assert 0 < figures.more["memory %"] < 100


# -- the configuration of the documents -------------------------------------------------------------------------------


def test_documented_nodes_get_another_model_and_size() -> None:
    tables = as_documented(64, **MODEL)
    documented = parse_toml(ROOT / "configs" / "resnet50.toml")
    assert [tables[node].get("next") for node in ("cpu_decoder", "cpu_posdecoder", "resnet50")] == [
        "cpu_posdecoder",
        "resnet50",
        None,
    ]
    assert tables["cpu_decoder"] == documented["cpu_decoder"]
    assert (tables["cpu_posdecoder"]["resize_h"], tables["cpu_posdecoder"]["resize_w"]) == (64, 64)
    assert tables["resnet50"]["max"] == documented["resnet50"]["max"] == 4
    assert "model::cache" not in tables["resnet50"]


# -- accuracy -------------------------------------------------------------------------------------------------------


def test_classes_come_from_names_in_the_order_of_the_file(tmp_path: Path) -> None:
    for name in ("ring_0", "ring_1", "star_0", "moon_0"):
        (tmp_path / f"{name}.jpg").write_bytes(name.encode())
    names = tmp_path / "names.txt"
    names.write_text("star\nring\n", encoding="utf-8")
    found = labelled_images(tmp_path, names, is_demo=False)
    assert dict(zip(found.images, found.classes, strict=True)) == {
        b"ring_0": "1",
        b"ring_1": "1",
        b"star_0": "0",
        b"moon_0": None,
    }
    assert sorted(set(labelled_images(tmp_path, None, is_demo=False).classes)) == ["0", "1", "2"]


def test_images_of_a_single_name_have_no_known_class(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"photo_{number}.jpg").write_bytes(b"")
    assert labelled_images(tmp_path, None, is_demo=False).classes == [None, None]


def test_images_of_the_demo_have_classes_for_its_model_alone() -> None:
    assert labelled_images(None, None, is_demo=True).classes == [str(index) for index in range(8) for _ in range(6)]
    assert labelled_images(None, None, is_demo=False).classes == [None] * 48


def test_services_with_the_same_model_agree_and_are_as_accurate() -> None:
    """The truth of the last image is wrong, the image before that is none."""
    files = sorted((DEMO / "images").glob("*_00.jpg"))
    images = [path.read_bytes() for path in files] + [b"no image", encode(picture(64, 64))]
    labels = (DEMO / "labels.txt").read_text(encoding="utf-8").split()
    classes = [str(labels.index(path.stem[:-3])) for path in files] + [None, "100"]
    model = baseline.load_model(None, str(DEMO / "model.onnx"), 64)
    report = Comparison("title")
    with serving_baseline(model, 64) as port, serving(as_documented(64, **MODEL)) as server:
        services = [Running("locked", port, 0), Running("pipe", server.port, 0)]
        comparison.compare_answers(report, services, comparison.Labelled("images", images, classes))
    assert [(one.images, one.labelled, one.right, one.agreeing) for one in report.accuracies] == [
        (len(images), len(images) - 1, len(files), len(images))
    ] * 2
    assert report.accuracies[1].apart < 1e-4


def test_refuses_a_folder_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["baseline", "--img_dir", "missing"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("argument --img_dir: missing is not a folder")

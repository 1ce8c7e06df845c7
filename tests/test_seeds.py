"""What the project was made from: documents that describe five systems. Each part of them has a command here.

The rows are the user's: a row goes only if the user says so. A part that moves to another command changes its row.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
CODE = "\n".join(code for page in PAGES for code in re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL))
"""What stands in code blocks and between backquotes."""


class Part(NamedTuple):
    """A part of a document: its name there, the module and the command that are it here, and options that it needs.

    The command is named in the README or in ``docs/`` as it is written here.
    """

    document: str
    name: str
    module: str
    command: str
    options: str = ""


TRAIN, SERVE = "train", "torchpipe_server.cli"
PARTS = [
    # 000: preprocessing by the pipe in a training loop, and testing what was trained
    Part("000", "train_gpu.py", TRAIN, "python scripts/train.py --data", "--toml --val-toml --workers --checkpoint"),
    Part("000", "train_dp.py", TRAIN, "python scripts/train.py --dp", "--dp --devices"),
    Part("000", "train_ddp.py", TRAIN, "scripts/train.py --ddp", "--ddp --batch-norm"),
    Part(
        "000", "test_gpu.py, both solutions", "test_gpu", "python scripts/test_gpu.py", "--solution --precision --toml"
    ),
    Part("000", "consistency of training and serving", "recipes.experiments.consistency", "scripts/run.py consistency"),
    Part("000", "CPU against GPU decode, three cores", "bench_gpu", "scripts/bench_gpu.py baseline"),
    # 001: templates of trainings
    Part("001", "train.py, loader.py", TRAIN, "python scripts/train.py --data"),
    Part("001", "train_DP.py", TRAIN, "python scripts/train.py --dp", "--dp"),
    Part("001", "train_DDP.py", TRAIN, "scripts/train.py --ddp", "--ddp --batch-norm"),
    Part("001", "train_amp.py", TRAIN, "scripts/train.py --amp", "--amp"),
    Part("001", "loader_DALI.py, classes", TRAIN, "scripts/train.py --dali", "--dali --decode --size --amp --ddp"),
    Part(
        "001",
        "loader_DALI.py, pairs of images by ExternalSource",
        "recipes.restoration",
        "scripts/run.py restoration",
        "--data_source --resize --crop --seed --checkpoint",
    ),
    # 002: a service, the locked TensorRT service it is compared with, and the load tester
    Part("002", "main_torchpipe.py", SERVE, "torchpipe-serve configs/resnet50.toml"),
    Part("002", "main_trt.py, by PyCUDA", "baseline_server", "scripts/baseline_server.py --engine", "--engine --cuda"),
    Part(
        "002",
        "clien_qps.py",
        "client_qps",
        "scripts/client_qps.py --img_dir",
        "--img_dir --port --request_client --request_batch --total_number",
    ),
    Part("002", "the table of both, on a GPU", "bench_gpu", "scripts/bench_gpu.py baseline", "--image --cores"),
    Part("002", "the table of both, on a CPU", "bench", "scripts/bench.py baseline"),
    # 003: what makes a training faster, by section
    Part("003", "1 hardware, monitoring", "torchpipe_py.cli", "torchpipe doctor"),
    Part("003", "2 where the time goes", "recipes.experiments.profile", "scripts/run.py profile", "--trace --steps"),
    Part("003", "3 decoders", "benchmarks.decoders", "scripts/run.py decoders", "--img_dir --json"),
    Part("003", "4 augmentation on the GPU", TRAIN, "--augment", "--augment"),
    Part("003", "5 prefetching", TRAIN, "--prefetch", "--prefetch"),
    Part("003", "6 several GPUs", TRAIN, "scripts/train.py --ddp", "--ddp --dp"),
    Part("003", "7 mixed precision", TRAIN, "scripts/train.py --amp", "--amp"),
    Part("003", "8 cudnn.benchmark, data in memory, workers", TRAIN, "--in-memory", "--cudnn-benchmark --workers"),
    Part("003", "8 LMDB", "recipes.datasets", "scripts/run.py lmdb", "--data --out"),
    Part("003", "8 TFRecord", "recipes.tfrecord", "scripts/run.py tfrecord", "--data --out"),
    Part("003", "each trick, measured", "recipes.experiments.tricks", "scripts/run.py tricks", "--json"),
    # 004: torchvision's loader against DALI, with CutOut and GridMask
    Part("004", "CUTOUT, GridMask, ColorJitter", TRAIN, "--augment crop color cutout", "--augment"),
    Part("004", "TrainPipeline, TestPipeline", TRAIN, "scripts/train.py --dali", "--dali --decode"),
    Part(
        "004",
        "both experiments, with their plots",
        "recipes.experiments.comparison",
        "scripts/run.py loaders",
        "--batch-sizes --workers --plots --json --augment",
    ),
]
LIBRARIES = ("torch", "tensorrt", "onnx", "pycuda", "opencv-python-headless", "thriftpy2", "tomli", "numpy", "pytest")
TOP_LEVEL = ("pyproject.toml", "README.md", "torchpipe_py", "server", "idl", "configs", "tests", "scripts")
WHOSE = "this row is the user's: see the top of tests/test_seeds.py"


def named(part: Part) -> str:
    return f"{part.document}: {part.name}"


@pytest.mark.parametrize("part", PARTS, ids=named)
def test_each_part_has_a_command_with_its_options(
    part: Part, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module(part.module).main
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code, WHOSE
    shown = capsys.readouterr().out
    missing = [option for option in shlex.split(part.options) if not re.search(rf"{option}(?![\w-])", shown)]
    assert not missing, f"{part.module} has no {', '.join(missing)}; {WHOSE}"


@pytest.mark.parametrize("part", PARTS, ids=named)
def test_each_command_is_named_in_the_documentation(part: Part) -> None:
    is_named = part.command in CODE
    assert is_named, f"no page has {part.command!r}; {WHOSE}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_library_that_the_user_named_is_a_dependency(library: str) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert library in {re.split(r"[^\w-]", need, maxsplit=1)[0] for need in needs}, WHOSE


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_the_top_level_is_the_one_that_the_user_named(name: str) -> None:
    assert (ROOT / name).exists(), WHOSE

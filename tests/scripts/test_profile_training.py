"""scripts/profile_training.py on the CPU, and its reading of traces on made-up ones, as of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from profile_training import main
from recipes.experiments.profiling import OPERATORS, Operator, Profile, described
from recipes.experiments.timeline import STEP, WAIT, Copies, gpu_use, merged, overlap
from training_data import write_classes, write_toml

MAIN, OTHER = 1, 2  # threads
MODEL, SIDE = 7, 20  # streams


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write_classes(tmp_path / "data", 12, 2)
    given = ["--data", tmp_path / "data", "--toml", write_toml(tmp_path), "--device", "cpu", "--batch-size", 4]
    return list(map(str, [*given, "--workers", 0, "--warmup", 1]))


def annotation(name: str, start: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"cat": cat, "name": name, "tid": MAIN, "ts": start, "dur": end - start, "args": {}}


def kernel(number: int, stream: int, start: float, end: float, tid: int, launched: float) -> list[dict[str, Any]]:
    """With its launch."""
    where = {"device": 0, "stream": stream, "correlation": number}
    return [
        {"cat": "kernel", "name": "k", "tid": stream, "ts": start, "dur": end - start, "args": where},
        {"cat": "cuda_runtime", "name": "l", "tid": tid, "ts": launched, "dur": 1, "args": {"correlation": number}},
    ]


def copy(name: str, size: int, start: float, end: float) -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": name, "tid": SIDE, "ts": start, "dur": end - start, "args": {"bytes": size}}


def test_what_a_gpu_did() -> None:
    events = [
        annotation(WAIT, 0, 40),
        annotation(STEP, 40, 100),
        annotation(WAIT, 100, 120),
        annotation(STEP, 120, 200),
        annotation(STEP, 40, 100, "gpu_user_annotation"),
        *kernel(1, SIDE, 10, 30, MAIN, 5),  # the loader's, launched inside next
        *kernel(2, SIDE, 50, 60, OTHER, 45),  # the loader's, launched by a thread of the pipe during a step
        *kernel(3, MODEL, 50, 90, MAIN, 48),
        *kernel(4, MODEL, 130, 180, OTHER, 125),  # backward: autograd's thread, the model's stream
        *kernel(5, MODEL, 195, 230, MAIN, 190),  # its end is outside
        *kernel(6, MODEL, 240, 260, MAIN, 239),  # all of it is outside
        copy("Memcpy HtoD (Pinned -> Device)", 1000, 100, 105),
        copy("Memcpy HtoD (Pageable -> Device)", 10, 106, 107),
        copy("Memcpy HtoD (Pinned -> Device)", 3000, 110, 117),
        copy("Memcpy DtoH (Device -> Pageable)", 4, 181, 182),
        {"ph": "M", "name": "process_name"},
    ]
    use = gpu_use(events)
    assert use is not None
    assert use.busy == pytest.approx((20 + 40 + 50 + 5) / 200)
    assert use.model == pytest.approx((40 + 50 + 5) / 200)
    assert use.loader == pytest.approx((20 + 10) / 200)
    assert use.starved == pytest.approx((20 + 20) / 200)  # copies alone are no work
    assert use.copies == {"Pageable": Copies(1, 10, 0.001), "Pinned": Copies(2, 4000, 0.012)}


def test_traces_without_kernels_or_annotations() -> None:
    assert gpu_use([annotation(WAIT, 0, 1), annotation(STEP, 1, 2)]) is None
    with pytest.raises(ValueError, match="no annotations"):
        gpu_use([annotation(WAIT, 0, 1)])


def test_spans() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(3, 5.5)]) == 1.5
    assert overlap([(0, 1)], []) == overlap([(0, 1)], [(1, 2)]) == 0


def test_lines_of_a_gpu() -> None:
    gpu = gpu_use([annotation(WAIT, 0, 25), annotation(STEP, 25, 100), *kernel(1, MODEL, 30, 90, MAIN, 26)])
    lines = described(Profile(2, 8, 0.5, 2.0, 0.26, gpu, [Operator("aten::mm", 4, 30.0), Operator("aten::add", 2, 10)]))
    assert lines[0] == "2 steps, 1000.0 ms each, 4.0 images/s"
    assert lines[1] == "waiting for data: 250.0 ms a step, 25.0% of the time; 26.0% by the loader's own count"
    assert lines[2] == "GPU busy: 60.0% of the time; kernels on the model's stream 60.0%, on the loader's streams 0.0%"
    assert lines[3] == "copies to the GPU: none"
    assert lines[5].split() == ["15.000", "ms", "a", "step", "75.0%", "2.0", "calls", "aten::mm"]
    assert lines[-1] == "the GPU waited for data 25.0% of the time"


def test_on_the_cpu(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five steps, of three batches an epoch: the second epoch begins on its own."""
    trace, checkpoint = tmp_path / "trace.json", tmp_path / "last.pt"
    more = ["--steps", "4", "--trace", str(trace), "--checkpoint", str(checkpoint), "--precision", "bf16"]
    assert main([*options, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 steps, ")
    assert len([line for line in lines if " calls  " in line]) == OPERATORS
    assert not any(WAIT in line for line in lines)
    assert lines[-1].startswith("there is no GPU in this training: the CPU's loop waited for data ")
    named = [event["name"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    assert named.count(WAIT) == named.count(STEP) == 4
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--toml", "none.toml"], "none.toml: no such file"),
        (["--arch", "no_such"], "no_such"),
        (["--device", "7"], "7"),
    ],
)
def test_errors(options: list[str], capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert main([*options, *more]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("more", [["--trace", "trace.txt"], ["--steps", "0"], ["--warmup", "none"]])
def test_options_that_do_not_fit(options: list[str], more: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*options, *more])
    assert caught.value.code == 2

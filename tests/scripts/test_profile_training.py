"""scripts/run.py profile on the CPU, and its reading of traces on made-up ones, as of a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.training_data import write_classes, write_toml
from recipes.experiments.profile import COMPUTE, OPERATORS, Operator, Profile, described, main, verdict
from recipes.experiments.timeline import STEP, WAIT, Copies, gpu_use, merged, overlap

MAIN, OTHER = 1, 2  # threads
MODEL, SIDE = 7, 20  # streams


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write_classes(tmp_path / "data", 12, 2)
    given = ["--data", tmp_path / "data", "--toml", write_toml(tmp_path), "--device", "cpu", "--batch-size", 4]
    return list(map(str, [*given, "--workers", 0, "--warmup", 1]))


# -- traces ---------------------------------------------------------------------------------------------------------


def annotation(name: str, start: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"cat": cat, "name": name, "tid": MAIN, "ts": start, "dur": end - start, "args": {}}


def kernel(number: int, stream: int, start: float, end: float, tid: int, launched: float) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    where = {"device": 0, "stream": stream, "correlation": number}
    return [
        {"cat": "kernel", "name": "k", "tid": stream, "ts": start, "dur": end - start, "args": where},
        {"cat": "cuda_runtime", "name": "l", "tid": tid, "ts": launched, "dur": 1, "args": {"correlation": number}},
    ]


def copy(name: str, size: int, start: float, end: float) -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": name, "tid": SIDE, "ts": start, "dur": end - start, "args": {"bytes": size}}


def test_kernels_and_copies_are_counted_by_stream_inside_the_annotations() -> None:
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


def test_a_trace_without_kernels_has_no_use_and_one_without_annotations_is_refused() -> None:
    assert gpu_use([annotation(WAIT, 0, 1), annotation(STEP, 1, 2)]) is None
    with pytest.raises(ValueError, match="no annotations"):
        gpu_use([annotation(WAIT, 0, 1)])


def test_spans_are_merged_and_overlaps_measured() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 6)], [(3, 5.5)]) == 1.5
    assert overlap([(0, 1)], []) == overlap([(0, 1)], [(1, 2)]) == 0


# -- what is shown --------------------------------------------------------------------------------------------------


def profile(device: str = "H200", gpu: Any = None, **seconds: float) -> Profile:
    """A profile of two steps that took 2 s."""
    stages: dict[str, float | None] = dict.fromkeys(("read", "decode", "transform", "waiting for data", *COMPUTE), 0.0)
    stages["transfer"] = None
    stages |= {name.replace("waiting", "waiting for data"): value for name, value in seconds.items()}
    operators = [Operator("aten::mm", 4, 30.0), Operator("aten::add", 2, 10)]
    return Profile(2, 8, 2.0, stages, gpu, operators, device)


def test_reports_lines_of_a_gpu() -> None:
    gpu = gpu_use([annotation(WAIT, 0, 25), annotation(STEP, 25, 100), *kernel(1, MODEL, 30, 90, MAIN, 26)])
    lines = described(profile(gpu=gpu, waiting=0.5, decode=0.4, read=0.1, transfer=0.01))
    assert lines[0] == "2 steps on H200, 1000.0 ms each, 4 images/s"
    rows = {line[:16].strip(): line[16:].split() for line in lines[2:10]}
    assert rows["decode"][:2] == ["200.00", "20.0%"]
    assert rows["transfer"][:2] == ["5.00", "0.5%"]
    assert rows["waiting for data"][:2] == ["250.00", "25.0%"]
    assert "under the profiler: GPU busy 60.0% of the time, idle and waiting for data 25.0%" in lines[11]
    assert lines[12] == "copies to the GPU: none"
    assert lines[14].split() == ["15.000", "ms", "a", "step", "75.0%", "2.0", "calls", "aten::mm"]
    assert lines[-1].startswith(
        "the training loop waited for data 25% of the time, mostly for decode; what helps: more dec"
    )


@pytest.mark.parametrize(
    ("device", "seconds", "found", "option"),
    [
        ("H200", {"waiting": 1.0, "read": 0.9, "decode": 0.5}, "mostly for read", "--in-memory"),
        ("H200", {"waiting": 1.0, "transfer": 0.9, "decode": 0.5}, "mostly for transfer", "decode on the GPU"),
        ("H200", {"waiting": 0.1, "decode": 1.9, "backward": 1.0}, "fast enough, backward takes longest", "--amp"),
        ("the CPU", {"waiting": 1.0, "transform": 0.4, "decode": 0.9}, "mostly for decode", "instance_num"),
        ("the CPU", {"waiting": 1.0, "transform": 0.8, "decode": 0.9}, "mostly for transform", "--augment"),
        (
            "the CPU",
            {"waiting": 0.1, "optimiser": 1.0, "decode": 0.5},
            "fast enough, optimiser takes longest",
            "--batch-size",
        ),
    ],
)
def test_verdict_names_longest_stage_and_remedy(
    device: str, seconds: dict[str, float], found: str, option: str
) -> None:
    line = verdict(profile(device, **seconds))
    assert found in line
    assert option in line


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profiles_on_cpu(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine steps, of three batches an epoch: the next epoch begins on its own."""
    trace, figures, checkpoint = tmp_path / "trace.json", tmp_path / "figures.json", tmp_path / "last.pt"
    more = ["--steps", "4", "--trace", trace, "--json", figures, "--checkpoint", checkpoint, "--amp"]
    assert main([*options, *map(str, more)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 steps on the CPU, ")
    assert len([line for line in lines if " calls  " in line]) == OPERATORS
    assert not any(WAIT in line for line in lines)
    assert lines[-1].startswith("the training loop waited for data ")
    named = [event["name"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    assert named.count(WAIT) == named.count(STEP) == 4
    written = json.loads(figures.read_text(encoding="utf-8"))
    assert (written["steps"], written["images"], written["stages"]["transfer"]) == (4, 16, None)
    loop = [written["stages"][name] for name in ("waiting for data", *COMPUTE)]
    assert min(loop) > 0
    assert sum(loop) <= written["wall"]
    assert lines[-1] == written["verdict"]
    assert not checkpoint.exists()


@pytest.mark.slow
def test_a_corrupt_file_is_one_line(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "data" / "train").rglob("*.jpg"):
        path.write_bytes(b"no image")
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert "train/" in printed
    assert "corrupt" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"), [(["--toml", "none.toml"], "none.toml: no such file"), (["--device", "7"], "7")]
)
def test_errors_are_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main([*options, *more]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("more", [["--trace", "trace.txt"], ["--steps", "0"], ["--warmup", "none"], ["--ddp"]])
def test_options_that_do_not_fit_are_refused(options: list[str], more: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*options, *more])
    assert caught.value.code == 2

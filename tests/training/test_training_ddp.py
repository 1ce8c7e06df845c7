"""Two ranks with gloo: every sample once, equal steps, errors on all of them."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
from kit.training_data import same
from kit.training_ranks import RANKS, SCENARIOS, TIMEOUT, main

from torchpipe_py.training import DistributedEvalSampler

# Only ranks that hang are to fail: interpreters that import PyTorch take their time, and so does what they run.
START_SECONDS, RUN_SECONDS = 300, 2 * TIMEOUT
pytestmark = pytest.mark.timeout(START_SECONDS + RUN_SECONDS + 60)


def run_ranks(folder: Path, names: list[str]) -> list[Any]:
    """The report of each rank; ``None`` for one that did not finish."""
    context = multiprocessing.get_context("spawn")
    have_started = context.Barrier(RANKS, timeout=START_SECONDS)
    shared = str(folder), names, have_started
    processes = [context.Process(target=main, args=(rank, *shared)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    end = time.monotonic() + START_SECONDS + RUN_SECONDS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()
    files = [folder / f"told_{rank}.pickle" for rank in range(RANKS)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The scenarios' results of each rank; one pair of processes runs them all, the deadly one last."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), sorted(SCENARIOS, key="a_rank_dies".__eq__))


def seen(steps: Any) -> list[int]:
    """Indices of the samples that are not masked."""
    return [index for indices, mask, _ in steps for index, is_there in zip(indices, mask, strict=True) if is_there]


@pytest.mark.slow
def test_each_validation_sample_is_seen_once(told: list[dict[str, Any]]) -> None:
    by_rank = [rank["validate"] for rank in told]
    assert sorted(index for steps in by_rank for index in seen(steps)) == list(range(9))
    assert [len(steps) for steps in by_rank] == [3, 3]
    assert by_rank[0][2] == ([8], [True], [2])


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("skip_on_one_rank", ([-1], [False], [-100])),  # a whole batch is skipped: rank 0 makes its step all the same
        ("workers_decode_and_skip_on_one_rank", ([-1], [False], [-100])),
        ("mask_on_one_rank", ([4, 6], [False, False], [-100, -100])),
    ],
)
def test_bad_samples_on_one_rank_leave_the_steps_equal(told: list[dict[str, Any]], name: str, second: Any) -> None:
    (rank_0, batches, fillers_0), (rank_1, _, fillers_1) = (rank[name] for rank in told)
    assert [len(rank_0), len(rank_1), batches] == [3, 3, 3]
    assert (fillers_0, fillers_1) == ((0, 1) if name.startswith("mask") else (2, 1))  # rank 1 has a batch less
    assert sorted(seen(rank_0) + seen(rank_1)) == [0, 1, 2, 3, 5, 7]
    assert rank_0[1] == second


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        (
            "raise_on_one_rank",
            [r"^BadSample: sample 6 \(", r"^PeerFailed: rank 0 stopped with .*sample 6 \("],
        ),
        ("fewer_samples_than_ranks", ["^TrainingError: the dataset has 1 sample for 2 ranks"] * 2),
        ("no_local_rank", ["^TrainingError: .*needs local_rank"] * 2),
        ("no_distributed_sampler", ["^TrainingError: .*gives every rank all samples"] * 2),
        ("seeds_differ", ["^TrainingError: the ranks differ in seed: 0, 1"] * 2),
        (
            "a_toml_is_missing_on_one_rank",
            ["^PeerFailed: rank 1 stopped with ConfigError: missing.toml: no such file", "^ConfigError"],
        ),
        (
            "a_sampler_raises_on_one_rank",
            ["^PeerFailed: rank 1 stopped with TrainingError: ArithmeticError: no", "^ArithmeticError: no order"],
        ),
    ],
)
def test_an_error_on_one_rank_is_one_on_both(told: list[dict[str, Any]], name: str, errors: list[str]) -> None:
    for rank, error in zip(told, errors, strict=True):
        kind, message = rank[name]
        assert re.search(error, f"{kind}: {message}")


def test_training_deals_out_and_resumes(told: list[dict[str, Any]]) -> None:
    (orders_0, left_0, resumed_0), (orders_1, left_1, resumed_1) = (rank["train_and_resume"] for rank in told)
    for rank_0, rank_1 in zip(orders_0, orders_1, strict=True):
        assert sorted(rank_0 + rank_1) == list(range(10))
    assert orders_0[0] != orders_0[1]
    assert len(left_0) == len(left_1) == 2
    assert same(left_0, resumed_0)
    assert same(left_1, resumed_1)


def test_a_rank_that_dies_is_an_error_on_the_other(told: list[dict[str, Any]]) -> None:
    rank_0, rank_1 = told
    assert "a_rank_dies" not in rank_1
    assert "a_rank_dies" in rank_0, "rank 0 hung"
    error, seconds = rank_0["a_rank_dies"]
    assert error in ("RuntimeError", "DistBackendError")
    assert seconds < TIMEOUT


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 7, 20])
def test_the_eval_sampler_deals_each_sample_out_once(ranks: int, count: int) -> None:
    samplers = [DistributedEvalSampler(range(count), ranks, rank) for rank in range(ranks)]
    dealt = [list(indices) for indices in samplers]
    assert sorted(index for indices in dealt for index in indices) == list(range(count))
    assert [len(indices) for indices in samplers] == [len(indices) for indices in dealt]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    with pytest.raises(ValueError, match=rf"rank {ranks} is not in 0\.\.{ranks - 1}"):
        DistributedEvalSampler(range(3), ranks, ranks)

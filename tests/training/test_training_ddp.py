"""Two ranks with gloo: every sample once, equal steps, errors on all of them."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from training_data import same
from training_ranks import RANKS, SCENARIOS, TIMEOUT, have_started, main

from torchpipe_py.training import DistributedEvalSampler

# Only ranks that hang are to fail: interpreters that import PyTorch take their time, and so does what they run.
START_SECONDS, RUN_SECONDS = 300, 2 * TIMEOUT
pytestmark = pytest.mark.timeout(START_SECONDS + RUN_SECONDS + 60)


def run_ranks(folder: Path, names: list[str]) -> list[Any]:
    """What each rank told; ``None`` for one that did not come to an end."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=main, args=(rank, str(folder), names)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    latest_start = time.monotonic() + START_SECONDS
    while (
        not have_started(folder)
        and all(process.is_alive() for process in processes)
        and time.monotonic() < latest_start
    ):
        time.sleep(0.01)
    end = time.monotonic() + RUN_SECONDS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()
    files = [folder / f"told_{rank}.pickle" for rank in range(RANKS)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank what the scenarios gave; one pair of processes runs them all, the deadly one last."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), sorted(SCENARIOS, key="a_rank_dies".__eq__))


def seen(steps: Any) -> list[int]:
    """Indices of the samples that are not masked."""
    return [index for indices, mask, _ in steps for index, is_there in zip(indices, mask, strict=True) if is_there]


def test_each_validation_sample_is_seen_once(told: list[dict[str, Any]]) -> None:
    by_rank = [rank["validate"] for rank in told]
    assert sorted(index for steps in by_rank for index in seen(steps)) == list(range(9))
    assert [len(steps) for steps in by_rank] == [3, 3]
    assert by_rank[0][2] == ([8], [True], [2])


def test_a_rank_that_skips_a_whole_batch_makes_its_step(told: list[dict[str, Any]]) -> None:
    (rank_0, *facts_0), (rank_1, *facts_1) = (rank["skip_on_one_rank"] for rank in told)
    assert [len(rank_0), len(rank_1)] == [3, 3]
    assert facts_0 == [3, 2]
    assert facts_1 == [3, 1]  # it has a batch less
    assert sorted(seen(rank_0) + seen(rank_1)) == [0, 1, 2, 3, 5, 7]
    assert rank_0[1] == ([-1], [False], [-100])


def test_workers_that_decode(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["workers_decode_and_skip_on_one_rank"] == rank["skip_on_one_rank"][0]


def test_masks_on_one_rank(told: list[dict[str, Any]]) -> None:
    rank_0, rank_1 = (rank["mask_on_one_rank"] for rank in told)
    assert [len(rank_0), len(rank_1)] == [3, 3]
    assert rank_0[1] == ([4, 6], [False, False], [-100, -100])
    assert sorted(seen(rank_0) + seen(rank_1)) == [0, 1, 2, 3, 5, 7]


def test_a_bad_sample_on_one_rank_stops_both_at_its_step(told: list[dict[str, Any]]) -> None:
    (steps_0, kind_0, message_0), (steps_1, kind_1, message_1) = (rank["raise_on_one_rank"] for rank in told)
    assert steps_0 == steps_1 == [0]
    assert (kind_0, kind_1) == ("BadSample", "PeerFailed")
    assert message_0.startswith("sample 6 (")
    assert "rank 0 stopped with TrainingError: BadSample: sample 6 (" in message_1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fewer_samples_than_ranks", "the dataset has 1 sample for 2 ranks"),
        ("no_local_rank", "needs local_rank"),
        ("no_distributed_sampler", "gives every rank all samples"),
        ("seeds_differ", "the ranks differ in seed: 0, 1"),
    ],
)
def test_mistakes_are_told_on_every_rank(told: list[dict[str, Any]], name: str, message: str) -> None:
    for rank in told:
        kind, text = rank[name]
        assert kind == "TrainingError"
        assert message in text


def test_a_mistake_of_one_rank_is_told_on_the_other(told: list[dict[str, Any]]) -> None:
    rank_0, rank_1 = (rank["a_toml_is_missing_on_one_rank"] for rank in told)
    assert rank_1[0] == "ConfigError"
    assert rank_0[0] == "PeerFailed"
    assert "rank 1 stopped with ConfigError: missing.toml: no such file" in rank_0[1]


def test_what_a_sampler_raises_on_one_rank_is_told_on_the_other(told: list[dict[str, Any]]) -> None:
    rank_0, rank_1 = (rank["a_sampler_raises_on_one_rank"] for rank in told)
    assert rank_1 == [("ArithmeticError", "no order")] * 2
    assert rank_0 == [("PeerFailed", "rank 1 stopped with TrainingError: ArithmeticError: no order")] * 2


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_the_eval_sampler_deals_each_sample_out_once(ranks: int, count: int) -> None:
    samplers = [DistributedEvalSampler(range(count), ranks, rank) for rank in range(ranks)]
    dealt = [list(indices) for indices in samplers]
    assert sorted(index for indices in dealt for index in indices) == list(range(count))
    assert [len(indices) for indices in samplers] == [len(indices) for indices in dealt]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_rank_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        DistributedEvalSampler(range(3), 2, 2)

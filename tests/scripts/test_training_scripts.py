"""scripts/train.py at the smallest size, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train
from kit.waits import PROGRAM_WAIT
from training_data import write_classes, write_toml

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that differ in color: twelve images to train on, five to validate with."""
    write_classes(tmp_path / "data", 12, 5)
    return tmp_path / "data"


def started(command: list[str], *arguments: object) -> str:
    """What it prints; an error of the script fails the test with all of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=PROGRAM_WAIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun's processes too
            raise
    assert process.returncode == 0, printed
    return printed


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The same in this process, which has PyTorch already."""
    capsys.readouterr()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train.main(list(map(str, arguments))) == 0
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def options(folder: Path, toml: str, *more: object) -> list[object]:
    return ["--data", folder, "--toml", toml, "--device", "cpu", "--batch-size", 4, "--workers", 0, *more]


def accuracies(printed: str) -> list[tuple[float, int]]:
    return [(float(share), int(seen)) for share, seen in re.findall(r"accuracy ([\d.]+) of (\d+) images", printed)]


def test_it_learns_and_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, toml = [sys.executable, str(SCRIPTS / "train.py")], write_toml(tmp_path)
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    printed = started(script, *options(folder, toml, "--epochs", 8, "--checkpoint", whole))
    assert len(accuracies(printed)) == 8
    assert accuracies(printed)[-1] == (1.0, 5)

    first = ran(capsys, *options(folder, toml, "--epochs", 8, "--checkpoint", parts, "--max-steps", 4))
    assert len(accuracies(first)) == 1
    assert torch.load(parts, weights_only=True)["loader"]["position"] == 1  # of the second epoch's three batches
    second = ran(capsys, *options(folder, toml, "--epochs", 8, "--checkpoint", parts))
    losses = re.compile(r"loss [\d.]+, accuracy [\d.]+")
    assert losses.findall(first) + losses.findall(second) == losses.findall(printed)
    unbroken, resumed = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def test_two_processes(folder: Path, tmp_path: Path) -> None:
    (folder / "val" / "red" / "01.jpg").write_bytes(b"no image")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--local_addr", "127.0.0.1"]  # or the name of the machine would have to be known to it
    script = [*command, str(SCRIPTS / "train.py"), "--ddp"]
    toml = write_toml(tmp_path)
    printed = started(script, *options(folder, toml, "--epochs", 2, "--batch-size", 2, "--bad-samples", "mask"))
    assert [seen for _, seen in accuracies(printed)] == [4, 4]


@pytest.mark.parametrize("more", [["--amp"], ["--amp", "bf16"], ["--dp", "--devices", "cpu", "cpu"]])
def test_other_ways_to_train(folder: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = ran(capsys, *options(folder, write_toml(tmp_path), "--epochs", 1, *more))
    assert [seen for _, seen in accuracies(printed)] == [5]


# -- what a user can mend -------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], folder: Path, toml: str, *more: object) -> str:
    """The one line on stderr of a training that cannot be."""
    capsys.readouterr()
    assert train.main(list(map(str, options(folder, toml, *more)))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("train: ")
    return line


def test_errors_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = write_toml(tmp_path)
    assert "nowhere" in told(capsys, tmp_path / "nowhere", toml)
    assert "12 images are no batch of 100" in told(capsys, folder, toml, "--batch-size", 100)
    assert str(tmp_path / "no.toml") in told(capsys, folder, str(tmp_path / "no.toml"))
    (folder / "train" / "red" / "01.jpg").write_bytes(b"no image")
    assert str(folder / "train" / "red" / "01.jpg") in told(capsys, folder, toml, "--epochs", 1)


def test_a_checkpoint_of_something_else(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, last = write_toml(tmp_path), tmp_path / "last.pt"
    last.write_bytes(b"junk")
    assert f"{last}: cannot be read as a checkpoint" in told(capsys, folder, toml, "--checkpoint", last)
    last.unlink()
    assert train.main(list(map(str, options(folder, toml, "--epochs", 1, "--checkpoint", last)))) == 0
    saved = torch.load(last, weights_only=True)

    more = ["--checkpoint", last, "--epochs", 2]
    line = told(capsys, folder, toml, *more, "--batch-size", 3)
    assert f"{last}: the state was saved with batches = 3, here it is 4" in line
    torch.save({**saved, "model": {"0.weight": torch.zeros(1)}, "arch": "resnet18"}, last)
    line = told(capsys, folder, toml, *more)
    assert f"{last}: holds no weights of --arch small; it was trained with --arch resnet18" in line
    torch.save(saved, last)
    for part in ("train", "val"):
        (folder / part / "blue").rename(folder / part / "zebra")
    assert "(only trained: blue; only in the folder: zebra)" in told(capsys, folder, toml, *more)


def test_fine_tuning(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, first = write_toml(tmp_path), tmp_path / "first.pt"
    one = ["--epochs", 1, "--max-steps", 1, "--lr", 0]
    arguments = list(map(str, options(folder, toml, *one, "--seed", 1, "--checkpoint", first)))
    assert train.main(arguments) == 0
    before = torch.load(first, weights_only=True)["model"]

    def tuned(name: str, *more: object) -> tuple[str, dict[str, torch.Tensor]]:
        """What it prints first, and the weights after a step that changes none."""
        capsys.readouterr()
        saved = tmp_path / name
        assert train.main(list(map(str, options(folder, toml, *one, "--checkpoint", saved, *more)))) == 0
        return capsys.readouterr().out.splitlines()[0], torch.load(saved, weights_only=True)["model"]

    line, after = tuned("same.pt", "--weights", first)
    assert line == f"weights of {first}['model']"
    assert all(
        torch.equal(after[name], tensor)
        for name, tensor in before.items()
        if "running" not in name and "num" not in name
    )
    for part in ("train", "val"):
        (folder / part / "blue").rename(folder / part / "green")
    line, after = tuned("other.pt", "--weights", first)
    assert line == f"weights of {first}['model'], but for 14.weight, 14.bias"
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["14.weight"], before["14.weight"])
    line, _ = tuned("other.pt", "--weights", "no longer there")  # for its checkpoint is
    assert "goes on after step 1" in line

    assert "of torchvision's classifiers, chosen by --arch" in told(capsys, folder, toml, "--weights", "pretrained")
    assert "none.pt: no such file" in told(capsys, folder, toml, "--weights", "none.pt")
    torch.save({"0.weight": torch.zeros(16, 1, 3, 3)}, tmp_path / "odd.pt")
    line = told(capsys, folder, toml, "--weights", tmp_path / "odd.pt")
    assert "does not fit --arch small: missing in the file: 1.weight, 1.bias, 1.running_mean and" in line
    assert "0.weight is 16x1x3x3 in the file and 16x3x3x3 in the model" in line


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--batch-size", "0", "expected a whole number, at least 1, got '0'"),
        ("--workers", "-1", "expected a whole number, at least 0, got '-1'"),
        ("--dp", "--ddp", "not allowed with argument --dp"),
        ("--amp", "fp8", "argument --amp: invalid choice"),
        ("--bad-samples", "maybe", "argument --bad-samples: invalid choice: 'maybe'; valid: mask, raise, skip"),
    ],
)
def test_options_that_make_no_sense(option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(["--data", "nowhere", "--toml", "none", option, value])
    assert reason in capsys.readouterr().err

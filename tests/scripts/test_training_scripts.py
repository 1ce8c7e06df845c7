"""scripts/train.py at the smallest size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from kit.services import reserved_port
from kit.training_data import write_classes, write_toml
from kit.waits import PROGRAM_WAIT
from recipes import events, models, session
from recipes.options import make_parser
from recipes.tfrecord import message_type, scan_records

from torchpipe_py.training import TrainingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that differ in color: twelve images to train on, five to validate with."""
    write_classes(tmp_path / "data", 12, 5)
    return tmp_path / "data"


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The output of a training."""
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


def test_it_learns_and_goes_on_where_it_stopped(folder: Path, tmp_path: Path, capsys: Any) -> None:
    toml, whole, parts = write_toml(tmp_path), tmp_path / "whole.pt", tmp_path / "parts.pt"
    log = tmp_path / "new" / "log"
    printed = ran(capsys, *options(folder, toml, "--epochs", 8, "--checkpoint", whole, "--log", log))
    assert len(accuracies(printed)) == 8
    assert accuracies(printed)[-1] == (1.0, 5)
    check_log(log, printed)

    first = ran(capsys, *options(folder, toml, "--epochs", 8, "--checkpoint", parts, "--max-steps", 4))
    assert len(accuracies(first)) == 1
    assert torch.load(parts, weights_only=True)["loader"]["position"] == 1  # of the second epoch's three batches
    second = ran(capsys, *options(folder, toml, "--epochs", 8, "--checkpoint", parts))
    losses = re.compile(r"loss [\d.]+; validation loss [\d.]+, accuracy [\d.]+")
    assert losses.findall(first) + losses.findall(second) == losses.findall(printed)
    unbroken, resumed = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


OWN = """
from torch import nn

scale = 2


def build(num_classes, width=4):
    layers = [nn.Conv2d(3, width, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def too_few(classes):
    return build(classes - 1)


def wrong(more):
    return nn.Identity()


def text():
    return "a network"
"""


def test_trains_network_of_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, last, own = write_toml(tmp_path), tmp_path / "last.pt", tmp_path / "own_network.py"
    own.write_text(OWN, encoding="utf-8")
    printed = ran(capsys, *options(folder, toml, "--epochs", 1, "--arch", f"{own}:build", "--checkpoint", last))
    assert f"torchpipe export {own}:build --weights {tmp_path / 'last_best.pt'} --preprocess {toml}" in printed
    saved = torch.load(last, weights_only=True)
    assert (saved["arch"], tuple(saved["model"]["4.weight"].shape)) == (f"{own}:build", (2, 4))
    for name, message in (
        ("built", f"{own} has no function 'built'; did you mean 'build'"),
        ("scale", f"{own} has no function 'scale'"),
        ("too_few", "gives 4x1, expected Nx2, for the classes"),
        ("wrong", "TypeError: wrong() missing 1 required positional argument: 'more'"),
        ("text", "returns a str; expected a torch.nn.Module"),
    ):
        assert message in told(capsys, folder, toml, "--arch", f"{own}:{name}")
    assert "none.py: no such file" in told(capsys, folder, toml, "--arch", f"{tmp_path / 'none.py'}:build")


def test_keeps_best_checkpoint_beside_last(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    toml, last = write_toml(tmp_path), tmp_path / "last.pt"
    found = iter([(0.4, 1.0), (0.8, 0.9), (0.8, 0.5), (0.6, 0.1), (0.8, 0.6), (0.8, 0.4)])
    monkeypatch.setattr(session.Session, "validate", lambda _: session.Validation(*next(found), 5))

    def epoch_of(path: Path) -> int:
        return int(torch.load(path, weights_only=True)["loader"]["epoch"])

    ran(capsys, *options(folder, toml, "--epochs", 4, "--checkpoint", last))
    assert (epoch_of(last), epoch_of(tmp_path / "last_best.pt")) == (4, 3)
    ran(capsys, *options(folder, toml, "--epochs", 5, "--checkpoint", last))  # the best is in the checkpoint
    assert (epoch_of(last), epoch_of(tmp_path / "last_best.pt")) == (5, 3)
    ran(capsys, *options(folder, toml, "--epochs", 6, "--checkpoint", last))
    assert epoch_of(tmp_path / "last_best.pt") == 6


def check_log(log: Path, printed: str) -> None:
    """The only file of the folder has the losses and accuracies that were printed, for TensorBoard."""
    (file,) = log.iterdir()
    assert ".tfevents." in file.name
    first, *logged = read_events(file)
    assert first == (0, {}, "brain.Event:2")
    assert [step for step, _, _ in logged] == [*range(3, 27, 3)]
    figures = re.findall(r"loss ([\d.]+); validation loss ([\d.]+), accuracy ([\d.]+)", printed)
    for (_, values, _), numbers in zip(logged, figures, strict=True):
        assert values.keys() == {"loss/train", "loss/val", "accuracy/val", "images_per_s"}
        named = [values[name] for name in ("loss/train", "loss/val", "accuracy/val")]
        assert named == pytest.approx([*map(float, numbers)], abs=6e-5)


def read_events(file: Path) -> list[tuple[int, dict[str, float], str]]:
    """Step, figures and version of each event of a file; checksums of lengths are compared."""
    content, found = file.read_bytes(), []
    for start, size in scan_records(file):
        event = message_type(events._PROTO, "Event").FromString(content[start + 12 : start + size - 4])
        values = {value.tag: value.simple_value for value in event.summary.value}
        found.append((event.step, values, event.file_version))
    return found


@pytest.mark.slow
def test_trains_with_two_processes(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one, and another of rank 1."""
    (folder / "val" / "red" / "01.jpg").write_bytes(b"no image")
    more = ("--ddp", "--epochs", 2, "--batch-size", 2, "--bad-samples", "mask")
    arguments = options(folder, write_toml(tmp_path), *more)
    command = [sys.executable, train.__file__, *map(str, arguments)]
    with reserved_port() as port:
        ranks = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": "0",
            "LOCAL_RANK": "0",
        }
        for name, value in ranks.items():
            monkeypatch.setenv(name, value)
        other = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(command, env=other) as process:
            printed = ran(capsys, *arguments)
            assert process.wait(PROGRAM_WAIT) == 0
    assert [seen for _, seen in accuracies(printed)] == [4, 4]


@pytest.mark.parametrize("more", [["--amp", "bf16"], ["--dp", "--devices", "cpu", "cpu"]])
def test_trains_with_each_option(
    folder: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "12 images are fewer than --batch-size 100" in told(capsys, folder, toml, "--batch-size", 100)
    assert str(tmp_path / "no.toml") in told(capsys, folder, str(tmp_path / "no.toml"))
    assert str(toml) in told(capsys, folder, toml, "--log", toml)
    (folder / "train" / "red" / "01.jpg").write_bytes(b"no image")
    assert str(folder / "train" / "red" / "01.jpg") in told(capsys, folder, toml, "--epochs", 1)


def test_refuses_checkpoint_of_another_kind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, last = write_toml(tmp_path), tmp_path / "last.pt"
    last.write_bytes(b"junk")
    assert f"{last}: cannot be read as a checkpoint" in told(capsys, folder, toml, "--checkpoint", last)
    last.unlink()
    ran(capsys, *options(folder, toml, "--epochs", 1, "--checkpoint", last))
    saved, more = torch.load(last, weights_only=True), ["--checkpoint", last, "--epochs", 2]
    torch.save({name: saved[name] for name in ("model", "classes")}, last)
    line = told(capsys, folder, toml, *more)
    assert f"{last}: is incomplete: it lacks optimiser, schedule, scaler, loader, steps, sums" in line
    torch.save(saved, last)
    assert "saved with another --lr; go on with --lr 0.003" in told(capsys, folder, toml, *more, "--lr", 0.1)
    assert "another --augment; go on without --augment" in told(capsys, folder, toml, *more, "--augment", "color")
    line = told(capsys, folder, toml, *more, "--batch-size", 3)
    assert f"{last}: the state was saved with batches = 3, here it is 4" in line
    torch.save({**saved, "model": {"0.weight": torch.zeros(1)}, "arch": "resnet18"}, last)
    line = told(capsys, folder, toml, *more)
    assert f"{last}: holds no weights of --arch small; it was trained with --arch resnet18" in line


def test_fine_tunes_given_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, first, second = write_toml(tmp_path), tmp_path / "first.pt", tmp_path / "second.pt"
    one = options(folder, toml, "--epochs", 1, "--max-steps", 1, "--lr", 0)  # a step that changes no weight
    ran(capsys, *one, "--seed", 1, "--checkpoint", first)
    for part in ("train", "val"):
        (folder / part / "blue").rename(folder / part / "green")
    printed = ran(capsys, *one, "--checkpoint", second, "--weights", first)
    assert printed.splitlines()[0] == f"weights of {first}['model'], but for 14.weight, 14.bias"
    before, after = (torch.load(path, weights_only=True)["model"] for path in (first, second))
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["14.weight"], before["14.weight"])
    printed = ran(capsys, *one, "--checkpoint", second, "--weights", "no longer there")  # for its checkpoint is
    assert "goes on after step 1" in printed
    assert "of torchvision's classifiers, chosen by --arch" in told(capsys, folder, toml, "--weights", "pretrained")
    assert "none.pt: no such file" in told(capsys, folder, toml, "--weights", "none.pt")
    torch.save({"0.weight": torch.zeros(16, 1, 3, 3)}, tmp_path / "odd.pt")
    line = told(capsys, folder, toml, "--weights", tmp_path / "odd.pt")
    assert "does not fit --arch small: missing in the file: 1.weight, 1.bias, 1.running_mean and" in line
    assert "0.weight is 16x1x3x3 in the file and 16x3x3x3 in the model" in line


def test_a_checkpoint_without_options_is_gone_on_with(folder: Path, tmp_path: Path, capsys: Any) -> None:
    toml, last = write_toml(tmp_path), tmp_path / "last.pt"
    more = ["--checkpoint", last, "--max-steps", 1]
    ran(capsys, *options(folder, toml, *more, "--augment", "color", "cutout"))
    assert "--augment color cutout" in told(capsys, folder, toml, *more, "--augment", "cutout")
    saved = torch.load(last, weights_only=True)
    del saved["options"]
    torch.save(saved, last)
    assert "goes on after step 1" in ran(capsys, *options(folder, toml, *more, "--lr", 0.1))


def test_the_folder_of_a_checkpoint_is_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").mkdir()  # in another folder than the checkpoint's
    last = make_parser().parse_args(["--data", str(folder), "--checkpoint", "new/more/last.pt"]).checkpoint
    models.save_checkpoint(last, {"model": 1})
    assert (tmp_path / "new" / "more" / "last.pt").is_file()


@pytest.mark.parametrize(
    ("place", "reason"), [("", "empty"), ("file/more/last.pt", "file is not a folder"), ("data", "is a directory")]
)
def test_a_checkpoint_that_cannot_be_written_is_refused_at_once(
    folder: Path, tmp_path: Path, place: str, reason: str, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        train.main(list(map(str, options(folder, "none.toml", "--checkpoint", tmp_path / place if place else ""))))
    assert reason in capsys.readouterr().err


def test_unfinished_checkpoint_keeps_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos\nframe #0")

    path = tmp_path / "new" / "last.pt"
    models.save_checkpoint(path, {"model": 1})
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(TrainingError, match=r"last\.pt: the checkpoint cannot be written: \[enforce .* pos$"):
        models.save_checkpoint(path, {"model": 2})
    assert [each.name for each in path.parent.iterdir()] == ["last.pt"]
    assert torch.load(path, weights_only=True) == {"model": 1}

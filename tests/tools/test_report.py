"""Charts and tables of reports, torchpipe doctor, and torchvision's models."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchpipe_py.cli import main
from torchpipe_py.tools import doctor
from torchpipe_py.tools.export.models import INSTALL, torchvision_models
from torchpipe_py.tools.report import (
    Axis,
    Bars,
    Line,
    ToolError,
    chart,
    check_outputs,
    linear_axis,
    log_axis,
    progress_bar,
    replace_text,
    value_axis,
    write_text,
)

ROOT = Path(__file__).parents[2]

# -- what the tools' reports share -------------------------------------------------------------------------------------


def test_replaced_file_stays_a_link_and_keeps_its_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "file.toml", tmp_path / "link.toml"
    file.write_text("before", encoding="utf-8")
    file.chmod(0o600)
    link.symlink_to(file)
    replace_text(link, "after")
    assert (link.is_symlink(), file.read_text(encoding="utf-8")) == (True, "after")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [
        ("parity a.toml b.toml --img_dir images", "json", "a.toml"),
        ("parity a.toml b.toml --img_dir images", "html", "b.toml"),
        ("parity a.toml b.toml --img_dir images --model m.toml", "json", "m.toml"),
        ("parity a.toml --against net.py:predict --img_dir images", "json", "net.py"),
        ("watch a.toml --streams cameras.toml", "out", "a.toml"),
        ("watch a.toml --streams cameras.toml", "out", "cameras.toml"),
        ("bench a.toml --img_dir images", "json", "a.toml"),
        ("load --img_dir images --replay times.txt", "csv", "times.txt"),
        ("tune a.toml --img_dir images --replay times.txt", "html", "times.txt"),
    ],
)
def test_no_report_replaces_a_file_that_the_tool_reads(
    command: str,
    flag: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("a.toml", "b.toml", "m.toml", "net.py", "cameras.toml", "times.txt"):
        (tmp_path / file).write_text("0", encoding="utf-8")
    assert main([*command.split(), f"--{flag}", f"./{name}"]) in (1, 2)
    assert f": --{flag} {name}: would replace the input {name}" in capfd.readouterr().err
    assert (tmp_path / name).read_text(encoding="utf-8") == "0"


def test_no_report_replaces_an_image_or_what_a_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("sub/m.onnx", "n.onnx", "labels.txt", "other.txt", "one.JPG"):
        (tmp_path / name).touch()
    text = '[n]\nbackend = "OnnxTensor"\nmodel = "m.onnx | n.onnx"\nmax = 4\nlabels = "labels.txt"\nwrong = "a\\u0000b"'
    (tmp_path / "sub" / "a.toml").write_text(text, encoding="utf-8")
    for name in ("sub/m.onnx", "n.onnx", "labels.txt"):
        with pytest.raises(ToolError, match=f"^--json {name}: would replace the input .*{Path(name).name}$"):
            check_outputs({"json": Path(name)}, ["sub/a.toml"])
    with pytest.raises(ToolError, match=r"^--json one\.JPG: would replace an image$"):
        check_outputs({"json": Path("one.JPG")})
    check_outputs({"json": Path("other.txt"), "html": Path("new.jpg")}, ["sub/a.toml", "none.toml"])


def test_no_part_of_a_report_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Path.write_text

    def full(path: Path, text: str, **keys: Any) -> int:
        right(path, text[:1], **keys)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ToolError, match=r"r\.html: cannot be written: No space left on device"):
        write_text(tmp_path / "r.html", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "axis",
    [
        linear_axis("x", 0, 0, least_step=1),
        linear_axis("x", 0, 7, exact=True, least_step=1),
        log_axis("x", 0.3, 5000),
        log_axis("x", 2, 3),
        value_axis("x", [1, 1, 1, 1000]),
        value_axis("x", []),
    ],
    ids=lambda axis: str([text for _, text in axis.ticks]),
)
def test_ticks_are_on_their_axis(axis: Axis) -> None:
    places = [axis.place(value) for value, _ in axis.ticks]
    assert len(places) >= 2
    assert places == sorted(places)
    assert len({text for _, text in axis.ticks}) == len(set(places)) == len(places)


def test_charts_escape_names_and_stay_in_their_frame() -> None:
    x, y = linear_axis("<x>", 0, 10), linear_axis("y", 0, 10)
    line = Line("<b>", [(0, 1), None, (20, 50)], "blue", labels=["one", "", "two"])
    text = chart("a & b", x, y, [line, Bars("n", [(0, 1, 5), (1, 2, 0)], "teal")], ("limit", 500))
    assert "<b>" not in text
    assert "a &amp; b" in text
    assert "limit" in text
    assert text.count("<polyline") == text.count("<circle") == 2  # points without a neighbour; the limit is above
    assert "<title>0 to 1: 5</title>" in text
    assert text.count("<rect") == 1
    assert chart("", x, y, [], ("limit", 5)).count("<polyline") == 1


def test_closed_progress_output_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    with progress_bar(True, has_lines=True) as show:
        show("profile", 0.0, "about 5 s left")
        show("verify", 0.0, "about 1 s left")


# -- ``torchpipe doctor`` names what is installed, what is missing, and what is broken ---------------------------------


def test_reports_versions_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^numpy +{re.escape(metadata.version('numpy'))} ", printed, re.MULTILINE)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["cores"] >= 1
    assert "CPU" in report["providers"]
    assert {entry["name"] for entry in report["libraries"]} == {entry[1] for entry in doctor.LIBRARIES}


def test_a_missing_required_library_is_exit_status_1(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", (("no_such_module", "no-such-distribution", doctor.REQUIRED, "all"),))
    assert main(["doctor"]) == 1
    assert "pip install no-such-distribution" in capsys.readouterr().out


def test_reports_why_a_library_cannot_be_imported(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "broken_library.py").write_text('raise RuntimeError("operator nms does not exist\\nmore")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "LIBRARIES", (("broken_library", "broken-library", "train", "nothing"),))
    main(["doctor"])
    assert "cannot be imported: RuntimeError: operator nms does not exist\n" in capsys.readouterr().out
    assert "broken_library" not in sys.modules


# -- torchvision itself ------------------------------------------------------------------------------------------------


OPERATORS = """
import torch

@torch.library.register_fake("torchvision::an_operator_that_could_not_be_loaded")
def described(boxes): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called torchvision, which comes before an installed one."""
    before = _torchvision()
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "models.py").write_text("ours = True", encoding="utf-8")
    yield folder
    for name in _torchvision():
        del sys.modules[name]
    sys.modules.update(before)


def _torchvision() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}


def test_a_build_for_cuda_goes_with_a_pytorch_for_the_cpu(package: Path) -> None:
    (package / "__init__.py").write_text(OPERATORS, encoding="utf-8")
    register = torch.library.register_fake
    with pytest.raises(RuntimeError, match="operator torchvision::an_operator"):
        register("torchvision::an_operator_that_could_not_be_loaded")(print)
    assert torchvision_models().ours
    assert torch.library.register_fake is register


def test_broken_library_is_reported_with_remedy(package: Path) -> None:
    (package / "__init__.py").write_text("raise OSError('libcudart.so.99:\\n  no such file')", encoding="utf-8")
    with pytest.raises(ToolError) as caught:
        torchvision_models()
    assert str(caught.value) == (
        "torchvision cannot be imported (OSError: libcudart.so.99: no such file): "
        f"{INSTALL}; for your own model give file.py:function"
    )
    for place in ("docs/first-model.md", "CONTRIBUTING.md", "scripts/first_model.sh"):
        assert INSTALL.removeprefix("pip install ") in (ROOT / place).read_text(encoding="utf-8"), place

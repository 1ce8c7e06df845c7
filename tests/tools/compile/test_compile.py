"""``torchpipe compile``: what is chosen, refused and certified, by made-up speeds and real losses."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from kit.measurer import FakeMeasurer, use_measurer

from torchpipe_py import ConfigError, parse_toml, pipe
from torchpipe_py.backends.model.onnx import OnnxTensor
from torchpipe_py.certificate import DIGEST, CertifiedTables, digest, read_certified
from torchpipe_py.cli import main
from torchpipe_py.plan.config import Tables
from torchpipe_py.plan.files import file_hash
from torchpipe_py.registry import default
from torchpipe_py.tools.compare_models.run import Comparison
from torchpipe_py.tools.compare_models.tolerance import Verdict, read_tolerance
from torchpipe_py.tools.compile import command, compile_config
from torchpipe_py.tools.compile.changes import Change, Chooser
from torchpipe_py.tools.compile.losses import Halves, Losses, least_pictures
from torchpipe_py.tools.compile.report import CompileReport
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.candidates import Candidate, as_served, shapes_of
from torchpipe_py.tools.tune.engine import Wanted
from torchpipe_py.tools.tune.measure import Profile
from torchpipe_py.tools.tune.pixels import Alternative, shapes_with
from torchpipe_py.tools.tune.report import Report
from torchpipe_py.tools.tune.search import Budget

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIXELS = '[n]\nbackend = "S[DecodeMat,ResizeMat]"\nresize_h = 32\nresize_w = 32\n'
CLASSES = (
    '[n]\nbackend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"\nresize_h = 64\nresize_w = 64\n'
    'color = "rgb"\nmodel = "model.onnx"\nmean = "123.675, 116.28, 103.53"\nstd = "58.395, 57.12, 57.375"\n'
    'postprocessor = "SoftmaxMax"\nlabels = "labels.txt"\nmax = 4\nthreads = 1\n'
)
OPENCV = "opencv-python-headless"
NEAREST, AT_LEAST = "nearest interpolation", 'at_least = "1x"'
OF_PIXELS = "mean=7, images=0.7"
"""Nearest interpolation is beyond it in three of four pictures, and decoding less in none."""


def measuring(speeds: dict[str, float], patch: pytest.MonkeyPatch) -> None:
    """A file with a change is so many times as fast as without; workers and settings change nothing."""

    def speed(candidate: Candidate) -> float:
        factor = 1.0
        for name, each in speeds.items():
            factor *= each if name in candidate.alternative else 1.0
        return 100.0 * factor

    def known(written: Candidate) -> Profile:
        base = as_served(written, 2, False)
        return Profile(base, cores=2, uses_gpu=False, lone=0.001, answers=100.0, clients=4, loop_s=0.3)

    use_measurer(FakeMeasurer(speed), known, patch)


class Certified(NamedTuple):
    folder: Path
    report: CompileReport


@pytest.fixture(scope="module")
def of_certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certified]:
    folder = tmp_path_factory.mktemp("certified")
    for name in ("model.onnx", "labels.txt"):
        shutil.copy(DEMO / name, folder)
    (folder / "own.toml").write_text(CLASSES, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        measuring({"int8": 2.0, AT_LEAST: 1.5}, patch)
        wanted, limits = Wanted(slo_p99=0.02, budget=600), read_tolerance("top1=0.7")
        report = command.compiled("own.toml", str(DEMO / "images"), limits, Path("c.toml"), wanted)
        assert (report.search.verdict, report.search.failed, report.certified) == ("better", "", True)
        yield Certified(folder, report)


@pytest.fixture
def certified(of_certified: Certified) -> Path:
    """A folder with a compiled classifier in int8, ``c.toml``, and all that belongs to it; as it was made."""
    return of_certified.folder


@pytest.fixture
def report(of_certified: Certified) -> CompileReport:
    """The report of its compilation, as if nothing were written."""
    return replace(of_certified.report, written=[])


@pytest.fixture
def copy(certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a folder of one's own, which is the working directory."""
    shutil.copytree(certified, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file whose results are pixels."""
    (tmp_path / "p.toml").write_text(PIXELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {change["name"]: change["outcome"] for change in report["changes"] if change["outcome"] != "not possible"}


# --- what is chosen


def test_refuses_the_fastest_change_if_it_loses_too_much(
    pixels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring({NEAREST: 3.0, AT_LEAST: 2.0, "2x": 1.4}, monkeypatch)
    arguments = ["--img_dir", str(DEMO / "images"), "--tolerance", OF_PIXELS, "--budget", "600", "--json", "r.json"]
    assert main(["compile", "p.toml", *arguments]) == 0
    report = json.loads((pixels / "r.json").read_text(encoding="utf-8"))
    assert outcomes(report) == {'at_least = "2x"': "allowed, not used", AT_LEAST: "used", NEAREST: "refused"}
    known = {change["name"]: change for change in report["changes"]}
    assert known[NEAREST]["why"].startswith("beyond the tolerance (mean ≤ 7)")
    assert known['at_least = "2x"']["why"] == f"{AT_LEAST} gains more"
    assert known["GPU decode"]["why"] == "there is no GPU"
    assert (known[AT_LEAST]["ms"], known[AT_LEAST]["gain"]) == (pytest.approx(10), pytest.approx(2))  # of 20 ms
    loss = known[AT_LEAST]["loss"]["limits"][0]
    assert (loss["beyond"], loss["low"], loss["verdict"]) == (0.0, 0.0, "within")
    assert 0 < loss["high"] < loss["allowed"]
    assert parse_toml("p.compiled.toml")["n"] == {**parse_toml("p.toml")["n"], "at_least": "1x"}
    printed = capsys.readouterr().out
    assert "better than your file by a factor of 2.00" in printed
    assert printed.splitlines()[-1].endswith("--require-certificate p.compiled.certificate.json")
    assert "<h2>Changes</h2>" in (pixels / "p.compiled.certificate.html").read_text(encoding="utf-8")


def test_combines_changes_that_gain_together(report: CompileReport) -> None:
    found = outcomes(report.to_json())
    assert {name for name, outcome in found.items() if outcome == "used"} == {"int8", AT_LEAST}
    assert report.search.gain == pytest.approx(3.0)
    assert found[NEAREST] == "allowed, not used"  # it gains nothing


def test_int8_model_lies_beside_the_compiled_file(copy: Path) -> None:
    """Another one would have another name: a service may use this one while the file is compiled again."""
    digits = hashlib.sha256(Path(int8_model()).read_bytes()).hexdigest()[:12]
    assert parse_toml("c.toml")["n"]["model"] == int8_model() == f"c.n.{digits}.int8.onnx"
    with pipe("c.toml") as run:
        item = {"data": (DEMO / "images" / "circle_00.jpg").read_bytes()}
        run(item)
    assert item["result"][0] == "circle"


def test_file_that_nothing_beats_is_certified_as_it_is(pixels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring({}, monkeypatch)
    report = compile_config("p.toml", DEMO / "images", OF_PIXELS, "out.toml", budget=600)
    assert (report["verdict"], report["certified"]) == ("as good", True)
    assert parse_toml("out.toml")["n"] == parse_toml("p.toml")["n"]


def test_undecided_counts_as_refused(pixels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring({NEAREST: 3.0, AT_LEAST: 2.0}, monkeypatch)
    right = Losses.of

    def late(self: Losses, candidate: Candidate, seconds: float) -> Comparison:
        return right(self, candidate, -1.0 if candidate.alternative == AT_LEAST else seconds)

    monkeypatch.setattr(Losses, "of", late)
    # One batch of pictures is too few for it.
    report = compile_config("p.toml", DEMO / "images", "mean=7, images=0.8", "out.toml", budget=600)
    assert outcomes(report)[AT_LEAST] == "refused"
    (why,) = [change["why"] for change in report["changes"] if change["name"] == AT_LEAST]
    assert why.startswith("undecided: 16 of 24 images are too few for mean ≤ 7")


@pytest.mark.parametrize(
    ("speeds", "verdict", "left"),
    [
        ({NEAREST: 3.0, AT_LEAST: 2.0}, "better", {"at_least": "1x"}),
        ({NEAREST: 3.0, AT_LEAST: 1.0}, "as good", {}),
    ],
    ids=["another change is left", "nothing is left"],
)
def test_change_that_loses_too_much_on_the_other_half_is_undone(
    speeds: dict[str, float], verdict: str, left: dict[str, str], pixels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(speeds, monkeypatch)
    right, certifies = Losses.of, list[bool]()

    def unlucky(self: Losses, candidate: Candidate, seconds: float) -> Comparison:
        comparison = right(self, candidate, seconds)
        if certifies and NEAREST in candidate.alternative:
            comparison.verdict = Verdict.BEYOND
        return comparison

    monkeypatch.setattr(Losses, "of", unlucky)

    def progress(phase: str, share: float, seconds: float) -> None:
        certifies.extend([True] * (phase == "certify"))

    report = compile_config("p.toml", DEMO / "images", "mean=20, images=0.7", "out.toml", budget=600, progress=progress)
    assert (report["verdict"], report["certified"]) == (verdict, True)
    assert outcomes(report)[NEAREST] == "refused"
    assert parse_toml("out.toml")["n"] == {**parse_toml("p.toml")["n"], **left}


def test_phases_share_what_the_profile_leaves() -> None:
    now = [0.0]
    clock = Budget(100.0, None, lambda: now[0])
    bench: Any = SimpleNamespace(clock=clock, known=SimpleNamespace(answers=1e6))
    now[0] = 60.0  # an engine was built
    halves = Halves("", (), ())
    report = CompileReport(Report("c.toml", None, None, slo_given=False), read_tolerance("top1=0.5"), halves, [])
    command._Compilation(Tables(), Path(), report)._share_out(bench)
    left = [clock.left(phase) for phase in (*command.ENDS, "certify")]
    assert left == pytest.approx([*(end * 25.0 for end in command.ENDS.values()), 40.0])


def test_shape_with_fewer_changes_shares_what_the_best_one_shares(copy: Path) -> None:
    """A change for a GPU offers each shape with the other sharing, too."""
    (copy / "own.toml").write_text(CLASSES + "shared = true\n", encoding="utf-8")
    shapes = shapes_of(Tables.of("own.toml"))
    used = [
        Alternative(NEAREST, "resize", {"interpolation": "nearest"}, needs_gpu=True),
        Alternative(AT_LEAST, "decode size", {"at_least": "1x"}),
    ]
    bench: Any = SimpleNamespace(shapes=shapes)
    found = shapes_with(shapes, used)
    assert {bool(best.heads) for best in found} == {False, True}
    for best in found:
        chooser = Chooser(Mock(), "", (), copy)
        chooser.used = [Change(each) for each in used]
        fewer = chooser.with_fewer(best, bench, "it loses too much")
        assert fewer is not None
        assert (len(chooser.used), bool(fewer.heads)) == (1, bool(best.heads))
        assert fewer.alternative == chooser.used[0].name


# --- what is written


def test_toml_file_is_written_last(pixels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring({AT_LEAST: 2.0}, monkeypatch)
    (pixels / "out.toml").write_text("[before]\n", encoding="utf-8")
    names, right = list[str](), command.replace_text

    def fail(path: Path, text: str) -> None:
        names.append(path.name)
        if path.suffix == ".toml":
            raise ToolError("the disk is full")
        right(path, text)

    monkeypatch.setattr(command, "replace_text", fail)
    with pytest.raises(ToolError, match="the disk is full"):
        compile_config("p.toml", DEMO / "images", OF_PIXELS, "out.toml", budget=600)
    assert names == ["out.certificate.json", "out.certificate.html", "out.toml"]
    assert (pixels / "out.toml").read_text(encoding="utf-8") == "[before]\n"
    with pytest.raises(ConfigError, match=r"out\.toml is not the certified file"):
        read_certified("out.certificate.json", "out.toml")


def test_files_are_replaced_not_written_over(
    copy: Path, of_certified: Certified, report: CompileReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has opened one reads it to its end."""
    written = [Path(name) for name in of_certified.report.written]
    before = [(path.stat().st_ino, path.open("rb")) for path in written]
    tables = parse_toml("c.toml")
    made = copy / "torchpipe-compile-x" / "n.int8.onnx"
    made.parent.mkdir()
    shutil.copy(int8_model(), made)
    tables["n"]["model"] = str(made)
    command._write(report, tables, Path("c.toml"), Wanted(budget=1.0), made.parent)
    model, *others = zip(written, before, strict=True)
    assert model[0].stat().st_ino == model[1][0], "the same model need not be written again"
    for path, (inode, file) in others:
        assert path.stat().st_ino != inode, path
        assert file.read(), path
    for _, file in before:
        file.close()


def test_model_that_this_run_has_not_made_is_not_copied(copy: Path, report: CompileReport) -> None:
    own, tables = copy / "torchpipe-compile-mine" / "n.int8.onnx", parse_toml("c.toml")
    own.parent.mkdir()
    shutil.copy(int8_model(), own)
    tables["n"]["model"] = str(own)
    command._write(report, tables, Path("c.toml"), Wanted(budget=1.0), copy / "torchpipe-compile-run")
    assert report.written == ["c.toml", "c.certificate.json", "c.certificate.html"]
    assert parse_toml("c.toml")["n"]["model"] == str(own)


def test_file_that_changes_meanwhile_is_not_certified(pixels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring({AT_LEAST: 2.0}, monkeypatch)

    def progress(phase: str, share: float, seconds: float) -> None:
        if phase == "certify":
            (pixels / "p.toml").write_text(PIXELS + "max_pixels = 1000\n", encoding="utf-8")

    with pytest.raises(ToolError, match=r"p\.toml: it, or a file that it names, changed meanwhile"):
        compile_config("p.toml", DEMO / "images", OF_PIXELS, "out.toml", budget=600, progress=progress)
    assert not (pixels / "out.toml").exists()


@pytest.mark.parametrize("phase_of_loss", ["", "certify"], ids=["at first", "meanwhile"])
def test_file_that_cannot_be_read_is_named(pixels: Path, monkeypatch: pytest.MonkeyPatch, phase_of_loss: str) -> None:
    measuring({AT_LEAST: 2.0}, monkeypatch)
    right, phases = file_hash, [""]

    def failing(path: Any) -> str:
        if phases[-1] == phase_of_loss:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return right(path)

    monkeypatch.setattr(command, "file_hash", failing)
    with pytest.raises(ToolError, match=r"p\.toml: cannot be read: Permission denied"):
        compile_config(
            "p.toml", DEMO / "images", OF_PIXELS, "out.toml", budget=600,
            progress=lambda phase, share, left: phases.append(phase),
        )  # fmt: skip


# --- the certificate


def int8_model() -> str:
    (name,) = Path().glob("c.n.*.int8.onnx")
    return str(name)


def check(certificate: str = "c.certificate.json", config: str = "c.toml", *imports: str) -> CertifiedTables:
    """What each process of a service does."""
    tables = read_certified(certificate, config, [("--import", name) for name in imports])
    with tables.loading():
        run = pipe(tables)
    with run:
        tables.check_choices(run.setup_choices())
    return tables


def edit(name: str, old: str, new: str) -> None:
    text = Path(name).read_text(encoding="utf-8")
    assert old in text
    Path(name).write_text(text.replace(old, new, 1), encoding="utf-8")


def edited(change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(Path("c.certificate.json").read_text(encoding="utf-8"))
    change(content)
    Path("c.certificate.json").write_text(json.dumps(content), encoding="utf-8")


def longer_model() -> None:
    with open(int8_model(), "ab") as file:
        file.write(b"\x00")


def no_path() -> None:
    content = json.loads(Path("c.certificate.json").read_text(encoding="utf-8"))
    content["compiled"]["files"][0]["path"] = "a\0b"
    content[DIGEST] = digest(content)
    Path("c.certificate.json").write_text(json.dumps(content), encoding="utf-8")


DIFFERENCES: dict[str, tuple[Callable[[], object], str]] = {
    "model bytes": (longer_model, ".int8.onnx is not the certified file: SHA-256 "),
    "labels": (lambda: edit("labels.txt", "circle", "round"), "node 'n': key 'labels': labels.txt is not the "),
    "a model that is gone": (lambda: Path(int8_model()).unlink(), ".int8.onnx cannot be read: No such file"),
    "TOML": (lambda: edit("c.toml", "max = 4", "max = 8"), "c.toml is not the certified file: SHA-256 "),
    "an edited gain": (lambda: edited(lambda content: content["figures"].update(gain=9.9)), "it was edited: "),
    "an edited loss": (lambda: edited(lambda content: content["loss"]["limits"][0].update(high=0.0)), "it was edited"),
    "no number": (lambda: edited(lambda content: content["figures"].update(gain=float("nan"))), "it was edited: "),
    "an edited hash": (lambda: edited(lambda content: content["compiled"].update(sha256="0")), "it was edited: "),
    "a path of no file": (no_path, "cannot be read: embedded null byte"),
    "another version": (lambda: edited(lambda content: content.update(schema=99)), "of version 99, this "),
    "another file": (lambda: Path("c.certificate.json").write_text("[]"), "not a certificate, which torchpipe compile"),
    "no certificate": (lambda: Path("c.certificate.json").unlink(), "certificate c.certificate.json: No such file"),
}


def test_certificate_fails_for_each_difference(
    certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []
    for name, (change, message) in DIFFERENCES.items():
        folder = tmp_path / name
        shutil.copytree(certified, folder)
        monkeypatch.chdir(folder)
        check()
        change()
        try:
            check()
            failed.append(f"{name}: nothing is refused")
        except ConfigError as error:
            has_renewal = "; renew it: torchpipe compile own.toml --img_dir " in str(error)
            if message not in str(error) or not (has_renewal or "not a cert" in message or "No such file" in message):
                failed.append(f"{name}: {error}")
    assert failed == []


def test_certificate_fails_for_another_opencv(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == OPENCV else right(name))
    with pytest.raises(ConfigError, match=rf"{OPENCV} is 9\.9 here, [\d.]+ in the certificate"):
        check()


def test_digest_is_no_signature(copy: Path) -> None:
    """It shows careless edits: whoever means to forge a figure computes another digest."""

    def forge(content: dict[str, Any]) -> None:
        content["figures"]["gain"] = 9.9
        content[DIGEST] = digest(content)

    edited(forge)
    assert check() == parse_toml("c.toml")


def test_certified_files_may_move_together(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "elsewhere").mkdir()
    monkeypatch.chdir(copy / "elsewhere")
    check("../c.certificate.json", "../c.toml")


def test_custom_code_is_certified(copy: Path) -> None:
    Path("own.py").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--import own\.py is not among the certified code"):
        check("c.certificate.json", "c.toml", "own.py")


def test_provider_is_certified(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxTensor, "setup_choices", lambda self: iter(["OnnxTensor: CUDAExecutionProvider"]))
    with pytest.raises(ConfigError) as error:
        check()
    stated = "OnnxTensor: CPUExecutionProvider in the certificate; renew it: torchpipe compile own.toml "
    assert f"node 'n' uses OnnxTensor: CUDAExecutionProvider here, {stated}" in str(error.value)


# --- bad input


@pytest.mark.parametrize(
    ("tolerance", "keys", "message"),
    [
        ("mean=7", {}, "48 pictures, too few to show mean=7: one half chooses, the other certifies, and both need 840"),
        ("top1=0.7", {}, "--tolerance: 'top1' is not measured on pixels"),
        (OF_PIXELS, {"budget": 5.0}, "--budget 5: 12 pictures, the least for mean=7, images=0.7, take about 3 s to"),
    ],
    ids=["too few pictures", "another kind of results", "too little time"],
)
def test_refuses_first_what_cannot_be_certified(
    tolerance: str, keys: dict[str, Any], message: str, pixels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring({}, monkeypatch)
    with pytest.raises(ToolError) as error:
        compile_config("p.toml", DEMO / "images", tolerance, "out.toml", **{"budget": 600.0, **keys})
    assert message in str(error.value)


def test_least_number_of_pictures_is_what_a_perfect_file_needs() -> None:
    found = {text: least_pictures(read_tolerance(text)) for text in ("top1=0.999", "top1=0.99", "top1=0.9, score=0.1")}
    assert found == {"top1=0.999": 4213, "top1=0.99": 420, "top1=0.9, score=0.1": 420}


def test_file_in_another_folder_may_have_custom_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text(
        "from torchpipe_py import Backend, register_backend\n\n\n@register_backend\nclass OnlyHere(Backend):\n"
        "    def forward(self, items):\n        pass\n"
    )
    (tmp_path / "c.toml").write_text('[n]\nbackend = "OnlyHere"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with default.restored(), pytest.raises(ToolError, match=r"tolerance|picture|image"):
        compile_config("c.toml", ".", "top1=0.9", "elsewhere/out.toml", imports=["only_here.py"])


def test_report_and_certificate_are_different_files(pixels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--img_dir", str(DEMO / "images"), "--tolerance", OF_PIXELS, "--json", "p.compiled.certificate.json"]
    assert main(["compile", "p.toml", *arguments]) == 1
    both = "--json and --out, its certificate: both would write p.compiled.certificate.json, one over the other"
    assert both in capsys.readouterr().err

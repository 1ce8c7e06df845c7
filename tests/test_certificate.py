"""Certificates: which files of code they cover, and what a process that loads certified files may find."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import Register
from kit.certified import certify
from torchpipe_server import cli
from torchpipe_server.options import parse_options
from torchpipe_server.supervisor.generation import Configuration, Generation
from torchpipe_server.worker.service import make_plan

from torchpipe_py import Backend, ConfigError, Param, certificate, parse_toml, pipe
from torchpipe_py.certificate import code_files, read_certified, versions
from torchpipe_py.values import to_str


class Reads(Backend):
    """Has a file."""

    words = Param(to_str, file=True, doc="a text file")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Register) -> Path:
    """The working directory, with ``c.toml``, its certificate, code, and a folder ``elsewhere``."""
    monkeypatch.chdir(tmp_path)
    for name in ("own.py", "lone/deep/part.py", "lone/__init__.py", "lone/deep/__init__.py", "lone/other.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "words.txt").write_text("a", encoding="utf-8")
    (tmp_path / "c.toml").write_text(f'[n]\nbackend = "{register(Reads)}"\nwords = "words.txt"\n', encoding="utf-8")
    certify(tmp_path / "c.toml", ["own.py", "lone.deep.part"])
    return tmp_path


def load(*code: tuple[str, str], meanwhile: Callable[[], object] = lambda: None) -> None:
    with read_certified("c.certificate.json", "c.toml", code).loading():
        meanwhile()


# -- code -------------------------------------------------------------------------------------------------------------


def test_module_has_the_files_that_its_import_runs(folder: Path) -> None:
    assert code_files("elsewhere/own.py") == {"own": "elsewhere/own.py"}
    assert [*code_files("lone.deep.part")] == ["lone", "lone.deep", "lone.deep.part"]
    assert {*code_files("lone")} == {"lone", "lone.deep", "lone.deep.part", "lone.other"}
    assert code_files("json.decoder")["json.decoder"].endswith(os.path.join("json", "decoder.py"))
    assert code_files("no_such_module_here.part") == {}
    (folder / "elsewhere" / "helper.py").write_text("", encoding="utf-8")
    assert code_files("helper") == {}
    assert [*code_files("helper", ["elsewhere/own.py", "helper"])] == ["helper"]


@pytest.mark.parametrize(
    ("code", "change", "message"),
    [
        (("--import", "lone.deep.part"), "lone/deep/part.py", "--import lone.deep.part: .*part.py is not the cert"),
        (("--import", "lone.deep.part"), "lone/__init__.py", "--import lone.deep.part: .*__init__.py is not the cert"),
        (("--import", "lone.deep.part"), "lone/other.py", ""),
        (("--import", "lone"), "", "--import lone: .*other.py is not among the certified code"),
        (("--import", "lone.deep.gone"), "", "--import lone.deep.gone is not among the certified code"),
        (("--import", "own.py"), "own.py", "--import own.py: own.py is not the certified file"),
        (("--handler", "own.py"), "own.py", "--handler own.py: own.py is not the certified file"),
        (("--handler", "lone.other"), "", "--handler lone.other: .*other.py is not among the certified code"),
        (("--handler", "third.py"), "", "--handler third.py is not among the certified code"),
    ],
)  # fmt: skip
def test_code_that_is_not_certified_is_refused(folder: Path, code: tuple[str, str], change: str, message: str) -> None:
    load(("--import", "own.py"), ("--import", "lone.deep.part"), ("--handler", "own.py"))
    if change:
        (folder / change).write_text("x = 1", encoding="utf-8")
    if not message:
        load(code)
        return
    with pytest.raises(ConfigError, match=message) as error:
        load(code)
    assert str(error.value).endswith("; renew it: torchpipe compile own.toml")


def test_module_of_a_certified_package_that_is_gone_is_refused(folder: Path) -> None:
    certify(folder / "c.toml", ["lone"])
    load(("--import", "lone"))
    (folder / "lone" / "other.py").unlink()
    with pytest.raises(ConfigError, match=r"--import lone: the certified module lone\.other is missing"):
        load(("--import", "lone"))


def test_file_may_be_elsewhere_and_is_told_from_one_of_its_name_in_a_package(folder: Path) -> None:
    (folder / "lone" / "own.py").write_text("x = 2", encoding="utf-8")
    certify(folder / "c.toml", ["own.py", "lone.own"])
    shutil.move("own.py", "elsewhere")
    load(("--import", "elsewhere/own.py"), ("--import", "lone.own"))
    shutil.copy("lone/own.py", "elsewhere/own.py")
    with pytest.raises(ConfigError, match=r"elsewhere/own\.py is not the certified file"):
        load(("--import", "elsewhere/own.py"))


def test_service_checks_its_handler_and_imports(folder: Path) -> None:
    flags = ["--import", "own.py, lone.deep.part", "--handler", "own.py:Photos"]
    options = parse_options(["c.toml", "--require-certificate", "c.certificate.json", *flags])
    with cli._read_file(options).loading():
        pass
    (folder / "own.py").write_text("x = 1", encoding="utf-8")
    with pytest.raises(ConfigError) as error, cli._read_file(options).loading():
        pass
    assert [line.split(":")[1].strip() for line in str(error.value).splitlines()] == [
        "--import own.py",
        "--handler own.py",
    ]


def test_version_of_a_package_with_backends_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> list[Any]:
        return [SimpleNamespace(name=name, dist=SimpleNamespace(name="pytest")) for name in ("Blur", "Other")]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert "pytest" not in versions({"n": {"backend": "Identity"}})
    assert versions({"n": {"backend": "S[Identity,Blur]"}})["pytest"] == pytest.__version__


# -- files while they are loaded --------------------------------------------------------------------------------------


def replaced(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.write_bytes(path.with_suffix(".old").read_bytes())


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced by a copy": lambda folder: replaced(folder / "words.txt"),
    "written over": lambda folder: (folder / "words.txt").write_text("b", encoding="utf-8"),
    "gone": lambda folder: (folder / "words.txt").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_file_that_changes_while_it_is_loaded_is_refused(folder: Path, change: str) -> None:
    with pytest.raises(ConfigError, match=r"words\.txt changed while it was loaded; renew it: "):
        load(meanwhile=lambda: CHANGES[change](folder))


def test_file_that_takes_precedence_while_another_is_loaded_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the working directory comes before the one beside the TOML file."""
    monkeypatch.chdir(folder / "elsewhere")
    tables = read_certified("../c.certificate.json", "../c.toml")
    with pytest.raises(ConfigError, match=r"words\.txt changed while it was loaded"), tables.loading():
        Path("words.txt").write_text("b", encoding="utf-8")


def test_process_checks_the_nodes_that_it_runs_alone(folder: Path) -> None:
    (folder / "words.txt").write_text("b", encoding="utf-8")
    tables = read_certified("c.certificate.json", "c.toml")
    with tables.loading(lambda node: node != "n"):
        pass
    tables.check_choices({"n": ["A: B"]}, lambda node: node != "n")
    with (
        pytest.raises(ConfigError, match=r"node 'n': key 'words': words\.txt is not the certified file"),
        tables.loading(),
    ):
        pass
    with pytest.raises(ConfigError, match="node 'n' uses A: B here, nothing in the certificate"):
        tables.check_choices({"n": ["A: B"]})


def test_decoder_that_runs_in_another_process_is_the_same_choice(folder: Path) -> None:
    choice = "FirstAvailable[DecodeMat,Identity]"
    (folder / "c.toml").write_text(f'[n]\nbackend = "{choice}"\n', encoding="utf-8")
    certify(folder / "c.toml", choices={"n": [f"{choice}: DecodeMat"]})
    options = parse_options(["c.toml", "--require-certificate", "c.certificate.json", "--decode-isolation", "process"])
    tables = cli._read_file(options)
    with pipe(make_plan(options, tables, 1)) as run:
        tables.check_choices(run.setup_choices())


def test_reload_reads_no_model_in_the_supervisor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are large, and the processes that load them compare them."""
    hashed, right = list[str](), certificate.file_hash
    monkeypatch.setattr(certificate, "file_hash", lambda path: hashed.append(str(path)) or right(path))
    options = parse_options(["c.toml", "--require-certificate", "c.certificate.json"])
    assert cli._read_file(options) == parse_toml("c.toml")
    assert hashed == ["c.toml"]


def test_toml_file_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables could be of another file than the one that is certified."""

    def parse(path: str) -> Any:
        tables = parse_toml(path)
        replaced(folder / "c.toml")
        return tables

    monkeypatch.setattr(certificate, "parse_toml", parse)
    with pytest.raises(ConfigError, match=r"c\.toml changed while it was read"):
        read_certified("c.certificate.json", "c.toml")


def test_each_file_of_a_value_with_several_may_move(
    folder: Path, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    class Model(Backend):
        model = Param(to_str, file=True, doc="a text file")

    backend = register(Model)
    (folder / "more.txt").write_text("b", encoding="utf-8")
    text = f'[n]\nbackend = "{backend}"\nmodel = "words.txt&more.txt"\n'
    (folder / "c.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder / "elsewhere")
    certify(Path("../c.toml"))
    monkeypatch.chdir("/")
    tables = read_certified(str(folder / "c.certificate.json"), str(folder / "c.toml"))
    assert [path for _, _, path, _ in tables.certificate.files] == ["more.txt", "words.txt"]
    with tables.loading():
        pass


def test_process_that_a_worker_starts_again_checks_its_node(folder: Path) -> None:
    options = parse_options(["c.toml", "--require-certificate", "c.certificate.json"])
    reloading = make_plan(options, cli._read_file(options), 1).plans["n"].reloading
    with reloading():
        pass
    (folder / "words.txt").write_text("b", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not the certified file"), reloading():
        pass


def test_reload_keeps_engine_processes_only_with_the_same_certificate(folder: Path) -> None:
    """They have not compared their files with another one."""
    with open("c.toml", "a", encoding="utf-8") as file:
        file.write("shared = true\n")
    certify(folder / "c.toml")
    options = parse_options(["c.toml", "--require-certificate", "c.certificate.json", "--workers", "2"])

    def read() -> Configuration:
        return Configuration.of(cli._read_file(options), {}, options)

    before = Generation(read(), options)
    for engine in before.engines:
        engine.child = Mock(is_ready=True)
    assert Generation(read(), options, before).engines is before.engines
    certify(folder / "c.toml", choices={"n": ["A: B"]})
    assert Generation(read(), options, before).engines is not before.engines

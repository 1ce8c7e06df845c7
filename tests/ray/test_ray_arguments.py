from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.config import Tables
from torchpipe_py.ray.arguments import SETTINGS, found_folder, overridden, read_arguments, read_user_config


def test_words_become_values() -> None:
    given = {"replicas": "2", "max_replicas": "4", "num_gpus": "0.5", "import": "mine", "m.max": "8"}
    arguments = read_arguments({"config": "a.toml", **given})
    assert (arguments.config, arguments.replicas, arguments.max_replicas) == ("a.toml", 2, 4)
    assert (arguments.num_gpus, arguments.import_code) == (0.5, "mine")
    assert arguments.overrides == {("m", "max"): "8"}
    assert read_user_config({"m.min": 2}, arguments) == ("a.toml", {("m", "max"): "8", ("m", "min"): 2})
    assert read_user_config({"config": "b.toml"}, arguments) == ("b.toml", {})
    tables = overridden(Tables({"global": {}, "m.a": {"next": "x"}}), {("m.a", "next"): "y", ("global", "max"): "3"})
    assert tables == {"global": {"max": "3"}, "m.a": {"next": "y"}}


A_KEY = " (a key of the configuration is node.key)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": None}, "the argument 'config' is missing, as in config=configs/demo.toml"),
        ({"replica": 2}, f"no argument 'replica'; did you mean 'replicas'?{A_KEY[:-1]}=value)"),
        ({"replicas": "two"}, "argument 'replicas': expected an integer, got 'two'"),
        ({"replicas": 0}, "argument 'replicas': expected at least 1, got 0"),
        (
            {"max_replicas": 2, "scale_on": "queue"},
            "argument 'scale_on': expected one of ongoing, queue_time, got 'queue'",
        ),
        ({"target": 5}, "argument 'target' is for scaling, which max_replicas turns on"),
        ({"replicas": 3, "max_replicas": 2}, "argument 'max_replicas' = 2 is less than replicas"),
    ],
)
def test_names_wrong_argument_and_nearest_valid(given: dict[str, Any], message: str) -> None:
    whole = {name: value for name, value in {"config": "a.toml", **given}.items() if value is not None}
    with pytest.raises(ConfigError) as error:
        read_arguments(whole)
    assert str(error.value) == f"app: {message}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("b.toml", "expected config and node.key, each with a value, got a str"),
        (
            {"replicas": 2},
            "no 'replicas'; of app's arguments only config can change (a key of the configuration is node.key)",
        ),
        ({"confg": "b"}, "no 'confg'; did you mean 'config'? (a key of the configuration is node.key)"),
    ],
)
def test_names_argument_that_cannot_be_exchanged(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_user_config(given, read_arguments({"config": "a.toml"}))
    assert str(error.value) == f"user_config: {message}"


def test_names_unknown_node_of_an_override() -> None:
    with pytest.raises(ConfigError, match=r"argument 'modl.max': config has no node 'modl'; did you mean 'model'\?"):
        overridden(Tables({"global": {}, "model": {}}), {("modl", "max"): 3})


def test_working_directory_of_a_node_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError) as error:
        found_folder("a.toml", str(there))
    assert str(error.value).startswith(f"a.toml: not on node {os.uname().nodename}, neither in {here} nor in {there}: ")
    (there / "a.toml").touch()
    assert found_folder("a.toml", str(there)) == str(there)
    (here / "a.toml").touch()
    assert found_folder("a.toml", str(there)) == str(here)


def test_the_table_of_the_documentation_has_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8").splitlines()
    for name, (_, param) in SETTINGS.items():
        default = "" if param.default in (None, "") else f"={param.default}"
        choices = ", ".join(param.choices)
        assert f"| `{name}{default}` | {param.doc}{choices and ': '}{choices} |" in page

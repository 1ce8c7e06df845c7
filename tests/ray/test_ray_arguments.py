from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.config import Tables
from torchpipe_py.ray.arguments import SETTINGS, found_folder, overridden, read_arguments, read_user_config


def test_words_become_values() -> None:
    given = {
        "config": "a.toml",
        "replicas": "2",
        "max_replicas": "4",
        "num_gpus": "0.5",
        "import": "mine",
        "m.max": "8",
    }
    arguments = read_arguments(given)
    assert (arguments.config, arguments.replicas, arguments.max_replicas) == ("a.toml", 2, 4)
    assert (arguments.num_gpus, arguments.import_code) == (0.5, "mine")
    assert arguments.overrides == {("m", "max"): "8"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "app: the argument 'config' is missing, as in config=configs/demo.toml"),
        (
            {"config": "a.toml", "replica": 2},
            "app: no argument 'replica'; did you mean 'replicas'? (a key of the configuration is node.key=value)",
        ),
        ({"config": "a.toml", "replicas": "two"}, "app: argument 'replicas': expected an integer, got 'two'"),
        ({"config": "a.toml", "replicas": 0}, "app: argument 'replicas': expected 1 or more, got 0"),
        (
            {"config": "a.toml", "max_replicas": 2, "scale_on": "queue"},
            "app: argument 'scale_on': no 'queue'; did you mean 'queue_time'?",
        ),
        (
            {"config": "a.toml", "target": 5},
            "app: argument 'target' is for scaling, which max_replicas turns on",
        ),
        (
            {"config": "a.toml", "replicas": 3, "max_replicas": 2},
            "app: argument 'max_replicas' = 2 is less than replicas",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(given)
    assert str(error.value) == message


def test_overrides_take_the_place_of_a_nodes_values() -> None:
    tables = overridden(Tables({"global": {}, "m.a": {"next": "x"}}), {("m.a", "next"): "y", ("global", "max"): "3"})
    assert tables == {"global": {"max": "3"}, "m.a": {"next": "y"}}


def test_an_override_of_an_unknown_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^argument 'modl.max': config has no node 'modl'; did you mean 'model'\?$"):
        overridden(Tables({"global": {}, "model": {}}), {("modl", "max"): 3})


def test_a_user_config_changes_what_it_names() -> None:
    before = read_arguments({"config": "a.toml", "m.max": 8})
    assert read_user_config({"m.min": 2}, before) == ("a.toml", {("m", "max"): 8, ("m", "min"): 2})
    assert read_user_config({"config": "b.toml"}, before) == ("b.toml", {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("b.toml", "user_config: expected config and node.key, each with a value, got a str"),
        (
            {"replicas": 2},
            "user_config: no 'replicas'; of app's arguments only config can change (a key of the configuration is "
            "node.key)",
        ),
        ({"confg": "b"}, "user_config: no 'confg'; did you mean 'config'? (a key of the configuration is node.key)"),
    ],
)
def test_a_user_config_that_is_wrong_is_refused(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_user_config(given, read_arguments({"config": "a.toml"}))
    assert str(error.value) == message


def test_the_working_directory_of_a_node_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    (there / "a.toml").touch()
    assert found_folder("a.toml", str(there)) == str(there)
    (here / "a.toml").touch()
    assert found_folder("a.toml", str(there)) == str(here)


def test_a_node_without_the_file_names_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        found_folder("a.toml", "/else")
    assert str(error.value).startswith(
        f"a.toml: not on node {os.uname().nodename}, neither in {os.getcwd()} nor in /else: the file and all that it "
    )


def test_the_table_of_the_documentation_has_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")
    assert [line for line in table() if line not in page.splitlines()] == []


def table() -> list[str]:
    """A line for each argument, with its default where that is a value."""
    lines = []
    for name, setting in SETTINGS.items():
        default = "" if setting.default in (None, "") else f"={setting.default}"
        choices = ", ".join(setting.metadata["choices"])
        lines.append(f"| `{name}{default}` | {setting.metadata['doc']}{choices and ': '}{choices} |")
    return lines

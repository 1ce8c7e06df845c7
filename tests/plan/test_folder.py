"""A folder of TOML files as one configuration: names, versions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchpipe_py import ConfigError, UnknownNode, parse_folder, pipe

TWO_ROOTS = '[one]\nnext = "end"\n[end]\nbackend = "Identity"\n[two]\nbackend = "Identity"\n'
JUMPING = '[outer]\nbackend = "S[Jump]"\n"Jump::jump" = "inner"\n[inner]\nbackend = "Identity"\n'


def written(folder: Path, **files: str) -> Path:
    """``files`` by name, in which ``__`` stands for the slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_models_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path, a='[n]\nbackend = "Identity"\n', b__2=JUMPING, b__10=JUMPING, c=TWO_ROOTS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "labels.txt").write_text("nothing for a model")
    (tmp_path / ".hidden.toml").write_text("not read")
    with pipe(parse_folder(tmp_path)) as run:
        assert [(model.name, model.version, model.root) for model in run.models] == [
            ("a", "1", "a/1/n"),
            ("b", "2", "b/2/outer"),
            ("b", "10", "b/10/outer"),
            ("c.one", "1", "c/1/one"),
            ("c.two", "1", "c/1/two"),
        ]
        for name in ("a", "a/1", "b", "b/2", "b/10", "c.one", "c.two/1"):
            assert run({"data": name, "node_name": name})["result"] == name
        nodes = run.stats()["nodes"]
        assert {name: nodes[name]["requests"] for name in ("b/2/inner", "b/10/inner")} == {
            "b/2/inner": 1,
            "b/10/inner": 2,
        }
        for wrong in ("a/1/n", "n", "b/3", "../a"):
            with pytest.raises(UnknownNode, match="no root"):
                run({"data": 1, "node_name": wrong})
    only = parse_folder(tmp_path).without("a").without("c")
    with pipe(only) as run:
        run({"data": 1})
        assert run.stats()["nodes"]["b/10/outer"]["requests"] == 1, "the one model, its last version"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no model in it; NAME.toml is one"),
        ({"a b": "[n]"}, "a b.toml: the name of a model is letters"),
        ({"a__x": "[n]"}, "x.toml: a version is a number from 1"),
        ({"a__0": "[n]"}, "0.toml: a version is a number from 1"),
        ({"a": "[n]", "a__1": "[n]"}, "version 1 of 'a' is .*, too"),
        ({"a": "[n"}, "a.toml: not valid TOML"),
        ({"a": '[n]\nnext = "m"', "b": "[m]"}, "a.toml: node 'n': key 'next': no node .*m"),
        ({"a": "maximum = 3\n[n]", "b": "[m]"}, "a.toml: global: key 'maximum': no node takes it"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe(parse_folder(written(tmp_path, **files)))


def test_a_model_is_read_again_alone(tmp_path: Path) -> None:
    served = parse_folder(written(tmp_path, a="[n]", b="[m]"))
    written(tmp_path, a="not read", b__2="[m]")
    assert list(served.having("b")) == ["a/1", "b/1", "b/2"]
    with pytest.raises(ConfigError, match=r"no model '\.\./b' in .*; "):
        served.having("../b")
    with pytest.raises(ConfigError, match=r"a\.toml: not valid TOML"):
        served.having("a")

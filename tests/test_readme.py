"""What README.md shows is what the programs print."""

from __future__ import annotations

import re
from pathlib import Path

import tomli
from torchpipe_server import options

from torchpipe_py.cli import markdown_table
from torchpipe_py.plan.config import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "server" / "README.md").read_text(encoding="utf-8")


def test_the_table_of_backends_is_the_generated_one() -> None:
    shown = README.split("<!-- torchpipe backends --markdown -->")[1].split("<!-- end -->")[0]
    assert shown.strip().splitlines() == list(markdown_table())


def test_the_demo_shown_is_the_demo_served() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    served = tomli.loads((ROOT / "configs" / "demo.toml").read_text(encoding="utf-8"))
    demo, *others = map(tomli.loads, blocks)
    assert demo == served
    assert others
    for other in others:  # nothing in them that a pipe would refuse before it looks for a device
        load_config({name: {**node, "model": str(ROOT / "configs/demo/model.onnx")} for name, node in other.items()})


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`((?:configs|scripts|idl|server)/[\w./]+)`", README + OPERATIONS):
        assert (ROOT / path).exists(), path


def test_the_flags_of_the_service_are_the_declared_ones() -> None:
    shown = OPERATIONS.split("<!-- flags -->")[1].split("<!-- end -->")[0]
    assert shown.strip().splitlines() == options.markdown_table()

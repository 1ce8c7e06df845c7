"""The flags of the service."""

from __future__ import annotations

import pytest
from torchpipe_server.options import markdown_table, parse_options

from torchpipe_py.plan.config import NODE_KEYS, PIPELINE_KEYS
from torchpipe_py.plan.unknown import SERVICE_FLAGS


def test_errors_about_configurations_name_flags_that_are_there() -> None:
    flags = {row.split("`")[1].removeprefix("--") for row in markdown_table()}
    assert set(SERVICE_FLAGS) == flags - {key.replace("_", "-") for key in (*NODE_KEYS, *PIPELINE_KEYS)}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--config", "x.toml"], "--config; the TOML file is given without a flag"),
        (["x.toml", "--gpus", "0"], "--gpus 0; CUDA devices are --devices here, their numbers"),
        (["x.toml", "--http", "80"], "--http 80; --port takes HTTP and Thrift, --http-port is for monitoring"),
    ],
)
def test_a_flag_of_another_server_is_named_as_it_is_here(
    given: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(given)
    assert hint in capsys.readouterr().err


def test_the_former_name_of_import_adds_to_its_list() -> None:
    assert parse_options(["a.toml", "--import", "a", "--import-code", "b"]).import_code == "a,b"

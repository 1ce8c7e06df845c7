"""The flags of the service."""

from __future__ import annotations

from torchpipe_server.options import markdown_table

from torchpipe_py.plan.config import NODE_KEYS, PIPELINE_KEYS
from torchpipe_py.plan.unknown import SERVICE_FLAGS


def test_errors_about_configurations_name_flags_that_are_there() -> None:
    flags = {row.split("`")[1].removeprefix("--") for row in markdown_table()}
    assert set(SERVICE_FLAGS) == flags - {key.replace("_", "-") for key in (*NODE_KEYS, *PIPELINE_KEYS)}

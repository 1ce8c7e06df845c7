"""Long chains; instances of nodes that do not say how many."""

from __future__ import annotations

import pytest

from torchpipe_py.plan import build
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import load_config
from torchpipe_py.plan.graph import build_graph


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = {f"n{index}": {"next": f"n{index + 1}"} for index in range(1200)}
    made = build_graph(load_config({**nodes, "n1200": {}}))
    assert (made.order[0], made.order[-1], len(made.upstream["n1200"])) == ("n0", "n1200", 1200)


# -- how many instances a node has that does not say so ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "cores", "processes", "expected"),
    [
        ({"backend": "Identity"}, 16, 1, 1),
        ({"backend": "DecodeMat"}, 4, 1, 4),
        ({"backend": "S[DecodeMat,ResizeMat]", "resize_h": 8, "resize_w": 8, "filter": "or"}, 16, 8, 2),
        ({"backend": "DecodeMat"}, 2, 8, 1),
        ({"backend": "CheckJpeg"}, 64, 1, 8),
        ({"backend": "CheckJpeg", "instance_num": 3}, 64, 1, 3),
    ],
)
def test_what_decodes_or_checks_has_the_cores(
    node: dict[str, object], cores: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    tables = {"first": {"backend": "Identity", "next": "node"}, "node": node}
    assert plan_pipeline(tables, processes=processes).plans["node"].spec.instance_num == (expected,)

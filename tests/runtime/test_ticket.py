"""Whether a request waits or something works on it, whichever kind of node has it: a client that leaves ends the first,
and one that only closes its side is still answered by the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from kit.engines import workers_of
from kit.steered import steering
from kit.waits import WAIT, eventually

from torchpipe_py import pipe

NODE = {"backend": "Steered"}
CONFIGS: dict[str, dict[str, Any]] = {
    "single": {"n": NODE},
    "batching": {"n": {**NODE, "most": 2, "batching_timeout": 1}},
    "forked": {"n": {"next": "a,b"}, "a": NODE, "b": {}},
    "forked, one elsewhere": {
        "n": {"next": "a,b"},
        "a": {"backend": "Process[Steered]"},
        "b": {**NODE, "instance_num": 2},
    },
    "jump": {"n": {"backend": "Jump", "jump": "inner"}, "inner": NODE},
    "process": {"n": {"backend": "Process[Steered]"}},
    "after a process": {"n": {"backend": "Process[Identity]", "next": "last"}, "last": NODE},
    "after a jump": {"n": {"backend": "Jump", "jump": "inner", "next": "last"}, "inner": {}, "last": NODE},
    "after a fork": {
        "n": {"next": "a,b"},
        "a": {"next": "last"},
        "b": {"next": "last"},
        "last": {**NODE, "map": "a[result:data],b[result:b]"},
    },
    "shared": {"n": {**NODE, "shared": True}},
}


@contextmanager
def piped(config: dict[str, Any], is_shared: bool) -> Iterator[pipe]:
    if is_shared:
        with workers_of(config) as [worker]:
            yield worker.pipe
    else:
        with pipe(config) as p:
            yield p


@pytest.mark.parametrize("kind", CONFIGS)
def test_request_is_queued_until_something_works_on_it(kind: str, tmp_path: Path) -> None:
    config = {name: {**node, "folder": str(tmp_path)} for name, node in CONFIGS[kind].items() if "Steered" in str(node)}
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    with steering(), piped({**CONFIGS[kind], **config}, kind == "shared") as p:
        tickets = [p.dispatch({"data": "block", "node_name": "n"}, lambda _, error: ended.put(error)) for _ in "12"]
        eventually((tmp_path / "entered").exists)
        running, waiting = tickets
        eventually(lambda: not running.is_queued)
        # In the others it is in the same batch, other requests have it, or another process.
        if kind in ("single", "process", "forked") or kind.startswith("after"):
            eventually(lambda: waiting.is_queued)
        assert not running.is_queued
        (tmp_path / "open").touch()
        assert [ended.get(timeout=WAIT) for _ in tickets] == [None, None]
        assert not any(ticket.is_queued for ticket in tickets)

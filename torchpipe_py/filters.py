"""Filters, which decide what happens to a request that enters a node or a child of ``Sequential``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY

Data = dict[str, Any]


class Status(enum.Enum):
    """A filter's verdict."""

    Run = "run the backend"
    Skip = "go on without running it"
    SerialSkip = "skip the largest serial chain from here"
    SubGraphSkip = "skip the largest subgraph all of whose non-root nodes have their predecessors in it"
    Break = "end the request; the dict as it stands is the outcome"
    Error = "fail the request"


Filter = Callable[[Data], Status]

# On the path of every request, and until Python 3.12 a member of an enum takes as long as a call.
RUN, SKIP, BREAK = Status.Run, Status.Skip, Status.Break


def swap(data: Data) -> Status:
    """``Break`` without a ``result``; otherwise ``Run``, with the result as the next ``data``."""
    if TASK_RESULT_KEY not in data:
        return BREAK
    data[TASK_DATA_KEY] = data.pop(TASK_RESULT_KEY)
    return RUN


def or_(data: Data) -> Status:
    """``Run`` if there is no result yet, otherwise ``Skip``."""
    return SKIP if TASK_RESULT_KEY in data else RUN


def run(data: Data) -> Status:
    """Always ``Run``, on the data as it is."""
    return RUN


def always(status: Status, data: Data) -> Status:
    """``status`` for every request."""
    return status


serial_skip = partial(always, Status.SerialSkip)
subgraph_skip = partial(always, Status.SubGraphSkip)

BUILT_IN: dict[str, Filter] = {
    "swap": swap,
    "or": or_,
    "run": run,
    "skip": partial(always, Status.Skip),
    "serialskip": serial_skip,
    "subgraphskip": subgraph_skip,
    "break": partial(always, Status.Break),
    "error": partial(always, Status.Error),
}
ALIASES = {"continue": "run", "serial_skip": "serialskip", "subgraph_skip": "subgraphskip"}

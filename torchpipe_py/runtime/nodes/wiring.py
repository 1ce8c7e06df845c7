"""The connections of a node, which it gets once, before its first request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchpipe_py.runtime.admission import QueueTarget
from torchpipe_py.runtime.nodes.ordering import Order
from torchpipe_py.runtime.request import Request

Deliver = Callable[[Request], object]

Fail = Callable[[Request, BaseException], object]

Around = Callable[[Sequence[Request], float, Callable[[], Any]], Any]
"""``around(requests, started, run)`` calls ``run``, which runs a backend, in a context that belongs to the requests."""

IsDue = Callable[[float, float], bool]
"""``is_due(since, until)``: whether a request that has not arrived is due in that time, in seconds from now."""


class Loaded(Protocol):
    """A node from which requests may come."""

    def load(self) -> int:
        """Number of requests there that could be delivered and are not yet."""


class Waiting(Protocol):
    """A node whose leader waits to fill a batch."""

    def is_awaiting(self) -> bool:
        """Whether a request could still reach it in time."""

    def wake_leader(self) -> None:
        """Have the leader look again."""


class Source(Protocol):
    """A queue before a pipe: the leaders of the nodes that requests enter fetch the requests from it."""

    def fetch(self, node: object, /) -> None:
        """Submit all waiting requests, on the calling thread. The node's leader calls it again before it sleeps."""

    def announce(self, node: object, /) -> bool:
        """The node's leader will sleep: submit new requests until its next ``fetch``; returns whether any wait now."""

    def together(self) -> AbstractContextManager[None]:
        """A context that collects the requests completed on the calling thread and reports them together at its end."""


@dataclass(frozen=True, eq=False)
class Wiring:
    """The connections of one node.

    ``deliver(request)`` passes a finished request on, on the thread that finished it; ``fail(request, error)``
    completes a request with an error. ``upstream`` holds the nodes from which a request can still reach this one,
    perhaps itself, and ``both_ways`` the other nodes that are both before and after this one, at any distance.
    ``waiting``, shared by the nodes of a pipe, holds nodes whose leader waits to fill a batch: an instance that has
    delivered its batch wakes the leaders that no request can reach any more. ``expected``, shared too, tells which
    requests are due from outside.

    With ``order``, requests enter by ``order.put``. ``target`` limits how long requests wait, and
    ``path_compute(now)`` is the expected compute time of their path, in seconds. With ``source``, the leader fetches
    requests from it. A batch is delivered inside ``together()``. Each ``forward`` runs inside the first of
    ``contexts``, if there is one, which is shared by nodes and may be added later.
    """

    deliver: Deliver
    fail: Fail
    upstream: Sequence[Loaded] = ()
    both_ways: Collection[Loaded] = ()
    waiting: set[Waiting] = field(default_factory=set)
    expected: Sequence[IsDue] = ()
    order: Order | None = None
    target: QueueTarget = field(default_factory=QueueTarget)
    path_compute: Callable[[float], float] = float
    source: Source | None = None
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    contexts: Sequence[Around] = ()

"""Which children are stuck for good, and their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic

from torchpipe_server.supervisor.children.child import Child, Reason

logger = logging.getLogger("torchpipe_server")

RETIRE_SECONDS = 0.5  # for a worker with something that hangs to finish what does not

_PROBLEMS: dict[Reason, str] = {
    "silent": "gives no sign of life",
    "stuck": "has an I/O loop that is stuck",
    "hung_batch": "has a batch that does not end",
    "dead_instance": "has lost the thread of an instance",
}


class Retirement:
    """Ends children in which something is stuck; who has them replaces those that have ended."""

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._retiring: dict[Child, float] = {}  # and when they are killed

    def look(self, children: Iterable[Child]) -> None:
        """Ask them for figures, and retire those in which something is stuck for good."""
        for child in children:
            reason = child.look(self._hang_seconds)
            if reason is None:
                if child.state in ("ready", "draining"):
                    child.ask_stats()
            elif child not in self._retiring:
                logger.error("%s (pid %d) %s: replacing it", child.name, child.pid, _PROBLEMS[reason])
                self._retire(child, reason)

    def kill_due(self, now: float) -> list[float]:
        """Kill those whose time is over, or that have nothing left to finish; the seconds that others have still."""
        left = []
        for child, until in list(self._retiring.items()):
            if child.is_gone:
                del self._retiring[child]
            elif now >= until or not child.connections:
                child.kill()
            else:
                left.append(until - now)
        return left

    def _retire(self, child: Child, reason: Reason) -> None:
        """End it; first let it finish the rest, where only some of its batches do not end."""
        # NOTE: what cannot be finished is answered when the worker is dead, by whoever takes its connections over.
        self._retiring[child] = monotonic()
        if child.is_ready and child.connections and reason in ("hung_batch", "dead_instance"):
            self._retiring[child] += RETIRE_SECONDS
            child.release(reason)
        else:
            child.kill(reason)

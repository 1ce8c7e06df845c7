"""Which children are stuck for good, and their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torchpipe_server.front.loop import Loop
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

    def __init__(self, loop: Loop, hang_seconds: float) -> None:
        self._loop, self._hang_seconds = loop, hang_seconds
        self._retiring: set[Child] = set()  # what they can finish, they finish

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

    def _retire(self, child: Child, reason: Reason) -> None:
        """End it; first let it finish the rest, where only some of its batches do not end."""
        # NOTE: what cannot be finished is answered when the worker is dead, by whoever takes its connections over.
        if child.is_ready and child.connections and reason in ("hung_batch", "dead_instance"):
            self._retiring.add(child)
            self._loop.call_later(RETIRE_SECONDS, self._kill, child)
            child.release(reason)
        else:
            child.kill(reason)

    def _kill(self, child: Child) -> None:
        self._retiring.discard(child)
        child.kill()

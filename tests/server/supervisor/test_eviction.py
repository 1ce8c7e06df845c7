"""A connection that gives way is idle in the moment in which it does."""

from __future__ import annotations

import socket

from torchpipe_server.front.journal import Entry
from torchpipe_server.options import Options
from torchpipe_server.serving.loop import Loop
from torchpipe_server.supervisor.acceptor import listen
from torchpipe_server.supervisor.connections import Connections


class Served(Connections):
    """Whose connections have a worker that reads what a client has sent just before one listens for it."""

    entry: Entry | None = None

    def _hears_nothing(self, slot: int) -> bool:
        if self.entry is not None:
            self.entry.touch()
        return super()._hears_nothing(slot)


def test_what_a_worker_has_just_read_is_not_hung_up_on():
    loop = Loop()
    served = Served(loop, listen("127.0.0.1", 0), Options("", max_connections=4), None, list, lambda: False)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours:
        served._take(theirs, "127.0.0.1")
        (slot,) = served._sockets
        served.entry = served.journal.entry(slot)
        assert served._evict([slot]) is None
        served.entry.wipe()
        served.entry = None
        assert served._evict([slot]) == slot
        assert ours.recv(1) == b""
        served.drain()
        served.close()
    loop.close()

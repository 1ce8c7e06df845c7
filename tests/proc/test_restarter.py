"""``Restarter``: how often it starts a process in place of one that died."""

from __future__ import annotations

from torchpipe_py import WorkerDied
from torchpipe_py.proc.pool import LOSSES, Pool
from torchpipe_py.proc.restarter import LinkedChild, Restarter


class Starting:
    """Starts that fail; the pool is closed during start number ``close_at``."""

    def __init__(self, close_at: int) -> None:
        self.count, self.pool, self._close_at = 0, Pool(), close_at

    def __call__(self) -> LinkedChild:
        self.count += 1
        if self.count == self._close_at:
            self.pool.close()
        raise WorkerDied("took longer than 60 s")


def test_it_starts_no_process_for_a_pool_that_was_closed() -> None:
    starting = Starting(1)
    restarter = Restarter("Process[Slow]", starting.pool, starting, 0.0)
    restarter.serve(restarter.is_idle)
    assert starting.count == 1


def test_it_tries_several_times_for_an_open_pool() -> None:
    starting = Starting(LOSSES)
    restarter = Restarter("Process[Slow]", starting.pool, starting, 0.0)
    restarter.serve(restarter.is_idle)
    assert starting.count == LOSSES

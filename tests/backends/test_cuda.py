"""What belongs to CUDA and needs no GPU."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
from kit.locks import WatchedLock
from kit.waits import WAIT

from torchpipe_py.backends import cuda
from torchpipe_py.backends.cuda import no_collection


def test_a_thread_that_leaves_first_enables_no_collections_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    second_is_there, first_left = threading.Event(), threading.Event()
    enabled: list[bool] = []
    monkeypatch.setattr(cuda, "_without_collection", WatchedLock(second_is_there.set))

    def second() -> None:
        with no_collection():
            second_is_there.set()
            first_left.wait(WAIT)
            enabled.append(gc.isenabled())

    thread = threading.Thread(target=second)
    with no_collection():
        thread.start()
        assert second_is_there.wait(WAIT), "inside, or at the lock"
    first_left.set()
    thread.join(WAIT)
    assert enabled == [False]
    assert gc.isenabled()


def test_process_that_is_forked_without_collections_may_be_without_them_itself() -> None:
    with cuda._without_collection:  # as another thread of this process may have it
        child = os.fork()
        if not child:
            signal.alarm(60)
            with no_collection():
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

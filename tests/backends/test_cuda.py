"""What belongs to CUDA and needs no GPU."""

from __future__ import annotations

import gc
import threading

from kit.waits import WAIT

from torchpipe_py.backends.cuda import no_collection


def test_a_thread_that_leaves_first_enables_no_collections_for_another() -> None:
    second_is_inside, first_left = threading.Event(), threading.Event()
    enabled: list[bool] = []

    def second() -> None:
        with no_collection():
            second_is_inside.set()
            first_left.wait(WAIT)
            enabled.append(gc.isenabled())

    thread = threading.Thread(target=second)
    with no_collection():
        thread.start()
        second_is_inside.wait(0.2)  # it does not get there, unless both may be inside
    first_left.set()
    thread.join(WAIT)
    assert enabled == [False]
    assert gc.isenabled()

"""The memory that decoders of a process have under way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import pytest
from kit.waits import eventually, run

from torchpipe_py import DeadlineExceeded, pipe
from torchpipe_py.backends.current import CURRENT
from torchpipe_py.backends.image import memory as memory_module
from torchpipe_py.backends.image.memory import DECODING, SMALL, DecodingMemory

SIZE = 2 * SMALL


class Holder(threading.Thread):
    """Holds a reservation until ``end``; ``waits`` is set once it waits for others."""

    deadline = None

    def __init__(self, memory: DecodingMemory, size: int, limit: int, is_large: bool = False) -> None:
        super().__init__(daemon=True)
        self._arguments = memory, size, limit, is_large
        self.waits, self.has, self.may_end = threading.Event(), threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        CURRENT.instance, (memory, *arguments) = self, self._arguments
        with memory.reserved(*arguments):
            self.has.set()
            self.may_end.wait(60)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits.set()
        yield

    def end(self) -> None:
        self.may_end.set()
        self.join(60)


def is_unused(memory: DecodingMemory) -> bool:
    """Whether a large image gets the whole limit: it would wait for one in use, of either kind."""
    holder = Holder(memory, SIZE, SIZE, is_large=True)
    is_admitted = holder.has.wait(60)
    holder.end()
    return is_admitted


def test_requests_beyond_limit_wait_in_order() -> None:
    memory = DecodingMemory()
    first, second = (Holder(memory, SIZE, 2 * SIZE) for _ in range(2))
    assert first.has.wait(60)
    assert second.has.wait(60)
    large = Holder(memory, 2 * SIZE, 2 * SIZE)
    assert large.waits.wait(60)
    small = Holder(memory, SIZE, 2 * SIZE)  # would fit sooner, but came later
    assert small.waits.wait(60)
    first.end()
    assert not large.has.is_set()
    assert not small.has.is_set()
    second.end()
    assert large.has.wait(60)
    assert not small.has.is_set()
    large.end()
    assert small.has.wait(60)
    small.end()
    assert is_unused(memory)


def test_small_images_do_not_wait_for_large_ones() -> None:
    memory, limit = DecodingMemory(), 4 * SIZE
    large = Holder(memory, limit, limit, is_large=True)
    assert large.has.wait(60)
    others = [Holder(memory, SIZE, limit) for _ in range(2)]
    assert all(other.has.wait(60) for other in others)
    third = Holder(memory, SIZE, limit)  # beside a large one they have half of the limit
    assert third.waits.wait(60)
    large.end()
    assert third.has.wait(60)
    next_large = Holder(memory, SIZE, limit, is_large=True)
    assert next_large.waits.wait(60)
    fourth = Holder(memory, SIZE, limit)  # or one that is wanted
    assert fourth.waits.wait(60)
    third.end()
    assert next_large.has.wait(60)
    assert fourth.has.wait(60)
    for holder in (*others, next_large, fourth):
        holder.end()
    assert is_unused(memory)


def test_forked_process_starts_without_reservations() -> None:
    holder = Holder(DECODING, SIZE, SIZE)
    assert holder.has.wait(60)
    with DECODING._lock:  # as another thread of this process may have it
        child = os.fork()
        if not child:
            signal.alarm(60)
            with DECODING.reserved(SIZE, SIZE):
                os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    holder.end()


def test_wait_for_memory_ends_at_deadline_and_is_not_a_hung_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, waiting = threading.Semaphore(0), memory_module.waiting
    monkeypatch.setattr(memory_module, "waiting", lambda: (waits.release(), waiting())[1])
    big = bytes(cv2.imencode(".jpg", np.zeros((1400, 1400, 3), np.uint8))[1])
    limit = 8 * 1400 * 1400
    with pipe({"backend": "DecodeMat", "max_pixels": 1400 * 1400}) as p:
        with DECODING.reserved(limit, limit):
            request = p.submit({"data": big}, timeout=0.3)
            late = p.submit({"data": big})
            assert isinstance(request.exception(60), DeadlineExceeded)
            assert waits.acquire(timeout=60)
            assert waits.acquire(timeout=60), "the other does not wait"
            eventually(lambda: not any(node["oldest_batch_s"] for node in p.stats()["nodes"].values()))
            assert not late.done()
        assert late.result(60)["result"].shape == (1400, 1400, 3)


_PEAKS = """
import cv2, numpy as np
from torchpipe_py.backends.image.decode import MatDecoder
from torchpipe_py.backends.image.decode import HeaderCheck

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

def encoded(kind, side, *options):
    return bytes(cv2.imencode(kind, np.zeros((side, side, 3), np.uint8), options)[1])

decode = MatDecoder("bgr")
kinds = {"jpeg": (".jpg",), "progressive": (".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)}
side = 2000
for name, (kind, *options) in kinds.items():
    decode(encoded(kind, 64, *options))
    content, counted = encoded(kind, side, *options), HeaderCheck()(encoded(kind, side, *options)).memory
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again
    start = peak()
    decode(content)
    print(name, peak() - start, counted)
    side += 500
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_counted_memory_equals_memory_of_decoding() -> None:
    done = run(sys.executable, "-c", _PEAKS)
    assert done.returncode == 0, done.stderr
    for name, taken, counted in map(str.split, done.stdout.splitlines()):
        assert int(taken) <= 1.1 * int(counted) + 2**23, name

"""Slots of shared memory: what is written at one end is read at the other, and large memory is given back."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import WAIT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchpipe_py.errors import Failure
from torchpipe_py.proc.process.transport import INLINE, Packed
from torchpipe_py.proc.shared import memory
from torchpipe_py.proc.shared.memory import BellMemory, LinkMemory, TooLargeError, attach_bell, changed

KIBIBYTE, MEBIBYTE = 2**10, 2**20


class Ends:
    """A worker's end and an engine's, each with a mapping of its own."""

    def __init__(self) -> None:
        self.worker = LinkMemory.create()
        self.engine = LinkMemory(os.dup(self.worker.fd))
        self.number = 0

    def there(self, message: Any, slot: int = 0, copies: bool = True) -> Any:
        """A message as the engine reads it."""
        self.number += 1
        self.worker.ask(slot, self.number, Packed.of(message), 3, 1.5, inf)
        row = self.engine.request(slot)
        assert (row.kind, row.first, row.second) == (3, 1.5, inf)
        return self.engine.read(slot, row, copies)

    def back(self, message: Any, slot: int = 0) -> Any:
        """A message as the worker reads it."""
        self.engine.answer(slot, self.number, Packed.of(message), False, 2.5, 3.5)
        row = self.worker.reply(slot)
        assert (row.kind, row.first, row.second) == (0, 2.5, 3.5)
        return self.worker.read(slot, row, copies=True)

    def release(self) -> None:
        """The worker is through with its first slot."""
        self.worker.release(0, self.worker.reply(0))

    def used(self) -> int:
        """Bytes of memory that are taken."""
        return os.stat(self.worker.fd).st_blocks * 512

    def close(self) -> None:
        os.close(self.worker.fd)
        os.close(self.engine.fd)


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def same(left: Any, right: Any) -> bool:
    """Equal, of the same types, dtypes and shapes, NaN or not."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# -- messages -------------------------------------------------------------------------------------------------------


MAKERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda content: np.frombuffer(content, np.uint8),
    "tensor": lambda content: torch.from_numpy(np.frombuffer(content, np.uint8).copy()),
}


@pytest.mark.parametrize("size", [0, 1, INLINE - 1, INLINE, INLINE + 1, 64 * KIBIBYTE, 5 * MEBIBYTE])
@pytest.mark.parametrize("kind", MAKERS)
def test_messages_of_all_sizes(ends: Ends, size: int, kind: str) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    value = MAKERS[kind](content)
    message = {"data": value, "more": [value, content[:7]]}
    assert same(ends.there(message), message)
    assert same(ends.back(message), message)
    ends.release()


ARRAYS = [
    np.zeros((), np.float32),
    np.zeros((0, 3), np.int64),
    np.arange(6000, dtype=np.int16).reshape(20, 300)[::2, ::-3],
    np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    np.arange(24000, dtype=np.uint8).reshape(2, 3, 4000).transpose(2, 0, 1),
    np.arange(6000, dtype=">i4"),
    np.array([("a", 1.0)] * 900, [("name", "U3"), ("value", "<f8")]),
    np.array(["é", "long" * 30] * 90),
    np.array([b"a", None, {"b": 1}], object),
    np.array(["2026-11-22", "NaT"], "datetime64[s]"),
    *[np.ones(5000, code) for code in np.typecodes["All"] if code not in "SUVOMmae"],
]


@pytest.mark.parametrize("index", range(len(ARRAYS)), ids=lambda index: f"{ARRAYS[index].dtype}{ARRAYS[index].shape}")
def test_arrays(ends: Ends, index: int) -> None:
    array = ARRAYS[index]
    for found in (ends.there(array), ends.back(array)):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tolist() == array.tolist() or array.dtype.kind == "M"


def test_tensors(ends: Ends) -> None:
    tensors = {
        "float": torch.arange(6000.0).reshape(2, 3, 1000),
        "half": torch.ones(5000, dtype=torch.float16),
        "bfloat16": torch.ones(5000, dtype=torch.bfloat16),
        "bool": torch.ones(5000, dtype=torch.bool),
        "complex": torch.ones(5000, dtype=torch.complex64),
        "transposed": torch.arange(6000).reshape(60, 100).T,
        "channels last": torch.arange(6000.0).reshape(1, 3, 40, 50).to(memory_format=torch.channels_last),
        "part": torch.arange(6000)[::2],
        "number": torch.tensor(3),
        "nothing": torch.zeros(0, 3),
    }
    found = ends.there(tensors)
    assert same(found, tensors)
    assert found["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert same(ends.back(found), tensors)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(bytes, st.integers(0, 3 * INLINE))
    | st.builds(bytearray, st.integers(0, 3 * INLINE))
    | st.builds(np.arange, st.integers(0, INLINE)),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=st.dictionaries(st.text(), VALUES), second=st.dictionaries(st.text(), VALUES), slot=st.integers(0, 127))
def test_any_dict(ends: Ends, first: dict[str, Any], second: dict[str, Any], slot: int) -> None:
    assert same(ends.there(first, slot), first)
    assert same(ends.back(second, slot), second)
    assert same(ends.engine.read(slot, ends.engine.request(slot), copies=True), first), "the answer stands behind it"


def test_what_is_the_same_object_stays_one(ends: Ends) -> None:
    blob, array = bytes(2 * INLINE), bytearray(2 * INLINE)
    found = ends.there([blob, blob, array, array])
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_arrays_lie_in_the_slot_or_are_copies(ends: Ends) -> None:
    array = np.arange(INLINE)
    within, copy = ends.there(array, copies=False), ends.there(array, copies=True)
    ends.there(array + 1)
    assert within[0] == 1
    assert copy[0] == 0
    assert copy.flags.writeable


# -- room -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.LinkMemory, "slot_bytes", 2**18)
    ends = Ends()
    try:
        for size in (2**18 - memory.FAILURE_BYTES, 2**18, 2**20):
            with pytest.raises(TooLargeError, match=r"a request of \d+ bytes is too large .* 196608 bytes are left"):
                ends.there(bytes(size))
        assert ends.worker._asked[0] == 0, "it was sent nevertheless"
        most = bytes(2**18 - memory.FAILURE_BYTES - KIBIBYTE)
        assert ends.there({"data": most}, slot=1)["data"] == most
        with pytest.raises(TooLargeError, match=r"an answer of \d+ bytes is too large"):
            ends.back(bytes(2**17), slot=1)
        assert ends.worker._answered[1] == 0
        assert ends.back("x" * 60_000, slot=1) == "x" * 60_000
    finally:
        ends.close()


@pytest.mark.parametrize(("size", "has_trace"), [(100, True), (10**5, False)])
def test_a_failure_always_fits(monkeypatch: pytest.MonkeyPatch, size: int, has_trace: bool) -> None:
    monkeypatch.setattr(memory.LinkMemory, "slot_bytes", 2**18)
    ends = Ends()
    try:
        ends.there(bytes(2**18 - memory.FAILURE_BYTES - KIBIBYTE))
        ends.engine.fail(0, ends.number, Failure("", "Odd", "what was wrong", "t" * size, b""), 2.5)
        row = ends.worker.reply(0)
        told = ends.worker.read(0, row, copies=True)
        assert (row.kind, told.name, told.message) == (memory.FAILED, "Odd", "what was wrong")
        assert bool(told.trace) == has_trace
    finally:
        ends.close()


def test_memory_of_large_messages_is_given_back() -> None:
    ends = Ends()
    try:
        empty = ends.used()
        assert empty <= 64 * KIBIBYTE
        ends.there("kept", slot=1)
        for _ in range(3):
            ends.there(bytes(5 * MEBIBYTE))
            ends.back(np.zeros(MEBIBYTE))
            assert ends.used() > 13 * MEBIBYTE
            ends.release()
            assert ends.used() <= empty + memory.KEPT_BYTES + 64 * KIBIBYTE
        for _ in range(3):
            ends.there(bytes(300 * KIBIBYTE))
            ends.back(bytes(100 * KIBIBYTE))
            ends.release()
        assert ends.used() >= memory.KEPT_BYTES, "it was given back for small messages"
        assert ends.engine.read(1, ends.engine.request(1), copies=True) == "kept"
    finally:
        ends.close()


def test_words_of_the_slots(ends: Ends) -> None:
    before, told = ends.engine.from_asker(), ends.worker.from_answerer()
    ends.worker.ask(7, 2**32 - 1, Packed.of(1), 0, 0.0, inf)
    ends.worker.ask(127, 1, Packed.of(1), 0, 0.0, inf)
    ends.worker.give_up(7, 2**32 - 1)
    assert changed(before, ends.engine.from_asker()) == [7, 127, memory.SLOTS + 7]
    assert changed(told, ends.worker.from_answerer()) == []
    ends.engine.answer(7, 2**32 - 1, Packed.of(1), False, 0.0, 0.0)
    assert changed(told, ends.worker.from_answerer()) == [7]


class CountedLock:
    """Notes how often any of it is taken."""

    taken = 0

    def __enter__(self) -> None:
        CountedLock.taken += 1

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(("machine", "in_fence", "in_barrier"), [("x86_64", 0, 1), ("aarch64", 2, 2)])
def test_locks_keep_order_where_the_processor_does_not(
    monkeypatch: pytest.MonkeyPatch, machine: str, in_fence: int, in_barrier: int
) -> None:
    monkeypatch.setattr(memory, "threading", SimpleNamespace(Lock=CountedLock))
    monkeypatch.setattr(memory, "_MACHINE", machine)
    for keep_order, taken in ((memory.fence, in_fence), (memory.barrier, in_barrier)):
        monkeypatch.setattr(CountedLock, "taken", 0)
        keep_order()
        assert CountedLock.taken == taken


# -- bells ----------------------------------------------------------------------------------------------------------


def test_a_bell_wakes_who_sleeps() -> None:
    made = BellMemory()
    ringer = attach_bell(made.memory_fd, made.bell.fd)
    poller, quiet = select.poll(), select.poll()
    for each in (poller, quiet):
        each.register(made.bell.fd, select.POLLIN)
    ringer.ring()
    assert quiet.poll(0) == [], "it was rung for one who is awake"
    assert made.bell.sleep(poller, lambda: True) == []
    asleep, woken = threading.Event(), threading.Event()

    def sleep() -> None:
        work: list[int] = []

        def has_work() -> bool:
            asleep.set()
            return bool(work)

        made.bell.sleep(poller, has_work)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    assert asleep.wait(WAIT)
    ringer.ring()
    assert woken.wait(WAIT)
    thread.join(WAIT)
    assert quiet.poll(0) == []


def test_a_sleeper_tells_what_else_is_ready() -> None:
    made = BellMemory()
    read_end, write_end = os.pipe()
    poller = select.poll()
    for fd in (made.bell.fd, read_end):
        poller.register(fd, select.POLLIN)
    os.write(write_end, b"x")
    assert made.bell.sleep(poller, lambda: False) == [read_end]
    for fd in (read_end, write_end):
        os.close(fd)

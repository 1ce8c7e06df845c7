"""Messages and descriptors between the supervisor and a worker."""

from __future__ import annotations

import array
import gc
import os
import resource
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from service import eventually, turn
from torchpipe_server.front.loop import new_loop
from torchpipe_server.worker.channel import Channel

MEBIBYTE = 2**20


class End:
    """One side: what it has heard, and the text that each descriptor leads to."""

    def __init__(self, loop: Any, sock: socket.socket) -> None:
        self.heard: list[tuple[Any, str | None]] = []
        self.ends = 0
        self.on_message: Callable[[Any], object] = lambda message: None
        self.channel = Channel(loop, sock, self._hear, self._end)

    def _hear(self, message: Any, descriptor: int) -> None:
        text = None
        if descriptor >= 0:
            text = os.pread(descriptor, 100, 0).decode()
            os.close(descriptor)
        self.heard.append((message, text))
        self.on_message(message)

    def _end(self) -> None:
        self.ends += 1


class Pair:
    def __init__(self, buffer_bytes: int = 0) -> None:
        self.loop = new_loop(is_fast=False)
        self.socks = socket.socketpair()
        for sock in self.socks if buffer_bytes else ():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.ours, self.theirs = (End(self.loop, sock) for sock in self.socks)

    def run(self, until: Callable[[], object]) -> None:
        """The loop, round by round."""
        eventually(lambda: (turn(self.loop, 0), until())[1])

    def close(self) -> None:
        self.ours.channel.close()
        self.theirs.channel.close()
        self.loop.close()


@pytest.fixture(params=[0, 4096], ids=["default buffer", "small buffer"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    before = psutil.Process().num_fds()
    yield made
    assert psutil.Process().num_fds() <= before, "descriptors are left"
    made.close()


def test_its_owner_needs_no_garbage_collection(pair: Pair) -> None:
    """The descriptors of a worker that has died would wait for it: a supervisor makes hardly any garbage."""
    gc.disable()
    try:
        pair.ours.channel.close()
        pair.run(lambda: pair.theirs.ends)
        owner = weakref.ref(pair.theirs)
        pair.theirs = pair.ours
        assert owner() is None
    finally:
        gc.enable()


def file_of(text: str) -> int:
    descriptor = os.memfd_create("text")
    os.write(descriptor, text.encode())
    return descriptor


def send(end: End, message: dict[str, Any], text: str | None = None) -> None:
    if text is None:
        end.channel.send(message)
        return
    descriptor = file_of(text)
    end.channel.send(message, descriptor)
    os.close(descriptor)  # the other side has a copy


def test_messages_in_both_directions(pair: Pair) -> None:
    for index in range(100):
        send(pair.ours, {"to": index})
        send(pair.theirs, {"fro": index, "text": 'größe\n"\\'})
    pair.run(lambda: len(pair.ours.heard) == len(pair.theirs.heard) == 100)
    assert pair.theirs.heard == [({"to": index}, None) for index in range(100)]
    assert pair.ours.heard == [({"fro": index, "text": 'größe\n"\\'}, None) for index in range(100)]


def test_each_descriptor_comes_with_its_message(pair: Pair) -> None:
    wanted = []
    for index in range(300):
        text = str(index) if index % 3 else None
        send(pair.ours, {"number": index}, text)
        wanted.append(({"number": index}, text))
    pair.run(lambda: len(pair.theirs.heard) == 300)
    assert pair.theirs.heard == wanted


def test_messages_larger_than_the_sockets_buffer_with_descriptors_in_between(pair: Pair) -> None:
    wanted = {}
    for end in (pair.ours, pair.theirs):
        wanted[end] = []
        for index in range(12):
            message = {"number": index, "text": str(index) * (MEBIBYTE // 2 if index % 4 == 1 else 1)}
            text = f"{index}" if index % 2 else None
            send(end, message, text)
            wanted[end].append((message, text))
    pair.run(lambda: len(pair.ours.heard) == len(pair.theirs.heard) == 12)
    assert pair.theirs.heard == wanted[pair.ours]
    assert pair.ours.heard == wanted[pair.theirs]


def test_an_answer_sent_while_hearing(pair: Pair) -> None:
    pair.theirs.on_message = lambda message: send(pair.theirs, {"again": message["number"]}, "x")
    for index in range(50):
        send(pair.ours, {"number": index})
    pair.run(lambda: len(pair.ours.heard) == 50)
    assert pair.ours.heard == [({"again": index}, "x") for index in range(50)]


def test_what_was_said_before_the_end_is_heard(pair: Pair) -> None:
    for index in range(20):
        send(pair.ours, {"number": index}, "x")
    pair.run(lambda: not pair.ours.channel._unsent)
    pair.ours.channel.close()
    pair.run(lambda: pair.theirs.ends)
    assert len(pair.theirs.heard) == 20
    assert pair.ours.ends == 0, "its own close is not told"
    assert pair.theirs.ends == 1


def test_the_end_of_the_other_side_is_told_once_also_when_it_is_noticed_by_a_send(pair: Pair) -> None:
    pair.theirs.channel.close()
    for _ in range(3):
        send(pair.ours, {"lost": 1}, "x")
    pair.run(lambda: pair.ours.ends)
    send(pair.ours, {"lost": 1}, "x")
    pair.ours.channel.close()
    turn(pair.loop, 0)
    assert pair.ours.ends == 1


def test_what_was_said_before_the_end_is_heard_though_it_is_noticed_by_a_send(pair: Pair) -> None:
    """A worker that has ended well has said so, whatever is still sent to it."""
    send(pair.theirs, {"type": "end"})
    pair.theirs.channel.close()
    for _ in range(3):
        send(pair.ours, {"type": "stats"}, "text")
    pair.run(lambda: pair.ours.ends)
    turn(pair.loop, 0)
    assert (pair.ours.heard, pair.ours.ends) == ([({"type": "end"}, None)], 1)


def test_what_is_unsent_at_the_end_is_given_back(pair: Pair) -> None:
    """The fixture counts descriptors."""
    send(pair.ours, {"text": "x" * MEBIBYTE}, "large")
    for _ in range(30):
        send(pair.ours, {"text": "x"}, "small")
    assert pair.ours.channel._unsent
    pair.theirs.channel.close()
    pair.run(lambda: pair.ours.ends)
    pair.ours.channel.close()


def test_a_channel_closed_by_its_own_handler(pair: Pair) -> None:
    pair.theirs.on_message = lambda message: pair.theirs.channel.close()
    send(pair.ours, {"number": 1}, "x")
    pair.run(lambda: pair.ours.ends)
    assert len(pair.theirs.heard) == 1


def test_half_a_message_at_the_end_is_not_heard() -> None:
    pair = Pair()
    ours = pair.socks[0]
    ours.send(b'{"whole": 1}\n{"half')
    pair.run(lambda: pair.theirs.heard)
    ours.shutdown(socket.SHUT_WR)
    pair.run(lambda: pair.theirs.ends)
    assert pair.theirs.heard == [({"whole": 1}, None)]
    pair.close()


def test_a_message_byte_by_byte() -> None:
    pair = Pair()
    descriptor = file_of("here")
    message = b'{"number": 1, "descriptor": true}\n'
    ours = pair.socks[0]
    ours.sendmsg([message[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
    for byte in message[1:]:
        turn(pair.loop, 0)
        ours.send(bytes([byte]))
    pair.run(lambda: pair.theirs.heard)
    assert pair.theirs.heard == [({"number": 1}, "here")]
    os.close(descriptor)
    pair.close()


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[], None]]:
    """Lets this process open no more files, until the test is over."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take() -> None:
        taken.append(os.open("/dev/null", os.O_RDONLY))  # no lower number is free
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while taken[-1] < highest:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))

    yield take
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in taken:
        os.close(descriptor)


def test_a_descriptor_there_is_no_room_for_is_missing_and_the_others_keep_their_places(few_descriptors) -> None:
    pair = Pair()
    send(pair.ours, {"number": 1}, "one")
    send(pair.ours, {"number": 2})
    few_descriptors()
    pair.run(lambda: len(pair.theirs.heard) == 2)
    assert pair.theirs.heard == [({"number": 1}, None), ({"number": 2}, None)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] + 4, limits[1]))
    send(pair.ours, {"number": 3}, "three")
    pair.run(lambda: len(pair.theirs.heard) == 3)
    assert pair.theirs.heard[2] == ({"number": 3}, "three")
    pair.close()


def test_a_send_that_cannot_keep_its_descriptor_raises_and_sends_nothing(few_descriptors) -> None:
    pair = Pair(4096)
    descriptor = file_of("x")
    send(pair.ours, {"number": 1, "text": "x" * MEBIBYTE})
    few_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        pair.ours.channel.send({"number": 2}, descriptor)
    send(pair.ours, {"number": 3})
    pair.run(lambda: len(pair.theirs.heard) == 2)
    assert [message["number"] for message, _ in pair.theirs.heard] == [1, 3]
    os.close(descriptor)
    pair.close()

"""One decoder's process, as its instance sees it."""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import socket
from contextlib import suppress

import numpy as np

from torchpipe_py.errors import WorkerDied, first_line
from torchpipe_py.proc.isolation import wire
from torchpipe_py.proc.isolation.template import Template, failure_of, first_message, receive
from torchpipe_py.proc.process.interpreter import describe_ending

READY_SECONDS = 30.0
_KEPT = 16 * 2**20
"""Bytes of an image's memory that stay for the next one; what a larger image took goes back to the system."""


class Decoder:
    """A decoder's process, and the memory that it shares with this one; used from one thread at a time.

    ``seconds`` bound one image, ``mebibytes`` its encoded bytes, its pixels, and what decoding takes besides, each.
    ``is_filtered``: the kernel refuses it system calls that decoding does not need.
    """

    def __init__(self, label: str, template: Template, instance: int, seconds: float, mebibytes: int) -> None:
        self._label, self._template, self._seconds = label, template, seconds
        self._capacity = mebibytes * 2**20
        self._number = 0
        self.is_open = True
        self.has_taken = False
        """Whether the request that it died with had reached it."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fd = _create_memory(wire.total_size(self._capacity))
                try:
                    self._memory = mmap.mmap(fd, wire.total_size(self._capacity))
                    fds = [theirs.fileno(), fd]
                    try:
                        self._process = template.fork(fds, instance, self._capacity, math.ceil(seconds), mebibytes)
                    except BaseException:
                        self._memory.close()
                        raise
                finally:
                    os.close(fd)
        except BaseException:
            self._connection.close()
            raise
        try:
            self.is_filtered = self._wait_until_ready()
            self._connection.settimeout(seconds)
        except OSError as error:
            raise self._died(f"it does not start: {first_line(error)}") from None
        except BaseException:
            self._end()
            raise

    def _wait_until_ready(self) -> bool:
        told = json.loads(first_message(self._connection, READY_SECONDS, self._process.pid))
        if "failure" in told:
            raise failure_of(told)
        return bool(told["filtered"])

    def decode(self, encoded: np.ndarray) -> tuple[np.ndarray, str | None] | wire.Refusal:
        """The Mat of an encoded image, bytes in one dimension, and its color; or why there is none.

        ``WorkerDied`` where the process dies, takes too long, or answers what makes no sense. It has ended then.
        """
        if encoded.size > self._capacity:
            return wire.Refusal("DecodeError", f"{encoded.size} bytes are more than max_memory has room for", False)
        self._number += 1
        np.frombuffer(self._memory, np.uint8, encoded.size, wire.DATA_AT)[:] = encoded
        try:
            self._connection.send(wire.REQUEST.pack(self._number, encoded.size))
            packed = receive(self._connection, wire.MAX_ANSWER + 1)
            answer = wire.unpack_answer(packed, self._number, self._capacity)
        except TimeoutError:
            raise self._died(f"it took longer than {self._seconds:g} s and was ended", is_over=True) from None
        except OSError:
            raise self._died() from None
        except ValueError as error:
            raise self._died(f"it gave {error} and was ended", is_over=True) from None
        except BaseException:
            self._end()  # its answer to this must not be taken for one to the next
            raise
        if isinstance(answer, wire.Refusal):
            return answer
        start = wire.DATA_AT + self._capacity
        mat: np.ndarray = np.ndarray(answer.shape, np.uint8, self._memory, start).copy()
        self._release(start, mat.size)
        return mat, answer.color

    def close(self) -> None:
        """Let the process end, which it does once it is idle or its template ends; twice is allowed."""
        if self.is_open:
            self.is_open = False
            self._connection.close()
            self._memory.close()

    def _end(self) -> int | None:
        """Kill the process; its exit status, as far as that can be known."""
        status = self._template.end(self._process)
        self.close()
        return status

    def _died(self, reason: str = "", is_over: bool = False) -> WorkerDied:
        """What to raise once the process has ended; ``is_over``: the request is not for another one."""
        (taken,) = wire.TAKEN.unpack_from(self._memory)
        self.has_taken = is_over or taken == self._number
        status = self._end()
        if not reason:
            reason = "died" if status is None else describe_ending(status)
        return WorkerDied(f"{self._label}: the process that decodes: {reason}")

    def _release(self, start: int, size: int) -> None:
        if size > _KEPT:
            first = -(-(start + _KEPT) // mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # gVisor cannot: what was taken stays taken
                self._memory.madvise(mmap.MADV_REMOVE, first, start + size - first)


def _create_memory(size: int) -> int:
    """A descriptor of memory that takes pages as they are written.

    Its size is sealed: whoever made it smaller would have the other process killed as it reads.
    """
    fd = os.memfd_create("torchpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd

"""Socket calls that keep the interpreter lock.

Python's own give it up around every call. To get it back from a dozen busy threads takes 50 to 200 µs on a machine
with many cores, several times as long as the call itself, which never blocks here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

RECEIVE_BYTES = 120 * 1024  # below malloc's threshold for mapping memory anew each time
LARGE = 64 * 1024  # bytes beyond which copying takes so long that others should have the lock

_libc = ctypes.PyDLL(None, use_errno=True)
_recv, _send = _libc.recv, _libc.send
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = _send.restype = ctypes.c_ssize_t

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Receiver:
    """Reads from sockets into a buffer of its own; for one thread."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(RECEIVE_BYTES)
        self._address = ctypes.addressof(self._buffer)

    def receive(self, sock: socket.socket) -> bytes:
        """What has arrived, at most ``RECEIVE_BYTES``; nothing at the end. ``BlockingIOError``, ``OSError``."""
        size = _recv(sock.fileno(), self._address, RECEIVE_BYTES, socket.MSG_DONTWAIT)
        if size < 0:
            _raise()
        return ctypes.string_at(self._address, size)


def send(sock: socket.socket, data: bytes) -> int:
    """How many bytes the system has taken. ``BlockingIOError``, ``OSError``."""
    if len(data) > LARGE:
        return sock.send(data)
    sent: int = _send(sock.fileno(), data, len(data), _FLAGS)
    if sent < 0:
        _raise()
    return sent


def _raise() -> None:
    number = ctypes.get_errno()
    if number in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
        raise BlockingIOError(number, os.strerror(number))
    raise OSError(number, os.strerror(number))

"""A decoder that does what its bytes say, as one does that a hostile image has taken over."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py import Isolation, ItemBackend, NoResult
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import DONE, Link


def picture_of(value: object) -> np.ndarray:
    """A Mat of one row that says it."""
    return np.frombuffer(repr(value).encode(), np.uint8).reshape(1, -1, 1).copy()


class Hostile(ItemBackend):
    """``data`` is b"act argument"; ``result`` is a Mat of what the act returned, or b"plain"."""

    isolation = Isolation.MOVES

    def forward_item(self, item: dict[str, Any]) -> None:
        act, _, argument = bytes(item["data"]).decode("latin-1").partition(" ")
        try:
            value = getattr(self, act, lambda _: "plain")(argument)
        except (OSError, subprocess.SubprocessError) as error:
            value = type(error).__name__
        if isinstance(value, NoResult):
            item["error"] = value
        elif value is not None:
            item["result"] = value if isinstance(value, np.ndarray) else picture_of(value)

    def pid(self, _: str) -> int:
        return os.getpid()

    # -- that end the process ---------------------------------------------------------------------------------------

    def segfault(self, _: str) -> None:
        ctypes.string_at(0)

    def abort(self, _: str) -> None:
        os.abort()

    def leave(self, _: str) -> None:
        os._exit(3)

    def sleep(self, _: str) -> None:
        time.sleep(3600)

    def spin(self, _: str) -> None:
        """As native code does: without letting go of the GIL."""
        libc = ctypes.PyDLL(None)
        while True:
            libc.getpid()

    # -- that answer what makes no sense ----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """An answer of another kind, or an answer to what nobody asked."""
        link = next(found for found in gc.get_objects() if isinstance(found, Link))
        number = link._asked[0]
        if text == "other number":
            link._answered[0] = number + 1
        else:
            link.answer(0, number, Packed(b"?", b"", (), 0), DONE, 0.0)
        link.other.ring()
        time.sleep(3600)

    def say_pickle(self, path: str) -> None:
        class Attack:
            def __reduce__(self) -> Any:
                return Path.touch, (Path(path),)

        link = next(found for found in gc.get_objects() if isinstance(found, Link))
        link.answer(0, link._asked[0], Packed.of(Attack()), DONE, 0.0)
        link.other.ring()
        time.sleep(3600)

    # -- that raise, or have no result ------------------------------------------------------------------------------

    def defect(self, text: str) -> None:
        raise ValueError(text)

    def no_result(self, _: str) -> None:
        return None

    def refuse(self, text: str) -> NoResult:
        return NoResult(text)

    def allocate(self, mebibytes: str) -> Any:
        return np.ones(int(mebibytes) * 2**20, np.uint8).sum()

    def large(self, rows: str) -> np.ndarray:
        return np.full((int(rows), 1024, 1024 // 256), 7, np.uint8)

    def floats(self, _: str) -> np.ndarray:
        return np.zeros((2, 2), np.float32)

    # -- that reach for others ----------------------------------------------------------------------------------------

    def open(self, path: str) -> str:
        with open(path, "rb") as file:
            return str(file.read(1))

    def unlink(self, path: str) -> str:
        os.unlink(path)
        return "gone"

    def connect(self, _: str) -> str:
        socket.socket().close()
        return "connected"

    def run(self, _: str) -> str:
        return subprocess.run(["true"], check=True).args[0]

    def fork(self, _: str) -> int:
        child = os.fork()
        if child == 0:
            os._exit(0)
        return child

    def kill(self, pid: str) -> str:
        os.kill(int(pid), signal.SIGTERM)
        return "killed"

    def shrink(self, _: str) -> str:
        for fd in range(3, 10):
            os.truncate(fd, 0)
        return "shrunk"

    def capabilities(self, _: str) -> int:
        """Whether it may lift a limit."""
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return 0

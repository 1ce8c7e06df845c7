"""Memory that the supervisor and its workers share: what is written there needs no message, and outlives its writer."""

from __future__ import annotations

import fcntl
import mmap
import os
from multiprocessing import reduction
from typing import Any


class SharedMemory:
    """``size`` bytes, zero at first, in a file without a name; a child process that is started with them shares them.

    Nobody can make the file shorter: that would end whoever looks at it.
    """

    def __init__(self, name: str, size: int, fd: int | None = None) -> None:
        self._name, self._size = name, size
        if fd is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._fd = fd
        self.view = memoryview(mmap.mmap(fd, size))

    def __reduce__(self) -> Any:
        return _attach, (self._name, self._size, reduction.DupFd(self._fd))

    def close(self) -> None:
        """Give the descriptor back, after which no further process can share the bytes; ``view`` stays."""
        os.close(self._fd)


def _attach(name: str, size: int, fd: Any) -> SharedMemory:
    return SharedMemory(name, size, fd.detach())

"""A decoder's process, forked, confined and expendable."""

from __future__ import annotations

import contextlib
import math
import resource
from typing import Any

from torchpipe_py.errors import DecodeError
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.proc import raw
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.confine import confine, limit_memory
from torchpipe_py.proc.link import SET_UP, Header
from torchpipe_py.proc.setup import Setup
from torchpipe_py.proc.worker import Answerer, make_backend

# What is imported for the first image, is imported before files can no longer be opened.
_TRIALS = (b"", b"BM:\0\0\0\0\0\0\x006\0\0\0(\0\0\0\1\0\0\0\1\0\0\0\1\0\x18\0\0\0\0\0\4" + bytes(23))


class Decoder(Answerer):
    """Sets its backend up and confines itself for the first call, and decodes an image for each one after that."""

    def __init__(self, setup: Setup, fds: list[int], seconds: float, mebibytes: int) -> None:
        super().__init__(*fds)
        self._fds, self._seconds, self._mebibytes = fds, math.ceil(seconds), mebibytes
        self._backend = make_backend(setup)

    def answer(self, header: Header, slot: int) -> Packed:
        item: dict[str, Any] = {}
        try:
            if header.kind == SET_UP:
                return self._set_up()
            _limit_cpu(self._seconds)
            item[TASK_DATA_KEY] = raw.encoded_in(self.link, slot, header).tobytes()
            self._backend.forward([item])
            return raw.pack_answer(item, self._mebibytes * 2**20)
        except MemoryError:
            problem = DecodeError(f"needs more than max_memory = {self._mebibytes} MiB")
            return raw.pack_error(problem, raised=False)
        except Exception as error:
            return raw.pack_error(error, raised=True)

    def _set_up(self) -> Packed:
        self._backend.setup()
        for trial in _TRIALS:
            with contextlib.suppress(Exception):
                self._backend.forward([{TASK_DATA_KEY: trial}])
        limit_memory(self._mebibytes)
        is_filtered = confine({0, 1, 2, *self._fds[1:]})
        return raw.pack_error(raw.FILTERED if is_filtered else "unfiltered", raised=False)


def _limit_cpu(seconds: int) -> None:
    """Let the system end this process where one image takes more, even if nobody watches it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))

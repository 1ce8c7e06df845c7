"""The other side: a process that has imported what decoders need, and the decoders that are forked from it."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from dataclasses import replace
from typing import Any

from torchpipe_py.backends.base import Backend
from torchpipe_py.errors import ConfigError, DecodeError, Failure
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.proc.isolation import wire
from torchpipe_py.proc.isolation.confinement import confine
from torchpipe_py.proc.process.limits import end_with_parent, limit_memory
from torchpipe_py.proc.process.setup import Setup

FORK = struct.Struct("<cIQIQ")  # b"f", instance, bytes of an image, most seconds for it, MiB for its decoder
END = struct.Struct("<ci")  # b"e", process id
ANSWER = struct.Struct("<i")  # a process id, or less than 0: an errno; a status as of os.waitstatus_to_exitcode

_FAILURE_BYTES = 8192
# What is imported for the first image, is imported before files can no longer be opened.
_TRIALS = (b"", b"BM:\0\0\0\0\0\0\x006\0\0\0(\0\0\0\1\0\0\0\1\0\0\0\1\0\x18\0\0\0\0\0\4" + bytes(23))


def main(control_fd: int, parent: int) -> None:
    """Read a pickled ``Setup`` from standard input, say whether it works, and fork decoders until the parent is gone.

    ``control_fd`` is a socket that keeps messages apart; ``parent`` is the process id at its other end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C, and a service manager, signal the whole group while the parent still has work.
        signal.signal(number, lambda *_: None)
    os.set_inheritable(control_fd, False)
    end_with_parent(parent)
    keep_freed_memory()
    control = socket.socket(fileno=control_fd)
    try:
        setup: Setup = pickle.load(sys.stdin.buffer)
        trial = _decoder(setup, 0)
        trial.setup()  # what it imports is there before the first fork
        trial.close()
    except BaseException as error:
        control.send(_failure(error))
        return
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(1)  # a thread would not survive the fork, and the instances are the parallelism
    gc.collect()
    gc.freeze()
    control.send(b"{}")
    _Template(control, setup).run()


class _Template:
    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control, self._setup = control, setup

    def run(self) -> None:
        while True:
            message, fds, _, _ = socket.recv_fds(self._control, FORK.size, 2)
            if not message:
                return
            if message[:1] == b"f":
                answer = self._fork(message, fds)
                for fd in fds:
                    os.close(fd)
            else:
                answer = _end(END.unpack(message)[1])
            self._control.send(ANSWER.pack(answer))

    def _fork(self, message: bytes, fds: list[int]) -> int:
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return -(error.errno or 1)
        if pid:
            return pid
        try:
            end_with_parent(template)
            self._control.close()
            _, instance, capacity, seconds, mebibytes = FORK.unpack(message)
            connection_fd, memory_fd = fds
            _serve(_decoder(self._setup, instance), connection_fd, memory_fd, capacity, seconds, mebibytes)
        finally:
            os._exit(1)
        return 0


def _end(pid: int) -> int:
    """Kill the decoder, unless it has died by itself; how it ended."""
    try:
        os.kill(pid, signal.SIGKILL)  # it is no other process: this one has not waited for it yet
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except (ProcessLookupError, ChildProcessError):
        return 0


def _serve(backend: Backend, connection_fd: int, memory_fd: int, capacity: int, seconds: int, mebibytes: int) -> None:
    """The main loop of a decoder; it ends when nobody is at the other end."""
    connection = socket.socket(fileno=connection_fd)
    try:
        memory = mmap.mmap(memory_fd, wire.total_size(capacity))
        backend.setup()
        for trial in _TRIALS:
            with contextlib.suppress(Exception):
                backend.forward([{TASK_DATA_KEY: trial}])
        limit_memory(mebibytes)
        is_filtered = confine({0, 1, 2, connection_fd})
    except BaseException as error:
        connection.send(_failure(error))
        return
    connection.send(json.dumps({"filtered": is_filtered}).encode())
    pixels = memoryview(memory)[wire.DATA_AT + capacity :]
    while request := connection.recv(wire.REQUEST.size):
        number, size = wire.REQUEST.unpack(request)
        wire.TAKEN.pack_into(memory, 0, number)
        _limit_cpu(seconds)
        item: dict[str, Any] = {}
        try:
            item[TASK_DATA_KEY] = memory[wire.DATA_AT : wire.DATA_AT + size]
            backend.forward([item])
            answer = wire.pack_answer(number, item, pixels)
        except MemoryError:
            answer = wire.pack_error(number, DecodeError(f"needs more than max_memory = {mebibytes} MiB"), False)
        except Exception as error:
            answer = wire.pack_error(number, error, raised=True)
        connection.send(answer)
        del item  # an idle decoder keeps nothing of its last image


def _limit_cpu(seconds: int) -> None:
    """Let the system end this process where one image takes more, even if nobody watches it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + seconds + 1
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _decoder(setup: Setup, instance: int) -> Backend:
    try:
        plan, _ = pickle.loads(setup.pickled)
    except Exception as error:
        raise ConfigError(
            f"a decoder's process cannot import what it needs: {type(error).__name__}: {error}; a class must stand at "
            "the top level of a module, and the module in a folder that sys.path has by its absolute path"
        ) from error
    backend: Backend = plan.create(replace(setup.config, instance=instance))
    for color in setup.colors:
        backend.prefer_color(color)
    return backend


def _failure(error: BaseException) -> bytes:
    """An exception for ``Template`` to raise again: its kind, its name, its message, where it was raised."""
    failure = Failure.of(error)
    told = [failure.kind, failure.name, failure.message[:_FAILURE_BYTES], failure.trace[-_FAILURE_BYTES:]]
    return json.dumps({"failure": told}).encode()

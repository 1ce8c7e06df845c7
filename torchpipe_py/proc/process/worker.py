"""A worker process: makes the backend, runs it for its parent, and ends when the parent does."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import select
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np

from torchpipe_py import registry
from torchpipe_py.backends.base import Backend, BatchRange, Data
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import ConfigError, Failure
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.proc.process.child import WorkerMemory
from torchpipe_py.proc.process.limits import end_with_parent, limit_memory
from torchpipe_py.proc.process.outcome import ItemOutcome
from torchpipe_py.proc.process.setup import Setup, load_main
from torchpipe_py.proc.process.transport import Packed, unpack
from torchpipe_py.proc.shared.codec import pack_outcomes
from torchpipe_py.proc.shared.memory import DONE, FAILED, NOT_RUN, SLOTS, Bell, Header, barrier, changed


def main(connection: int, memory: int, rings: int, sleeps: int, parent: int) -> None:
    """Serve until the parent says ``close``; all but ``parent``, which is its process id, are file descriptors.

    ``rings`` is the bell of the parent, ``sleeps`` that of this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent says when to end: Ctrl-C, or a service manager, signals the whole group while it still has work.
        # NOTE: a handler, since what is ignored would stay ignored in the programs that a backend starts.
        signal.signal(number, lambda *_: None)
    for fd in (connection, memory, rings, sleeps):
        os.set_inheritable(fd, False)
    end_with_parent(parent)
    keep_freed_memory()
    _end_with(parent, connection)
    _BackendServer(Connection(connection), WorkerMemory(memory), rings, sleeps).run()


def _end_with(parent: int, connection: int) -> None:
    """End this process, in the middle of ``forward`` too, as soon as the parent is gone."""
    poller = select.poll()
    poller.register(connection, 0)  # nothing but a hang-up
    if hasattr(os, "pidfd_open"):
        try:
            poller.register(os.pidfd_open(parent), select.POLLIN)
        except OSError:  # gone already, which the connection tells, or a system without it
            pass

    def watch() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="torchpipe-parent", daemon=True).start()


class _BackendServer:
    """Takes setup and close over a connection, and answers them there; calls come in slots, one after the other."""

    def __init__(self, connection: Connection, memory: WorkerMemory, rings: int, sleeps: int) -> None:
        self._connection, self._memory = connection, memory
        self._parents_bell = Bell(memory.asker_asleep, rings)
        self._bell = Bell(memory.answerer_asleep, sleeps)
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._poller.register(sleeps, select.POLLIN)
        self._words = memory.from_asker()
        self._backend: Any = None  # until `_set_up`

    def run(self) -> None:
        while True:
            if self._has_calls():
                self._take()
            elif self._bell.sleep(self._poller, self._has_calls) and not self._obey():
                return

    # -- calls --------------------------------------------------------------------------------------------------

    def _has_calls(self) -> bool:
        return self._memory.from_asker() != self._words

    def _take(self) -> None:
        """Run what is new, what was sent first."""
        before, self._words = self._words, self._memory.from_asker()
        numbers = np.frombuffer(self._words, np.uint32).tolist()
        slots = [index for index in changed(before, self._words) if index < SLOTS]
        if len(slots) > 1:
            slots.sort(key=lambda slot: self._memory.request(slot).first)
        for slot in slots:
            self._run(slot, numbers[slot])

    def _run(self, slot: int, number: int) -> None:
        self._memory.begin(slot, number)
        # Either it is seen there that it has begun, or it is seen here that it was given up.
        barrier()
        header, begun = self._memory.request(slot), perf_counter()
        if self._memory.is_given_up(slot, number) or begun >= header.second:
            self._memory.answer(slot, number, Packed.of(None), NOT_RUN, begun, perf_counter())
        else:
            try:
                packed = pack_outcomes(self._forward(slot, header))
                self._memory.answer(slot, number, packed, DONE, begun, perf_counter())
            except BaseException as error:
                self._memory.fail(slot, number, Failure.of(error), begun)
        self._parents_bell.ring()

    def _forward(self, slot: int, header: Header) -> list[ItemOutcome]:
        message = self._memory.read(slot, header, copies=True)
        items: list[Data] = [message[0]] if header.kind == 1 else message
        before = [dict(item) for item in items]
        self._backend.forward(items)
        return list(map(ItemOutcome.of, before, items))

    # -- setup and close ----------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Take a message of the connection; ``False`` once it is closed."""
        try:
            kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return False
        try:
            answer: tuple[int, Any] = DONE, self._set_up(value) if kind == "setup" else self._backend.close()
        except BaseException as error:
            answer = FAILED, Failure.of(error)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps(answer))
        return bool(kind == "setup")

    def _set_up(self, setup: Setup) -> tuple[BatchRange, Signature]:
        sys.argv[:] = setup.argv
        logging.getLogger("torchpipe_py").setLevel(setup.log_level)
        if setup.main is not None:
            self._memory.before_main = partial(load_main, setup.main)
        try:
            plan, postprocessors = unpack(setup.pickled, [], 0, self._memory.before_main)
        except Exception as error:
            raise ConfigError(
                f"a worker process cannot import what it needs: {type(error).__name__}: {error}; "
                "a class must stand at the top level of a module that can be imported without side effects"
            ) from error
        for name, cls in postprocessors.items():
            registry.register_postprocessor(cls, name)
        if setup.takes_tensors:
            importlib.import_module("torch")
        backend: Backend = plan.create(setup.config)
        for color in setup.colors:
            backend.prefer_color(color)
        try:
            backend.setup()
            told = (backend.min(), backend.max()), backend.signature()
            if setup.max_memory:
                limit_memory(setup.max_memory)
        except BaseException:
            with contextlib.suppress(Exception):
                backend.close()
            raise
        self._backend = backend
        return told

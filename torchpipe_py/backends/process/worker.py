"""A worker process: makes the backend, runs it for its parent, and ends when the parent does."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.base import Backend, BatchRange, Data
from torchpipe_py.backends.process.limits import end_with_parent, limit_memory
from torchpipe_py.backends.process.outcome import ItemOutcome, stuck
from torchpipe_py.backends.process.setup import Setup, load_main
from torchpipe_py.backends.process.transport import Block, SharedMemoryChannel
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import ConfigError, Failure


def main(connection: int, outgoing: int, incoming: int, parent: int) -> None:
    """Serve until the parent says ``close``; the first three are file descriptors, ``parent`` is its process id."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The parent says when to end: Ctrl-C, or a service manager, signals the whole group while it still has work.
        # NOTE: a handler, since what is ignored would stay ignored in the programs that a backend starts.
        signal.signal(number, lambda *_: None)
    for fd in (connection, outgoing, incoming):
        os.set_inheritable(fd, False)
    end_with_parent(parent)
    _end_with(parent, connection)
    _BackendServer(SharedMemoryChannel(Connection(connection), Block(outgoing), Block(incoming))).run()


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
    """Answers each message with ("done", value) or ("failed", a ``Failure``)."""

    def __init__(self, channel: SharedMemoryChannel) -> None:
        self._channel = channel
        self._backend: Backend | None = None
        self._calls: dict[str, Callable[[Any], Any]] = {"setup": self._set_up, "forward": self._forward}
        self._calls["close"] = self._close

    def run(self) -> None:
        is_open = True
        while is_open:
            try:
                packed = self._channel.receive()
            except (EOFError, OSError):
                return
            kind = ""
            try:
                kind, value = self._channel.unpack(packed)
                answer: tuple[str, Any] = ("done", self._calls[kind](value))
            except BaseException as error:
                answer = ("failed", Failure.of(error))
            is_open = kind != "close"
            try:
                self._answer(answer)
            except OSError:
                return
            value = answer = ()  # type: ignore[assignment]  # an idle worker keeps nothing of its last batch

    def _answer(self, answer: tuple[str, Any]) -> None:
        try:
            packed = self._channel.pack(answer)
        except Exception as error:
            packed = self._channel.pack(
                ("failed", Failure.of(stuck(answer[1] if isinstance(answer[1], list) else [], error)))
            )
        self._channel.post(packed)

    def _set_up(self, setup: Setup) -> tuple[BatchRange, Signature]:
        sys.argv[:] = setup.argv
        logging.getLogger("torchpipe_py").setLevel(setup.log_level)
        if setup.main is not None:
            self._channel.before_main = partial(load_main, setup.main)
        try:
            plan, postprocessors = self._channel.loads(setup.pickled)
        except Exception as error:
            raise ConfigError(
                f"a worker process cannot import what it needs: {type(error).__name__}: {error}; "
                "a class must stand at the top level of a module that can be imported without side effects"
            ) from error
        for name, cls in postprocessors.items():
            registry.register_postprocessor(cls, name)
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

    def _forward(self, items: list[Data]) -> list[ItemOutcome]:
        assert self._backend is not None
        before = [dict(item) for item in items]
        self._backend.forward(items)
        return list(map(ItemOutcome.of, before, items))

    def _close(self, _: object) -> None:
        if self._backend is not None:
            self._backend.close()

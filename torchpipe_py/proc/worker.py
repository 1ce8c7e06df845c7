"""A child process: answers the calls of its parent one after the other, and ends when the parent ends."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import signal
import sys
from functools import partial
from time import perf_counter
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.base import Backend, Data
from torchpipe_py.errors import ConfigError, Failure
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.metrics import Metrics, collect_in
from torchpipe_py.proc.codec import METRICS_KEY, ItemOutcome, Packed, Unpickler, pack_outcomes
from torchpipe_py.proc.confine import end_with_parent, limit_memory
from torchpipe_py.proc.link import CLOSE, DONE, NOT_RUN, SET_UP, Bell, Header, Link
from torchpipe_py.proc.setup import Setup, load_main


def main(memory: int, rings: int, sleeps: int, parent: int) -> None:
    """Run a backend until the parent, whose process id is ``parent``, sends ``CLOSE``; see ``restarter.Launch``."""
    prepare(memory, rings, sleeps)
    end_with_parent(parent)
    _Worker(memory, rings, sleeps).run()


def prepare(*fds: int) -> None:
    """Prepare a new process that has these descriptors; it ignores signals to end.

    The parent decides when it ends: Ctrl-C, or a service manager, signals the whole group while it still has work.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # NOTE: a handler, since an ignored signal would stay ignored in programs that a backend starts.
        signal.signal(number, lambda *_: None)
    for fd in fds:
        os.set_inheritable(fd, False)
    keep_freed_memory()


class Answerer:
    """Answers the calls of a link, in order."""

    def __init__(self, memory: int, rings: int, sleeps: int) -> None:
        self.link = Link(memory)
        self.link.other = Bell(rings, self.link.asker_asleep)
        self.link.bell = Bell(sleeps, self.link.answerer_asleep)
        self._poller = select.poll()
        self._poller.register(sleeps, select.POLLIN)
        self.is_over = False

    def run(self) -> None:
        """Answer calls until the last one."""
        while not self.is_over:
            asked, _ = self.link.take()
            for call in asked:
                self._run(*call)
            if not asked:
                self.link.bell.sleep(self._poller, self.link.has_work)

    def answer(self, header: Header, slot: int) -> Packed:
        """The answer to a call; raises the exception that makes it fail."""
        raise NotImplementedError(type(self).__name__)

    def _run(self, header: Header, slot: int, number: int) -> None:
        link = self.link
        link.begin(slot, number)
        begun = perf_counter()
        if link.is_abandoned(slot, number) or begun >= header.second:
            link.answer(slot, number, Packed.of(None), NOT_RUN, begun)
        else:
            try:
                link.answer(slot, number, self.answer(header, slot), DONE, begun)
            except BaseException as error:
                link.fail(slot, number, Failure.of(error), begun)
        link.other.ring()


class _Worker(Answerer):
    """Runs the backend of a ``Process``."""

    _backend: Backend
    _metrics: Metrics
    _name: str

    def answer(self, header: Header, slot: int) -> Packed:
        if header.kind == CLOSE:
            self.is_over = True
            self._backend.close()
            return Packed.of(None)
        message = self.link.read(slot, header, copies=True)
        if header.kind == SET_UP:
            return Packed.of(self._set_up(message))
        items: list[Data] = [message[0]] if header.kind == 1 else message
        before = [dict(item) for item in items]
        self._backend.forward(items)
        outcomes = list(map(ItemOutcome.of, before, items))
        if changes := self._metrics.take_changes():
            outcomes[0].changed[METRICS_KEY] = changes, self._name
        return pack_outcomes(outcomes)

    def _set_up(self, setup: Setup) -> Any:
        sys.argv[:] = setup.argv
        logging.getLogger("torchpipe_py").setLevel(setup.log_level)
        if setup.main:
            self.link.before_main = partial(load_main, setup.main)
        self._metrics, self._name = Metrics(), setup.name
        collect_in(self._metrics)
        backend = make_backend(setup, self.link.before_main)
        try:
            backend.setup()
            ready = (backend.min(), backend.max()), backend.signature(), tuple(backend.setup_choices())
            if setup.max_memory:
                limit_memory(setup.max_memory)
        except BaseException:
            with contextlib.suppress(Exception):
                backend.close()
            raise
        self._backend = backend
        return ready


def make_backend(setup: Setup, before_main: Any = None) -> Backend:
    """The backend that a ``Setup`` describes, not set up; ``ConfigError`` if it cannot be imported."""
    try:
        plan, postprocessors = Unpickler(setup.pickled, [], [], before_main).load()
    except Exception as error:
        raise ConfigError(
            f"a worker process cannot import what it needs: {type(error).__name__}: {error}; a class must be at the "
            "top level of a module that can be imported without side effects, from a folder that sys.path has by its "
            "absolute path: '', the working directory, is left out (PYTHONPATH=$PWD, uvicorn --app-dir $PWD)"
        ) from error
    for name, cls in postprocessors.items():
        registry.register_postprocessor(cls, name)
    if setup.takes_tensors:
        importlib.import_module("torch")
    backend: Backend = plan.create(setup.config)
    for color in setup.colors:
        backend.prefer_color(color)
    return backend

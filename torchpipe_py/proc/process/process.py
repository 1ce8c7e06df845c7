"""A backend in a process of its own."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from torchpipe_py.backends.base import BackendConfig, Data, tensor_key
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend
from torchpipe_py.backends.image.memory import waiting
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import BackendUnavailable, ConfigError, WorkerDied, first_line
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.proc.process.child import Answer, Call, WorkerProcess
from torchpipe_py.proc.process.dispatcher import Dispatcher
from torchpipe_py.proc.process.outcome import ItemOutcome, take_outcome
from torchpipe_py.proc.process.setup import Setup, is_loading_main, main_source, pickle_plan
from torchpipe_py.proc.process.transport import loaded_torch
from torchpipe_py.proc.shared.codec import pack_sent
from torchpipe_py.proc.shared.memory import NOT_RUN
from torchpipe_py.values import to_float, to_int

START_SECONDS = 60.0
"""In which a process that replaces another one is set up; the first may take as long as it wants."""

_STARTS = 3


class Process(HandOverBackend):
    """Runs the backend in its brackets in a process of each instance's own, for Python code that holds the GIL.

    What the dict holds goes there and comes back as copies: large arrays, Tensors on the CPU and ``bytes`` through
    shared memory, 1 GiB for a batch and its answer at most, everything else pickled. A value that cannot be pickled
    stays in the dict, unseen by the backend; ``TypeError`` where it is ``data``, or one that the backend wrote. A
    process that dies fails the batch it had with ``WorkerDied``; the next batch gets a new process. Classes in the
    brackets must be importable from a module.

    A node's own backend that takes one item at a time hands it to the process that has least to do.
    """

    children = (1, 1)

    max_seconds = Param(
        to_float, 0.0, low=0, doc="seconds that a batch may take; then the process is ended and replaced; 0: any"
    )
    max_memory = Param(
        to_int, 0, low=0, high=2**24, doc="MiB that the process may take beyond what it has after setup; 0: any"
    )

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._colors: tuple[str | None, ...] = ()
        self._worker: WorkerProcess | None = None
        self._has_entered = self._is_stopped = False
        self._to_mend = threading.Semaphore(0)
        self._dispatcher: Dispatcher = config.shared.get(
            Dispatcher, lambda: Dispatcher(config.instance_num, self.max_seconds, in_place=not config.reaches_caller)
        )
        self._range, self._signature = (1, 1), Signature()

    def prefer_color(self, color: str | None) -> str | None:
        self._colors = (color,)
        return self.config.children[0].prefer_color(color)

    def setup(self) -> None:
        if not hasattr(os, "eventfd"):
            raise BackendUnavailable(f"{self.config.label} needs Linux")
        if is_loading_main():
            raise ConfigError(
                f"{self.config.label}: a worker process imports the main script for a class that stands in it, and "
                'the script starts a pipe when imported: put that under `if __name__ == "__main__":`'
            )
        self._setup = self._describe()
        self._start()

    def forward(self, items: list[Data]) -> None:
        sent, packed = pack_sent(items, self.config.label)
        for left in reversed(range(_STARTS)):
            worker = self._worker
            if worker is None:
                with waiting():
                    worker = self._start_again()
            try:
                outcomes = worker.call(packed, len(items), self.max_seconds or None)
                break
            except WorkerDied:
                if worker.has_taken or not left:
                    raise
            finally:
                if not worker.is_open:
                    self._worker = None
        if len(items) == 1:
            outcomes = [outcomes]
        for item, of_it, (changed, kept) in zip(items, sent, outcomes, strict=True):
            ItemOutcome(kept, changed).apply(item, of_it)

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        [sent], packed = pack_sent([item], self.config.label)
        is_large = self.config.instance_num > 1 and self._is_large(item)
        call = Call(packed, 1, request.deadline, partial(self._finish, item, sent, done), is_large)
        dispatcher = self._dispatcher
        request.linked().give_up.append(partial(dispatcher.give_up, call))
        dispatcher.ask(call)

    def keep(self) -> None:
        self._enter()
        while self._to_mend.acquire() and not self._is_stopped:
            try:
                self._start_again()
            except WorkerDied as error:
                self._dispatcher.fail(self.config.instance, error)
            else:
                self._enter()

    def stop(self) -> None:
        self._dispatcher.close()
        self._is_stopped = True
        self._to_mend.release()

    def running_since(self) -> float:
        return self._dispatcher.running_since(self.config.instance) if self._has_entered else 0.0

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if self._has_entered:
            worker = self._dispatcher.leave(self.config.instance) or worker
        if worker is not None:
            worker.close()

    def max(self) -> int:
        return self._range[1]

    def min(self) -> int:
        return self._range[0]

    def signature(self) -> Signature:
        return self._signature

    def batch_key(self, item: Data) -> Hashable:
        try:
            return self.config.children[0].batch_key(item)
        except Exception:  # it needs what only setup gives it, and that was done elsewhere
            return tensor_key(item[TASK_DATA_KEY])

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)

    def _describe(self) -> Setup:
        return Setup(
            pickle_plan(self.config),
            config=replace(self.config, params={}, children=(), filters=(), graphs=None),
            colors=self._colors,
            main=main_source(),
            argv=tuple(sys.argv),
            log_level=logging.getLogger("torchpipe_py").getEffectiveLevel(),
            max_memory=self.max_memory,
        )

    def _start(self, timeout: float | None = None) -> WorkerProcess:
        worker = WorkerProcess(self.config.label, self.config.instance)
        # NOTE: looked at each time, since PyTorch may have been imported only after the first process was started.
        takes_tensors = bool(self.max_seconds or self.max_memory) and loaded_torch() is not None
        try:
            self._range, self._signature = worker.set_up(replace(self._setup, takes_tensors=takes_tensors), timeout)
        except BaseException:
            worker.kill()
            raise
        self._worker = worker
        return worker

    def _start_again(self) -> WorkerProcess:
        """One in place of one that has died; ``WorkerDied`` where none can be started."""
        reason: BaseException | None = None
        for _ in range(_STARTS):
            try:
                return self._start(START_SECONDS)
            except Exception as error:
                reason = error
        raise WorkerDied(
            f"{self.config.label}: its worker process cannot be started again: {first_line(reason)}"  # type: ignore[arg-type]
        ) from reason

    def _enter(self) -> None:
        assert self._worker is not None
        if self._dispatcher.enter(self.config.instance, self._worker, self._to_mend.release):
            self._worker, self._has_entered = None, True

    def _finish(self, item: Data, sent: Data, done: HandedOver, answer: Answer) -> None:
        error = take_outcome(item, sent, answer.outcomes) if answer.error is None else answer.error
        done(error, None if answer.kind == NOT_RUN else (answer.instance, answer.begun, answer.ended))

    def _is_large(self, item: Data) -> bool:
        try:
            return self.is_large(item)
        except Exception:  # `forward` has the same dict, and says what is wrong with it
            return False

"""Backends that run elsewhere: in a separate process for each instance, confined or not, or in the engine process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torchpipe_py.backends.base import BackendConfig, Data, ItemBackend, tensor_key
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend
from torchpipe_py.backends.image import original
from torchpipe_py.backends.image.mat import encoded_bytes
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED_IMAGE, Signature
from torchpipe_py.errors import BackendError, ConfigError, WorkerDied, log_failure
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY, TASK_STATE_KEY
from torchpipe_py.metrics import Metrics, current
from torchpipe_py.proc import raw
from torchpipe_py.proc.codec import loaded_torch, pack_sent, take_outcome
from torchpipe_py.proc.link import Room, require_machine
from torchpipe_py.proc.pool import Call, Pool
from torchpipe_py.proc.restarter import LinkedChild, Restarter, launch
from torchpipe_py.proc.setup import Setup, is_loading_main, main_source, pickle_plan
from torchpipe_py.proc.zygote import Limits, Zygote
from torchpipe_py.values import to_float, to_int

if TYPE_CHECKING:
    from torchpipe_py.proc.client import EngineClient

logger = logging.getLogger("torchpipe_py")

START_SECONDS = 60.0
"""Time limit for setting up a replacement process; the first process has no limit."""

READY_SECONDS = 30.0
"""Time limit for setting up a forked decoder."""

ROOM = Room(slots=1, slot_bytes=2**30, kept_bytes=2**26)


class Process(HandOverBackend):
    """Runs the backend in its brackets in a separate process for each instance, for Python code that holds the GIL.

    The values of the dict are copied there and back: large arrays, Tensors on the CPU and ``bytes`` through shared
    memory (at most 1 GiB for a batch and its answer), everything else pickled. A value that cannot be pickled stays in
    the dict, and the backend does not see it; ``TypeError`` if it is ``data``, or if the backend wrote it. If a
    process dies, its batch fails with ``WorkerDied``; the next batch gets a new process. Classes in the brackets must
    be importable from a module.

    If it is the node's outermost backend and takes one item at a time, each item goes to the least busy process.
    """

    reads = ()
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
        self._range, self._signature, self._choices = (1, 1), Signature(), tuple[str, ...]()
        self._pool: Pool = config.shared.get(Pool, Pool)
        start = partial(self._start, START_SECONDS)
        self._restarter = Restarter(config.label, Pool(), start, self.max_seconds, self._forget_gauges)
        self._metrics: Metrics | None = None  # of the pipe
        self._name = ""  # of the process, among the sources of gauges

    def prefer_color(self, color: str | None) -> str | None:
        self._colors = (color,)
        return self.config.children[0].prefer_color(color)

    def setup(self) -> None:
        require_machine(self.config.label)
        if is_loading_main():
            raise ConfigError(
                f"{self.config.label}: a worker process imports the main script for a class in it, and "
                'the script starts a pipe when imported: put that under `if __name__ == "__main__":`'
            )
        self._metrics = current()
        self._setup = describe(self.config, self._colors, self.max_memory)
        self._restarter.enter(self._start(None))

    def forward(self, items: list[Data]) -> None:
        sent, packed = pack_sent(items, self.config.label)
        outcomes = self._restarter.call(packed, len(items))
        for item, of_it, outcome in zip(items, sent, [outcomes] if len(items) == 1 else outcomes, strict=True):
            error = take_outcome(item, of_it, outcome, self._metrics)
            if error is not None:
                raise error

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        [sent], packed = pack_sent([item], self.config.label)

        def finish(error: BaseException | None, outcome: Any) -> None:
            link, reply = call.link, call.reply
            ran = None if link is None or reply is None else (link.instance, reply.first, reply.second)
            done(take_outcome(item, sent, outcome, self._metrics) if error is None else error, ran)

        is_large = False
        with suppress(Exception):  # `forward` gets the same dict, and reports the error
            is_large = self.config.instance_num > 1 and self.is_large(item)
        call = Call(packed, 1, finish, request.deadline, is_large, request.priority)
        links = request.linked()
        links.has_begun[request.node] = partial(self._pool.has_begun, call)
        # NOTE: of one key at a node with ``ordered_by``, the next request enters when this call ends.
        links.on_completed.append(partial(self._pool.abandon, call, unless_begun=TASK_STATE_KEY in item))
        self._pool.ask(call)

    def keep(self) -> None:
        self._restarter.move(self._pool)
        while not self._restarter.is_idle():
            try:
                self._restarter.serve(self._restarter.is_idle)
            except Exception as error:
                log_failure("cannot read a message from a worker process", error)

    def stop(self) -> None:
        self._pool.close()

    def running_since(self) -> float:
        return self._restarter.running_since() if self._restarter.pool is self._pool else 0.0

    def close(self) -> None:
        child = self._restarter.leave()
        if child is not None:
            child.close()
            self._forget_gauges()

    def max(self) -> int:
        return self._range[1]

    def min(self) -> int:
        return self._range[0]

    def signature(self) -> Signature:
        return self._signature

    def setup_choices(self) -> Iterator[str]:
        yield from self._choices

    def batch_key(self, item: Data) -> Hashable:
        try:
            return self.config.children[0].batch_key(item)
        except Exception:  # it depends on setup, which was done in another process
            return tensor_key(item[TASK_DATA_KEY])

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)

    def _start(self, seconds: float | None) -> LinkedChild:
        # NOTE: checked each time, since PyTorch may be imported after the first process was started.
        takes_tensors = bool(self.max_seconds or self.max_memory) and loaded_torch() is not None
        self._name = uuid4().hex
        setup = replace(self._setup, takes_tensors=takes_tensors, name=self._name)
        child: LinkedChild | None = None
        try:
            with nullcontext() if seconds is None else self.config.reloading():
                child = LinkedChild(self.config.label, self.config.instance, launch, ROOM)
                self._range, self._signature, self._choices = child.set_up(setup, seconds)
        except BaseException:
            if child is not None:
                child.close()
            raise
        if self._metrics is not None:
            self._metrics.enter(self._name)
        return child

    def _forget_gauges(self) -> None:
        if self._metrics is not None:
            self._metrics.leave(self._name)


class Isolated(ItemBackend):
    """Runs a decoder in a confined, replaceable process for each instance; ``decode_isolation`` inserts it.

    Encoded bytes go in, a Mat and its ``color`` come out; the decoder sees no other key of the dict. If it crashes,
    takes longer than ``max_seconds`` or more than ``max_memory``, only its own image is lost: there is no ``result``,
    ``error`` is a ``WorkerDied`` or a ``DecodeError``, and the next image gets a new process. The process cannot open
    files or connections or start programs; its answers are checked and never unpickled. Linux on x86-64 only.
    """

    reads = ()

    # any_thread() stays False: one thread uses a child process.
    children = (1, 1)

    max_seconds = Param(to_float, 10.0, low=0.1, high=3600, doc="the most seconds that an image takes")
    max_memory = Param(
        to_int,
        1024,
        low=16,
        high=2**17,
        doc="most MiB of an encoded image, of its pixels, and of what decoding takes besides",
    )

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._colors: tuple[str | None, ...] = ()
        self._zygote: Zygote | None = None
        self._restarter = Restarter(config.label, Pool(read=raw.read), self._start, self.max_seconds)

    def prefer_color(self, color: str | None) -> str | None:
        self._colors = (color,)
        return self.config.children[0].prefer_color(color)

    def setup(self) -> None:
        require_machine(self.config.label)
        setup = describe(replace(self.config, instance=0), self._colors, argv=(), main={})
        self._zygote = self.config.shared.get((Zygote, setup.pickled), lambda: Zygote(self.config.label, setup))
        self._zygote.enter()
        self._restarter.enter(self._start())

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def setup_choices(self) -> Iterator[str]:
        yield from ()  # it decodes on the CPU

    def is_large(self, item: Data) -> bool:
        return self.config.children[0].is_large(item)

    def forward_item(self, item: Data) -> None:
        encoded = encoded_bytes(item[TASK_DATA_KEY])
        if encoded.size > self.max_memory * 2**20:
            answer = raw.Refusal("DecodeError", f"{encoded.size} bytes are more than max_memory has room for")
        else:
            try:
                answer = self._restarter.call(raw.pack_encoded(encoded), 1)
            except WorkerDied as error:
                logger.warning("%s", error)
                item[TASK_ERROR_KEY] = error
                return
        if not isinstance(answer, raw.Refusal):
            original.begin(item, *answer.mat.shape[:2])
            item[TASK_RESULT_KEY] = answer.mat
            item.update(answer.keys)
        elif answer.raised:
            raise BackendError(f"{answer.name}: {answer.message}")
        elif (problem := answer.error()) is not None:
            item[TASK_ERROR_KEY] = problem

    def close(self) -> None:
        child = self._restarter.leave()
        if child is not None:
            child.release()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.leave()

    def _start(self) -> LinkedChild:
        assert self._zygote is not None
        config, limits = self.config, Limits(self.max_seconds, self.max_memory)
        fork = partial(self._zygote.fork, config.instance, limits)
        child = LinkedChild(config.label, config.instance, fork, raw.room_for(self.max_memory * 2**20))
        ready = child.set_up(None, READY_SECONDS, raw.read)
        if ready.raised:
            raise child.kill_and_describe(f"does not start: {ready.name}: {ready.message}")
        if config.instance == 0 and ready.message != raw.FILTERED:
            logger.warning("%s: this system filters no system calls; only limits confine a decoder", config.label)
        return child


class Remote(HandOverBackend):
    """Hands requests over to the engine process: ``section`` is the head of its nodes, ``engine`` the client.

    The values of the dict are copied there and back; values that cannot be pickled stay here and are not visible
    there. Changes that the engine process makes to an array in place are not visible here.
    """

    any_params = True
    runs_nodes = True

    def setup(self) -> None:
        self._engine: EngineClient = self.params["engine"]
        self._section, self._signature = self._engine.section(self.params["section"])

    def start(self, item: Data, done: HandedOver, request: Any) -> None:
        [sent], packed = pack_sent([item], self.config.label)

        def finish(error: BaseException | None, outcome: Any) -> None:
            done(take_outcome(item, sent, outcome) if error is None else error)

        call = Call(packed, self._section, finish, request.deadline, priority=request.priority)
        links = request.linked()
        links.has_begun[request.node] = partial(self._engine.has_begun, call)
        links.on_completed.append(partial(self._engine.abandon, call))
        if request.done:  # perhaps before the other process could be notified
            self._engine.abandon(call)
        else:
            self._engine.ask(call)

    @classmethod
    def keys_read(cls, params: Mapping[str, Any]) -> Collection[str] | None:
        keys: Collection[str] | None = params["reads"]
        return keys

    def expected_wait(self) -> float:
        return self._engine.expected_wait()

    def signature(self) -> Signature:
        signature: Signature = self._signature
        return signature

    @classmethod
    def batch_range(cls, params: Mapping[str, Any], children: Any) -> tuple[int, int]:
        return 1, 1


def describe(config: BackendConfig, colors: tuple[str | None, ...], max_memory: int = 0, **more: Any) -> Setup:
    """The ``Setup`` message for a child process that runs the only child of a backend."""
    setup = Setup(
        pickle_plan(config),
        config=replace(config, params={}, children=(), filters=(), graphs=None, reloading=nullcontext),
        colors=colors,
        main=main_source(),
        argv=tuple(sys.argv),
        log_level=logging.getLogger("torchpipe_py").getEffectiveLevel(),
        max_memory=max_memory,
    )
    return replace(setup, **more)

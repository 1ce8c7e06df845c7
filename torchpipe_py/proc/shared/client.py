"""The engine process as a worker sees it, whichever process that is now."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Protocol

from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import EngineUnavailable, WorkerDied, describe, log_failure, logger
from torchpipe_py.proc.shared.link import ENDED, EngineCall, Link
from torchpipe_py.proc.shared.memory import SLOTS, Header

HOLD_SECONDS = 0.4
"""How long a request waits for the next engine process when one has died."""

START_SECONDS = 60.0  # for an engine process that is ready to tell what it runs
_TURN_SECONDS = 0.02  # for answers; the thread of ``watch`` waits for other things as well
_DIED = "the engine process has died, and the next one is not ready yet"
_WEIGHT = 1 / 16  # of the last call in what a call takes


class Watch(Protocol):
    """Has ``take()`` called on one thread, whenever the descriptor can be read, from now on; ``None`` ends that.

    It may be called from any thread, and it keeps ``take`` until it has ended that.
    """

    def __call__(self, fd: int, take: Callable[[], object] | None) -> object: ...


class EngineClient:
    """Takes calls from any thread; the thread of ``watch``, which waits for other things as well, tells the answers.

    A thread of its own takes the large ones, and what the other has left every ``SLEEP_SECONDS``.
    ``attach(sock)`` gives it the way to an engine process: the first one, or the next when one has died.
    ``tell_linked(is_linked)`` hears from any thread that there is a link or one is being made, and that there is none:
    then it takes another ``attach``, to the next engine process or to the same one if that lives.
    """

    def __init__(self, watch: Watch, tell_linked: Callable[[bool], object] = lambda is_linked: None) -> None:
        self._watch, self._tell_linked = watch, tell_linked
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # of answers
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._next: socket.socket | None = None
        self._waiting: deque[EngineCall] = deque()  # for a slot, or for an engine process
        self.sections: dict[str, tuple[int, Signature]] = {}
        self._is_closed = self._is_meeting = False
        self._missing = _DIED  # why there is no link
        self._thread: threading.Thread | None = None
        self.figures = HandOverTimes()

    def attach(self, sock: socket.socket) -> None:
        """The engine process at the other end serves from now on, or as soon as the one before is gone."""
        with self._lock:
            before, self._next = self._next, sock
            self._is_meeting = True
            self._tell_linked(True)
            if before is not None:
                before.close()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torchpipe-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def meet(self, sock: socket.socket) -> bool:
        """Attach, and wait until the engine process has told what it runs; ``False`` where no link can be made."""
        self.attach(sock)
        with self._lock:
            self._changed.wait_for(lambda: self.sections or not self._is_meeting)
            return bool(self.sections)

    def section(self, head: str) -> tuple[int, Signature]:
        """The number of a section, and what its data and results hold; waits for the engine process to tell."""
        with self._lock:
            if not self._changed.wait_for(lambda: self.sections, START_SECONDS):
                raise EngineUnavailable(f"no engine process has told what it runs within {START_SECONDS:g} s")
            return self.sections[head]

    def ask(self, call: EngineCall) -> None:
        """Have the engine process run it."""
        with self._lock:
            if call.is_over:
                return
            link = self._link
            if link is None:
                call.until = call.asked + HOLD_SECONDS
            if link is None or not link.free:
                self._waiting.append(call)
                self._changed.notify_all()
                return
            link.take_slot(call)
        self._send(link, call)

    def give_up(self, call: EngineCall) -> None:
        """Nobody waits for it any more: it ends here at once. Its slot, if any, is free when it has ended there too."""
        with self._lock:
            if call.is_over:
                return
            call.is_over = True
            link = self._link
            if link is not None and call.slot >= 0 and link.calls[call.slot] is call:
                link.memory.give_up(call.slot, call.number)
            else:
                link = None
                # NOTE: while no slot becomes free, these would hold more and more memory.
                with suppress(ValueError):
                    self._waiting.remove(call)
        if link is not None:
            link.bell.ring()
            del link
        self._tell(call, None, CancelledError())

    def pending(self) -> int:
        """Calls that are not answered; a moment's estimate."""
        link = self._link
        return len(self._waiting) + (0 if link is None else SLOTS - len(link.free))

    def expected_wait(self) -> float:
        """How long a call will take that is made now: as long as the last ones, seconds; 0 where none is under way."""
        return self.figures.recent if self.pending() else 0.0

    def close(self) -> None:
        """End the thread. Calls that are left are not answered any more."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            if self._link is not None:
                self._link.wake()
        if self._thread is not None:
            self._thread.join(START_SECONDS)
        with self._lock:
            link, self._link = self._link, None
            sock, self._next = self._next, None
        for way in (link, sock):
            if way is not None:
                way.close()

    # -- to the engine process ----------------------------------------------------------------------------------

    def _send(self, link: Link, call: EngineCall) -> None:
        """Write a call into the slot it has; what cannot be sent ends it."""
        try:
            call.sent = perf_counter()
            link.memory.ask(call.slot, call.number, call.packed, call.section, call.sent, call.deadline)
        except Exception as error:
            if self._free(link, call):
                self._tell(call, None, error)
            return
        link.bell.ring()

    def _free(self, link: Link, call: EngineCall) -> bool:
        """Its slot, unless the link is lost, is free for the next call that waits; whether it is to be told."""
        with self._lock:
            if link.calls[call.slot] is not call:
                return False
            link.free_slot(call.slot)
            is_over, call.is_over = call.is_over, True
        if self._waiting:
            self._send_waiting(link)
        return not is_over

    def _send_waiting(self, link: Link) -> None:
        while True:
            with self._lock:
                if self._link is not link or not link.free or not self._waiting:
                    return
                call = self._waiting.popleft()
                link.take_slot(call)
            self._send(link, call)

    # -- from it: the thread ------------------------------------------------------------------------------------

    # NOTE: whoever is told an error may raise it, and keep it in a cycle with all frames below. So those that tell drop
    # their link at the end: it closes its descriptors when nobody has it any more.

    def _run(self) -> None:
        while not self._is_closed:
            try:
                link = self._link
                if link is None:
                    self._connect()
                elif link.large:  # first, since the thread of ``watch`` may be telling the others
                    if link.has_ended():  # NOTE: before each, since a copy takes its time
                        self._lose(link)
                    else:
                        self._take_answer(link, link.large.popleft())
                else:
                    if link.has_answers():
                        self._take_turn(link)
                    # NOTE: also where answers are left: who comes for a lock again at once leaves others no chance.
                    if link.is_gone():
                        self._lose(link)
            except Exception as error:
                log_failure("what comes from the engine process cannot be taken", error)

    def _connect(self) -> None:
        """Wait for an engine process, and meanwhile fail the calls that have waited for too long."""
        self._fail_late()
        with self._lock:
            sock, self._next = self._next, None
            if sock is None:
                first = min((call.until for call in self._waiting), default=inf)
                if not self._is_closed:
                    self._changed.wait(None if first == inf else max(0.0, first - perf_counter()))
                return
        try:
            link = Link(sock, self._meets)
        except Exception as error:
            if not isinstance(error, ENDED):
                self._missing = f"there is no link to the engine process: {describe(error)}"
                logger.error("%s", self._missing)
            with self._lock:
                self._is_meeting = self._next is not None
                self._tell_linked(self._is_meeting)
                self._changed.notify_all()
            return
        with self._lock:
            self._link, self.sections = link, link.sections
            self._missing = _DIED
            self._tell_linked(True)
            for call in self._waiting:
                call.until = inf
            self._changed.notify_all()
        self._watch(link.rung, partial(self._take_rung, link))
        self._send_waiting(link)

    def _meets(self) -> bool:
        """Called while an engine process that has come does not tell yet what it runs: whether to wait on."""
        self._fail_late()
        return not self._is_closed

    def _fail_late(self) -> None:
        """Fail the calls that have waited too long for an engine process."""
        with self._lock:
            now = perf_counter()
            late = [call for call in self._waiting if call.until <= now]
            self._waiting = deque(call for call in self._waiting if call.until > now)
            for call in late:
                call.is_over = True
        for call in late:
            self._tell(call, None, EngineUnavailable(self._missing))

    def _take_rung(self, link: Link) -> None:
        """On the thread of ``watch``: the engine process has rung."""
        try:
            link.heed_bell()
            self._take_turn(link)
        except Exception as error:
            log_failure("what comes from the engine process cannot be taken", error)
        del link

    def _take_turn(self, link: Link) -> None:
        """Tell the answers that are there, for as long as a turn; the thread that has the bell comes for the rest."""
        if not self._take_answers(link, _TURN_SECONDS):
            link.ring_again()
        del link

    def _take_answers(self, link: Link, seconds: float = inf) -> bool:
        """Tell the answers that are there, for about so long, and leave the large ones; whether that were all."""
        with self._taking:
            end = perf_counter() + seconds
            link.answered += link.take_answered()
            while link.answered:
                slot = link.answered.popleft()
                if link.is_large(slot):
                    link.leave_large(slot)
                else:
                    self._take_answer(link, slot)
                if perf_counter() >= end:
                    break
            is_all = not link.answered
            del link
            return is_all

    def _take_answer(self, link: Link, slot: int) -> None:
        call = link.calls[slot]
        if call is None:  # the link is lost, and its calls have failed
            return
        reply = link.memory.reply(slot)
        answer: Any = None
        error: BaseException | None = None
        try:
            answer = link.memory.read(slot, reply, copies=True)
            if reply.kind:
                answer, error = None, answer.error()
        except Exception as failure:
            answer, error = None, failure
        self.figures.answered(call, reply)
        link.memory.release(slot, reply)
        if self._free(link, call):
            del link
            self._tell(call, answer, error)

    def _tell(self, call: EngineCall, answer: Any, error: BaseException | None) -> None:
        """End a call. NOTE: whoever has found that it was not over, with the lock held, does that."""
        try:
            call.done(answer, error)
        except Exception as failure:
            log_failure("the answer of the engine process cannot be told", failure)

    def _lose(self, link: Link) -> None:
        """The engine process has died: fail what it had, and let the rest wait for the next one."""
        self._watch(link.rung, None)
        with self._lock:
            self._link = None  # before anything else: what comes from now on is for the next one
            self._tell_linked(self._next is not None)
            until = perf_counter() + HOLD_SECONDS
            for call in self._waiting:
                call.until = until
        self._take_answers(link)
        with self._lock:
            # NOTE: taken from it, so that an answer that comes all the same is not a second one.
            lost = [call for call in link.calls if call is not None and call.slot not in link.large]
            for call in lost:
                link.calls[call.slot] = None
            lost = [call for call in lost if not call.is_over]
            for call in lost:
                call.is_over = True
        for call in lost:
            self._tell(call, None, WorkerDied("the engine process died while it had the request"))
        while link.large:
            self._take_answer(link, link.large.popleft())
        link.close()
        del link


class HandOverTimes:
    """Times of calls since the start, in seconds; threads that take answers add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = 0
        self.slot_wait = self.there = self.in_engine = self.back = 0.0
        self.recent = 0.0  # of one call from its start to its answer, the last ones more than those before

    def answered(self, call: EngineCall, reply: Header) -> None:
        """A call was answered: it waited for a slot, went there, was in the engine process, and came back."""
        now, taken, done = perf_counter(), reply.first, reply.second
        with self._lock:
            self.requests += 1
            self.slot_wait += call.sent - call.asked
            self.there += taken - call.sent
            self.in_engine += done - taken
            self.back += now - done
            self.recent += _WEIGHT * (now - call.asked - self.recent)

    def as_dict(self) -> dict[str, float]:
        """Totals, in milliseconds."""
        return {
            "requests": self.requests,
            "slot_wait_ms": 1000 * self.slot_wait,
            "there_ms": 1000 * self.there,
            "in_engine_ms": 1000 * self.in_engine,
            "back_ms": 1000 * self.back,
        }

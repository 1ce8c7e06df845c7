"""Requests of one key one after the other at a node, with a state for each key."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torchpipe_py.errors import BackendError, InvalidRequest, Overloaded, PipeClosed, describe, shown
from torchpipe_py.keys import TASK_STATE_KEY
from torchpipe_py.runtime.request import Request

MOST_KEYS = 4096
"""So many keys have a state at a node at a time."""

MOST_RETRY = 60.0
"""Seconds after which a client with a further key is to come again, at most."""

MOST_CHARACTERS = 256
"""Of a key that is a text."""


class _Turns:
    """The state of a key, and the requests that wait while another one of it is at the node."""

    __slots__ = ("is_entering", "is_free", "key", "left", "state", "waiting")

    def __init__(self, key: str | int) -> None:
        self.key = key
        self.state: Any = {}
        self.waiting: deque[Request] = deque()
        self.is_free = False  # none is at the node
        self.is_entering = False  # a thread brings one there, and then sees whether it has left already
        self.left = 0.0  # when the last one did


class Order:
    """Lets one request of each key at a time into node ``name`` by ``put``, in the order of arrival; from any thread.

    The key is what the request's dict has under ``ordered_by``: a text, or an integer. While the request is at the
    node, its dict has a shallow copy of the key's state under ``state``, at first ``{}``; what is there when the
    backend is through is the key's state from then on; where it raises, the state stays as it was. It is forgotten when
    no request of the key came for ``seconds``. Beyond ``most`` keys, ``Overloaded``.
    """

    def __init__(
        self,
        name: str,
        ordered_by: str,
        seconds: float,
        put: Callable[[Request], object],
        fail: Callable[[Request, BaseException], object],
        most: int = MOST_KEYS,
    ) -> None:
        self._name, self._by, self._seconds, self._most = name, ordered_by, seconds, most
        self._put, self._fail = put, fail
        self._is_closing = False
        self._turns: dict[Request, _Turns] = {}  # of those at the node
        self._busy: dict[str | int, _Turns] = {}
        self._idle: OrderedDict[str | int, _Turns] = OrderedDict()  # the first has been idle longest
        self._lock = threading.RLock()  # the handler of a signal may call the pipe while the main thread has it

    def put(self, request: Request) -> None:
        """Bring a request to the node, or let it wait for its turn."""
        try:
            if not self._begins(request):
                return
        except (InvalidRequest, Overloaded) as error:
            self._fail(request, error)
            return
        try:
            self._put(request)
        except BaseException:  # the handler of a signal may raise anywhere
            self.leave(request)
            raise

    def delivering(self, deliver: Callable[[Request], object]) -> Callable[[Request], None]:
        """``deliver``, after which the next request of the key comes to the node."""

        def keep_and_deliver(request: Request) -> None:
            try:
                turns = self._turns.get(request)
                if turns is not None:
                    turns.state = request.data.pop(TASK_STATE_KEY, turns.state)
                deliver(request)
            finally:
                self.leave(request)

        return keep_and_deliver

    def fail(self, request: Request, error: BaseException) -> None:
        """The node's ``fail``, after which the next request of the key comes to the node."""
        if request in self._turns and not request.done:
            request.data.pop(TASK_STATE_KEY, None)
        self._fail(request, error)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """The request is no longer at the node: the next of its key comes there. Nothing where it left before."""
        with self._lock:
            turns = self._turns.pop(request, None)
            if turns is None:
                return
            turns.is_free = True
            if turns.is_entering:
                return  # NOTE: or as many calls would be inside each other as requests fail at once
            turns.is_entering = True
        while (following := self._following(turns)) is not None:
            try:
                self._put(following)
            except BaseException as error:  # as in put
                turns.is_entering = False
                self.fail(following, BackendError(f"node {self._name!r}: {describe(error)}"))
                raise

    def copied_state(self, request: Request) -> Any:
        """A copy of the state as it was when the request came to the node."""
        state = self._turns[request].state
        return dict(state) if isinstance(state, dict) else state

    def waiting(self) -> int:
        """Requests that wait for their turn; a moment's estimate."""
        return sum(len(turns.waiting) for turns in list(self._busy.values()))

    def close(self) -> None:
        """What waits for its turn fails with ``PipeClosed``; what comes later goes to the node at once."""
        with self._lock:
            self._is_closing = True
            waiting = [request for turns in self._busy.values() for request in turns.waiting]
            for turns in self._busy.values():
                turns.waiting.clear()
        for request in waiting:
            self._fail(request, PipeClosed(f"the pipe was closed while the request waited at node {self._name!r}"))

    def _begins(self, request: Request) -> bool:
        """Whether it is the request's turn; else it waits."""
        key = self._key_of(request)
        with self._lock:
            turns = self._busy.get(key)
            if turns is None:
                turns = self._idle_turns(key)
            elif not self._is_closing:
                request.caller = None
                turns.waiting.append(request)
                return False
            self._begin(turns, request)
            return True

    def _begin(self, turns: _Turns, request: Request) -> None:
        turns.is_free = False
        self._turns[request] = self._busy[turns.key] = turns
        request.data[TASK_STATE_KEY] = self.copied_state(request)

    def _following(self, turns: _Turns) -> Request | None:
        """The request whose turn it is now; ``None`` where one is at the node, or none waits."""
        with self._lock:
            while turns.is_free and turns.waiting:
                request = turns.waiting.popleft()
                if not request.done:
                    self._begin(turns, request)
                    return request
            turns.is_entering = False
            if turns.is_free:
                turns.left = perf_counter()
                self._idle[turns.key] = self._busy.pop(turns.key)
            return None

    def _idle_turns(self, key: str | int) -> _Turns:
        """Those of a key of which no request is at the node: its state, or a new one."""
        oldest = perf_counter() - self._seconds
        while self._idle and next(iter(self._idle.values())).left <= oldest:
            self._idle.popitem(last=False)
        turns = self._idle.pop(key, None)
        if turns is None and len(self._idle) + len(self._busy) >= self._most:
            first = next(iter(self._idle.values()), None)
            seconds = min(MOST_RETRY, self._seconds if first is None else first.left - oldest)
            raise Overloaded(
                f"node {self._name!r} keeps the states of {self._most} different {self._by!r} (ordered_by), each for "
                f"{self._seconds:g} s after its last request (state_seconds)",
                retry_after_ms=max(1, math.ceil(1000 * seconds)),
            )
        return turns or _Turns(key)

    def _key_of(self, request: Request) -> str | int:
        key = request.data.get(self._by)
        if (type(key) is str and len(key) <= MOST_CHARACTERS) or (type(key) is int and key.bit_length() < 64):
            return key
        given = f"got {shown(key)}" if self._by in request.data else "the request has none"
        raise InvalidRequest(
            f"node {self._name!r} is ordered by {self._by!r}: expected a text of at most {MOST_CHARACTERS} characters "
            f"or an integer, {given}"
        )

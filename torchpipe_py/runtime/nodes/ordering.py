"""Runs the requests of each key one after the other at a node, with a state for each key."""

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
"""Maximum number of keys with a state at a node."""

MOST_RETRY = 60.0
"""Maximum ``Retry-After``, in seconds, for a client whose new key exceeds the limit."""

MOST_CHARACTERS = 256
"""Maximum length of a string key."""


class _Turns:
    """The state of a key, and the requests that wait while another one of the key is at the node."""

    __slots__ = ("is_entering", "is_free", "key", "left", "state", "waiting")

    def __init__(self, key: str | int) -> None:
        self.key = key
        self.state: Any = {}
        self.waiting: deque[Request] = deque()
        self.is_free = False  # no request is at the node
        self.is_entering = False  # a thread brings a request there, and then checks whether it has already left
        self.left = 0.0  # when the last request left


class Order:
    """Lets one request of each key at a time into node ``name``, in order of arrival; ``put`` is thread-safe.

    The key is the value of ``ordered_by`` in the request's dict: a string or an integer. While the request is at the
    node, its dict has a shallow copy of the key's state under ``state``, at first ``{}``; the value there when the
    backend finishes becomes the key's new state; if the backend raises, the state is unchanged. The state is dropped
    if no request of the key comes for ``seconds``. Raises ``Overloaded`` above ``most`` keys.
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
        self._turns: dict[Request, _Turns] = {}  # of the requests at the node
        self._busy: dict[str | int, _Turns] = {}
        self._idle: OrderedDict[str | int, _Turns] = OrderedDict()  # the first has been idle longest
        self._lock = threading.RLock()  # a signal handler may call the pipe while the main thread holds the lock

    def put(self, request: Request) -> None:
        """Bring a request to the node, or queue it until its turn."""
        try:
            if not self._begins(request):
                return
        except (InvalidRequest, Overloaded) as error:
            self._fail(request, error)
            return
        try:
            self._put(request)
        except BaseException:  # a signal handler may raise anywhere
            self.leave(request)
            raise

    def delivering(self, deliver: Callable[[Request], object]) -> Callable[[Request], None]:
        """Wrap ``deliver``, so that the next request of the key then enters the node."""

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
        """Call the node's ``fail``, then let the next request of the key enter the node."""
        if request in self._turns and not request.done:
            request.data.pop(TASK_STATE_KEY, None)
        self._fail(request, error)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Remove the request from the node and let the next of its key enter. No effect if it left before."""
        with self._lock:
            turns = self._turns.pop(request, None)
            if turns is None:
                return
            turns.is_free = True
            if turns.is_entering:
                return  # NOTE: otherwise calls would nest as deep as the number of requests that fail at once
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
        """Number of requests that wait for their turn; a momentary estimate."""
        return sum(len(turns.waiting) for turns in list(self._busy.values()))

    def close(self) -> None:
        """Fail waiting requests with ``PipeClosed``; later requests enter the node at once."""
        with self._lock:
            self._is_closing = True
            waiting = [request for turns in self._busy.values() for request in turns.waiting]
            for turns in self._busy.values():
                turns.waiting.clear()
        for request in waiting:
            self._fail(request, PipeClosed(f"the pipe was closed while the request waited at node {self._name!r}"))

    def _begins(self, request: Request) -> bool:
        """Whether it is the request's turn; else queues it."""
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
        """The request whose turn it is now; ``None`` if one is at the node, or none waits."""
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
        """The turns of a key without a request at the node: the stored ones, or new ones."""
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

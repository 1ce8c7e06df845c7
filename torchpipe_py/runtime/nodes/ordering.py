"""Runs the requests of each key one after the other at a node, with a state for each key."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torchpipe_py.errors import InvalidRequest, Overloaded, PipeClosed, shown
from torchpipe_py.keys import TASK_STATE_KEY
from torchpipe_py.runtime.request import Request
from torchpipe_py.wire.values import single

MOST_KEYS = 4096
"""Maximum number of keys with a state at a node."""

MOST_RETRY = 60.0
"""Maximum ``Retry-After``, in seconds, for a client whose new key exceeds the limit."""

MOST_CHARACTERS = 256
"""Maximum length of a string key."""


class KeyState:
    """The state of a key, and the requests that wait until the request of the key at the node has left it."""

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

    The key is the value of ``ordered_by`` in the request's dict: a string or an integer, or one as the Open Inference
    Protocol has it, bytes or an array of one element. While the request is at the
    node, its dict has a shallow copy of the key's state under ``state``, at first ``{}``; the value there when the
    backend finishes becomes the key's new state; if the backend raises, the state is unchanged. The state is dropped
    if no request of the key comes for ``seconds`` of ``clock``. Raises ``Overloaded`` above ``most`` keys.
    """

    def __init__(
        self,
        name: str,
        ordered_by: str,
        seconds: float,
        put: Callable[[Request], object],
        fail: Callable[[Request, BaseException], object],
        most: int = MOST_KEYS,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._name, self._by, self._seconds, self._most = name, ordered_by, seconds, most
        self._clock = clock
        self._put, self._fail = put, fail
        self._lock = threading.Lock()  # for all below
        self._is_closing = False
        self._present: dict[Request, KeyState] = {}  # for each request at the node
        self._busy: dict[str | int, KeyState] = {}
        self._idle: OrderedDict[str | int, KeyState] = OrderedDict()  # the first has been idle longest

    def put(self, request: Request) -> None:
        """Bring a request to the node, or queue it until its turn."""
        try:
            enters = self._enter_or_queue(request)
        except (InvalidRequest, Overloaded) as error:
            self._fail(request, error)
            return
        if enters:
            self._put(request)

    def delivering(self, deliver: Callable[[Request], object]) -> Callable[[Request], None]:
        """Wrap ``deliver``, so that the next request of the key then enters the node."""

        def keep_and_deliver(request: Request) -> None:
            try:
                key_state = self._present.get(request)
                if key_state is not None:
                    key_state.state = request.data.pop(TASK_STATE_KEY, key_state.state)
                deliver(request)
            finally:
                self.leave(request)

        return keep_and_deliver

    def fail(self, request: Request, error: BaseException) -> None:
        """Call the node's ``fail``, then let the next request of the key enter the node."""
        if request in self._present and not request.done:
            request.data.pop(TASK_STATE_KEY, None)
        self._fail(request, error)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Remove the request from the node and let the next of its key enter. No effect if it left before."""
        with self._lock:
            key_state = self._present.pop(request, None)
            if key_state is None:
                return
            key_state.is_free = True
            if key_state.is_entering:
                return  # NOTE: otherwise calls would nest as deep as the number of requests that fail at once
            key_state.is_entering = True
        while (following := self._following(key_state)) is not None:
            self._put(following)

    def copied_state(self, request: Request) -> Any:
        """A copy of the state as it was when the request came to the node."""
        state = self._present[request].state
        return dict(state) if isinstance(state, dict) else state

    def waiting(self) -> int:
        """Number of requests that wait for their turn; a momentary estimate."""
        return sum(len(key_state.waiting) for key_state in list(self._busy.values()))

    def waiting_requests(self) -> list[Request]:
        """A copy of these requests."""
        return [request for key_state in list(self._busy.values()) for request in key_state.waiting.copy()]

    def close(self) -> None:
        """Fail waiting requests with ``PipeClosed``; later requests enter the node at once."""
        with self._lock:
            self._is_closing = True
            waiting = [request for key_state in self._busy.values() for request in key_state.waiting]
            for key_state in self._busy.values():
                key_state.waiting.clear()
        for request in waiting:
            self._fail(request, PipeClosed(f"the pipe was closed while the request waited at node {self._name!r}"))

    def _enter_or_queue(self, request: Request) -> bool:
        """Mark the request as present if it is its turn, or queue it; returns whether it enters the node."""
        key = self._key_of(request)
        with self._lock:
            key_state = self._busy.get(key)
            if key_state is None:
                key_state = self._idle_state(key)
            elif not self._is_closing:
                request.caller = None
                key_state.waiting.append(request)
                return False
            self._enter(key_state, request)
            return True

    def _enter(self, key_state: KeyState, request: Request) -> None:
        key_state.is_free = False
        self._present[request] = self._busy[key_state.key] = key_state
        request.data[TASK_STATE_KEY] = self.copied_state(request)

    def _following(self, key_state: KeyState) -> Request | None:
        """The request whose turn it is now; ``None`` if one is at the node, or none waits."""
        with self._lock:
            while key_state.is_free and key_state.waiting:
                request = key_state.waiting.popleft()
                if not request.done:
                    self._enter(key_state, request)
                    return request
            key_state.is_entering = False
            if key_state.is_free:
                key_state.left = self._clock()
                self._idle[key_state.key] = self._busy.pop(key_state.key)
            return None

    def _idle_state(self, key: str | int) -> KeyState:
        """The state of a key without a request at the node: the stored one, or a new one."""
        oldest = self._clock() - self._seconds
        while self._idle and next(iter(self._idle.values())).left <= oldest:
            self._idle.popitem(last=False)
        key_state = self._idle.pop(key, None)
        if key_state is None and len(self._idle) + len(self._busy) >= self._most:
            first = next(iter(self._idle.values()), None)
            seconds = min(MOST_RETRY, self._seconds if first is None else first.left - oldest)
            raise Overloaded(
                f"node {self._name!r} keeps the states of {self._most} different {self._by!r} (ordered_by), each for "
                f"{self._seconds:g} s after its last request (state_seconds)",
                retry_after_ms=max(1, math.ceil(1000 * seconds)),
            )
        return key_state or KeyState(key)

    def _key_of(self, request: Request) -> str | int:
        key = single(request.data.get(self._by))
        if (type(key) is str and len(key) <= MOST_CHARACTERS) or (type(key) is int and key.bit_length() < 64):
            return key
        given = f"got {shown(key)}" if self._by in request.data else "the request has none"
        raise InvalidRequest(
            f"node {self._name!r} is ordered by {self._by!r}: expected a text of at most {MOST_CHARACTERS} characters "
            f"or an integer, {given}"
        )

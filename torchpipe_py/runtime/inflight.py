"""The requests of a pipe that are under way, and the end of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import BackendError, NoResult, Overloaded, PipeClosed, counted, describe, log_failure
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.idle import is_main_thread
from torchpipe_py.runtime.request import Branches, Request, nobody_waits
from torchpipe_py.runtime.routes import Enter


class InFlight:
    """A request is in flight from ``submit`` to ``complete``, which happens exactly once.

    The set of them is the one source of truth: whoever removes a request from it, completes it. ``most`` may be in
    flight, those of low priority only while it is not more than half; those of jumps are not counted.
    ``entries[name](request)`` brings a request to a node.
    """

    entries: Mapping[str, Enter]

    def __init__(self, name: str, most: int, retry_after_ms: Callable[[], int]) -> None:
        self.name, self.most = name, most
        self.admitted = self.rejected = 0
        self.refusal = ""  # why none is taken any more
        self._retry_after_ms = retry_after_ms
        self._requests: set[Request] = set()
        self._inner: set[Request] = set()  # of jumps
        self._lock = threading.RLock()  # the handler of a signal may call the pipe while the main thread has it

    def __len__(self) -> int:
        """How many were admitted and are not completed."""
        return len(self._requests)

    def refuse(self) -> None:
        """Take no further request."""
        # NOTE: without the lock, which the main thread may have while a handler of a signal closes the pipe there. What
        # is counted in at this moment comes to nodes that are closed.
        self.refusal = self.refusal or "the pipe is closed"

    def after_fork(self) -> None:
        """In a forked child no thread is there that would complete any."""
        self._lock = threading.RLock()
        self.refusal = "the pipe was built in the parent process; threads do not survive a fork"
        self._requests.clear()
        self._inner.clear()

    def is_awaited(self, now: float) -> bool:
        """Whether somebody waits for one of them still."""
        return any(request.deadline is None or request.deadline > now for request in list(self._requests))

    def end(self) -> None:
        """Fail what is left with ``PipeClosed``."""
        for request in [*self._inner, *self._requests]:
            self.complete(request, PipeClosed("the pipe was closed before the request was finished"))

    def add_inner(self, requests: Sequence[Request]) -> None:
        """Count in what a request of this pipe starts in it: nothing keeps it out."""
        self._inner.update(requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Count the requests in, all or none, and bring each to its root.

        ``Overloaded`` beyond the bound, ``PipeClosed`` after ``close``.
        """
        try:
            self._admit(requests)
            for request in requests:
                try:
                    self.entries[request.node](request)
                except Exception as error:
                    self.complete(request, error)
        except BaseException as error:  # the handler of a signal may raise anywhere
            for request in requests:
                request.on_done = nobody_waits
                if not self.complete(request, error):
                    request.error = error
                    self._let_go(request, None)
            raise

    def _admit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            if self.refusal:
                raise PipeClosed(self.refusal)
            most = self.most
            for request in requests:
                if request.priority:
                    most = max(1, self.most // 2)
                    break
            is_admitted = len(self._requests) + len(requests) <= most
            if is_admitted:
                self._requests.update(requests)
                self.admitted += len(requests)
            else:
                self.rejected += len(requests)
        if not is_admitted:
            running = counted(len(self), "request")
            raise Overloaded(
                f"{running} in flight, {len(requests)} more would pass "
                f"{'' if most == self.most else 'half of '}max_inflight = {self.most}",
                retry_after_ms=self._retry_after_ms() if len(requests) <= most else None,
            )

    def complete(self, request: Request, error: BaseException | None = None, last: Data | None = None) -> bool:
        """Make the outcome final and tell whoever waits; ``False`` if it was final already.

        ``request`` may be a branch of the one that ends. ``last`` is the outcome where others are still under way.
        """
        links, branches, under_way = request.links, None, self._requests
        if links is not None:
            branches = links.branches
            if branches is not None:
                request = branches.request
            if links.is_inner:
                under_way = self._inner
        try:
            under_way.remove(request)
        except KeyError:
            return False
        request.error = error
        request.done = True
        data = request.data
        try:
            if branches is not None:
                branches.settle(last, error is not None)
                data = request.data
            if error is None and TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                data[TASK_ERROR_KEY] = NoResult("a filter ended the request before any backend gave a result")
            if request.caller_data is not None:
                if error is None:
                    for key in request.caller_data.keys() - data.keys():
                        del request.caller_data[key]
                    request.caller_data.update(data)
                data = request.caller_data
        except Exception as failure:  # another thread may change the caller's dict
            error = request.error = error or BackendError(f"the request's dict: {describe(failure)}")
        # Whoever waits usually holds the request: a callback that is kept would make a cycle of the two.
        on_done, request.on_done = request.on_done, nobody_waits
        try:
            on_done(data, error)
        except BaseException as failure:
            if is_main_thread() and not isinstance(failure, Exception):
                raise  # a handler of a signal, Ctrl-C's say, has raised it
            log_failure(f"{self.name}: the callback of a finished request failed", failure)
        finally:
            if request.links is not None:  # NOTE: anew, since a jump may have made them until the request was done.
                self._let_go(request, branches)
        return True

    def _let_go(self, request: Request, branches: Branches | None) -> None:
        """Nobody waits any more for what the request's jumps have started."""
        links = request.links
        if links is not None:
            for give_up in links.give_up:
                give_up()
            links.give_up.clear()
            if links.timeline is not None:
                links.timeline.end(request.error, request.data)
        if branches is not None:
            # Branches that are still under way know the request; without this it would be a cycle that holds all dicts.
            request.links = None
            branches.requests.clear()

"""The requests in flight in a pipe, and the completion of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import BackendError, NoResult, Overloaded, PipeClosed, counted, describe, log_failure
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.request import Branches, OnDone, Request, ignore_outcome


class InFlight:
    """A request is in flight from ``admit`` to ``complete``, which happens exactly once.

    The set of requests is the only source of truth: the thread that removes a request completes it. At most ``most``
    may be in flight; low-priority requests are accepted up to half of that; requests of jumps are not counted.
    """

    def __init__(self, name: str, most: int, retry_after_ms: Callable[[], int]) -> None:
        self.name, self.most = name, most
        self._retry_after_ms = retry_after_ms
        self._lock = threading.Lock()  # for admitting: all below
        self.admitted = self.rejected = 0
        self.refusal = ""  # why requests are refused, if they are
        self._requests: set[Request] = set()
        self._inner: set[Request] = set()  # of jumps

    def __len__(self) -> int:
        """Number of requests that were admitted and are not completed."""
        return len(self._requests)

    def refuse(self) -> None:
        """Accept no further request."""
        with self._lock:
            self.refusal = self.refusal or "the pipe is closed"

    def after_fork(self) -> None:
        """Reset the state in a forked child, which lacks the threads that complete requests."""
        self._lock = threading.Lock()
        self.refusal = "the pipe was built in the parent process; threads do not survive a fork"
        self._requests.clear()
        self._inner.clear()

    def is_awaited(self, now: float) -> bool:
        """Whether a caller still waits for one of the requests."""
        return any(request.deadline is None or request.deadline > now for request in list(self._requests))

    def end(self) -> None:
        """Fail all remaining requests with ``PipeClosed``."""
        for request in [*self._inner, *self._requests]:
            self.complete(request, PipeClosed("the pipe was closed before the request was finished"))

    def add_inner(self, requests: Sequence[Request]) -> None:
        """Add requests started by a request of this pipe; they are never refused."""
        self._inner.update(requests)

    def admit(self, requests: Sequence[Request]) -> None:
        """Add all requests or none. Raises ``Overloaded`` above the limit, ``PipeClosed`` after ``refuse``."""
        with self._lock:
            more = len(requests)
            count = len(self._requests) + more
            if not self.refusal and (2 * count <= self.most or count <= self._most_for(requests)):
                for request in requests:
                    # NOTE: only now, as a refused call changes nothing, and before any of them can end: what an earlier
                    # call left must not show as an outcome.
                    request.data.pop(TASK_RESULT_KEY, None)
                    request.data.pop(TASK_ERROR_KEY, None)
                self._requests.update(requests)
                self.admitted += more
                return
            if not self.refusal:
                self.rejected += more
        error = PipeClosed(self.refusal) if self.refusal else self._overloaded(requests)
        for request in requests:
            request.error = error
            self._let_go(request, None)
        raise error

    def _overloaded(self, requests: Sequence[Request]) -> Overloaded:
        more, most = len(requests), self._most_for(requests)
        would = "would pass" if most == self.most else "with priority 1 would pass half of"
        text = f"{counted(len(self), 'request')} in flight, {more} more {would} max_inflight = {self.most}"
        return Overloaded(text, self._retry_after_ms() if more <= most else None, requests[0].deadline)

    def _most_for(self, requests: Sequence[Request]) -> int:
        return max(1, self.most // 2) if any(request.priority for request in requests) else self.most

    def report_refused(self, requests: Sequence[Request], error: BaseException) -> None:
        """Call ``on_done`` of requests that were not admitted."""
        for request in requests:
            request.done = True
            on_done, request.on_done = request.on_done, ignore_outcome
            self._call(on_done, request.data if request.caller_data is None else request.caller_data, error)

    def complete(self, request: Request, error: BaseException | None = None, last: Data | None = None) -> bool:
        """Make the outcome final and call ``on_done``; returns ``False`` if it was already final.

        ``request`` may be a branch of the one that ends. ``last`` is the outcome if other branches are still under way.
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
        # The callback usually refers to the request: keeping it would make a reference cycle.
        on_done, request.on_done = request.on_done, ignore_outcome
        try:
            self._call(on_done, data, error)
        finally:
            if request.links is not None:  # NOTE: read again, since a jump may have made them until now
                self._let_go(request, branches)
        return True

    def _call(self, on_done: OnDone, data: Data, error: BaseException | None) -> None:
        try:
            on_done(data, error)
        except BaseException as failure:
            log_failure(f"{self.name}: the callback of a finished request failed", failure)

    def _let_go(self, request: Request, branches: Branches | None) -> None:
        """Cancel the requests that its jumps started, and drop its branches."""
        links = request.links
        if links is not None:
            for end_work in links.on_completed:
                end_work()
            links.on_completed.clear()
            if links.timeline is not None:
                links.timeline.end(request.error, request.data)
        if branches is not None:
            # Branches still under way refer to the request; without this a reference cycle would hold all dicts.
            request.links = None
            branches.requests.clear()

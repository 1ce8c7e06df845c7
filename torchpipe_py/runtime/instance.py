"""One backend on a thread of its own: set up, run and closed there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from time import perf_counter

from torchpipe_py.backends.base import Backend, BackendConfig
from torchpipe_py.backends.image.memory import CURRENT
from torchpipe_py.errors import log_failure
from torchpipe_py.runtime.idle import Sleeper
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.statistics import Record

Serve = Callable[["Instance"], None]


def _no_backend(index: int) -> Backend:
    """In place of a backend before its set-up and after its end."""
    return Backend(BackendConfig(instance=index))


class Instance(Sleeper):
    """One backend and its thread, which waits between ``setup`` and the first request for ``open``.

    ``stand_ins`` are the identities of threads in its place: that of a caller that runs ``forward``, or those that
    deliver what was done elsewhere. ``taken`` are the requests that its own thread has, ``busy`` counts those that it
    or the caller's has and has not delivered, ``started`` is when ``forward`` was last called for them
    (``perf_counter``; 0.0 when idle), ``deadline`` the last of theirs. One of these two threads at a time writes these
    and ``record``.
    """

    def __init__(self, node: str, index: int, create: Callable[[int], Backend]) -> None:
        super().__init__()
        self.index = index
        self.backend = _no_backend(index)
        self.max = self.min = 1
        self.setup_error: BaseException | None = None
        self.taken: Sequence[Request] = ()
        self.busy = 0
        self.stand_ins: set[int] = set()
        self.started = 0.0
        self.deadline: float | None = None
        self.last_compute = 0.0  # seconds
        self.record = Record(node, index)
        self.node, self._create = node, create
        self._is_set_up, self._is_opened = threading.Event(), threading.Event()
        self._serve: Serve | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, which sets the backend up."""
        name = f"torchpipe-{self.node}-{self.index}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def wait_setup(self) -> BaseException | None:
        """Wait until the backend is set up; what that raised, if anything."""
        self._is_set_up.wait()
        return self.setup_error

    def open(self, serve: Serve | None) -> None:
        """Let the thread run ``serve(self)``, or end at once."""
        self._serve = self._serve or serve
        self._is_opened.set()

    def join(self, until: float) -> None:
        """Wait for the thread to end, no longer than ``until``."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(max(0.0, until - perf_counter()))

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def running_s(self, now: float) -> float:
        """Seconds since the ``forward`` began that runs now, on either thread or elsewhere; 0.0 where none runs."""
        started = self.started or self.backend.running_since()
        return max(0.0, now - started) if started else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile its ``forward`` does not run: it waits for memory, which others give back."""
        self.started = 0.0
        try:
            yield
        finally:
            self.started = perf_counter()

    @property
    def is_current(self) -> bool:
        """Whether its thread, or one that stands in for it, is the one that asks."""
        return self._thread is threading.current_thread() or threading.get_ident() in self.stand_ins

    def _main(self) -> None:
        try:
            self._set_up()
        except BaseException as error:
            self.setup_error = error
        finally:
            self._is_set_up.set()
        self._is_opened.wait()
        CURRENT.waiter = self
        try:
            if self._serve is not None:
                self._serve(self)
        finally:
            self._tear_down()

    def _set_up(self) -> None:
        self.backend = self._create(self.index)
        self.backend.setup()
        low, high = self.backend.min(), self.backend.max()
        are_sizes = isinstance(low, Integral) and isinstance(high, Integral)
        if not (are_sizes and 1 <= low <= high <= sys.maxsize):
            raise ValueError(
                f"range {low}..{high} of {self.backend.config.label} is none: min() and max() are integers, "
                f"1 <= min() <= max() <= {sys.maxsize}"
            )
        self.max, self.min = int(high), int(low)

    def _tear_down(self) -> None:
        try:
            self.backend.close()
        except BaseException as error:
            log_failure(f"node {self.node!r}: close of instance {self.index} failed", error)
        # What the instances share, an engine say, goes with the last of them.
        self.backend, self._create = _no_backend(self.index), _no_backend

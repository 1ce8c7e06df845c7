"""The pipes of a folder: each file of a model has its own, which is set up and closed without the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelUnavailable,
    Overloaded,
    PipeClosed,
    UnknownNode,
    counted,
)
from torchpipe_py.keys import TASK_NODE_NAME_KEY, TASK_PRIORITY_KEY
from torchpipe_py.metrics import summed
from torchpipe_py.plan.config import DEFAULT_MAX_INFLIGHT
from torchpipe_py.plan.folder import UNLOADED, Model, name_of, version_of
from torchpipe_py.runtime.nodes.wiring import IsDue
from torchpipe_py.runtime.pipe import Data, Ticket, pipe, unknown_root, wanted_timelines
from torchpipe_py.runtime.record.visits import Timeline

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

Done = Callable[[Data, BaseException | None], None]


class _Members:
    """The pipes at one time, by ``NAME/VERSION``, and where each ``node_name`` leads. Never changed.

    ``problems`` says why other models of the folder are not served, by ``NAME/VERSION``.
    """

    def __init__(self, pipes: Mapping[str, pipe], problems: Mapping[str, str]) -> None:
        # In ascending order of versions: a name without a version leads to the last.
        self.pipes = {key: pipes[key] for key in sorted(pipes, key=lambda key: (name_of(key), int(version_of(key))))}
        self.models: list[Model] = []
        self.of_name: dict[str, pipe] = {}
        self.roots: dict[str, str] = {}
        keys: dict[tuple[str, str], str] = {}
        for key, run in self.pipes.items():
            for model in run.models:
                other = keys.setdefault((model.name, model.version), key)
                if other != key:
                    text = f"model {model.name!r} is a root of {name_of(other)!r} and of {name_of(key)!r}: rename one"
                    raise ConfigError(text)
                self.models.append(model)
            self.of_name.update(dict.fromkeys(run.roots, run))
            self.roots.update(run.roots)
        self.problems = problems
        latest = {model.name: model for model in self.models}
        self.only = next(iter(latest.values())) if len(latest) == 1 else None

    def find(self, name: object) -> pipe:
        """The pipe of a ``node_name``. Raises ``UnknownNode``."""
        if name is None and self.only is not None:
            return self.of_name[self.only.name]
        if isinstance(name, str) and name in self.of_name:
            return self.of_name[name]
        if isinstance(name, str):
            self.check_loaded(name)
        if not self.roots:
            raise UnknownNode(f"no model is loaded{Pipes.hint_if_unknown}")
        error = unknown_root(name, self.roots)
        raise error if name is None else UnknownNode(f"{error}{Pipes.hint_if_unknown}")

    def check_loaded(self, name: str) -> None:
        """See ``pipe.check_loaded``. ``name`` is a ``node_name``: NAME, NAME.ROOT, or one of these with a version."""
        if not self.problems or name in self.of_name:
            return
        model, slash, version = name.rpartition("/") if "/" in name else (name, "", "")
        for each in (model, model.rpartition(".")[0]):
            for key, problem in self.problems.items():
                if key == f"{each}/{version}" if slash else name_of(key) == each:
                    reason = "is not loaded" if problem == UNLOADED else f"could not be loaded: {problem}"
                    raise ModelUnavailable(f"model {name[:80]!r} {reason}")


def _nothing() -> None:
    """Where nothing is counted."""


class Pipes:
    """Several pipes behind the interface of one: each request goes to the pipe of the root that it names.

    Any thread may send requests; one thread at a time may ``replace`` pipes. At most ``most`` requests are in flight in
    all pipes together, half of that with low priority; 0 leaves it to each pipe.
    """

    def __init__(self, most: int = 0) -> None:
        self._most, self._inflight = most, 0
        self._lock = threading.Lock()  # of ``_inflight``
        self._members = _Members({}, {})
        self._settings: list[Callable[[pipe], object]] = []  # for each pipe, also later ones
        self._followers: list[Callable[[], object]] = []

    def replace(
        self, removed: Collection[str], added: Mapping[str, pipe], problems: Mapping[str, str] = {}
    ) -> list[pipe]:
        """From now on serve ``added`` in place of ``removed``, both by ``NAME/VERSION``; returns the removed pipes.

        ``problems`` says why other models are not served, by ``NAME/VERSION``.

        Raises ``ConfigError``, and changes nothing, if two files have a model of the same name and version.
        """
        before, members = self._members.pipes, self._with(removed, added, problems)
        for run in added.values():
            for setting in self._settings:
                setting(run)
        self._members = members
        for changed in self._followers:
            changed()
        return [run for key, run in before.items() if key in removed or key in added]

    def check(self, removed: Collection[str], added: Mapping[str, pipe]) -> None:
        """Raise ``ConfigError`` if ``replace`` would."""
        self._with(removed, added)

    def _with(self, removed: Collection[str], added: Mapping[str, pipe], problems: Mapping[str, str] = {}) -> _Members:
        kept = {key: run for key, run in self._members.pipes.items() if key not in removed}
        return _Members({**kept, **added}, problems)

    hint_if_unknown = "; a file that was added to the folder has to be loaded"
    """The end of the message about an unknown model."""

    def check_loaded(self, name: str) -> None:
        """See ``pipe.check_loaded``."""
        self._members.check_loaded(name)

    def _set(self, setting: Callable[[pipe], object]) -> None:
        self._settings.append(setting)
        for run in self._members.pipes.values():
            setting(run)

    # -- what a pipe has ----------------------------------------------------------------------------------------

    @property
    def keys(self) -> Collection[str]:
        """``NAME/VERSION`` of each pipe."""
        return self._members.pipes.keys()

    @property
    def models(self) -> Sequence[Model]:
        """See ``pipe.models``."""
        return self._members.models

    def follow_models(self, changed: Callable[[], object]) -> None:
        """See ``pipe.follow_models``; ``changed`` is called on the thread that replaces pipes."""
        self._followers.append(changed)

    @property
    def roots(self) -> Mapping[str, str]:
        """See ``pipe.roots``."""
        return self._members.roots

    @property
    def only_root(self) -> str | None:
        """See ``pipe.only_root``."""
        return self._members.only.root if self._members.only else None

    @property
    def is_refusing(self) -> bool:
        """Whether any pipe is; see ``pipe.is_refusing``."""
        return any(run.is_refusing for run in self._members.pipes.values())

    def dispatch(self, data: Data, on_done: Done, timeout: float | None = None) -> Ticket:
        """See ``pipe.dispatch``."""
        if not isinstance(data, dict):
            raise InvalidRequest(f"expected a dict, got {type(data).__name__}")
        members = self._members
        run = members.find(data.get(TASK_NODE_NAME_KEY))
        leave = self._enter(bool(data.get(TASK_PRIORITY_KEY))) if self._most else _nothing

        def done(data: Data, error: BaseException | None) -> None:
            leave()
            on_done(data, error)

        try:
            try:
                return run.dispatch(data, done, timeout)
            except PipeClosed:
                if members is self._members:
                    raise
                return self._members.find(data.get(TASK_NODE_NAME_KEY)).dispatch(data, done, timeout)
        except BaseException:
            leave()
            raise

    def _enter(self, is_low: bool) -> Callable[[], object]:
        """Count a request; the result ends that. ``Overloaded`` if it is one too many."""
        with self._lock:
            if self._inflight >= (max(1, self._most // 2) if is_low else self._most):
                would = "with priority 1 would pass half of" if is_low else "would pass"
                text = f"{counted(self._inflight, 'request')} in flight, 1 more {would} max_inflight = {self._most}"
                raise Overloaded(text, 1000)
            self._inflight += 1
        entered = [1]

        def leave() -> None:
            with self._lock:  # NOTE: a second time if an interrupt comes once the request is done
                self._inflight -= entered.pop() if entered else 0

        return leave

    async def acall(self, data: Data, timeout: float | None = None) -> Data:
        """See ``pipe.acall``, for one request."""
        future: Future[Data] = Future()

        def settle(data: Data, error: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(data)
            else:
                future.set_exception(error)

        ticket = self.dispatch(data, settle, timeout)
        future.add_done_callback(lambda done: done.cancelled() and ticket.cancel())
        outcome = asyncio.wrap_future(future)
        if timeout is None:
            return await outcome
        late = DeadlineExceeded(f"not finished within {timeout} s")
        timer = asyncio.get_running_loop().call_later(timeout, ticket.cancel, late)
        try:
            return await outcome
        finally:
            timer.cancel()

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        """See ``pipe.check_delay``; a request without a known root is refused later."""
        members = self._members
        run = members.of_name.get(node_name) if isinstance(node_name, str) else None
        if run is None and members.only is not None:
            run = members.of_name[members.only.name]
        if run is not None:
            run.check_delay(seconds, priority, node_name)

    def signature(self, node_name: str | None = None) -> Signature:
        """See ``pipe.signature``."""
        return self._members.find(node_name).signature(node_name)

    def keys_read(self, node_name: str | None = None) -> frozenset[str] | None:
        """See ``pipe.keys_read``."""
        return self._members.find(node_name).keys_read(node_name)

    def nodes_of(self, node_name: str) -> list[str]:
        """See ``pipe.nodes_of``."""
        return self._members.find(node_name).nodes_of(node_name)

    def limit_delays(self, target: float | None = None) -> None:
        """See ``pipe.limit_delays``."""
        self._set(lambda run: run.limit_delays(target))

    def instrument(self, tracer_provider: TracerProvider | None = None, *, starts_traces: bool = True) -> None:
        """See ``pipe.instrument``."""
        self._set(lambda run: run.instrument(tracer_provider, starts_traces=starts_traces))

    @contextmanager
    def timed(self, with_pictures: bool = False) -> Iterator[list[Timeline]]:
        """See ``pipe.timed``."""
        for run in self._members.pipes.values():
            run.record_timelines()
        with wanted_timelines(with_pictures) as timelines:
            yield timelines

    @contextmanager
    def expecting(self, is_due: IsDue) -> Iterator[None]:
        """See ``pipe.expecting``; for the pipes of this moment."""
        with ExitStack() as stack:
            for run in self._members.pipes.values():
                stack.enter_context(run.expecting(is_due))
            yield

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """See ``pipe.arriving``; for the pipes of this moment."""
        with ExitStack() as stack:
            for run in self._members.pipes.values():
                stack.enter_context(run.arriving())
            yield

    def stats(self) -> dict[str, Any]:
        """See ``pipe.stats``: sums over the pipes, all their nodes, the sums of their metrics."""
        each = [run.stats() for run in self._members.pipes.values()]
        return {
            **{key: sum(stats[key] for stats in each) for key in ("inflight", "admitted", "rejected")},
            "max_inflight": self._most or max((stats["max_inflight"] for stats in each), default=DEFAULT_MAX_INFLIGHT),
            "nodes": {name: node for stats in each for name, node in stats["nodes"].items()},
            "metrics": summed([stats["metrics"] for stats in each]),
        }

    def close(self, timeout: float | None = None) -> bool:
        """See ``pipe.close``."""
        until = None if timeout is None else perf_counter() + timeout
        ended = [
            run.close(None if until is None else max(0.0, until - perf_counter()))
            for run in self._members.pipes.values()
        ]
        return all(ended)

"""Calls without I/O: address, trace, time limits, arguments and results."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torchpipe_client import errors
from torchpipe_client.contract import IDL, declared_error
from torchpipe_client.values import Result, from_response, to_bytes, to_value

T = TypeVar("T")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 2.0
_LONGEST_S = 1e8  # a wait without end, for sockets and clocks, which take no infinity
_NOT_BEGUN = (errors.NotConnected, errors.Overloaded, errors.Unavailable)
_PERHAPS_BEGUN = (errors.ConnectionLost, errors.WorkerDied)


class Address(NamedTuple):
    """The address of a service."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host:port``, an IPv6 address in brackets. Raises ``ValueError``."""
        host, _, port = text.rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if not host or not is_port or (":" in host and host[0] + host[-1] != "[]"):
            raise ValueError(f"address {text!r}: expected host:port, as 127.0.0.1:8888 or [::1]:8888")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def trace_fields(traceparent: str | None) -> dict[str, str | None]:
    """``traceparent`` and ``tracestate`` (W3C Trace Context) of a call's trace.

    The caller's ``traceparent``, or else OpenTelemetry's current span if the program has imported that.
    """
    parent, state = traceparent or None, None
    api: Any = sys.modules.get("opentelemetry.trace")
    if traceparent is None and api is not None:
        context = api.get_current_span().get_span_context()
        if context.is_valid:
            parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
            state = context.trace_state.to_header() or None
    return {"traceparent": parent, "tracestate": state}


# -- time and retries ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The limits of every call of a client; times in seconds.

    ``idempotent``: whether a call may be repeated if the service may have begun it.
    """

    timeout: float
    connect_timeout: float
    retries: int
    idempotent: bool
    max_connections: int

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "max_connections"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, not {self.retries!r}")


class Attempts:
    """The attempts of one call, which begins now: remaining time and retries.

    The client gives up after ``timeout`` for all attempts together; ``None`` means the client's. The service gets the
    rest of ``deadline_ms``, or else of ``timeout``, so that it drops what would be too late.
    """

    def __init__(self, limits: Limits, timeout: float | None, deadline_ms: int | None = None) -> None:
        self.limits, self.timeout = limits, limits.timeout if timeout is None else timeout
        if not self.timeout > 0:
            raise ValueError(f"timeout must be greater than 0, not {timeout!r}")
        if deadline_ms is not None and deadline_ms <= 0:
            raise ValueError(f"deadline_ms must be greater than 0, not {deadline_ms!r}")
        self.timeout = min(self.timeout, _LONGEST_S)
        now = time.monotonic()
        self._give_up_at = now + self.timeout
        self._deadline = now + min(self.timeout, self.timeout if deadline_ms is None else deadline_ms / 1000)
        self._retries, self._delay = limits.retries, _FIRST_DELAY_S
        self._has_lost_worker = False

    def left(self) -> float:
        """Seconds until the client gives up. Raises ``TimedOut`` if none are left."""
        left = self._give_up_at - time.monotonic()
        if left <= 0:
            raise self.timed_out()
        return left

    def timed_out(self) -> errors.TimedOut:
        return errors.TimedOut(f"no answer within {self.timeout:g} s")

    def no_connection(self) -> errors.TimedOut:
        most = self.limits.max_connections
        return errors.TimedOut(f"all {most} connections were in use for {self.timeout:g} s (max_connections)")

    def deadline_ms(self) -> int:
        """The deadline for the service; at least 1, since 0 means none."""
        return max(1, min(2**31 - 1, round(1000 * (self._deadline - time.monotonic()))))

    def may_repeat(self, outcome: object) -> bool:
        """Whether a call with this outcome can safely be sent again."""
        return isinstance(outcome, _NOT_BEGUN) or (self.limits.idempotent and isinstance(outcome, _PERHAPS_BEGUN))

    def delay_after(self, error: errors.ClientError) -> float | None:
        """Seconds to wait before the next attempt, at least as long as the service asks for; ``None`` to give up.

        Part of the delay is random, so that clients that fail together do not return together.
        """
        if not self._retries or not self.may_repeat(error):
            return None
        if isinstance(error, errors.WorkerDied):
            if self._has_lost_worker:
                return None  # this call may be what kills workers
            self._has_lost_worker = True
        delay = (error.retry_after_ms or 0) / 1000 + random.uniform(self._delay / 2, self._delay)
        if time.monotonic() + delay >= self._deadline:
            return None
        self._retries -= 1
        self._delay = min(2 * self._delay, _LONGEST_DELAY_S)
        return delay


# -- the methods of the contract ------------------------------------------------------------------------------------


class Call(Generic[T]):
    """One call with all its attempts."""

    def __init__(self, method: str, attempts: Attempts) -> None:
        self.method, self.attempts = method, attempts
        self._result: Any = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of the next attempt."""
        return {}

    def take(self, success: Any) -> errors.ClientError | None:
        """Take an answer. Returns an error in it after which the call should be repeated, if any.

        Raises ``BadReply`` for an answer that does not follow the contract.
        """
        try:
            return self._accept(success)
        except (AttributeError, TypeError, ValueError) as error:
            raise errors.BadReply(f"an answer to {self.method} that the contract does not allow: {error}") from error

    def result(self, error: errors.ClientError | None) -> T:
        """The outcome of the call; ``error`` is that of the last attempt, raised if there is no other outcome."""
        if error is not None:
            raise error
        return self._result  # type: ignore[no-any-return]

    def _accept(self, success: Any) -> errors.ClientError | None:
        """The answer of ``ping`` has no content."""


class InferBatch(Call[Result]):
    """A call with one image."""

    def __init__(self, attempts: Attempts, image: Any, uuid: str) -> None:
        super().__init__("infer_batch", attempts)
        self._params = IDL.InferenceParams(uuid=uuid, data=to_bytes("image", image))

    def arguments(self) -> dict[str, Any]:
        return {"params": self._params}

    def _accept(self, success: Any) -> None:
        self._result = _result(success)


class InferMany(Call[T]):
    """A call with a list of images; retries send only the images that failed in a retryable way.

    ``is_single``: there is one image, and its outcome is that of the call.
    """

    def __init__(
        self,
        attempts: Attempts,
        images: Iterable[Any],
        uuid: str,
        trace: Mapping[str, Any],
        is_single: bool = False,
        priority: int = 0,
    ) -> None:
        super().__init__("infer_many", attempts)
        self._items = self._to_items(images, uuid)
        self._outcomes: list[Any] = [None] * len(self._items)
        self._pending = list(range(len(self._items)))
        self._trace, self._is_single, self._priority = trace, is_single, _priority(priority)

    def _to_items(self, images: Iterable[Any], uuid: str) -> list[Any]:
        """The items to send, one for each image. Raises ``InvalidRequest``."""
        return [
            IDL.InferenceParams(uuid=uuid, data=to_bytes(f"images[{index}]", image))
            for index, image in enumerate(images)
        ]

    def arguments(self) -> dict[str, Any]:
        items = [self._items[index] for index in self._pending]
        return {
            **self._arguments_of(items),
            "deadline_ms": self.attempts.deadline_ms(),
            "priority": self._priority,
            **self._trace,
        }

    def _arguments_of(self, items: list[Any]) -> dict[str, Any]:
        return {"params": items}

    def _accept(self, success: Any) -> errors.ClientError | None:
        if len(success) != len(self._pending):
            raise errors.BadReply(f"{len(success)} outcomes for {len(self._pending)} requests")
        for index, outcome in zip(self._pending, success, strict=True):
            fields = [outcome.result, outcome.error, outcome.response]
            if fields.count(None) != 2:
                raise errors.BadReply(f"an outcome with {3 - fields.count(None)} fields instead of one")
            is_error = outcome.error is not None
            self._outcomes[index] = declared_error(outcome.error) if is_error else self._outcome(outcome)
        outcomes, may_repeat = self._outcomes, self.attempts.may_repeat
        self._pending = [index for index in self._pending if may_repeat(outcomes[index])]
        again: list[errors.ClientError] = [outcomes[index] for index in self._pending]
        return max(again, key=lambda error: error.retry_after_ms or 0, default=None)

    def _outcome(self, outcome: Any) -> Any:
        """The result of an image."""
        if outcome.result is None:
            raise errors.BadReply("an outcome without label and score")
        return _result(outcome.result)

    def result(self, error: errors.ClientError | None) -> T:
        """The outcomes; those of earlier attempts stand even if a later attempt fails as a whole."""
        outcomes: Any = self._outcomes
        if error is not None and None in outcomes:
            raise error
        if self._is_single and isinstance(outcomes[0], errors.ClientError):
            raise outcomes[0]
        return outcomes[0] if self._is_single else outcomes  # type: ignore[no-any-return]


class InferManyOutputs(InferMany[T]):
    """The same for any pipeline: items are images or dicts of inputs, outcomes are dicts of outputs."""

    def __init__(
        self, attempts: Attempts, items: Iterable[Any], outputs: Iterable[str] | None, node_name: str | None,
        uuid: str, trace: Mapping[str, Any], priority: int = 0, parameters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._outputs, self._node_name, self._uuid = _output_keys(outputs), node_name, uuid
        self._parameters = _parameters(parameters)
        super().__init__(attempts, items, uuid, trace, priority=priority)

    def _to_items(self, images: Iterable[Any], uuid: str) -> list[Any]:
        items = []
        for index, item in enumerate(images):
            name = f"images[{index}]"
            inputs = item if isinstance(item, Mapping) else {"data": to_bytes(name, item)}
            items.append({key: to_value(f"{name}[{key!r}]", value) for key, value in inputs.items()})
        return items

    def _arguments_of(self, items: list[Any]) -> dict[str, Any]:
        return {
            "inputs": items,
            "outputs": self._outputs,
            "node_name": self._node_name,
            "uuid": self._uuid,
            "parameters": self._parameters,
        }

    def _outcome(self, outcome: Any) -> Any:
        if outcome.response is None:
            raise errors.BadReply("an outcome without outputs")
        return from_response(outcome.response, self._uuid, self._outputs)


class Infer(Call["dict[str, Any]"]):
    """A call of any pipeline."""

    def __init__(
        self, attempts: Attempts, inputs: Mapping[str, Any], outputs: Iterable[str] | None, node_name: str | None,
        uuid: str, trace: Mapping[str, Any], priority: int = 0, parameters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__("infer", attempts)
        if not isinstance(inputs, Mapping):
            raise errors.InvalidRequest(f"inputs: expected a dict, as {{'data': …}}, got {type(inputs).__name__}")
        self._outputs = _output_keys(outputs)
        values = {key: to_value(f"inputs[{key!r}]", value) for key, value in inputs.items()}
        self._request = IDL.InferRequest(
            uuid=uuid, inputs=values, node_name=node_name, outputs=self._outputs,
            priority=_priority(priority) or None, parameters=_parameters(parameters), **trace,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        self._request.deadline_ms = self.attempts.deadline_ms()
        return {"request": self._request}

    def _accept(self, success: Any) -> None:
        self._result = from_response(success, self._request.uuid, self._outputs)


def _output_keys(outputs: Iterable[str] | None) -> list[str]:
    """The keys that an answer has to have."""
    if isinstance(outputs, str):
        raise errors.InvalidRequest(f"outputs: expected a list of keys, as [{outputs!r}], got {outputs!r}")
    return list(outputs or ["result"])


def _parameters(given: Mapping[str, Any] | None) -> str | None:
    """Parameters for backends, as JSON. ``InvalidRequest`` for what JSON lacks."""
    if not given:
        return None
    try:
        return json.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidRequest(f"parameters: {error}") from None


def _priority(given: Any) -> int:
    """0 (normal) or 1 (low); ``InvalidRequest`` for anything else, as Thrift would send 0.5 as 0."""
    if type(given) is not int or given not in (0, 1):
        raise errors.InvalidRequest(f"priority: expected 0 (normal) or 1 (low), got {given!r:.40}")
    return given


def _result(struct: Any) -> Result:
    return Result(struct.label, struct.score)

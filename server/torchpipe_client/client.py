"""The client for threads."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from torchpipe_client.connection import BasePool, Pool
from torchpipe_client.core import (
    Address,
    Attempts,
    Call,
    Infer,
    InferBatch,
    InferMany,
    InferManyOutputs,
    Limits,
    trace_fields,
)
from torchpipe_client.errors import ClientError, InvalidRequest
from torchpipe_client.values import Result

T = TypeVar("T")
P = TypeVar("P", bound=BasePool)


class BaseClient(Generic[P]):
    """The arguments of both clients."""

    _pool_class: type[P]

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        retries: int = 3,
        idempotent: bool = True,
        max_connections: int = 64,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Does not connect yet. Raises ``ValueError`` for an address without a port or a time of 0 or less."""
        self._address = Address.parse(address)
        self._limits = Limits(timeout, connect_timeout, retries, idempotent, max_connections)
        self._pool = self._pool_class(self._address, tls, max_connections)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._address)!r})"


class Client(BaseClient[Pool]):
    """A service at ``host:port``, for any number of threads at once.

    ``timeout`` bounds a call with its retries, ``connect_timeout`` each attempt to connect, in seconds. A call is
    repeated up to ``retries`` times: after ``overloaded``, ``unavailable`` and a refused connection, and, if
    ``idempotent``, after a lost connection and once after ``worker_died``. Each running call uses one of at most
    ``max_connections`` connections. ``tls`` is for a proxy that terminates TLS.

    A call joins the trace of its ``traceparent``, or else OpenTelemetry's current span, if there is one.

    Each call returns, or raises one ``ClientError``; ``ValueError`` for a ``timeout`` or ``deadline_ms`` of 0 or less.
    """

    _pool_class = Pool

    def ping(self, *, timeout: float | None = None) -> None:
        """Return once the service has answered."""
        return self._run(Call[None]("ping", Attempts(self._limits, timeout)))

    def infer_batch(
        self, image: bytes, *, timeout: float | None = None, uuid: str = "", traceparent: str | None = None
    ) -> Result:
        """Label and score of one encoded image. Within a trace it is sent as ``infer_many`` with one image."""
        trace, attempts = trace_fields(traceparent), Attempts(self._limits, timeout)
        if trace["traceparent"]:
            return self._run(InferMany[Result](attempts, [image], uuid, trace, is_single=True))
        return self._run(InferBatch(attempts, image, uuid))

    def infer_many(
        self,
        images: Iterable[bytes | Mapping[str, Any]],
        *,
        outputs: Iterable[str] | None = None,
        node_name: str | None = None,
        deadline_ms: int | None = None,
        priority: int = 0,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> list[Any]:
        """A result or an ``InferenceError`` for each of the images; raises if the whole call fails.

        Encoded images of a classifier have a ``Result`` each. Any pipeline runs if ``images`` are dicts of inputs as
        ``infer`` has them, or if ``outputs``, ``node_name`` or ``parameters`` is given; then each result is a dict with
        the keys that ``outputs`` names, by default ``result``. With ``priority`` 1 they run when no request of the
        normal priority 0 waits. ``parameters`` are as those of ``infer``.
        """
        attempts, trace = Attempts(self._limits, timeout, deadline_ms), trace_fields(traceparent)
        if isinstance(images, (bytes, str, Mapping)):
            raise InvalidRequest(f"images: expected a list of bytes or dicts, got {type(images).__name__}")
        items = list(images)
        is_plain = outputs is None and node_name is None and not parameters
        if is_plain and not any(isinstance(item, Mapping) for item in items):
            return self._run(InferMany["list[Any]"](attempts, items, uuid, trace, priority=priority))
        return self._run(
            InferManyOutputs["list[Any]"](attempts, items, outputs, node_name, uuid, trace, priority, parameters)
        )

    def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        node_name: str | None = None,
        deadline_ms: int | None = None,
        priority: int = 0,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> dict[str, Any]:
        """Run any pipeline: ``inputs`` are entries of the request's dict; returns the keys that ``outputs`` names.

        Values are bytes, text, numbers, NumPy arrays (``bool``, ``uint8`` to ``uint64``, ``int8`` to ``int64``,
        ``float16`` to ``float64``, ``bfloat16``, strings; of any shape) and lists of arrays. Results may also be
        ``Detections``, dicts and lists; tuples arrive as lists. By default ``outputs`` is ``result``. ``parameters``,
        such as ``{"threshold": 0.5}``, are for the pipeline's backends: values that JSON has.
        """
        attempts, trace = Attempts(self._limits, timeout, deadline_ms), trace_fields(traceparent)
        return self._run(Infer(attempts, inputs, outputs, node_name, uuid, trace, priority, parameters))

    def close(self) -> None:
        """Let running calls finish; later ones raise ``ClientClosed``. May be called again."""
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        while True:
            try:
                with self._pool.connection(call.attempts) as connection:
                    error = connection.exchange(call)
            except ClientError as failure:
                error = failure
            delay = None if error is None else call.attempts.delay_after(error)
            if delay is None:
                return call.result(error)
            time.sleep(delay)

"""The client for threads."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from torchpipe_client.address import Address
from torchpipe_client.attempts import Attempts, Limits
from torchpipe_client.calls import Call, Infer, InferBatch, InferMany, Ping, only
from torchpipe_client.connection import Pool
from torchpipe_client.errors import ClientError, InferenceError
from torchpipe_client.tracing import trace_of
from torchpipe_client.values import Result

T = TypeVar("T")


class Client:
    """A service at ``host:port``, for any number of threads at once.

    ``timeout`` bounds a call, its repetitions included, and ``connect_timeout`` each connection, in seconds. A call is
    repeated up to ``retries`` times: after ``overloaded``, ``unavailable`` and a connection that was refused, and, if
    ``idempotent``, after a connection that was lost and once after ``worker_died``. Each call under way has one of at
    most ``max_connections`` connections to itself. ``tls`` is for a proxy that takes TLS.

    A call is part of the trace that its ``traceparent`` names, else of OpenTelemetry's current span, if there is one.

    Each call returns, or raises one ``ClientError``; ``ValueError`` for a ``timeout`` or ``deadline_ms`` of 0 or less.
    """

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
        """Connects to nobody yet. Raises ``ValueError`` for an address without a port, and for times of 0 or less."""
        self._address = Address.parse(address)
        self._limits = Limits(timeout, connect_timeout, retries, idempotent, max_connections)
        self._pool = Pool(self._address, tls, max_connections)

    def ping(self, *, timeout: float | None = None) -> None:
        """Returns when the service has answered."""
        self._run(Ping(), self._limits.attempts(timeout, None))

    def infer_batch(
        self, image: bytes, *, timeout: float | None = None, uuid: str = "", traceparent: str | None = None
    ) -> Result:
        """Label and score of one encoded image. As part of a trace it is sent as an ``infer_many`` of one image."""
        trace = trace_of(traceparent)
        attempts = self._limits.attempts(timeout, None)
        if trace.parent:
            return only(self._run(InferMany((image,), uuid, attempts.may_repeat, trace), attempts))
        return self._run(InferBatch(image, uuid), attempts)

    def infer_many(
        self,
        images: Iterable[bytes],
        *,
        deadline_ms: int | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> list[Result | InferenceError]:
        """A result, or the error in its place, for each of the encoded images; raises where none has an outcome."""
        attempts = self._limits.attempts(timeout, deadline_ms)
        return self._run(InferMany(images, uuid, attempts.may_repeat, trace_of(traceparent)), attempts)

    def infer(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        node_name: str | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
        uuid: str = "",
        traceparent: str | None = None,
    ) -> dict[str, Any]:
        """Any pipeline: ``inputs`` by the keys of its dict, and those of its keys back that ``outputs`` names.

        Values are bytes, texts, numbers, arrays of NumPy (``bool``, ``uint8``, ``int8`` to ``int64``, ``float16`` to
        ``float64``, of any shape) and lists of arrays. Dicts and lists come back as JSON text. Without ``outputs`` it
        is ``result`` that comes back.
        """
        call = Infer(inputs, outputs, node_name, uuid, trace_of(traceparent))
        return self._run(call, self._limits.attempts(timeout, deadline_ms))

    def close(self) -> None:
        """Calls under way end as they would; those that come later raise ``ClientClosed``. May be called again."""
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._address)!r})"

    def _run(self, call: Call[T], attempts: Attempts) -> T:
        while True:
            try:
                with self._pool.connection(attempts) as connection:
                    error = call.take(connection.exchange(call, attempts))
            except ClientError as failure:
                error = failure
            delay = None if error is None else attempts.delay_after(error)
            if delay is None:
                return call.result(error)
            time.sleep(delay)

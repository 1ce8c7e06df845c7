"""The methods of the contract, without I/O: what is sent, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from torchpipe_client.contract import IDL
from torchpipe_client.errors import BadReply, ClientError, InferenceError, InvalidRequest, inference_error
from torchpipe_client.tracing import Trace
from torchpipe_client.values import Result, from_value, to_bytes, to_value

T = TypeVar("T")


class Call(Generic[T]):
    """One call, over all its attempts."""

    method: str

    def __init__(self) -> None:
        self._result: Any = None

    def arguments(self, deadline_ms: int) -> dict[str, Any]:
        """Of the next attempt."""
        return {}

    def take(self, success: Any) -> ClientError | None:
        """Take an answer. Returns an error in it for which the call should be repeated, if there is one.

        Raises ``BadReply`` for an answer that is not as the contract has it.
        """
        try:
            return self._accept(success)
        except (AttributeError, TypeError, ValueError) as error:
            raise BadReply(f"an answer to {self.method} that the contract does not allow: {error}") from error

    def result(self, error: ClientError | None) -> T:
        """The outcome; ``error`` is how the last attempt ended, and is raised where nothing else is known."""
        if error is not None:
            raise error
        return self._result  # type: ignore[no-any-return]

    def _accept(self, success: Any) -> ClientError | None:
        return None


class Ping(Call[None]):
    method = "ping"


class InferBatch(Call[Result]):
    """One image."""

    method = "infer_batch"

    def __init__(self, image: Any, uuid: str) -> None:
        super().__init__()
        self._params = IDL.InferenceParams(uuid=uuid, data=to_bytes("image", image))

    def arguments(self, deadline_ms: int) -> dict[str, Any]:
        return {"params": self._params}

    def _accept(self, success: Any) -> None:
        self._result = _result(success)


class InferMany(Call["list[Result | InferenceError]"]):
    """A list of images; only those are sent again whose errors may be repeated."""

    method = "infer_many"

    def __init__(
        self, images: Iterable[Any], uuid: str, may_repeat: Callable[[ClientError], bool], trace: Trace
    ) -> None:
        super().__init__()
        if isinstance(images, (bytes, str)):
            raise InvalidRequest(f"images: expected a list of bytes, got {type(images).__name__}")
        self._params = [
            IDL.InferenceParams(uuid=uuid, data=to_bytes(f"images[{index}]", image))
            for index, image in enumerate(images)
        ]
        self._outcomes: list[Any] = [None] * len(self._params)
        self._pending = list(range(len(self._params)))
        self._may_repeat, self._trace = may_repeat, trace

    def arguments(self, deadline_ms: int) -> dict[str, Any]:
        params = [self._params[index] for index in self._pending]
        parent, state = self._trace
        return {"params": params, "deadline_ms": deadline_ms, "traceparent": parent, "tracestate": state}

    def _accept(self, success: Any) -> ClientError | None:
        if len(success) != len(self._pending):
            raise BadReply(f"{len(success)} outcomes for {len(self._pending)} images")
        for index, outcome in zip(self._pending, success, strict=True):
            self._outcomes[index] = _outcome(outcome)
        self._pending = [index for index in self._pending if self._is_repeatable(self._outcomes[index])]
        errors: list[ClientError] = [self._outcomes[index] for index in self._pending]
        return max(errors, key=lambda error: error.retry_after_ms or 0, default=None)

    def _is_repeatable(self, outcome: Result | InferenceError) -> bool:
        return isinstance(outcome, InferenceError) and self._may_repeat(outcome)

    def result(self, error: ClientError | None) -> list[Result | InferenceError]:
        """An attempt that failed as a whole takes nothing from the outcomes of those before it."""
        if error is not None and None in self._outcomes:
            raise error
        return self._outcomes


class Infer(Call["dict[str, Any]"]):
    """Any pipeline."""

    method = "infer"

    def __init__(
        self, inputs: Mapping[str, Any], outputs: Iterable[str] | None, node_name: str | None, uuid: str, trace: Trace
    ) -> None:
        super().__init__()
        if not isinstance(inputs, Mapping):
            raise InvalidRequest(f"inputs: expected a dict, as {{'data': …}}, got {type(inputs).__name__}")
        if isinstance(outputs, str):
            raise InvalidRequest(f"outputs: expected a list of keys, as [{outputs!r}], got {outputs!r}")
        self._request = IDL.InferRequest(
            uuid=uuid,
            inputs={key: to_value(f"inputs[{key!r}]", value) for key, value in inputs.items()},
            node_name=node_name,
            outputs=None if outputs is None else list(outputs),
            traceparent=trace.parent,
            tracestate=trace.state,
        )

    def arguments(self, deadline_ms: int) -> dict[str, Any]:
        self._request.deadline_ms = deadline_ms
        return {"request": self._request}

    def _accept(self, success: Any) -> None:
        self._result = {key: from_value(key, value) for key, value in success.outputs.items()}


def only(outcomes: list[Result | InferenceError]) -> Result:
    """The result of a list of one; raises the error in its place."""
    (outcome,) = outcomes
    if isinstance(outcome, InferenceError):
        raise outcome
    return outcome


def _result(struct: Any) -> Result:
    if struct.label is None or struct.score is None:
        raise BadReply("a result without label and score")
    return Result(struct.label, struct.score)


def _outcome(outcome: Any) -> Result | InferenceError:
    if outcome.result is not None:
        return _result(outcome.result)
    if outcome.error is None:
        raise BadReply("an outcome with neither a result nor an error")
    return inference_error(outcome.error.code, outcome.error.message, outcome.error.retry_after_ms)

"""What the service's methods do: arguments to a pipe's requests, outcomes to result structs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchpipe_py import InvalidRequest, pipe
from torchpipe_py.runtime.deadlines import Deadlines
from torchpipe_py.wire.errors import ReplyTooLargeError, told
from torchpipe_py.wire.values import check_name, check_names, output_of, size_of
from torchpipe_server.front.services import OK, Cancellable, Done, Method, reply_bound, trace_fields
from torchpipe_server.methods.conversion import to_label_and_score, to_python, to_values
from torchpipe_server.methods.many import Turns


class InferenceHandler:
    """``InferenceService`` on a pipe. Methods are started by the I/O thread and finished by the pipe's threads.

    ``max_batch`` bounds the images of one call, ``max_reply_bytes`` what is copied for a reply.
    """

    def __init__(
        self, run: pipe, idl: Any, deadlines: Deadlines | None = None, max_batch: int = 256,
        max_reply_bytes: int = 64 * 2**20, turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self._pipe, self._idl, self._deadlines = run, idl, deadlines or Deadlines(run)
        self._max_batch, self._reply = max_batch, reply_bound(max_reply_bytes)
        self._turns = turns or Turns(run)
        service = idl.InferenceService
        self.methods: Mapping[str, Method] = {
            "ping": Method(service.ping_args, self._ping, self._raise),
            "infer_batch": Method(
                service.infer_batch_args,
                self._infer_batch,
                self._failer(service.infer_batch_result),
                _outcome_of,
                lambda args: _given(args.params, "params").uuid,
                lambda args: (None, None),  # there is no room for them
            ),
            "infer_many": Method(
                service.infer_many_args,
                self._infer_many,
                self._failer(service.infer_many_result),
                _outcome_of_many,
                lambda args: ",".join([item.uuid[:64] for item in _given(args.params, "params")[:8]]),
                trace_fields,
            ),
            "infer": Method(
                service.infer_args,
                self._infer,
                self._failer(service.infer_result),
                _outcome_of,
                lambda args: _given(args.request, "request").uuid,
                lambda args: trace_fields(args.request),
            ),
        }

    def _ping(self, args: Any, done: Done) -> None:
        done(self._idl.InferenceService.ping_result())

    def _raise(self, error: BaseException) -> Any:
        """ping declares no exception."""
        raise error

    def _failer(self, result: type) -> Callable[[BaseException], Any]:
        return lambda error: result(error=self._to_error(error))

    def _infer_batch(self, args: Any, done: Done) -> Cancellable:
        result_type = self._idl.InferenceService.infer_batch_result

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            result, failure = self._outcome(data, error)
            done(result_type(success=result, error=failure))

        data = {"data": _given(args.params, "params").data}
        return self._pipe.dispatch(data, finish, self._deadlines.seconds())

    def _infer_many(self, args: Any, done: Done) -> Cancellable:
        params = _given(args.params, "params")
        if len(params) > self._max_batch:
            raise InvalidRequest(f"{len(params)} images in one call; the limit is {self._max_batch} (--max-batch)")
        result_type = self._idl.InferenceService.infer_many_result
        items = [{"data": item.data} for item in params]
        seconds = self._deadlines.seconds(args.deadline_ms)
        return self._turns.gather(
            items, seconds, self._outcome_in_list, lambda outcomes: done(result_type(success=outcomes))
        )

    def _infer(self, args: Any, done: Done) -> Cancellable:
        request = _given(args.request, "request")
        keys = list(dict.fromkeys(request.outputs or ["result"]))
        check_name("uuid", request.uuid)
        check_names("inputs", request.inputs)
        check_names("outputs", keys)
        data = {key: to_python(value) for key, value in request.inputs.items()}
        if request.node_name is not None:
            data["node_name"] = request.node_name
        uuid = request.uuid

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            done(self._infer_result(uuid, data, keys, error))

        return self._pipe.dispatch(data, finish, timeout=self._deadlines.seconds(request.deadline_ms))

    def _infer_result(self, uuid: str, data: dict[str, Any], keys: list[str], error: BaseException | None) -> Any:
        result_type = self._idl.InferenceService.infer_result
        if error is not None:
            return result_type(error=self._to_error(error))
        try:
            outputs: dict[str, Any] = {}
            values = {key: output_of(data, key) for key in keys}
            size = sum(map(size_of, values.values()))
            if size > self._reply.bytes:
                raise ReplyTooLargeError(size, self._reply)
            for key, value in values.items():
                outputs.update(to_values(self._idl, key, value))
        except BaseException as failure:
            return result_type(error=self._to_error(failure))
        return result_type(success=self._idl.InferResponse(uuid=uuid, outputs=outputs))

    def _outcome(self, data: dict[str, Any], error: BaseException | None) -> tuple[Any, Any]:
        """``(InferenceResult, None)`` or ``(None, InferenceError)``."""
        if error is not None:
            return None, self._to_error(error)
        try:
            label, score = to_label_and_score(output_of(data, "result"), data.get("score"))
        except BaseException as failure:
            return None, self._to_error(failure)
        return self._idl.InferenceResult(label=label, score=score), None

    def _outcome_in_list(self, data: dict[str, Any], error: BaseException | None) -> Any:
        result, failure = self._outcome(data, error)
        return self._idl.InferenceOutcome(result=result, error=failure)

    def _to_error(self, error: BaseException) -> Any:
        code, text = told(error)
        return self._idl.InferenceError(code=code, message=text, retry_after_ms=getattr(error, "retry_after_ms", None))


def _outcome_of(result: Any) -> str:
    return OK if result.error is None else str(result.error.code)


def _outcome_of_many(result: Any) -> str:
    """Of a list with some errors the first one's code."""
    if result.error is not None:
        return str(result.error.code)
    return next((str(item.error.code) for item in result.success if item.error is not None), OK)


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise InvalidRequest(f"argument {name!r} is missing")
    return value

"""The methods of ``InferenceService``: arguments become requests of a pipe, outcomes become result structs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchpipe_py import Detections, InvalidRequest, pipe
from torchpipe_py.serving import (
    OK,
    Bound,
    Cancellable,
    Deadlines,
    Done,
    FairAdmission,
    ForwardedHeaders,
    Method,
    ReplyBudget,
    ReplyTooLargeError,
    Root,
    Roots,
    TraceFields,
    check_name,
    check_names,
    counted,
    errors,
    output_of,
    priority_in,
    priority_of,
    read_parameters,
    report,
    size_of,
    trace_fields,
)
from torchpipe_server.front.services import reply_bound
from torchpipe_server.methods.conversion import to_label_and_score, to_python, to_values
from torchpipe_server.wire.thrift import MESSAGE_BYTES, struct_size


class InferenceHandler:
    """``InferenceService`` on a pipe. The I/O thread starts methods, the pipe's threads finish them.

    ``max_batch`` bounds the images of one call, ``max_reply_bytes`` the values copied into a reply, ``text`` the
    parameters of a request; none of these is one of ``headers``, which Thrift lacks.
    """

    def __init__(
        self, run: pipe, idl: Any, deadlines: Deadlines | None = None, max_batch: int = 256,
        max_reply_bytes: int = 64 * 2**20, admission: FairAdmission | None = None, roots: Roots | None = None,
        text: Bound = Bound(2**20, "--max-text-bytes"), headers: ForwardedHeaders = ForwardedHeaders(),  # noqa: B008
    ) -> None:  # fmt: skip
        self._pipe, self._idl, self._deadlines = run, idl, deadlines or Deadlines(run)
        self._max_batch, self._reply = max_batch, reply_bound(max_reply_bytes)
        self._admission, self._text, self._headers = admission or FairAdmission(run), text, headers
        self._service, self._roots = idl.InferenceService, roots or Roots(run, "")
        self.methods: Mapping[str, Method] = {
            "ping": Method(self._service.ping_args, self._ping),
            # Its arguments have no fields for a trace.
            "infer_batch": self._method(
                "infer_batch", self._infer_batch, lambda args: _given(args, "params").uuid, lambda args: (None, None),
                lambda args: None,
            ),
            "infer_many": self._method(
                "infer_many", self._infer_many,
                lambda args: args.uuid or ",".join([item.uuid[:64] for item in (args.params or ())[:8]]), trace_fields,
                lambda args: args.node_name,
            ),
            "infer": self._method(
                "infer", self._infer, lambda args: _given(args, "request").uuid,
                lambda args: trace_fields(args.request),
                lambda args: args.request and args.request.node_name,
            ),
        }  # fmt: skip

    def _method(
        self, name: str, start: Callable[[Any, Done], Cancellable], request_id: Callable[[Any], str],
        traced: Callable[[Any], TraceFields], node_name: Callable[[Any], str | None],
    ) -> Method:  # fmt: skip
        args, result = getattr(self._service, f"{name}_args"), getattr(self._service, f"{name}_result")
        fail = lambda error: result(error=self._to_error(error))  # noqa: E731
        model_of = lambda args: self._roots.model_of(node_name(args))  # noqa: E731
        return Method(args, start, fail, _outcome_of, request_id, traced, model_of=model_of)

    def _ping(self, args: Any, done: Done) -> None:
        done(self._service.ping_result())

    def _infer_batch(self, args: Any, done: Done) -> Cancellable:
        result_type = self._service.infer_batch_result

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            result, error = self._outcome(data, error)
            done(result_type(result) if error is None else error)

        return self._pipe.dispatch({"data": _given(args, "params").data}, finish, self._deadlines.admit())

    def _infer_many(self, args: Any, done: Done) -> Cancellable:
        priority = priority_of(args.priority or 0)
        result_type = self._service.infer_many_result

        def finish(outcomes: list[Any]) -> None:
            done(result_type(success=outcomes))

        infer = self._infer_images if args.inputs is None else self._infer_requests
        return infer(args, priority, finish)

    def _infer_images(self, args: Any, priority: int, done: Callable[[list[Any]], object]) -> Cancellable:
        """A call with ``params``: the ``InferenceOutcome`` of each has a label and a score."""
        params, outcome_type = _given(args, "params"), self._idl.InferenceOutcome
        self._check_batch(len(params), "image")
        if (args.outputs, args.node_name, args.parameters) != (None, None, None):
            raise InvalidRequest("outputs, node_name and parameters are for 'inputs', not for 'params'")

        def outcome(data: dict[str, Any], error: BaseException | None) -> Any:
            result, error = self._outcome(data, error)
            return outcome_type(result, None if error is None else self._to_error(error))

        options = {"priority": priority} if priority else {}
        items = [{"data": item.data, **options} for item in params]
        return self._admission.gather(items, self._deadlines.admit(args.deadline_ms, priority), outcome, done)

    def _infer_requests(self, args: Any, priority: int, done: Callable[[list[Any]], object]) -> Cancellable:
        """A call with ``inputs``; its responses together are as large as one may be."""
        if args.params:
            raise InvalidRequest("'params' or 'inputs', not both")
        self._check_batch(len(args.inputs), "request")
        keys, uuid, outcome_type = _keys(args.outputs), args.uuid or "", self._idl.InferenceOutcome
        check_name("uuid", uuid)
        parameters = read_parameters(args.parameters, self._text, self._headers)
        given = [_inputs(inputs) for inputs in args.inputs]
        frame = MESSAGE_BYTES + len("infer_many") + struct_size(self._service.infer_many_result(success=[]))
        budget = ReplyBudget(self._reply, frame, struct_size, "send fewer inputs in a call")

        def enter(inputs: dict[str, Any]) -> tuple[Root, dict[str, Any]]:
            return self._roots.item(inputs, args.node_name, priority or None, keys, parameters)

        def answer(root: Root, data: dict[str, Any]) -> Any:
            return outcome_type(response=self._response(uuid, data, keys, root))

        def refuse(error: BaseException) -> Any:
            return outcome_type(error=self._to_error(error))

        seconds = self._deadlines.admit(args.deadline_ms, priority, args.node_name)
        return self._admission.gather_each(given, enter, seconds, answer, refuse, budget, done)

    def _check_batch(self, size: int, what: str) -> None:
        if size > self._max_batch:
            raise InvalidRequest(f"{counted(size, what)} in one call; the limit is {self._max_batch} (--max-batch)")

    def _infer(self, args: Any, done: Done) -> Cancellable:
        request = _given(args, "request")
        keys = _keys(request.outputs)
        check_name("uuid", request.uuid)
        priority = None if request.priority is None else priority_of(request.priority)
        parameters = read_parameters(request.parameters, self._text, self._headers)
        root, data = self._roots.item(_inputs(request.inputs), request.node_name, priority, keys, parameters)
        uuid, result_type = request.uuid, self._service.infer_result

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                result = result_type(success=self._response(uuid, data, keys, root))
            except BaseException as failure:
                result = failure
            done(result)

        seconds = self._deadlines.admit(request.deadline_ms, priority_in(data), data.get("node_name"))
        return self._pipe.dispatch(data, finish, seconds)

    def _response(self, uuid: str, data: dict[str, Any], keys: list[str], root: Root) -> Any:
        """The ``InferResponse`` with the values under ``keys``."""
        values = {key: root.output(data, key) for key in keys}
        size = sum(map(size_of, values.values()))
        if size > self._reply.bytes:
            raise ReplyTooLargeError(size, self._reply)
        outputs: dict[str, Any] = {}
        for key, value in values.items():
            outputs.update(to_values(self._idl, key, value, self._reply))
        detections = [key for key, value in values.items() if isinstance(value, Detections)]
        json = [key for key, value in values.items() if outputs[key].text is not None and not isinstance(value, str)]
        return self._idl.InferResponse(uuid=uuid, outputs=outputs, json=json or None, detections=detections or None)

    def _outcome(self, data: dict[str, Any], error: BaseException | None) -> tuple[Any, BaseException | None]:
        """The ``InferenceResult``, or the error in its place."""
        if error is None:
            try:
                label, score = to_label_and_score(output_of(data, "result"), data.get("score"))
                return self._idl.InferenceResult(label=label, score=score), None
            except BaseException as failure:
                error = failure
        return None, error

    def _to_error(self, error: BaseException) -> Any:
        code, text = report(error)
        return self._idl.InferenceError(code=code, message=text, retry_after_ms=errors.retry_after_ms_of(error))


def _keys(outputs: list[str] | None) -> list[str]:
    """The keys wanted back, each once."""
    keys = outputs or ["result"]
    check_names("outputs", keys)
    return list(dict.fromkeys(keys))


def _inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """These ``Value``s as values of Python."""
    check_names("inputs", inputs)
    return {key: to_python(f"{key[:40]!r}: ", value) for key, value in inputs.items()}


def _given(args: Any, name: str) -> Any:
    value = getattr(args, name)
    if value is None:
        raise InvalidRequest(f"argument {name!r} is missing")
    return value


def _outcome_of(result: Any) -> str:
    """The outcome to count; for a list with errors, the code of the first."""
    if result.error is not None:
        return str(result.error.code)
    if not isinstance(result.success, list):
        return OK
    return next((str(item.error.code) for item in result.success if item.error is not None), OK)

"""The protocol over gRPC: its methods, and the ``Codec`` of their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

from torchpipe_py.errors import InvalidRequest, UnknownNode
from torchpipe_py.methods.oip import metadata
from torchpipe_py.methods.oip.core import Model, NotServedError, OpenInference, RepositoryError, shared_memory
from torchpipe_py.methods.oip.requests import (
    Given,
    InferLimits,
    InferRequest,
    InputOptions,
    Options,
    OutputOptions,
    Wanted,
    check_load,
    infer_request,
    is_base64,
    options_from,
)
from torchpipe_py.methods.oip.tensors import BYTES, DATATYPES, NUMBERS, Output
from torchpipe_py.methods.routes import Cancellable, Done, Method, Rpc, RpcAnswer, RpcRequest, model_in, trace_headers
from torchpipe_py.methods.rpc.messages import OIP, message, methods, reflected
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import RequestTooLargeError
from torchpipe_py.wire.infer import priority_of
from torchpipe_py.wire.json_values import check_range
from torchpipe_py.wire.parameters import check_values
from torchpipe_py.wire.values import MOST_DIMENSIONS, MOST_PARAMETERS, MOST_VALUES

_HEALTH = "grpc.health.v1.Health"
_WATCH_SECONDS = 0.4  # the oldest state that a watch is answered with: there may be many, and each asks twice a second
_FINAL = "triton_enable_empty_final_response"  # a wish of Triton's clients for streams
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The field of ``InferTensorContents`` that has the elements of a datatype."""

_WIDEST = {"i": np.dtype("int64"), "u": np.dtype("uint64")}
"""The type with room for every integer of a field, by kind."""

_ModelInferResponse = message("inference.ModelInferResponse")
_StreamResponse = message("inference.ModelStreamInferResponse")
_HealthResponse = message("grpc.health.v1.HealthCheckResponse")
_ReflectionResponse = message("grpc.reflection.v1.ServerReflectionResponse")


class OipRpcs:
    """The protocol's methods over gRPC, and gRPC's own check of health."""

    def __init__(self, core: OpenInference, limits: InferLimits) -> None:
        self._core, self._limits = core, limits
        self._was_ready: dict[str, tuple[bool, float]] = {}
        known: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda asked: {"live": True},
            "ServerReady": lambda asked: {"ready": core.is_ready()},
            "ServerMetadata": lambda asked: metadata.SERVER,
            "ModelReady": self._model_ready,
            "ModelMetadata": lambda asked: core.metadata(asked.name, asked.version),
            "ModelConfig": lambda asked: {"config": core.config(asked.name, asked.version)},
            "Check": self._check,
        }
        self.rpcs = [self._rpc(method, known) for method in methods()]

    def _rpc(self, method: Any, known: Mapping[str, Callable[[Any], Any]]) -> Rpc:
        name, args = method.name, message(method.input_type.full_name)
        path = f"/{method.containing_service.full_name}/{name}"
        if name == "ModelInfer":
            method = Method(args, self._infer, request_id=_request_id, trace_fields=trace_headers, model_of=model_in)
            return Rpc(path, method)
        if name == "ModelStreamInfer":
            outcome = lambda answer: answer.outcome  # noqa: E731
            start = self._infer_in_stream
            method = Method(args, start, outcome=outcome, request_id=_request_id, trace_fields=trace_headers)
            return Rpc(path, method._replace(model_of=model_in), is_stream=True)
        if name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            answer_with = message(method.output_type.full_name)
            return Rpc(
                path, Method(args, partial(self._control, name.removeprefix("RepositoryModel").lower(), answer_with))
            )
        if name == "RepositoryIndex":
            return Rpc(path, Method(args, partial(self._index, message(method.output_type.full_name))))
        if name == "ModelStatistics":
            return Rpc(path, Method(args, partial(self._statistics, message(method.output_type.full_name))))
        if name == "Watch":
            return Rpc(path, Method(args, self._watch), is_watch=True)
        if name == "ServerReflectionInfo":
            return Rpc(path, Method(args, _reflect), is_stream=True)
        answer: Callable[[Any], Any] = known.get(
            name, lambda asked: shared_memory(asked.name or name.endswith("Register"))
        )
        made: Any = message(method.output_type.full_name)

        def start_known(request: RpcRequest, done: Done) -> None:
            fields = answer(request.message) or {}
            done(RpcAnswer(ParseDict(fields, made(), ignore_unknown_fields=True)))

        return Rpc(path, Method(args, start_known, request_id=_request_id))

    def _model_ready(self, asked: Any) -> dict[str, Any]:
        """A model that is not served is not ready, as Triton's clients expect; it is not an error."""
        try:
            return {"ready": self._core.is_ready(asked.name, asked.version)}
        except UnknownNode:
            return {"ready": False}

    def _control(self, action: str, made: Any, request: RpcRequest, done: Done) -> None:
        name = request.message.model_name
        if self._core.control is None:
            raise NotServedError(f"models are {action}ed at --http-port, or here with --repository-control")
        if action == "load":
            check_load(name, request.message.parameters)

        self._core.control(
            action, name, lambda status, said: done(RpcAnswer(made()) if status < 300 else RepositoryError(said))
        )

    def _statistics(self, made: Any, request: RpcRequest, done: Done) -> None:
        asked = request.message
        self._core.statistics(asked.name, asked.version, lambda said: done(RpcAnswer(ParseDict(said, made()))))

    def _index(self, made: Any, request: RpcRequest, done: Done) -> None:
        def answer(models: list[dict[str, Any]] | RepositoryError) -> None:
            done(models if isinstance(models, RepositoryError) else RpcAnswer(made(models=models)))

        self._core.index(request.message.ready, answer)

    def _check(self, asked: Any, is_watch: bool = False) -> dict[str, Any]:
        """A service is ready if all models are; a model's name is a service, too.

        For a watch, which the protocol asks to have a state for every name, it may be of the last moment.
        """
        name, now = "" if asked.service in (OIP, _HEALTH) else asked.service, perf_counter()
        if name and is_watch and not self._core.models.versions(name):
            return {"status": "SERVICE_UNKNOWN"}  # ``find`` looks for a name like it, which takes long
        if name:
            self._core.models.find(name)
        is_ready, asked_at = self._was_ready.get(name, (False, -_WATCH_SECONDS))
        if not is_watch or now >= asked_at + _WATCH_SECONDS:
            is_ready = self._core.is_ready(name)
            self._was_ready[name] = is_ready, now
        return {"status": "SERVING" if is_ready else "NOT_SERVING"}

    def _watch(self, request: RpcRequest, done: Done) -> None:
        status = {"status": "NOT_SERVING"} if request.is_ending else self._check(request.message, is_watch=True)
        done(RpcAnswer(_HealthResponse(**status)))

    # -- inference ----------------------------------------------------------------------------------------------

    def _infer(self, request: RpcRequest, done: Done) -> Cancellable:
        began = request.arrived or perf_counter()
        asked = request.message
        model = self._core.models.find(asked.model_name, asked.model_version)
        request.model = model.key
        return self._core.infer(model, self._read(request), self, began, done)

    def _infer_in_stream(self, request: RpcRequest, done: Done) -> Cancellable | None:
        """Infer in a stream: an error is an answer too, after which the stream goes on."""
        asked = request.message
        is_final = bool(asked.parameters.pop(_FINAL).bool_param) if _FINAL in asked.parameters else False

        def answer(result: Any) -> None:
            if isinstance(result, BaseException):
                failed = answers.failure(result).body
                made = _StreamResponse(error_message=failed["error"], infer_response={"id": asked.id})
                done(RpcAnswer(made, outcome=failed["code"]))
                return
            made = _StreamResponse(infer_response=result.message)
            if is_final:
                made.infer_response.parameters["triton_final_response"].bool_param = True
            done(result._replace(message=made))

        try:
            return self._infer(request, answer)
        except Exception as error:
            answer(error)
            return None

    def _read(self, request: RpcRequest) -> InferRequest:
        """The request; raises what is wrong with it."""
        asked = request.message
        # NOTE: before anything is done for each: a message has room for millions.
        inputs, outputs, parameters = asked.inputs, asked.outputs, asked.parameters
        for what, given, most in (
            ("inputs", inputs, MOST_VALUES), ("outputs", outputs, MOST_VALUES),
            ("parameters", parameters, MOST_PARAMETERS),
        ):  # fmt: skip
            if len(given) > most:
                raise InvalidRequest(f"{len(given)} {what}; the limit is {most}")
        options: Options | None = None
        more: dict[str, Any] = {}
        if parameters:
            given = _named(parameters)
            for name in ("binary_data_output", "binary_data"):  # over HTTP alone they make a difference
                given.pop(name, None)
            options, more = options_from(Options, given)
            check_values(more, self._limits.text)
        more = self._limits.headers.add_to(more, request.fields)
        wanted = [_wanted(output) for output in outputs]
        tensors = self._inputs(inputs, asked.raw_input_contents, asked.model_name)
        priority, deadline_ms = request.fields.get("x-priority"), request.deadline_ms
        read = infer_request(
            asked.id or None, options, tensors, wanted, self._limits.items, True, deadline_ms,
            0 if priority is None else priority_of(priority), more,
        )  # fmt: skip
        if options is not None and deadline_ms is not None and read.deadline_ms is not None:
            read.deadline_ms = min(read.deadline_ms, deadline_ms)
        return read

    def _inputs(self, inputs: Sequence[Any], raw: Sequence[bytes], model: str) -> list[Given]:
        for given in inputs if raw else ():
            if given.HasField("contents") and given.contents.ListFields():  # MLServer's client sends it empty
                text = "contents field must not be specified when using raw_input_contents"  # Triton's words
                raise InvalidRequest(f"{text} for {given.name[:40]!r} for model {model[:80]!r}")
        if raw and len(raw) != len(inputs):
            raise InvalidRequest(f"{len(raw)} raw_input_contents for {len(inputs)} inputs")
        tensors: list[Given] = []
        for index, given in enumerate(inputs):
            name, shape = given.name, given.shape
            others: dict[str, Any] = {}
            if given.parameters:
                _, others = options_from(InputOptions, _named(given.parameters), f"input {name[:40]!r}: ")
            if len(shape) > MOST_DIMENSIONS:
                raise InvalidRequest(f"input {name[:40]!r}: {len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
            data = memoryview(raw[index]) if raw else self._contents(given)
            tensors.append(Given(name, given.datatype, list(shape), data, is_base64(others)))
        return tensors

    def _contents(self, given: Any) -> list[Any] | np.ndarray:
        where, field = f"input {given.name[:40]!r}: ", _CONTENTS.get(given.datatype)
        if field is None:
            if given.datatype in DATATYPES:
                raise InvalidRequest(f"{where}{given.datatype} is sent as raw_input_contents")
            return []
        for other, _ in given.contents.ListFields():
            if other.name != field:
                raise InvalidRequest(
                    f"{where}{given.datatype} is read from {field}, and the contents have {other.name}"
                )
        elements = getattr(given.contents, field)
        most, name = self._limits.text.bytes // 2, self._limits.text.name
        if len(elements) > most:
            raise RequestTooLargeError(
                f"{where}{len(elements)} elements in contents; the limit is {most} (half of {name}): send large inputs "
                "as raw_input_contents"
            )
        if given.datatype == BYTES:
            return list(elements)
        # NOTE: an array, since in a list each number would be an object; of 64 bits, since NumPy 1 wraps integers that
        # are beyond a type.
        dtype = np.dtype(NUMBERS[given.datatype])
        array = np.fromiter(elements, _WIDEST.get(dtype.kind, dtype), len(elements))
        if dtype.kind in _WIDEST and array.size:
            check_range(where, dtype, int(array.min()), int(array.max()))
        return array.astype(dtype, copy=False)

    # -- answers ------------------------------------------------------------------------------------------------

    def answer(self, model: Model, asked: InferRequest, outputs: Sequence[tuple[Output, bool]]) -> RpcAnswer:
        """See ``Codec``."""
        tensors = [{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each, _ in outputs]
        made = _ModelInferResponse(
            model_name=model.name, model_version=model.version, id=asked.id, outputs=tensors,
            raw_output_contents=[output.to_binary() for output, _ in outputs],
        )  # fmt: skip
        return RpcAnswer(made)


def _named(parameters: Any) -> dict[str, Any]:
    """The parameters of a message as values."""
    given = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        given[name] = None if choice is None else getattr(parameter, choice)
    return given


def _wanted(output: Any) -> Wanted:
    if not output.parameters:
        return Wanted(output.name, True)
    options, _ = options_from(OutputOptions, _named(output.parameters), f"output {output.name[:40]!r}: ")
    return Wanted(output.name, True, options.classification or 0)  # NOTE: all answers are binary here


def _reflect(request: RpcRequest, done: Done) -> None:
    done(RpcAnswer(_ReflectionResponse(original_request=request.message, **reflected(request.message))))


def _request_id(request: RpcRequest) -> str:
    return request.fields.get("x-request-id") or str(getattr(request.message, "id", ""))

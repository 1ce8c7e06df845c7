"""The messages of the protocol over HTTP: JSON, and the binary data of tensors after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.methods.oip.requests import (
    Given,
    Images,
    InferLimits,
    InferRequest,
    InputOptions,
    Options,
    OutputOptions,
    Wanted,
    infer_request,
    is_base64,
    options_from,
    options_of,
)
from torchpipe_py.methods.oip.results import SMALLER
from torchpipe_py.methods.oip.tensors import Output
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError
from torchpipe_py.wire.http import SMALL_BYTES, HttpAnswer, HttpRequest
from torchpipe_py.wire.infer import milliseconds, priority_of
from torchpipe_py.wire.json_values import parse_json, with_lists
from torchpipe_py.wire.parameters import check_values

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; the tensors' binary data follow."""
_JSON_SIZE = HEADER_LENGTH.lower()

_JSON, _BINARY = "application/json", "application/octet-stream"


class _Input(Given):
    """A tensor of a request; ``data`` is absent if it is binary."""

    parameters: dict[str, Any] | None = None


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Any] | None = None

    def wanted(self, is_binary: bool) -> Wanted:
        """The output as it is asked for; ``is_binary`` is the default."""
        if not self.parameters:
            return Wanted(self.name, is_binary)
        options, _ = options_from(OutputOptions, self.parameters, f"output {self.name[:40]!r}: ")
        return options.wanted(self.name, is_binary)


class _Asked(msgspec.Struct, gc=False):
    """The JSON of a request."""

    inputs: list[_Input]
    id: str | int | float | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


class _OptionsOnly(msgspec.Struct, gc=False):
    """The JSON of a request without its tensors."""

    parameters: Options | None = None


class _IndexAsked(msgspec.Struct, gc=False):
    ready: bool = False


class _LoadAsked(msgspec.Struct, gc=False):
    parameters: dict[str, Any] = {}


_decode_options = msgspec.json.Decoder(_OptionsOnly).decode
_decode = msgspec.json.Decoder(_Asked).decode


def read_infer(
    body: bytes, fields: Mapping[str, str], limits: InferLimits, images: Images | None = None,
    admit: Callable[[float | None, int, str | None, int], object] | None = None,
) -> InferRequest:  # fmt: skip
    """Read a request; ``fields`` are its headers, their names in lower case. Raises ``InvalidRequest``.

    Texts of JSON for ``images`` are base64. ``admit``, if given, is called with what ``options_of`` returns before
    inputs are read, which takes long; it may raise.
    """
    deadline_ms = milliseconds(fields["x-deadline-ms"]) if "x-deadline-ms" in fields else None
    priority = priority_of(fields["x-priority"]) if "x-priority" in fields else 0
    view, size = memoryview(body), len(body)
    if _JSON_SIZE in fields:
        size = _json_size(fields[_JSON_SIZE], size)
    text = view[:size]
    if admit is not None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # which ``_read_json`` reports
            admit(*options_of(_decode_options(text).parameters, deadline_ms, priority))
    asked = _read_json(text)
    options: Options | None = None
    more: dict[str, Any] = {}
    if asked.parameters:
        options, more = options_from(Options, asked.parameters)
        check_values(more, limits.text)
    more = limits.headers.add_to(more, fields)
    is_binary = options is not None and options.binary_data_output
    outputs = [output.wanted(is_binary) for output in asked.outputs] if asked.outputs else ()
    _add_binary(asked.inputs, view[size:])
    name = None if asked.id is None else str(asked.id)
    return infer_request(
        name, options, asked.inputs, outputs, limits.items, is_binary, deadline_ms, priority, more, images
    )


def takes_long(request: HttpRequest) -> bool:
    """Whether the JSON of a request for inference takes long to read; its binary data do not."""
    if request.size <= SMALL_BYTES:
        return False
    given = request.fields.get(_JSON_SIZE)
    size = request.size if given is None else _number(given)
    return size is None or size > SMALL_BYTES


def _number(given: str) -> int | None:
    """The number that a header has; ``None`` for any other text."""
    # NOTE: other digits than those of ASCII, such as a superscript, are no numbers for ``int``.
    return int(given) if given.isascii() and given.isdigit() and len(given) <= 12 else None


def _json_size(given: str, size: int) -> int:
    """The number of bytes of JSON in a body of ``size``, from the header."""
    number = _number(given)
    if number is None or number > size:
        raise InvalidRequest(f"{HEADER_LENGTH} {given[:40]!r}; the body has {size} bytes")
    return number


def read_index(body: bytes) -> bool:
    """Whether a request for the repository's index asks only for the models that are served."""
    try:
        return bool(body) and msgspec.json.decode(body, type=_IndexAsked).ready
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest('expected no body, {} or {"ready": true}') from None


def read_parameters(body: bytes) -> dict[str, Any]:
    """The parameters of a request to load a model. Raises ``InvalidRequest``."""
    try:
        return msgspec.convert(parse_json(body), _LoadAsked).parameters
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request: {error}") from None


def _add_binary(inputs: Sequence[_Input], binary: memoryview) -> None:
    """Give inputs with a ``binary_data_size`` their data from ``binary``, which has them one after the other."""
    start, end = 0, len(binary)
    for given in inputs:
        size = None
        if given.parameters:
            options, others = options_from(InputOptions, given.parameters, f"input {given.name[:40]!r}: ")
            size = options.binary_data_size
            if others:
                given.is_base64 = is_base64(others)
        if size is not None:
            if given.data is not msgspec.UNSET:
                raise InvalidRequest(f"input {given.name[:40]!r}: both data and binary_data_size")
            if not 0 <= size <= end - start:
                where = f"input {given.name[:40]!r}: binary_data_size {size}"
                raise InvalidRequest(f"{where}; {end - start} bytes follow the JSON")
            given.data = binary[start : start + size]
            start += size
    if start != end:
        raise InvalidRequest(f"{end - start} bytes behind the binary data of the inputs")


def _read_json(text: memoryview) -> _Asked:
    try:
        if len(text) <= SMALL_BYTES:
            try:
                return _decode(text)
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        # Python's own reader takes what others write beyond JSON: NaN, and halves of surrogate pairs.
        asked = msgspec.convert(parse_json(bytes(text)), _Asked)
        asked.parameters = with_lists(asked.parameters)
        return asked
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request: {str(error)[:360]}") from None
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{error.object[:40]!r} has half of a surrogate pair") from None


def answer(
    model: str, version: str, request: InferRequest, outputs: Sequence[tuple[Output, bool]], reply: Bound
) -> HttpAnswer:
    """JSON, followed by the binary data, if there is any. ``ReplyTooLargeError`` for more than ``reply``.

    Another thread encodes long JSON, and then raises what it is refused for.
    """
    is_long = sum([output.size(False) for output, is_binary in outputs if not is_binary]) > SMALL_BYTES
    if not is_long or any(is_binary for _, is_binary in outputs):
        return encoded_answer(model, version, request, outputs, reply, is_long)
    make = partial(encoded_answer, model, version, request, outputs, reply, True)
    return HttpAnswer(200, _JSON, b"", make=lambda: make().body, size=sum(output.size(True) for output, _ in outputs))


def encoded_answer(
    model: str, version: str, request: InferRequest, outputs: Sequence[tuple[Output, bool]], reply: Bound,
    in_pieces: bool,
) -> HttpAnswer:  # fmt: skip
    """``answer`` with its body, encoded on this thread; ``in_pieces`` lets other threads run meanwhile."""
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for output, is_binary in outputs:
        form: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if is_binary:
            binary.append(output.to_binary())
            form["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            form["data"] = output.to_json(reply, SMALLER, in_pieces)
        described.append(form)
    whole: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        whole["id"] = request.id
    whole["outputs"] = described
    text = msgspec.json.encode(whole)
    size = len(text) + sum(map(len, binary))
    if size > reply.bytes:
        raise ReplyTooLargeError(size, reply, SMALLER if len(described) > len(binary) else "")
    if not binary:
        return HttpAnswer(200, _JSON, text)
    return HttpAnswer(200, _BINARY, b"".join([text, *binary]), {HEADER_LENGTH: str(len(text))})

"""What an inference request asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from torchpipe_py import InvalidRequest, TensorSpec
from torchpipe_py.errors import counted, nearest
from torchpipe_py.wire.errors import Bound, RequestTooLargeError
from torchpipe_py.wire.infer import check_encoding, exact_milliseconds, milliseconds
from torchpipe_py.wire.json_values import MOST_CONTAINERS, parse_json
from torchpipe_py.wire.values import check_name, check_names
from torchpipe_server.methods.oip.tensors import form_of, rows_of_binary, rows_of_json

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; the tensors' binary data follow."""

_OF_REQUEST = ("binary_data_output", "deadline_ms", "node_name", "timeout")
_OF_INPUT = ("binary_data_size",)
_OF_OUTPUT = ("binary_data",)
_DATA = "data"
MOST_ITEM_VALUES = 2**12
"""Of one request: items times inputs. Each costs the same, however small."""

Row = dict[str, Any]
"""The inputs of one item, by name."""

Parameters = dict[str, Any] | None


class _Input(msgspec.Struct, gc=False):
    """A tensor of a request; ``data`` is absent where it is binary."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = None
    data: Any = msgspec.UNSET


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: Parameters = None


class _Asked(msgspec.Struct, gc=False):
    """The JSON of a request."""

    inputs: list[_Input]
    id: str | None = None
    parameters: Parameters = None
    outputs: list[_Output] | None = None


_decode = msgspec.json.Decoder(_Asked).decode


class InferLimits(NamedTuple):
    """``text`` bounds JSON, ``items`` the batch of one request."""

    text: Bound
    items: int


class Wanted(NamedTuple):
    """An output that is asked for, and whether as binary."""

    name: str
    is_binary: bool


class Head(NamedTuple):
    """What the header fields of a request say: where its JSON ends, and a deadline."""

    json_size: str | None
    deadline_ms: float | None


class InferRequest(NamedTuple):
    """``outputs`` is empty where all are wanted, ``is_binary`` says then in which form."""

    id: str | None
    rows: Sequence[Row]
    outputs: Sequence[Wanted]
    is_binary: bool
    node_name: str | None
    deadline_ms: float | None

    def items(self, inputs: Sequence[TensorSpec]) -> list[Row]:
        """Of each item a dict for the pipe: the ``inputs`` of the root are its ``data``, others are keys."""
        names = [spec.name for spec in inputs if spec.name != _DATA]
        items = [_item(row, names) for row in self.rows]
        if self.node_name is not None:
            for item in items:
                item["node_name"] = self.node_name
        return items


def read_head(fields: Mapping[str, str]) -> Head:
    """What the header fields say, their names in lower case; raises what is wrong with them."""
    check_encoding(fields)
    return Head(fields.get(HEADER_LENGTH.lower()), milliseconds(fields.get("x-deadline-ms")))


def read_infer(body: bytes, head: Head, limits: InferLimits) -> InferRequest:
    """The request; raises what is wrong with it."""
    size = len(body) if head.json_size is None else _json_bytes(head.json_size, len(body))
    view = memoryview(body)
    asked = _read_json(view[:size], limits.text)
    deadline_ms, is_binary, node_name = head.deadline_ms, False, None
    if asked.parameters:
        options = _known(asked.parameters, "the request", _OF_REQUEST)
        is_binary = _flag(options, "binary_data_output", "the request")
        deadline_ms = _deadline(options, deadline_ms)
        node_name = options.get("node_name")
        if node_name is not None:
            if not isinstance(node_name, str):
                raise InvalidRequest("node_name is not a text")
            check_name("node_name", node_name)
    if asked.id is not None:
        check_name("id", asked.id)
    outputs: list[Wanted] = []
    if asked.outputs:
        check_names("outputs", [output.name for output in asked.outputs])
        outputs = [_output(given, is_binary) for given in asked.outputs]
        if len({output.name for output in outputs}) < len(outputs):
            raise InvalidRequest("an output is asked for twice")
    rows = _rows(asked.inputs, view[size:], limits.items)
    return InferRequest(asked.id, rows, outputs, is_binary, node_name, deadline_ms)


def _json_bytes(given: str, size: int) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) <= size):
        raise InvalidRequest(f"{HEADER_LENGTH} {given[:40]!r}; the body has {size} bytes")
    return int(given)


def _read_json(text: memoryview, most: Bound) -> _Asked:
    if len(text) > min(most.bytes, MOST_CONTAINERS):
        if len(text) > most.bytes:
            raise RequestTooLargeError(
                f"JSON of {len(text)} bytes; the limit is {most.bytes} ({most.name}): send large values as binary"
            )
        return _converted(bytes(text), most)  # which looks first at what it may become
    try:
        return _decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request: {error}"[:300]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _converted(bytes(text), most)


def _converted(text: bytes, most: Bound) -> _Asked:
    """The same by Python's own reader, which takes what others write beyond JSON: NaN, and halves of pairs."""
    value = parse_json(text, most)
    try:
        return msgspec.convert(value, _Asked)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request: {error}"[:300]) from None


def _deadline(options: Mapping[str, Any], header: float | None) -> float | None:
    """In milliseconds; ``timeout``, which is Triton's, is in microseconds, and 0 means none."""
    if "deadline_ms" in options:
        return exact_milliseconds(options["deadline_ms"])
    timeout = options.get("timeout")
    if not timeout:
        return header
    if type(timeout) is not int or abs(timeout) >= 2**63:
        raise InvalidRequest(f"timeout {str(timeout)[:40]!r}; expected microseconds")
    return milliseconds(timeout / 1000)


def _known(options: Mapping[str, Any], where: str, known: Sequence[str]) -> Mapping[str, Any]:
    """The parameters, all of them known ones."""
    for name in options:
        if name in known:
            continue
        if name.startswith("sequence_"):
            raise InvalidRequest(f"{where}: parameter {name[:40]!r}: a pipe keeps no state between requests")
        if name == "classification":
            raise InvalidRequest(
                f"{where}: parameter 'classification': a postprocessor in the configuration labels classes (TopK)"
            )
        raise InvalidRequest(f"{where}: unknown parameter {name[:40]!r}; {nearest(name[:40], known)}")
    return options


def _flag(options: Mapping[str, Any], name: str, where: str) -> bool:
    flag = options.get(name, False)
    if not isinstance(flag, bool):
        raise InvalidRequest(f"{where}: {name} is true or false")
    return flag


def _output(given: _Output, is_binary: bool) -> Wanted:
    if not given.name:
        raise InvalidRequest("outputs: an empty name")
    if given.parameters:
        where = f"output {given.name[:40]!r}"
        options = _known(given.parameters, where, _OF_OUTPUT)
        is_binary = _flag(options, "binary_data", where)
    return Wanted(given.name, is_binary)


def _rows(inputs: Sequence[_Input], binary: memoryview, most: int) -> list[Row]:
    if not inputs:
        raise InvalidRequest("the request has no inputs")
    check_names("inputs", [given.name for given in inputs])
    rows: list[Row] = []
    start = 0
    for given in inputs:
        if not given.name:
            raise InvalidRequest("inputs: an empty name")
        form = form_of(given.name, given.datatype, given.shape)
        items = form.items
        if items > most:
            raise InvalidRequest(f"{form.where}a batch of {items}; the limit is {most} (--max-batch)")
        if items * len(inputs) > MOST_ITEM_VALUES:
            raise InvalidRequest(
                f"{counted(len(inputs), 'input')} of {items} items; the limit is {MOST_ITEM_VALUES} values"
            )
        rows = rows or [{} for _ in range(items)]
        if items != len(rows):
            raise InvalidRequest(f"{form.where}a batch of {items}, and of {len(rows)} in another input")
        if form.name in rows[0]:
            raise InvalidRequest(f"{form.where}it is there twice")
        size = None
        if given.parameters:
            size = _known(given.parameters, f"input {form.name[:40]!r}", _OF_INPUT).get("binary_data_size")
        if size is None:
            values = rows_of_json(form, given.data)
        elif given.data is not msgspec.UNSET:
            raise InvalidRequest(f"{form.where}both data and binary_data_size")
        else:
            if type(size) is not int or not 0 <= size <= len(binary) - start:
                left = len(binary) - start
                raise InvalidRequest(f"{form.where}binary_data_size {str(size)[:40]}; {left} bytes follow the JSON")
            values = rows_of_binary(form, binary[start : start + size])
            start += size
        for row, value in zip(rows, values, strict=True):
            row[form.name] = value
    if start != len(binary):
        raise InvalidRequest(f"{len(binary) - start} bytes behind the binary data of the inputs")
    return rows


def _item(row: Row, names: Sequence[str]) -> Row:
    held = {name: row[name] for name in names if name in row}
    if _DATA in row:
        return row
    if not held:
        other = next(iter(row))[:40]
        raise InvalidRequest(f"unknown input {other!r}; {nearest(other, names or [_DATA])}")
    item = {name: value for name, value in row.items() if name not in held}
    item[_DATA] = held if len(names) > 1 else held[names[0]]
    return item

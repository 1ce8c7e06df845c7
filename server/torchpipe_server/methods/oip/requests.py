"""What an inference request asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec

from torchpipe_py import InvalidRequest, TensorSpec
from torchpipe_py.errors import counted, nearest
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.infer import check_encoding, milliseconds, priority_of
from torchpipe_py.wire.json_values import MOST_CONTAINERS, parse_json
from torchpipe_py.wire.values import check_name, check_names
from torchpipe_server.methods.oip.tensors import form_of, rows_of

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; the tensors' binary data follow."""

_DATA = "data"
MOST_ITEM_VALUES = 2**12
"""Of one request: items times inputs. Each costs the same, however small."""

Row = dict[str, Any]
"""The inputs of one item, by name."""


class _Options(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The parameters of a request. ``timeout`` is Triton's, in microseconds; 0 means none.

    Of ``priority``, Triton's too, 0 is normal and any larger number low.
    """

    binary_data_output: bool = False
    deadline_ms: float | None = None
    node_name: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    timeout: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class _InputOptions(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    binary_data_size: int | None = None


class _OutputOptions(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    binary_data: bool | None = None


class _Input(msgspec.Struct, gc=False):
    """A tensor of a request; ``data`` is absent if it is binary."""

    name: str
    datatype: str
    shape: list[int]
    parameters: _InputOptions | None = None
    data: Any = msgspec.UNSET


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: _OutputOptions | None = None


class _Asked(msgspec.Struct, gc=False):
    """The JSON of a request."""

    inputs: list[_Input]
    id: str | None = None
    parameters: _Options | None = None
    outputs: list[_Output] | None = None


_decode = msgspec.json.Decoder(_Asked).decode
_OPTIONS = [name for struct in (_Options, _InputOptions, _OutputOptions) for name in struct.__struct_fields__]
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)` - at `")


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
    priority: int = 0


class InferRequest(NamedTuple):
    """``outputs`` is empty if all are wanted; then ``is_binary`` says in which form."""

    id: str | None
    rows: Sequence[Row]
    outputs: Sequence[Wanted]
    is_binary: bool
    node_name: str | None
    deadline_ms: float | None
    priority: int = 0

    def items(self, inputs: Sequence[TensorSpec]) -> list[Row]:
        """Of each item a dict for the pipe: the ``inputs`` of the root are its ``data``, others are keys."""
        names = [spec.name for spec in inputs if spec.name != _DATA]
        items = [_item(row, names) for row in self.rows]
        if self.node_name is not None:
            for item in items:
                item["node_name"] = self.node_name
        if self.priority:
            for item in items:
                item["priority"] = self.priority
        return items


def read_head(fields: Mapping[str, str]) -> Head:
    """What the header fields say, their names in lower case; raises what is wrong with them."""
    check_encoding(fields)
    deadline, priority = milliseconds(fields.get("x-deadline-ms")), priority_of(fields.get("x-priority", 0))
    return Head(fields.get(HEADER_LENGTH.lower()), deadline, priority)


def read_infer(body: bytes, head: Head, limits: InferLimits) -> InferRequest:
    """The request; raises what is wrong with it."""
    size, given = len(body), head.json_size
    if given is not None:
        if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) <= size):
            raise InvalidRequest(f"{HEADER_LENGTH} {given[:40]!r}; the body has {size} bytes")
        size = int(given)
    view = memoryview(body)
    asked = _read_json(view[:size], limits.text)
    deadline_ms, is_binary, node_name, priority = head.deadline_ms, False, None, head.priority
    options = asked.parameters
    if options is not None:
        is_binary, node_name = options.binary_data_output, options.node_name
        priority = min(1, options.priority) or priority
        if options.deadline_ms is not None:
            deadline_ms = milliseconds(options.deadline_ms)
        elif options.timeout:
            deadline_ms = milliseconds(options.timeout / 1000)
    for what, name in (("node_name", node_name), ("id", asked.id)):
        if name is not None:
            check_name(what, name)
    outputs: list[Wanted] = []
    for output in asked.outputs or ():
        wanted = None if output.parameters is None else output.parameters.binary_data
        outputs.append(Wanted(output.name, is_binary if wanted is None else wanted))
    _check_names("outputs", [output.name for output in outputs])
    rows = _rows(asked.inputs, view[size:], limits.items)
    return InferRequest(asked.id, rows, outputs, is_binary, node_name, deadline_ms, priority)


def _check_names(what: str, names: Sequence[str]) -> None:
    check_names(what, names)
    if "" in names:
        raise InvalidRequest(f"{what}: an empty name")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{what}: a name is there twice")


def _read_json(text: memoryview, most: Bound) -> _Asked:
    try:
        if len(text) <= min(most.bytes, MOST_CONTAINERS):
            try:
                return _decode(text)
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        # Python's own reader takes what others write beyond JSON: NaN, and halves of surrogate pairs.
        return msgspec.convert(parse_json(bytes(text), most), _Asked)
    except msgspec.ValidationError as error:
        _refuse(str(error))


def _refuse(text: str) -> NoReturn:
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        name, hint = unknown[1][:40], ""
        if name.startswith("sequence_"):
            hint = "a pipe keeps no state between requests"
        elif name == "classification":
            hint = "a postprocessor in the configuration labels classes (TopK)"
        text = f"{text[:240]}; {hint or nearest(name, _OPTIONS)}"
    raise InvalidRequest(f"the request: {text[:360]}") from None


def _rows(inputs: Sequence[_Input], binary: memoryview, most: int) -> list[Row]:
    if not inputs:
        raise InvalidRequest("the request has no inputs")
    _check_names("inputs", [given.name for given in inputs])
    rows: list[Row] = []
    start = 0
    for given in inputs:
        form = form_of(given.name, given.datatype, given.shape)
        items, left = form.shape[0], len(binary) - start
        if items > most:
            raise InvalidRequest(f"{form.where}a batch of {items}; the limit is {most} (--max-batch)")
        if items * len(inputs) > MOST_ITEM_VALUES:
            count = counted(len(inputs), "input")
            raise InvalidRequest(f"{count} of {items} items; the limit is {MOST_ITEM_VALUES} values")
        rows = rows or [{} for _ in range(items)]
        if items != len(rows):
            raise InvalidRequest(f"{form.where}a batch of {items}, and of {len(rows)} in another input")
        size = None if given.parameters is None else given.parameters.binary_data_size
        data = given.data
        if size is not None:
            if data is not msgspec.UNSET:
                raise InvalidRequest(f"{form.where}both data and binary_data_size")
            if not 0 <= size <= left:
                raise InvalidRequest(f"{form.where}binary_data_size {size}; {left} bytes follow the JSON")
            data = binary[start : start + size]
            start += size
        for row, value in zip(rows, rows_of(form, data), strict=True):
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

"""What an inference request asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchpipe_py import InvalidRequest, TensorSpec
from torchpipe_py.errors import counted, nearest
from torchpipe_py.http.errors import Bound
from torchpipe_py.http.infer import check_encoding, milliseconds
from torchpipe_py.http.json_values import parse_json
from torchpipe_py.http.values import check_name, check_names
from torchpipe_server.worker.oip.tensors import form_of, rows_of_binary, rows_of_json

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


class InferLimits(NamedTuple):
    """``text`` bounds JSON, ``items`` the batch of one request."""

    text: Bound
    items: int


class Wanted(NamedTuple):
    """An output that is asked for, and whether as binary."""

    name: str
    is_binary: bool


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


def read_infer(body: bytes, fields: Mapping[str, str], limits: InferLimits) -> InferRequest:
    """The request; raises what is wrong with it. ``fields`` are the headers, their names in lower case."""
    check_encoding(fields)
    size = _json_bytes(fields.get(HEADER_LENGTH.lower()), len(body))
    asked = parse_json(body[:size], limits.text)
    if not isinstance(asked, dict):
        raise InvalidRequest('the request is no object, as {"inputs": [{"name": "data", …}]}')
    options = _parameters(asked, "the request", _OF_REQUEST)
    is_binary = _flag(options, "binary_data_output", "the request")
    name, node_name = asked.get("id"), options.get("node_name")
    for what, value in (("id", name), ("node_name", node_name)):
        if value is not None:
            if not isinstance(value, str):
                raise InvalidRequest(f"{what} is not a text")
            check_name(what, value)
    outputs = [_output(given, is_binary) for given in _objects(asked, "outputs")]
    if len({output.name for output in outputs}) < len(outputs):
        raise InvalidRequest("an output is asked for twice")
    rows = _rows(_objects(asked, "inputs"), memoryview(body)[size:], limits.items)
    return InferRequest(name, rows, outputs, is_binary, node_name, _deadline(options, fields.get("x-deadline-ms")))


def _json_bytes(given: str | None, size: int) -> int:
    if given is None:
        return size
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) <= size):
        raise InvalidRequest(f"{HEADER_LENGTH} {given[:40]!r}; the body has {size} bytes")
    return int(given)


def _deadline(options: Mapping[str, Any], header: str | None) -> float | None:
    """In milliseconds; ``timeout``, which is Triton's, is in microseconds, and 0 means none."""
    if "deadline_ms" not in options and options.get("timeout"):
        if type(options["timeout"]) is not int or abs(options["timeout"]) >= 2**63:
            raise InvalidRequest(f"timeout {str(options['timeout'])[:40]!r}; expected microseconds")
        return milliseconds(options["timeout"] / 1000)
    return milliseconds(options.get("deadline_ms", header))


def _parameters(given: Mapping[str, Any], where: str, known: Sequence[str]) -> dict[str, Any]:
    options = given.get("parameters")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidRequest(f"{where}: parameters is no object")
    for name in options:
        if name.startswith("sequence_"):
            raise InvalidRequest(f"{where}: parameter {name[:40]!r}: a pipe keeps no state between requests")
        if name == "classification":
            raise InvalidRequest(
                f"{where}: parameter 'classification': a postprocessor in the configuration labels classes (TopK)"
            )
        if name not in known:
            raise InvalidRequest(f"{where}: unknown parameter {name[:40]!r}; {nearest(name[:40], known)}")
    return options


def _flag(options: Mapping[str, Any], name: str, where: str) -> bool:
    flag = options.get(name, False)
    if not isinstance(flag, bool):
        raise InvalidRequest(f"{where}: {name} is true or false")
    return flag


def _objects(asked: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    given = asked.get(key) or []
    if not isinstance(given, list):
        raise InvalidRequest(f"{key} is no list")
    for value in given:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            raise InvalidRequest(f'{key}: expected objects with a "name"')
    check_names(key, [value["name"] for value in given])
    return given


def _output(given: Mapping[str, Any], is_binary: bool) -> Wanted:
    where = f"output {given['name'][:40]!r}"
    options = _parameters(given, where, _OF_OUTPUT)
    return Wanted(given["name"], _flag(options, "binary_data", where) if "binary_data" in options else is_binary)


def _rows(inputs: Sequence[Mapping[str, Any]], binary: memoryview, most: int) -> list[Row]:
    if not inputs:
        raise InvalidRequest("the request has no inputs")
    rows: list[Row] = []
    start = 0
    for given in inputs:
        form = form_of(given["name"], given.get("datatype"), given.get("shape"))
        if form.items > most:
            raise InvalidRequest(f"{form.where}a batch of {form.items}; the limit is {most} (--max-batch)")
        if form.items * len(inputs) > MOST_ITEM_VALUES:
            raise InvalidRequest(
                f"{counted(len(inputs), 'input')} of {form.items} items; the limit is {MOST_ITEM_VALUES} values"
            )
        rows = rows or [{} for _ in range(form.items)]
        if form.items != len(rows):
            raise InvalidRequest(f"{form.where}a batch of {form.items}, and of {len(rows)} in another input")
        if form.name in rows[0]:
            raise InvalidRequest(f"{form.where}it is there twice")
        size = _parameters(given, form.where[:-2], _OF_INPUT).get("binary_data_size")
        if size is None:
            values = rows_of_json(form, given.get("data"))
        elif "data" in given:
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

"""``POST /infer``: an image or a dict over HTTP, or several, and their results as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from torchpipe_py.errors import DecodeError, InvalidRequest, counted
from torchpipe_py.wire import answers
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, RequestTooLargeError
from torchpipe_py.wire.http import SMALL_BYTES, HttpRequest
from torchpipe_py.wire.json_values import (
    InputReader,
    from_text,
    json_line,
    label_line,
    parse_json,
    to_json,
    with_lists,
)
from torchpipe_py.wire.parameters import ForwardedHeaders, check_values, hint_of, split
from torchpipe_py.wire.pictures import is_picture
from torchpipe_py.wire.values import check_name, check_names, is_label_and_score, json_size, output_of

_CURL_D = "curl -d leaves out line ends and NUL bytes: send it with --data-binary"
_FIELDS = "other values go in a form or in JSON"
_SMALLER = "ask for fewer outputs, or at /v2 for binary ones (binary_data)"
_OPTIONS = ("node_name", "deadline_ms", "priority", "outputs")
_PATHS = ("/infer", "/try")  # whose query has them; elsewhere its parameters have no meaning, or one of their own
_MEMBERS = ("inputs", "parameters", *_OPTIONS)
_EXPECTED = 'expected an object with "inputs", as in {"inputs": {"data": {"b64": "…"}}}'
MOST_BATCH_INPUTS = 2**12
"""Limit of the inputs of a call's items, all together."""


Item = dict[str, Any] | InvalidRequest


class Asked(msgspec.Struct):
    """A call: the inputs of its items by name, the ``keys`` that are answered, its options, parameters for backends.

    ``is_batch``: it is answered with an outcome for each item; else it has one. An item of a batch may be the error of
    its inputs. ``hint`` is for the answer, should ``data`` hold no image. ``whole`` says what became ``data``, if the
    client did not name it.
    """

    items: list[Item]
    keys: list[str]
    deadline_ms: float | None
    hint: str = ""
    node_name: str | None = None
    priority: int | None = None
    parameters: dict[str, Any] = {}
    is_batch: bool = False
    whole: str = ""


class _Options(msgspec.Struct, gc=False, omit_defaults=True):
    """The members of a JSON request that decide whether it is admitted."""

    node_name: str | None = None
    deadline_ms: float | None = None
    priority: int | str | None = None


_decode_options = msgspec.json.Decoder(_Options).decode

Images = Callable[[Mapping[str, Any], "str | None"], Collection[str]]
"""The inputs that are encoded images, of a request with these inputs and this ``node_name``."""

Taken = Callable[["str | None"], Collection[str]]
"""The parameters that backends declare to read, of a request with this ``node_name``."""


def read_request(
    body: bytes, query: str, fields: Mapping[str, str], text: Bound, headers: ForwardedHeaders, images: Images,
    taken: Taken, most: int, admit: Callable[[Asked], object] | None = None,
) -> Asked:  # fmt: skip
    """Read a request. Raises ``InvalidRequest``. ``text`` bounds the texts of JSON, ``headers`` become parameters.
    ``most`` bounds the items of a batch. A text of JSON for one of ``images`` is base64. Of parameters for backends, a
    query and a form may have those that are ``taken``.

    ``fields`` are the headers, their names in lower case. ``admit``, if given, is called before the inputs of JSON are
    read, which takes long, with a request that lacks them; it may raise.
    """
    content_type = fields.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    options, others = _parameters(query) if query else ({}, {})
    items: list[Item]
    more: dict[str, Any] = {}
    is_batch, whole = False, ""
    deadline, priority = fields.get("x-deadline-ms"), fields.get("x-priority")
    if kind == "application/json":
        if admit is not None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # which ``_read_json`` reports
                early = msgspec.to_builtins(_decode_options(body))
                # Outputs in JSON, which are not read here, replace those of the query.
                known = {"priority": priority, "deadline_ms": deadline, **options, **early, "outputs": None}
                admit(_asked([], known, "", {}, False))
        items, more, is_batch = _read_json(body, options, text, images, most)
    elif kind == "multipart/form-data":
        # Imported here: without forms their library is not needed.
        from torchpipe_py.wire.forms import read_form

        def names(texts: Mapping[str, str]) -> Collection[str]:
            return (*_OPTIONS, *taken(texts.get("node_name") or options.get("node_name")))

        form: dict[str, Any] = {}
        given, field = read_form(content_type, body, names, form, text, most)
        items = [*given]
        whole = f"the file of the form's field {field[:40]!r} is 'data': send several inputs as JSON"
        others.update({name: value for name, value in form.items() if name not in _OPTIONS})
        options.update({name: value for name, value in form.items() if name in _OPTIONS})
        is_batch = len(items) > 1
    else:  # whatever the type: `curl --data-binary` sends that of a form
        items = [{"data": body}]
        whole = "the body is one value: send several as JSON, with the header Content-Type: application/json"
    if others:
        more = {**_for_backends(others, taken(options.get("node_name")), text), **more}
    parameters = headers.add_to(more, fields)
    hint = _CURL_D if kind == "application/x-www-form-urlencoded" and _is_stripped(body) else ""
    if options or deadline is not None or priority is not None:
        known = {"priority": priority, "deadline_ms": deadline, **options}
        return _asked(items, known, hint, parameters, is_batch, whole)
    return Asked(items, ["result"], None, hint, None, None, parameters, is_batch, whole)


def is_long_json(request: HttpRequest) -> bool:
    """Whether a request for ``read_request`` takes long to read."""
    return request.size > SMALL_BYTES and request.kind == "application/json"


def deadline_ms_of(request: HttpRequest) -> float | None:
    """The deadline in the request's query or header, as far as it is known before the body is read."""
    given = request.fields.get("x-deadline-ms")
    with suppress(InvalidRequest):  # which ``read_request`` reports
        if "deadline_ms" in request.query and request.path in _PATHS:
            given = _parameters(request.query)[0].get("deadline_ms", given)
        return milliseconds(given)
    return None


def _is_stripped(body: bytes) -> bool:
    """Whether the body is binary and lacks the bytes that ``curl -d @file`` removes; every image has some."""
    return not (b"\0" in body or b"\n" in body or b"\r" in body or body.isascii())


def _parameters(query: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options in a query, and its other parameters."""
    try:
        parameters = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise InvalidRequest("the query has more than 16 parameters") from None
    parameters.pop("timing", None)  # the service's
    others = {name: parameters.pop(name) for name in [*parameters] if name not in _OPTIONS}
    return parameters, others


def _for_backends(given: Mapping[str, str], taken: Collection[str], text: Bound) -> dict[str, Any]:
    """The parameters of a query or form. ``InvalidRequest`` for one that no backend declares to read."""
    for name in given:
        if name not in taken:
            hint = hint_of(name, taken, (*_OPTIONS, "timing"))
            raise InvalidRequest(f"unknown parameter {name[:40]!r}; {hint}; {_FIELDS}")
    parameters = {name: from_text(f"parameter {name[:40]!r}", value) for name, value in given.items()}
    check_values(parameters, text)
    return parameters


def answer_of(
    data: Mapping[str, Any], asked: Asked, reply: Bound, output: Callable[[Mapping[str, Any], str], Any] = output_of
) -> bytes:
    """The values of the keys as a line of JSON, by ``output``. Raises the dict's ``error`` if one is missing."""
    values = values_of(data, asked, output)
    checked_size(values, reply)
    return line_of(values, reply)


def values_of(data: Mapping[str, Any], asked: Asked, output: Callable[[Mapping[str, Any], str], Any]) -> dict[str, Any]:
    """The values that are asked for, by ``output``. Raises the dict's ``error`` if one is missing."""
    try:
        return {key: output(data, key) for key in asked.keys}
    except DecodeError as error:
        if asked.hint:
            raise DecodeError(f"{error}; {asked.hint}") from error
        raise


def checked_size(values: Mapping[str, Any], reply: Bound) -> int:
    """The fewest bytes that values take as JSON. Raises ``ReplyTooLargeError`` if that is more than ``reply``."""
    size = sum(map(json_size, values.values()))
    if size > reply.bytes:
        raise ReplyTooLargeError(size, reply, _SMALLER)
    return size


def line_of(values: Mapping[str, Any], reply: Bound) -> bytes:
    """Values by key as a line of JSON. Raises ``ReplyTooLargeError``; see ``checked_size`` for what is known before."""
    if len(values) == 1 and is_label_and_score(value := next(iter(values.values()))):
        line = label_line(value)
        if len(line) > reply.bytes:
            raise ReplyTooLargeError(len(line), reply, _SMALLER)
        return line
    outputs: dict[str, str] = {}
    for key, value in values.items():
        outputs.update(to_json(key, value, reply))
    line = json_line(outputs)
    if len(line) > reply.bytes:
        raise ReplyTooLargeError(len(line), reply, _SMALLER)
    return line


def outcome_of(answer: bytes | BaseException) -> bytes:
    """An item of ``batch_line``: what ``answer_of`` returned, or the error in place of it."""
    if isinstance(answer, BaseException):
        return answers.to_line(answers.failure(answer).body)[:-1]
    return b'{"outputs": %b}' % answer[:-1]


def batch_line(outcomes: Sequence[bytes]) -> bytes:
    """The outcomes of a batch, in order, as a line of JSON."""
    return b'{"outcomes": [%b]}\n' % b", ".join(outcomes)


def _read_json(
    body: bytes, options: dict[str, Any], text: Bound, images: Images, most: int
) -> tuple[list[Item], dict[str, Any], bool]:
    """The items, the parameters for backends, and whether it is a batch; options of the service go to ``options``."""
    try:
        value = parse_json(body)
    except InvalidRequest:
        if is_picture(body):
            raise InvalidRequest("the body is a picture, not JSON: send it without Content-Type") from None
        raise
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), (dict, list)):
        raise InvalidRequest(_EXPECTED)
    for key in value:
        if key not in _MEMBERS:
            raise InvalidRequest(f"unknown member {key[:40]!r}; the members are {', '.join(_MEMBERS)}")
    more = parameters_of(value.get("parameters"), text)
    if isinstance(value.get("outputs"), str):
        raise InvalidRequest('outputs is a text; expected a list of names, as in ["result"]')
    milliseconds(value.get("deadline_ms"), (int, float))
    options.update({key: value[key] for key in _OPTIONS if value.get(key) is not None})
    node_name, given, reader = options.get("node_name"), value["inputs"], InputReader(text)
    node_name = node_name if isinstance(node_name, str) else None
    if isinstance(given, dict):
        return [reader.read(given, images(given, node_name))], more, False
    if len(given) > most:
        raise InvalidRequest(f"{counted(len(given), 'item')} in one call; the limit is {most} (max_batch)")
    if (count := sum(len(inputs) for inputs in given if isinstance(inputs, dict))) > MOST_BATCH_INPUTS:
        raise InvalidRequest(f"{count} inputs in one call; the limit is {MOST_BATCH_INPUTS}")
    return [_item(inputs, reader, images, node_name) for inputs in given], more, True


def read_parameters(given: str | None, text: Bound, headers: ForwardedHeaders) -> dict[str, Any]:
    """Parameters for backends, of a text of JSON. Raises ``InvalidRequest``, ``RequestTooLargeError``."""
    if not given:
        return {}
    if len(given) > 2 * text.bytes:
        raise RequestTooLargeError(f"parameters of {len(given)} characters; the limit is {2 * text.bytes}")
    try:
        value = parse_json(given.encode())
    except RequestTooLargeError:
        raise
    except InvalidRequest as error:
        raise InvalidRequest(f"parameters: {error}") from None
    return headers.add_to(parameters_of(value, text), {})


def parameters_of(given: Any, text: Bound) -> dict[str, Any]:
    """An object of JSON as parameters for backends. Raises ``InvalidRequest``, ``RequestTooLargeError``."""
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise InvalidRequest("parameters is not an object")
    own, others = split("", with_lists(given), _OPTIONS)
    for key in own:
        raise InvalidRequest(f"parameter {key!r}: it stands beside inputs, not in parameters")
    check_values(others, text)
    return others


def _item(given: Any, reader: InputReader, images: Images, node_name: str | None) -> Item:
    """An item of a batch: its inputs, or the error in place of them."""
    try:
        if not isinstance(given, dict):
            raise InvalidRequest('expected an object of inputs, as in {"data": {"b64": "…"}}')
        return reader.read(given, images(given, node_name))
    except RequestTooLargeError:
        raise
    except InvalidRequest as error:
        return error


def _asked(
    items: list[Item], options: Mapping[str, Any], hint: str, parameters: dict[str, Any], is_batch: bool,
    whole: str = "",
) -> Asked:  # fmt: skip
    outputs = options.get("outputs") or "result"
    keys = [key.strip() for key in outputs.split(",")] if isinstance(outputs, str) else outputs
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        raise InvalidRequest("outputs are names, separated by commas or in a list")
    check_names("outputs", keys)
    node_name = options.get("node_name")
    if node_name is not None:
        if not isinstance(node_name, str):
            raise InvalidRequest("node_name is not a text")
        check_name("node_name", node_name)
    priority = None if options.get("priority") is None else priority_of(options["priority"])
    deadline, names = milliseconds(options["deadline_ms"]), list(dict.fromkeys(keys))
    return Asked(items, names, deadline, hint, node_name, priority, parameters, is_batch, whole)


def priority_in(data: Mapping[str, Any]) -> int:
    """The priority of a request's dict: 0 (normal) or 1 (low); 0 if it is invalid, which the pipe refuses."""
    given = data.get("priority")
    return 1 if type(given) is int and given == 1 else 0


def priority_of(given: Any) -> int:
    """0 (normal) or 1 (low); ``InvalidRequest`` for anything else."""
    if type(given) not in (int, str) or str(given) not in ("0", "1"):
        raise InvalidRequest(f"priority {str(given)[:40]!r}; expected 0 (normal) or 1 (low)")
    return int(given)


def milliseconds(given: Any, types: Collection[type] = (int, float, str)) -> float | None:
    """A deadline of one of these types as a number; ``InvalidRequest`` for anything else."""
    if given is None:
        return None
    try:
        number = float(given) if type(given) in types else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequest(f"a deadline of {str(given)[:40]!r}; expected milliseconds, more than 0")
    return number

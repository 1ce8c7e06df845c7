"""Inference requests, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from torchpipe_py.errors import DeadlineExceeded, InvalidRequest, Overloaded, TorchpipeError
from torchpipe_py.methods.oip.tensors import BYTES, form_of, only_element, rows_of
from torchpipe_py.methods.roots import Root
from torchpipe_py.wire import parameters
from torchpipe_py.wire.errors import Bound, code_of, describe_error, restated
from torchpipe_py.wire.infer import milliseconds
from torchpipe_py.wire.json_values import from_json
from torchpipe_py.wire.parameters import ForwardedHeaders
from torchpipe_py.wire.values import NAME_CHARACTERS, check_name, check_names

MOST_ITEM_VALUES = 2**12
"""Limit of one request's items of all inputs, and elements of ``BYTES``. Each costs the same, however small."""

_BASE64 = ("base64", "pillow_image")  # MLServer's codecs of bytes and of images
_ELSEWHERE = {"binary_data_size": "an input", "binary_data": "an output", "classification": "an output"}

Images = Callable[["str | None"], Collection[str]]
"""The inputs that are encoded images, of a request with this ``node_name``."""

Row = dict[str, Any]
"""The inputs of one item, by name."""


class Options(msgspec.Struct, gc=False):
    """The parameters of a request. ``timeout`` is Triton's, in microseconds; 0 means none.

    Of ``priority``, Triton's too, 0 is normal and any larger number low.
    """

    binary_data_output: bool = False
    deadline_ms: float | None = None
    node_name: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    timeout: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class InputOptions(msgspec.Struct, gc=False):
    """The parameters of an input. Others are ignored, but for MLServer's ``content_type``."""

    binary_data_size: int | None = None


class OutputOptions(msgspec.Struct, gc=False):
    """The parameters of an output. Others are ignored."""

    binary_data: bool | None = None
    classification: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def wanted(self, name: str, is_binary: bool) -> Wanted:
        """The output of this name; ``is_binary`` is the default."""
        return Wanted(name, is_binary if self.binary_data is None else self.binary_data, self.classification or 0)


_KNOWN = {kind: frozenset(kind.__struct_fields__) for kind in (Options, InputOptions, OutputOptions)}
_Options = TypeVar("_Options", Options, InputOptions, OutputOptions)


class InferLimits(NamedTuple):
    """Limits of a request: ``text`` bounds its texts, ``items`` the batch. ``headers`` become parameters."""

    text: Bound
    items: int
    headers: ForwardedHeaders = ForwardedHeaders()


class Given(msgspec.Struct, gc=False):
    """An input of a request; ``data`` is what ``rows_of`` reads. ``is_base64``: elements of ``BYTES`` are."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = msgspec.UNSET
    is_base64: bool = False


class Wanted(NamedTuple):
    """A requested output, whether as binary; with ``classes`` above 0, that many best classes instead of numbers."""

    name: str
    is_binary: bool
    classes: int = 0


class InferRequest(msgspec.Struct):
    """A checked request. ``outputs`` is empty if all are wanted; then ``is_binary`` is their form.

    ``parameters`` are for the backends. ``timeout`` is the parameter of this name, if that sets the deadline.
    """

    id: str | None
    rows: list[Row]
    outputs: Sequence[Wanted]
    is_binary: bool
    node_name: str | None
    deadline_ms: float | None
    priority: int = 0
    parameters: dict[str, Any] = {}
    timeout: int = 0

    def items(self, root: Root) -> list[Row]:
        """A dict for the pipe per item; see ``Root.item`` and ``Root.check_rows``.

        Releases the rows, which are kept no longer than the pipe keeps them.
        """
        wanted = [output.name for output in self.outputs]
        priority = self.priority or None
        items = [root.item(row, wanted, self.node_name, priority, self.parameters) for row in self.rows]
        root.check_rows(self.rows)
        self.rows.clear()
        return items


def infer_request(
    id: str | None, options: Options | None, inputs: Sequence[Given], outputs: Sequence[Wanted], most: int,
    is_binary: bool, deadline_ms: float | None = None, priority: int = 0, more: dict[str, Any] | None = None,
    images: Images | None = None,
) -> InferRequest:  # fmt: skip
    """Check a request. Raises ``InvalidRequest``. ``most`` bounds the batch, ``more`` are the backends' parameters.

    ``deadline_ms`` and ``priority`` are those that the options may change. ``images`` is for a request in JSON.
    """
    node_name, timeout = None, 0
    if options is not None:
        deadline_ms, priority, node_name, timeout = options_of(options, deadline_ms, priority)
    if id is not None:
        check_name("id", id)
    if outputs:
        check_names("outputs", [output.name for output in outputs])
        outputs = list(dict.fromkeys(outputs))  # each once, as in other protocols
        _check_names("outputs", [output.name for output in outputs])
    rows = _rows(inputs, most, images, node_name)
    return InferRequest(id, rows, outputs, is_binary, node_name, deadline_ms, priority, more or {}, timeout)


def options_of(
    options: Options | None, deadline_ms: float | None, priority: int
) -> tuple[float | None, int, str | None, int]:
    """Deadline, priority, ``node_name`` and ``timeout`` of a request, as the options change the first two."""
    timeout = 0
    if options is None:
        return deadline_ms, priority, None, timeout
    if options.deadline_ms is not None:
        deadline_ms = milliseconds(options.deadline_ms)
    elif options.timeout:
        deadline_ms, timeout = milliseconds(options.timeout / 1000), options.timeout
    if options.node_name is not None:
        check_name("node_name", options.node_name)
    return deadline_ms, min(1, options.priority) or priority, options.node_name, timeout


def explained(error: BaseException, timeout: int) -> BaseException:
    """The error, which names the unit of ``timeout`` if that was exceeded and is shorter than a millisecond."""
    if not isinstance(error, TorchpipeError) or not 0 < timeout < 1000:
        return error
    if code_of(error) not in (DeadlineExceeded.code, Overloaded.code):
        return error
    return restated(error, f"{describe_error(error)}; timeout is in microseconds: {timeout} is {timeout / 1000:g} ms")


def options_from(kind: type[_Options], given: Mapping[str, Any], where: str = "") -> tuple[_Options, dict[str, Any]]:
    """The options among parameters, and the other ones. Raises ``InvalidRequest``, which begins with ``where``."""
    own: Mapping[str, Any] = given
    others: dict[str, Any] = {}
    if not given.keys() <= _KNOWN[kind]:
        own, others = parameters.split(where, given, kind.__struct_fields__)
        for name in _ELSEWHERE.keys() & others.keys() if kind is Options else ():
            raise InvalidRequest(f"parameter {name!r} is one of {_ELSEWHERE[name]}, not of the request")
    try:
        return msgspec.convert(own, kind), others
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", "`$.parameters")
        raise InvalidRequest(f"{where or 'the request: '}{text[:360]}") from None


def is_base64(others: Mapping[str, Any]) -> bool:
    """Whether the other parameters of an input, which are MLServer's, declare its elements of ``BYTES`` as base64."""
    return others.get("content_type") in _BASE64


def check_load(name: str, parameters: Mapping[str, Any] | None) -> None:
    """Refuse Triton's load parameters: they would override the file."""
    for parameter in parameters or ():
        raise InvalidRequest(f"failed to load {name[:80]!r}: no parameter {parameter[:40]!r}; change its TOML file")


def _check_names(what: str, names: Sequence[str]) -> None:
    check_names(what, names)
    if "" in names:
        raise InvalidRequest(f"{what}: an empty name")
    if len(set(names)) < len(names):
        name = next(name for index, name in enumerate(names) if name in names[:index])
        raise InvalidRequest(f"{what}: {name[:40]!r} appears twice{' in different forms' if what == 'outputs' else ''}")


def _rows(inputs: Sequence[Given], most: int, images: Images | None, node_name: str | None) -> list[Row]:
    if not inputs:
        raise InvalidRequest("the request has no inputs")
    first = inputs[0]
    # One image is one element of bytes: the checks of tensors are skipped.
    if len(inputs) == 1 and first.datatype == BYTES and first.shape in ([1], [1, 1]):
        element = only_element(first.data)
        if element is not None and 0 < len(first.name) <= NAME_CHARACTERS:
            return [{first.name: _decoded(first, element) if first.is_base64 else element}]
    _check_names("inputs", [given.name for given in inputs])
    encoded = images(node_name) if images is not None else ()
    rows: list[Row] = []
    values = 0
    for given in inputs:
        form = form_of(given.name, given.datatype, given.shape, given.name in encoded and not given.is_base64)
        items = form.shape[0]
        if items > most:
            raise InvalidRequest(f"{form.where}a batch of {items}; the limit is {most} (max_batch)")
        values += max(items, form.values)
        if values > MOST_ITEM_VALUES:
            raise InvalidRequest(f"{form.where}{values} values so far; the limit is {MOST_ITEM_VALUES}")
        rows = rows or [{} for _ in range(items)]
        if items != len(rows):
            batches = f"a batch of {len(rows)} in input {first.name[:40]!r} and of {items} in input {form.name[:40]!r}"
            advice = "an input without a batch begins with a dimension of 1 here, as in the metadata"
            raise InvalidRequest(f"{batches}: their first dimensions differ; {advice}")
        for row, value in zip(rows, rows_of(form, given.data), strict=True):
            row[form.name] = _decoded(given, value)
    return rows


def _decoded(given: Given, value: Any) -> Any:
    """An item of an input, read from base64 where it is."""
    if not given.is_base64 or given.datatype != BYTES:
        return value
    where = f"input {given.name[:40]!r}: "
    if isinstance(value, bytes):
        return from_json(where, {"b64": value.decode("latin-1")})
    elements = np.empty(value.size, object)
    elements[:] = [from_json(where, {"b64": element.decode("latin-1")}) for element in value.ravel()]
    return elements.reshape(value.shape)

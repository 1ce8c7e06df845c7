"""The doors of a service: each sends a request with named inputs its own way, and says what became of it.

A new door is a function here and a line in ``DOORS``; ``tests/doors`` then asks it everything.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

import torchpipe_py.errors
from kit.clients import IDL, Client, HttpClient, infer_rpc
from kit.services import ROOT, LocalServer
from kit.waits import WAIT
from torchpipe_py import Detections, pipe
from torchpipe_py.ray.arguments import Arguments
from torchpipe_py.ray.service import PipeReplica
from torchpipe_py.wire.detections import tensors_of
from torchpipe_py.wire.errors import code_of, reason
from torchpipe_py.wire.http import HttpRequest

HAS_GRPC = all(find_spec(name) for name in ("grpc", "google"))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LIMITS: dict[str, Any] = {
    "max_message_bytes": 2**17, "max_reply_bytes": 2**16, "max_text_bytes": 2**17, "max_batch": 8,
}  # fmt: skip

Arrays = Mapping[str, Any]


class Asked(NamedTuple):
    """A request to the root ``model``: arrays of one item each by the names of inputs, and the outputs wanted.

    ``inputs`` that are not arrays are for models that declare none. ``parameters`` are for backends.
    """

    model: str
    inputs: Arrays
    outputs: Sequence[str]
    deadline_ms: float | None = None
    parameters: Mapping[str, Any] = {}


class ClientLeftError(TimeoutError):
    """The client has left before its answer."""


class Answer(NamedTuple):
    """``code`` is ``ok``, or the error's; ``values`` are arrays, or what a custom backend made, by output.

    ``sent`` and ``received`` are the bytes of the messages, uncompressed, of a good one over a wire.
    """

    code: str
    values: Arrays
    message: str = ""
    sent: int = 0
    received: int = 0


class House:
    """A pipe, a server of all its protocols, and Ray's replica of the same configuration."""

    def __init__(self, config: dict[str, Any], stack: ExitStack, **limits: Any) -> None:
        limits = {**LIMITS, **limits}
        self.pipe = stack.enter_context(pipe(config))
        grpc_port = 0 if HAS_GRPC else -1
        self.server = stack.enter_context(LocalServer(self.pipe, grpc_port=grpc_port, **limits))
        self.replica = PipeReplica(Arguments("configs/demo.toml", **limits, drain_seconds=10.0), config, str(ROOT))
        stack.callback(lambda: asyncio.run(self.replica.end()))
        self.seconds = WAIT
        """How long a client waits for its answer before it leaves."""

    def pipe_of(self, door: str) -> pipe:
        """The pipe that answers."""
        return self.replica._served.pipe if door.startswith("ray") else self.pipe

    def connect(self, cls: type, **options: Any) -> Any:
        client = cls(self.server.port, **options)
        client.sock.settimeout(self.seconds)
        return client


@contextmanager
def house(config: dict[str, Any], **limits: Any) -> Iterator[House]:
    """A house within ``LIMITS``, changed by ``limits``."""
    with ExitStack() as stack:
        yield House(config, stack, **limits)


# -- forms of arrays ------------------------------------------------------------------------------------------------


def datatype_of(array: np.ndarray) -> str:
    """The Open Inference Protocol's name of a type."""
    if array.dtype == object:
        return "BYTES"
    kinds = {"b": "BOOL", "u": f"UINT{8 * array.itemsize}", "i": f"INT{8 * array.itemsize}"}
    return "BF16" if array.dtype == BFLOAT16 else kinds.get(array.dtype.kind, f"FP{8 * array.itemsize}")


def dtype_of(datatype: str) -> np.dtype:
    names = {"BYTES": "object", "BOOL": "bool", "BF16": BFLOAT16}
    return np.dtype(names.get(datatype, datatype.lower().replace("fp", "float")))


def to_raw(array: np.ndarray) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return b"".join([struct.pack("<I", len(text.encode())) + text.encode() for text in array.ravel().tolist()])


def from_raw(datatype: str, shape: Sequence[int], raw: bytes) -> np.ndarray:
    if datatype != "BYTES":
        return np.frombuffer(raw, dtype_of(datatype)).reshape(shape)
    texts, start = [], 0
    while start < len(raw):
        (size,) = struct.unpack_from("<I", raw, start)
        texts.append(raw[start + 4 : start + 4 + size].decode())
        start += 4 + size
    return to_texts(texts, shape)


def to_texts(texts: Sequence[str], shape: Sequence[int]) -> np.ndarray:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(tuple(shape))


def to_tensor(array: np.ndarray) -> Any:
    """As a request in Python has it."""
    if array.dtype == object:
        return array
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def from_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        value = value.view(torch.int16).numpy().view(BFLOAT16)
    # A scalar has one dimension on every wire.
    return np.atleast_1d(value) if isinstance(value, (torch.Tensor, np.ndarray)) else value


# -- in process -----------------------------------------------------------------------------------------------------


def python(house: House, asked: Asked) -> Answer:
    """A model's inputs are a dict under ``data``; so are its outputs, in the model's order, its result."""
    data: dict[str, Any] = {"node_name": asked.model}
    if asked.parameters:
        data["parameters"] = dict(asked.parameters)
    try:
        names = [spec.name for spec in house.pipe.signature(asked.model).inputs]
        given = {name: to_tensor(value) for name, value in asked.inputs.items()}
        data["data"] = given if names and names != ["data"] else given.pop("data")
        if asked.deadline_ms is not None:
            house.pipe(data, asked.deadline_ms / 1000)
        else:
            future = house.pipe.submit(data)
            if not wait([future], house.seconds).done:
                future.cancel()
                raise ClientLeftError
            future.result()
        if "result" not in data:
            raise reason(data, "result")
    except torchpipe_py.errors.TorchpipeError as error:
        return Answer(code_of(error), {}, str(error))
    return Answer("ok", outputs_of(house, asked, data["result"]))


def outputs_of(house: House, asked: Asked, result: Any) -> Arrays:
    """The outputs that are asked for, of a result in Python."""
    if isinstance(result, Detections):
        tensors = tensors_of("result", [result])
        return {name: tensors.get(name, result) for name in asked.outputs}
    declared = [spec.name for spec in house.pipe.signature(asked.model).outputs] or ["result"]
    values = result if len(declared) > 1 else [result]
    found = {name: from_tensor(value) for name, value in zip(declared, values, strict=True)}
    return {name: found[name] for name in asked.outputs}


def python_rows(house: House, asked: Asked) -> Answer:
    """All rows in one call."""
    names = [spec.name for spec in house.pipe.signature(asked.model).inputs]
    items: list[dict[str, Any]] = []
    for row in rows_of(asked):
        given = {name: to_tensor(value) for name, value in row.items()}
        items.append({"data": given if names != ["data"] else given["data"], "node_name": asked.model})
    try:
        house.pipe(items)
        for item in items:
            if "result" not in item:
                raise reason(item, "result")
    except torchpipe_py.errors.TorchpipeError as error:
        return Answer(code_of(error), {}, str(error))
    return Answer("ok", joined([outputs_of(house, asked, item["result"]) for item in items]))


def rows_of(asked: Asked) -> list[Arrays]:
    """The inputs of each row, whose arrays have a first dimension of 1."""
    count = len(next(iter(asked.inputs.values())))
    return [{name: value[index : index + 1] for name, value in asked.inputs.items()} for index in range(count)]


def joined(parts: Sequence[Arrays]) -> Arrays:
    """The outputs of rows as arrays of all of them."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    if "offsets" in arrays:  # of detections: each row's begin with 0
        arrays["offsets"] = np.cumsum([0, *[part["offsets"][-1] for part in parts]])
    return arrays


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


# -- Thrift ---------------------------------------------------------------------------------------------------------


def thrift(house: House, asked: Asked) -> Answer:
    deadline_ms = None if asked.deadline_ms is None else int(asked.deadline_ms)
    with house.connect(Client) as client:
        try:
            inputs = {name: IDL.Value(tensor=_thrift_tensor(value)) for name, value in asked.inputs.items()}
            more = {"outputs": list(asked.outputs), "node_name": asked.model, "deadline_ms": deadline_ms}
            outputs = client.infer(inputs, **more, parameters=_thrift_parameters(asked))
        except IDL.InferenceError as error:
            return Answer(error.code, {}, error.message)
        values = {name: _from_value(outputs[name]) for name in asked.outputs}
        return Answer("ok", values, "", client.counted.sent, client.counted.received)


def thrift_many(house: House, asked: Asked, rows: Sequence[Arrays] = ()) -> Answer:
    """The outcome of one request of one, or of several ``rows``, over the framed transport."""
    deadline_ms = None if asked.deadline_ms is None else int(asked.deadline_ms)
    inputs = [
        {name: IDL.Value(tensor=_thrift_tensor(value)) for name, value in row.items()} for row in rows or [asked.inputs]
    ]
    more = {"outputs": list(asked.outputs), "node_name": asked.model, "deadline_ms": deadline_ms}
    more["parameters"] = _thrift_parameters(asked)
    with house.connect(Client, framed=True) as client:
        try:
            outcomes = client.call("infer_many", inputs=inputs, **more)
        except IDL.InferenceError as error:
            return Answer(error.code, {}, error.message)
        for outcome in outcomes:
            if outcome.error is not None:
                return Answer(outcome.error.code, {}, outcome.error.message)
        parts = [{name: _from_value(outcome.response.outputs[name]) for name in asked.outputs} for outcome in outcomes]
        sent = client.counted.sent - 4  # the length of a request's frame is not part of it
        return Answer("ok", joined(parts), "", sent, client.counted.received)


def _thrift_parameters(asked: Asked) -> str | None:
    return json.dumps(dict(asked.parameters)) if asked.parameters else None


def _thrift_tensor(array: np.ndarray) -> Any:
    dtype = "string" if array.dtype == object else array.dtype.name
    return IDL.Tensor(dtype=dtype, shape=list(array.shape), data=to_raw(array))


def _from_value(value: Any) -> Any:
    if value.text is not None:
        return json.loads(value.text)
    tensor = value.tensor
    datatype = "BYTES" if tensor.dtype == "string" else datatype_of(np.empty(0, tensor.dtype))
    return from_raw(datatype, tensor.shape or [1], tensor.data)


# -- HTTP -----------------------------------------------------------------------------------------------------------


class Http(NamedTuple):
    """A request over HTTP, and what reads a good answer."""

    path: str
    body: bytes
    fields: dict[str, str]
    read: Callable[[bytes, Mapping[str, str]], Arrays]
    sent: int = 0
    """Bytes of a body before its compression; 0 if there is none."""


def infer(asked: Asked) -> Http:
    inputs = {name: _json_array(value) for name, value in asked.inputs.items()}
    more: dict[str, Any] = {} if asked.deadline_ms is None else {"deadline_ms": asked.deadline_ms}
    if asked.parameters:
        more["parameters"] = dict(asked.parameters)
    body = {"inputs": inputs, "outputs": list(asked.outputs), "node_name": asked.model, **more}
    return Http("/infer", json.dumps(body).encode(), {"content-type": "application/json"}, _read_infer)


def infer_rows(asked: Asked) -> Http:
    """All rows in one call."""
    inputs = [{name: _json_array(value) for name, value in row.items()} for row in rows_of(asked)]
    body = {"inputs": inputs, "outputs": list(asked.outputs), "node_name": asked.model}
    return Http("/infer", json.dumps(body).encode(), {"content-type": "application/json"}, _read_rows)


class RowError(Exception):
    """A row has failed; the arguments are code and message."""


def _read_rows(body: bytes, fields: Mapping[str, str]) -> Arrays:
    outcomes = json.loads(body)["outcomes"]
    for outcome in outcomes:
        if "code" in outcome:
            raise RowError(outcome["code"], outcome["error"])
    return joined(
        [{name: _from_json_array(value) for name, value in outcome["outputs"].items()} for outcome in outcomes]
    )


def _json_array(array: np.ndarray) -> dict[str, Any]:
    dtype = "string" if array.dtype == object else array.dtype.name
    return {"dtype": dtype, "shape": list(array.shape), "data": array.ravel().tolist()}


def _read_infer(body: bytes, fields: Mapping[str, str]) -> Arrays:
    return {name: _from_json_array(value) for name, value in json.loads(body).items()}


def _from_json_array(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data"}:
        return value
    shape = value["shape"] or [1]
    if value["dtype"] == "string":
        return to_texts(value["data"], shape)
    return np.array(value["data"], value["dtype"]).reshape(shape)


def oip(asked: Asked) -> Http:
    def member(name: str, array: np.ndarray) -> dict[str, Any]:
        return {
            "name": name,
            "datatype": datatype_of(array),
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }

    inputs = [member(name, array) for name, array in asked.inputs.items()]
    return Http(_oip_path(asked), json.dumps(_oip_body(asked, inputs)).encode(), {}, _read_oip)


def oip_binary(asked: Asked) -> Http:
    parts = {name: to_raw(array) for name, array in asked.inputs.items()}
    inputs = [
        {**_member(name, array), "parameters": {"binary_data_size": len(parts[name])}}
        for name, array in asked.inputs.items()
    ]
    head = json.dumps(_oip_body(asked, inputs, binary_data_output=True)).encode()
    fields = {"inference-header-content-length": str(len(head))}
    return Http(_oip_path(asked), head + b"".join(parts.values()), fields, _read_oip)


def _member(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}


def _oip_path(asked: Asked) -> str:
    return f"/v2/models/{asked.model}/infer"


def _oip_body(asked: Asked, inputs: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
    parameters.update(asked.parameters)
    if asked.deadline_ms is not None:
        parameters["deadline_ms"] = asked.deadline_ms
    return {"inputs": inputs, "parameters": parameters, "outputs": [{"name": name} for name in asked.outputs]}


def _read_oip(body: bytes, fields: Mapping[str, str]) -> Arrays:
    size = int(fields.get("inference-header-content-length", len(body)))
    head, start, found = json.loads(body[:size]), size, {}
    for output in head["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        count = output.get("parameters", {}).get("binary_data_size")
        if count is not None:
            found[name] = from_raw(datatype, shape, body[start : start + count])
            start += count
        elif datatype == "BYTES":
            found[name] = to_texts(output["data"], shape)
        else:
            found[name] = np.array(output["data"], dtype_of(datatype)).reshape(shape)
    return found


_WINDOWS = {"gzip": 31, "deflate": 15}


def compressed(coding: str, form: Callable[[Asked], Http]) -> Callable[[Asked], Http]:
    """The request with its body compressed, whose answer may be, too."""
    window = _WINDOWS[coding]

    def made(asked: Asked) -> Http:
        request = form(asked)
        packer = zlib.compressobj(wbits=window)
        fields = {**request.fields, "content-encoding": coding, "accept-encoding": coding}

        packed = packer.compress(request.body) + packer.flush()
        return Http(request.path, packed, fields, request.read, len(request.body))

    return made


def over_http(form: Callable[[Asked], Http], is_chunked: bool = False) -> Door:
    """``is_chunked``: the length of the body is not declared."""

    def ask(house: House, asked: Asked) -> Answer:
        request = form(asked)
        named = "".join(f"{name}: {value}\r\n" for name, value in request.fields.items())
        length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(request.body)}"
        head = f"POST {request.path} HTTP/1.1\r\nHost: a\r\n{length}\r\n{named}\r\n"
        with house.connect(HttpClient) as client:
            client.send(head.encode() + (in_chunks(request.body) if is_chunked else request.body))
            answer = client.read()
        return _of_http(request, answer.status, answer.body, answer.fields)

    return ask


def in_chunks(body: bytes, size: int = 5_000) -> bytes:
    """A body as it is sent by a client that does not know its length."""
    starts = range(0, len(body), size)
    return b"".join(
        [b"%x\r\n%b\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in [*starts, len(body)]]
    )


def over_ray(form: Callable[[Asked], Http]) -> Door:
    """As Ray Serve hands requests over."""

    def ask(house: House, asked: Asked) -> Answer:
        request = form(asked)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(request.body), 5_000):
                yield request.body[at : at + 5_000]

        given = HttpRequest("POST", request.path)
        given.fields = dict(request.fields)

        async def run() -> Any:
            try:
                return await asyncio.wait_for(house.replica.answer(given, pieces()), house.seconds)
            except asyncio.TimeoutError:  # not the built-in one before Python 3.11
                raise ClientLeftError from None

        answer = asyncio.run(run())
        return _of_http(request, answer.status, answer.body, answer.headers)

    return ask


def _of_http(request: Http, status: int, body: bytes, fields: Mapping[str, str]) -> Answer:
    if status == 200:
        told = {name.lower(): text for name, text in fields.items()}
        if "content-encoding" in told:
            assert told["content-encoding"] == request.fields["accept-encoding"]
            body = zlib.decompress(body, _WINDOWS[told["content-encoding"]])
        try:
            values = request.read(body, told)
        except RowError as error:
            code, message = error.args
            return Answer(code, {}, message)
        return Answer("ok", values, "", request.sent or len(request.body), len(body))
    failed = json.loads(body)
    return Answer(failed["code"], {}, failed["error"])


# -- gRPC -----------------------------------------------------------------------------------------------------------


def rpc(house: House, asked: Asked, is_compressed: bool = False) -> Answer:
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    more = {name: {kinds[type(value)]: value} for name, value in asked.parameters.items()}
    if asked.deadline_ms is not None:
        more["deadline_ms"] = {"double_param": asked.deadline_ms}
    request = message("inference.ModelInferRequest")(
        model_name=asked.model,
        inputs=[_member(name, array) for name, array in asked.inputs.items()],
        outputs=[{"name": name} for name in asked.outputs],
        parameters=more,
        raw_input_contents=[to_raw(array) for array in asked.inputs.values()],
    )
    compression = grpc.Compression.Gzip if is_compressed else None
    try:
        found = infer_rpc(house.server.grpc_port, request, house.seconds, compression=compression)
    except TimeoutError:
        raise ClientLeftError from None
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata() or ())
        return Answer(str(told.get("error-code") or _RPC_CODES[error.code().name]), {}, error.details())
    outputs = zip(found.outputs, found.raw_output_contents, strict=True)
    values = {output.name: from_raw(output.datatype, list(output.shape), raw) for output, raw in outputs}
    return Answer("ok", values, "", request.ByteSize(), found.ByteSize())


_RPC_CODES = {"RESOURCE_EXHAUSTED": "too_large"}
"""Of errors that gRPC makes itself."""

Door = Callable[[House, Asked], Answer]
DOORS: dict[str, Door] = {
    "python": python,
    "thrift": thrift,
    "thrift_many": thrift_many,
    "infer": over_http(infer),
    "oip": over_http(oip),
    "oip_binary": over_http(oip_binary),
    "infer_gzip": over_http(compressed("gzip", infer)),
    "oip_binary_deflate": over_http(compressed("deflate", oip_binary)),
    "infer_chunked": over_http(infer, is_chunked=True),
    "oip_binary_chunked": over_http(oip_binary, is_chunked=True),
    **({"grpc": rpc, "grpc_gzip": partial(rpc, is_compressed=True)} if HAS_GRPC else {}),
    "ray_infer": over_ray(infer),
    "ray_oip_binary": over_ray(oip_binary),
    "ray_infer_gzip": over_ray(compressed("gzip", infer)),
}

ROW_DOORS: dict[str, Door] = {
    "python": python_rows,
    "thrift_many": lambda house, asked: thrift_many(house, asked, rows_of(asked)),
    "infer": over_http(infer_rows),
    "infer_chunked": over_http(infer_rows, is_chunked=True),
    **{name: DOORS[name] for name in ("oip", "oip_binary", "oip_binary_deflate", "oip_binary_chunked")},
    **({"grpc": rpc} if HAS_GRPC else {}),
    "ray_infer": over_ray(infer_rows),
    "ray_oip_binary": over_ray(oip_binary),
}
"""Doors for a call with several rows, each a request to a model with a batch dimension."""


def same(found: Any, expected: Any) -> bool:
    """Whether a door gave this value: each bit of an array, whose bfloat16 may come as ``float32``."""
    if not is_array(expected):
        return bool(_as_json(found) == expected)
    if not is_array(found) or found.shape != expected.shape:
        return False
    if expected.dtype == object:
        return bool(found.tolist() == expected.tolist())
    if expected.dtype == BFLOAT16 and found.dtype == np.float32:
        expected = expected.astype(np.float32)
    return bool(found.dtype == expected.dtype and found.tobytes() == expected.tobytes())


def _as_json(found: Any) -> Any:
    """A value that the Open Inference Protocol has as one text of JSON."""
    is_text = is_array(found) and found.dtype == object and found.size == 1
    return json.loads(found.item()) if is_text else found

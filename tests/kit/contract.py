"""What every way into a pipe does with the same requests: the ways, and the table of what comes out.

A way is a function that asks a ``House`` for one request and says what became of it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlencode

import numpy as np
import thriftpy2
import torch
from thriftpy2.thrift import TApplicationException
from torchpipe_server import Handler
from torchpipe_server.methods.custom import CustomHandler

import torchpipe_py.errors
from kit.clients import IDL, Client, HttpClient, infer_rpc
from kit.engines import workers_of
from kit.inside import pipes_of
from kit.services import ROOT, LocalServer
from kit.steered import steering
from kit.waits import WAIT
from torchpipe_py import InvalidRequest, NoResult, pipe
from torchpipe_py.methods.routes import Routes, Served
from torchpipe_py.ray import service as replica_module
from torchpipe_py.ray.arguments import Arguments
from torchpipe_py.ray.service import PipeReplica
from torchpipe_py.wire.errors import reason
from torchpipe_py.wire.http import HttpRequest

HAS_GRPC = all(find_spec(name) for name in ("grpc", "google"))
MOST_INFLIGHT = 4
LIMITS: dict[str, Any] = {"max_message_bytes": 2**21, "max_reply_bytes": 2**19, "drain_seconds": 10.0}
CONFIG = {"global": {"max_inflight": MOST_INFLIGHT}, "main": {"backend": "Steered", "instance_num": 1}}


class Asked(NamedTuple):
    """A request: its ``data``, other keys, and what a caller may say besides."""

    data: Any = b"abc"
    inputs: dict[str, Any] = {}  # noqa: RUF012
    outputs: list[str] | None = None
    node_name: str | None = None
    deadline_ms: float | None = None
    priority: int | None = None

    @property
    def is_plain(self) -> bool:
        return self[1:4] == ({}, None, None)


class Outcome(NamedTuple):
    """``label`` is the result, or what is under the first key that is asked for; ``code`` is ``ok``, or the error's."""

    code: str
    label: Any = None
    message: str = ""
    retry_after_ms: int | None = None

    @classmethod
    def of(cls, error: Any) -> Outcome:
        message = getattr(error, "message", None) or torchpipe_py.errors.message_of(error)
        return cls(getattr(error, "code", "internal"), None, message, getattr(error, "retry_after_ms", None))


class Own(Handler):
    """A handler that leaves all errors to the service."""

    service = thriftpy2.load_fp(
        io.StringIO("service Own { string ask(1: binary data, 2: double timeout) }"), "contract_own_thrift"
    ).Own
    routes: ClassVar[dict[str, str]] = {"POST /own": "post"}

    async def ask(self, data: bytes, timeout: float) -> str:
        return str((await self.run({"data": data}, timeout or None))["result"][0])

    async def post(self, request: Any) -> dict[str, Any]:
        timeout = float(request.fields.get("timeout", 0))
        return {"label": (await self.run({"data": request.body}, timeout or None))["result"][0]}


class House:
    """One pipe behind a server of the service's methods and one of a handler's; another whose node is shared; Ray's."""

    def __init__(self, stack: ExitStack) -> None:
        stack.enter_context(steering())
        self.pipe = stack.enter_context(pipe(CONFIG))
        grpc_port = 0 if HAS_GRPC else -1
        self.server = stack.enter_context(LocalServer(self.pipe, grpc_port=grpc_port, **LIMITS))
        own = CustomHandler(Own, self.pipe)
        served = Served(own.methods, Routes(own.routes))
        self.own = stack.enter_context(LocalServer(self.pipe, make_served=lambda loop: served, **LIMITS))
        (worker,) = stack.enter_context(workers_of({**CONFIG, "main": {**CONFIG["main"], "shared": True}}))
        self.shared, self.engine = worker.pipe, worker.server.pipe
        with pipes_of(replica_module) as pipes:
            self.replica = PipeReplica(Arguments("configs/demo.toml", **LIMITS), CONFIG, str(ROOT))
        (self.replica_pipe,) = pipes
        stack.callback(lambda: asyncio.run(self.replica.end()))
        self.seconds = WAIT
        """How long a client waits for its answer before it leaves."""

    def pipe_of(self, way: str) -> pipe:
        """The pipe that answers."""
        return {"shared": self.shared, **dict.fromkeys(REPLICA, self.replica_pipe)}.get(way, self.pipe)

    def connect(self, cls: type = Client, port: int = 0, **options: Any) -> Any:
        client = cls(port or self.server.port, **options)
        client.sock.settimeout(self.seconds)
        return client


@contextmanager
def house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


# -- in process -----------------------------------------------------------------------------------------------------


def call(run: pipe, asked: Asked) -> Outcome:
    data: dict[str, Any] = {"data": asked.data, **asked.inputs}
    if asked.node_name is not None:
        data["node_name"] = asked.node_name
    if asked.priority is not None:
        data["priority"] = asked.priority
    try:
        run(data, None if asked.deadline_ms is None else asked.deadline_ms / 1000)
        key = (asked.outputs or ["result"])[0]
        if key not in data:
            raise reason(data, key)
    except Exception as error:
        return Outcome.of(error)
    return Outcome("ok", data[key][0] if key == "result" else data[key])


# -- Thrift ---------------------------------------------------------------------------------------------------------


def infer_batch(house: House, asked: Asked) -> Outcome:
    params = IDL.InferenceParams(uuid="x", data=asked.data)
    return _thrift(house, lambda client: client.call("infer_batch", params=params).label)


def infer_many(house: House, asked: Asked) -> Outcome:
    """The outcome of one image of one."""

    def ask(client: Client) -> Any:
        deadline_ms = None if asked.deadline_ms is None else int(asked.deadline_ms)
        (outcome,) = client.infer_many([asked.data], deadline_ms, asked.priority)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result.label

    return _thrift(house, ask)


def infer(house: House, asked: Asked, **framing: bool) -> Outcome:
    inputs = {"data": IDL.Value(bytes=asked.data), **{key: IDL.Value(text=text) for key, text in asked.inputs.items()}}
    more = {"outputs": asked.outputs, "node_name": asked.node_name, "priority": asked.priority}

    def ask(client: Client) -> Any:
        deadline_ms = None if asked.deadline_ms is None else int(asked.deadline_ms)
        outputs = client.infer(inputs, deadline_ms=deadline_ms, **more)
        return (outputs.get("label") or outputs[(asked.outputs or ["result"])[0]]).text

    return _thrift(house, ask, **framing)


def _thrift(house: House, ask: Callable[[Client], Any], **framing: bool) -> Outcome:
    with house.connect(**framing) as client:
        try:
            return Outcome("ok", ask(client))
        except (IDL.InferenceError, TApplicationException) as error:
            return Outcome.of(error)


def own_method(house: House, asked: Asked) -> Outcome:
    """The code is that of the exception whose name the client is told."""
    with house.connect(port=house.own.port) as client:
        try:
            seconds = (asked.deadline_ms or 0) / 1000
            return Outcome("ok", client.call("ask", Own.service, data=asked.data, timeout=seconds))
        except TApplicationException as error:
            name, _, message = error.message.partition(": ")
            return Outcome(getattr(getattr(torchpipe_py.errors, name, None), "code", "internal"), None, message)


# -- HTTP -----------------------------------------------------------------------------------------------------------


def raw(house: House, asked: Asked) -> Outcome:
    return http(house, f"/infer?{urlencode(_options(asked))}", asked.data)


def as_json(house: House, asked: Asked) -> Outcome:
    return http(house, "/infer", as_json_body(asked), content_type="application/json")


def as_json_body(asked: Asked) -> bytes:
    inputs = {"data": {"b64": base64.b64encode(asked.data).decode()}, **asked.inputs}
    options = {**_options(asked), **({"outputs": asked.outputs} if asked.outputs else {})}
    return json.dumps({"inputs": inputs, **options}).encode()


def form(house: House, asked: Asked) -> Outcome:
    fields = {**asked.inputs, **_options(asked)}
    parts = [('name="file"; filename="a.jpg"', asked.data)]
    parts += [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
    pieces = [f"--xyz\r\nContent-Disposition: form-data; {of}\r\n\r\n".encode() + body + b"\r\n" for of, body in parts]
    body = b"".join(pieces) + b"--xyz--\r\n"
    return http(house, "/infer", body, content_type="multipart/form-data; boundary=xyz")


def oip(house: House, asked: Asked) -> Outcome:
    return http(house, "/v2/models/test/infer", _oip(asked, {"data": [asked.data.decode()]}))


def oip_binary(house: House, asked: Asked) -> Outcome:
    body, fields = _oip_binary(asked)
    return http(house, "/v2/models/test/infer", body, **fields)


def _oip_binary(asked: Asked) -> tuple[bytes, dict[str, str]]:
    binary = struct.pack("<I", len(asked.data)) + asked.data
    head = _oip(asked, {"parameters": {"binary_data_size": len(binary)}})
    return head + binary, {"inference_header_content_length": str(len(head))}


def own_route(house: House, asked: Asked) -> Outcome:
    return http(house, "/own", asked.data, house.own.port, timeout=str((asked.deadline_ms or 0) / 1000))


def _options(asked: Asked) -> dict[str, Any]:
    given = {"node_name": asked.node_name, "deadline_ms": asked.deadline_ms, "priority": asked.priority}
    given["outputs"] = asked.outputs and ",".join(asked.outputs)
    return {name: value for name, value in given.items() if value is not None}


def _oip(asked: Asked, data: dict[str, Any]) -> bytes:
    inputs = [{"name": "data", "datatype": "BYTES", "shape": [1], **data}]
    inputs += [{"name": key, "datatype": "BYTES", "shape": [1], "data": [text]} for key, text in asked.inputs.items()]
    parameters = {name: value for name, value in _options(asked).items() if name != "outputs"}
    given: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    if asked.outputs:
        given["outputs"] = [{"name": name} for name in asked.outputs]
    return json.dumps(given).encode()


def http(house: House, path: str, body: bytes, port: int = 0, **fields: str) -> Outcome:
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{named}\r\n"
    with house.connect(HttpClient, port) as client:
        client.send(head.encode() + body)
        return _of_json(client.read().body)


def _of_json(body: bytes) -> Outcome:
    answer = json.loads(body)
    if "code" in answer:
        return Outcome(answer["code"], None, answer["error"], answer.get("retry_after_ms"))
    if "model_name" in answer:
        return Outcome("ok", answer["outputs"][0]["data"][0])
    return Outcome("ok", answer.get("label", next(iter(answer.values()))))


def replica(house: House, asked: Asked) -> Outcome:
    return _replica(house, "/infer", as_json_body(asked), content_type="application/json")


def replica_oip(house: House, asked: Asked) -> Outcome:
    body, fields = _oip_binary(asked)
    return _replica(house, "/v2/models/demo/infer", body, **fields)


def _replica(house: House, path: str, body: bytes, **fields: str) -> Outcome:
    """HTTP, as Ray Serve hands it over."""

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    request = HttpRequest("POST", path)
    request.fields = {name.replace("_", "-"): value for name, value in fields.items()}
    return _of_json(asyncio.run(house.replica.answer(request, pieces())).body)


def as_rpc(asked: Asked, model_name: str = "test") -> Any:
    """The message that asks so; a deadline that gRPC cannot say is a parameter."""
    from torchpipe_py.methods.rpc.messages import message

    given = {name: value for name, value in _options(asked).items() if name != "outputs"}
    if asked.deadline_ms is not None and asked.deadline_ms > 0:
        del given["deadline_ms"]
    kinds = {int: "int64_param", float: "double_param", str: "string_param"}
    named = {"data": asked.data, **{name: text.encode() for name, text in asked.inputs.items()}}
    return message("inference.ModelInferRequest")(
        model_name=model_name,
        inputs=[{"name": name, "datatype": "BYTES", "shape": [1]} for name in named],
        outputs=[{"name": name} for name in asked.outputs or ()],
        parameters={name: {kinds[type(value)]: value} for name, value in given.items()},
        raw_input_contents=[struct.pack("<I", len(value)) + value for value in named.values()],
    )


def rpc(house: House, asked: Asked) -> Outcome:
    import grpc

    seconds = asked.deadline_ms / 1000 if asked.deadline_ms and asked.deadline_ms > 0 else None
    try:
        found = infer_rpc(house.server.grpc_port, as_rpc(asked), house.seconds, timeout=seconds)
    except grpc.RpcError as error:
        said = dict(error.trailing_metadata() or ())
        code = said.get("error-code") or RPC_CODES[error.code().name]
        after = said.get("grpc-retry-pushback-ms")
        return Outcome(code, None, error.details(), after and int(after))
    return _of_rpc(found)


def _of_rpc(found: Any) -> Outcome:
    output, raw = found.outputs[0], found.raw_output_contents[0]
    if output.datatype == "BYTES":
        return Outcome("ok", raw[4 : 4 + struct.unpack_from("<I", raw)[0]].decode())
    return Outcome("ok", np.frombuffer(raw, output.datatype.lower())[0])


def replica_rpc(house: House, asked: Asked) -> Outcome:
    from torchpipe_py.methods.rpc.messages import message

    given = as_rpc(asked, "demo")
    if asked.deadline_ms is not None:
        given.parameters["deadline_ms"].double_param = asked.deadline_ms
    path = "/inference.GRPCInferenceService/ModelInfer"
    answer = asyncio.run(house.replica.rpc(path, given.SerializeToString(), {}))
    if answer.code is None:
        return _of_rpc(message("inference.ModelInferResponse").FromString(answer.data))
    after = answer.headers.get("grpc-retry-pushback-ms")
    return Outcome(answer.headers["error-code"], None, answer.text, after and int(after))


RPC_CODES = {"DEADLINE_EXCEEDED": "deadline_exceeded", "RESOURCE_EXHAUSTED": "too_large"}
"""Of errors that the client's or the server's gRPC makes."""

Way = Callable[[House, Asked], Outcome]
WAYS: dict[str, Way] = {
    "pipe": lambda house, asked: call(house.pipe, asked),
    "shared": lambda house, asked: call(house.shared, asked),
    "infer_batch": infer_batch,
    "infer_many": infer_many,
    "infer": infer,
    "infer, framed and compact": lambda house, asked: infer(house, asked, framed=True, compact=True),
    "raw": raw,
    "json": as_json,
    "form": form,
    "oip": oip,
    "oip_binary": oip_binary,
    "own_method": own_method,
    "own_route": own_route,
    "replica": replica,
    "replica_oip": replica_oip,
    **({"grpc": rpc, "replica_rpc": replica_rpc} if HAS_GRPC else {}),
}
REPLICA = ("replica", "replica_oip", *(("replica_rpc",) if HAS_GRPC else ()))
IN_PROCESS = ("pipe", "shared", *REPLICA)
PLAIN = ("infer_batch", "infer_many", "own_method", "own_route")
"""Those whose requests have nothing but ``data`` and a deadline."""


# -- the table ------------------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("of __str__")


class TooDark(NoResult):
    """A reason of a user's."""


class TooBright(NoResult):
    code = "too_bright"


class Faulty(TooBright):
    """Its ``code`` or its ``retry_after_ms`` is of no use, or cannot be read."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("at fault")
        vars(self).update(attributes)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is Ellipsis:
            raise RuntimeError("no such attribute")
        return value


CODES = {"number": 404, "bytes": b"x", "empty": "", "lines": "a\nb", "umlaut": "größe", "ok": "ok", "raises": ...}
RETRIES = {"text": "soon", "infinity": float("inf"), "NaN": float("nan"), "years": 2**40, "raises": ...}
itself: list[Any] = [1]
itself.append(itself)
VALUES: dict[str, Any] = {
    "unprintable": Unprintable(), "leaving": Leaving(), "text": "a text", "stop": StopIteration(), "thing": object(),
    "surrogate": NoResult("half \ud800"),
    "own": ValueError("too dark"), "reason": TooDark("too dark"), "coded": TooBright("too bright"),
    "asked": InvalidRequest("ask for less"),
    "path": OSError(2, "No such file or directory", "/srv/secret folder/model.onnx"),
    "label": ("ü\ud800", 0.5), "ranking": [("a", np.float32(0.75)), (2, 0.25)],
    "scalars": (np.int64(3), np.float32(0.5)), "nan": ("a", float("nan")), "infinite": ("a", 10**400),
    "first": [("a", float("inf")), ("b", 0.5)],
    "itself": itself, "array": np.array([object()], object), "float8": torch.zeros(2).to(torch.float8_e5m2),
    "huge": 2**200,
    **{f"code {name}": Faulty(code=value) for name, value in CODES.items()},
    **{f"retry {name}": Faulty(retry_after_ms=value) for name, value in RETRIES.items()},
}  # fmt: skip


class Row(NamedTuple):
    """``said``: the label, or a part of the message. ``unlike``: ways with another code; ``ways``: those to try."""

    asked: Asked
    code: str = "ok"
    said: str = ""
    unlike: Mapping[str, str] = {}
    ways: Iterable[str] = ()

    def outcome_for(self, way: str) -> tuple[str, str]:
        code = self.unlike.get(way, self.code)
        return code, self.said if code == self.code else ""


THRIFT = ("infer_batch", "infer_many", "infer", "infer, framed and compact")
OIP = ("oip", "oip_binary", *REPLICA[1:], *(("grpc",) if HAS_GRPC else ()))
HTTP = ("raw", "json", "form", *OIP, "replica")
OWN = ("own_method", "own_route")
SERVED = (*THRIFT, *HTTP)
NAMED = [way for way in WAYS if way != OWN[0]]
"""Those that tell a client the code of a class that it does not know."""

ROWS = {
    "result": Row(Asked(), "ok", "abc"),
    "no result": Row(Asked(b"none"), "no_result", "on request"),
    "no image": Row(Asked(b"corrupt"), "decode_error", "no image"),
    "a backend raises": Row(Asked(b"raise"), "backend_error", "node 'main': Steered: ValueError: on request"),
    "the root by name": Row(Asked(node_name="main"), "ok", "abc"),
    "unknown node": Row(Asked(node_name="mian"), "unknown_node", "no root 'mian'; did you mean 'main'?"),
    "another key": Row(
        Asked(inputs={"mine": "x"}, outputs=["mine"]), "ok", "x", ways=[way for way in WAYS if way != "raw"]
    ),
    "an unknown key": Row(
        Asked(outputs=["resul"]), "invalid_request", "'resul'; "
    ),
    "a text as error": Row(Asked(b"error text"), "no_result", "a text"),
    "half a character in an error": Row(Asked(b"error surrogate"), "no_result", "half ?", ways=(*SERVED, *OWN)),
    "an error with a path": Row(Asked(b"error path"), "internal", "directory: 'model.onnx'", ways=(*SERVED, *OWN)),
    "an error without text": Row(Asked(b"error unprintable"), "internal", "whose message cannot be read"),
    "an exception of the user's": Row(Asked(b"error own"), "internal", "too dark"),
    "a reason of the user's": Row(Asked(b"error reason"), "no_result", "too dark", ways=NAMED),
    "a reason with a code of its own": Row(Asked(b"error coded"), "too_bright", "too bright", ways=NAMED),
    **{f"a code: {name}": Row(Asked(f"error code {name}".encode()), "internal", ways=SERVED) for name in CODES},
    **{f"a retry: {name}": Row(Asked(f"error retry {name}".encode()), "too_bright", ways=SERVED) for name in RETRIES},
    "a request that a backend refuses": Row(Asked(b"error asked"), "invalid_request", "ask for less"),
    "an error that leaves": Row(Asked(b"error leaving"), "internal", "whose message cannot be read"),
    "an error that stops": Row(Asked(b"error stop"), "internal", "StopIteration"),
    "no error at all": Row(Asked(b"error thing"), "no_result", "<object object at 0x"),
    "half a character in a label": Row(Asked(b"value label"), "ok", "ü?", ways=(*THRIFT, *OIP, OWN[0])),
    "NumPy's scalars": Row(Asked(b"value scalars"), "ok", "3", ways=SERVED),
    "a ranking": Row(Asked(b"value ranking"), "ok", "a", ways=(*THRIFT, "oip")),
    "a score that is no number": Row(Asked(b"value nan"), "no_result", ways=SERVED),
    "a first score that is none": Row(Asked(b"value first"), "no_result", ways=SERVED),
    "a score beyond all numbers": Row(Asked(b"value infinite"), "no_result", ways=SERVED),
    "a list in itself": Row(Asked(b"value itself"), "no_result", ways=SERVED),
    "an object": Row(Asked(b"value thing"), "no_result", ways=SERVED),
    "an array of objects": Row(Asked(b"value array"), "no_result", ways=SERVED),
    "a type that NumPy has not": Row(Asked(b"value float8"), "no_result", ways=SERVED[2:]),
    "an integer of 200 bits": Row(Asked(b"value huge"), ways=[way for way in SERVED if way not in THRIFT[:2]]),
    "a large request": Row(Asked(bytes(2**21 + 9)), "too_large", str(2**21), ways=(*SERVED, "own_route")),
    "a large reply": Row(
        Asked(b"large"), "too_large", "the limit of a reply is 524288", {OWN[0]: "internal"}, (*SERVED, *OWN)
    ),
    "no deadline": Row(Asked(deadline_ms=0), "ok", "abc", dict.fromkeys(HTTP, "invalid_request"), SERVED),
    "a negative deadline": Row(Asked(deadline_ms=-1), "ok", "abc", dict.fromkeys(HTTP, "invalid_request"), SERVED),
    "a far deadline": Row(Asked(deadline_ms=2.0**31 - 1), "ok", "abc"),
}  # fmt: skip


CASES = [
    (name, way) for name, row in ROWS.items() for way in row.ways or WAYS if row.asked.is_plain or way not in PLAIN
]

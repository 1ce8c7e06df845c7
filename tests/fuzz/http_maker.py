"""Requests over HTTP, mutants of them, and a second opinion on how they are read and answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fuzz.thrift_maker import ThriftMaker

_TARGETS = (
    b"/infer", b"/infer", b"/infer", b"/infer?outputs=result,data", b"/infer?node_name=%00&deadline_ms=1e3",
    b"/infer?" + b"a=%ff&" * 20, b"/infer?deadline_ms=nan", b"/openapi.json", b"/nothing", b"*", b"http://a/infer",
    b"HTTPS://[::1]:80/infer?", b"http://a", b"/" + b"%2e./" * 30, b"//infer", b"/infer#a"
)  # fmt: skip
_FIELDS = (
    b"Expect: 100-continue", b"Connection: close", b"Connection: keep-alive, x", b"X-Deadline-Ms: 5",
    b"X-Deadline-Ms: -0", b"X-Request-Id: \xff\xfe", b"X-Request-Id: " + b"r" * 500, b"Upgrade: h2c", b"Accept: */*",
    b"Content-Encoding: gzip", b"Host: b", b"Content-Length: 1", b"Transfer-Encoding: gzip", b"A: b\r\n c", b"A : b",
    b"Trailer: A", b"Cookie: " + b"c " * 200, b"\xe9: a", b"Content-Type: application/json"
)  # fmt: skip
_TOKENS = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b" ", b"\t", b"\0", b":", b",", b";", b'"', b"--", b"chunked",
    b"0\r\n\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"ffffffffffffffff", b"[" * 99, b'{"a":' * 50, b"1e999",
    b"9" * 50, b"\\ud800", b"\xff", b"&", b"?", b"%", b"/", b"--xyz\r\n", b"filename="
)  # fmt: skip
_OIP_TARGETS = (
    b"/v2/models/pipe/infer", b"/v2/models/pipe/versions/1/infer", b"/v2", b"/v2/models/pipe", b"/v2/models/stats",
    b"/v2/models/pipe/config?node_name=%ff", b"/v2/models/%FF/ready", b"/v2/health/ready"
)  # fmt: skip


def _json(inputs: dict[str, Any], **members: Any) -> tuple[bytes, ...]:
    return b"application/json", json.dumps({"inputs": inputs, **members}).encode("utf-8", "surrogatepass")


def _form(*parts: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    body = b"".join(b"--xyz\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % part for part in parts)
    return b"multipart/form-data; boundary=xyz", body + b"--xyz--\r\n"


def _oip(binary: bytes, *inputs: dict[str, Any], **members: Any) -> tuple[bytes, ...]:
    text = json.dumps({"inputs": inputs, **members}).encode()
    return b"application/octet-stream", text + binary, b"Inference-Header-Content-Length: %d" % len(text)


_FILE = (b'name="data"; filename="a.jpg"', b"image")
_ARRAY = {"dtype": "float32", "shape": [2, 2], "data": [[1, 2.5], [-1, 1e308]]}
_FP32 = {"name": "data", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}
_BINARY = {"name": "data", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 10}}
_BODIES: tuple[tuple[bytes, ...], ...] = (  # their type, the bytes, a field that belongs to them
    (b"", b""),
    (b"image/jpeg", b"\xff\xd8\xff"),
    (b"\xff/a", b"x" * 3000),
    (b"application/x-www-form-urlencoded", b"POST /infer HTTP/1.1\r\nHost: a\r\n\r\n"),
    _json({"data": "a text, gr\xf6\xdfe \ud83d"}, outputs=["result", "data"], deadline_ms=5, node_name=""),
    _json({"data": {"b64": "AP8="}, "x" * 300: 2**63, "node_name": None}),
    _json({"data": _ARRAY, "box": [1, 1, 3.5, True], "empty": {"dtype": "uint8", "shape": [0, 3], "data": []}}),
    _json({"data": [0] * 5000}),
    _json({"data": [[["a"], [1, [2]]], []]}, outputs=["x"] * 300),
    (b"application/json", b'{"inputs": {"data": ' + b"[" * 40 + b"]" * 40 + b"}}"),
    (b"application/json", b'{"inputs": {"data": NaN, "x": ' + b"9" * 400 + b"}}"),
    _form(_FILE, (b'name="conf"', b"0.3"), (b'name="box"', b"[1, 1, 3, 3]"), (b'name="outputs"', b"result")),
    _form(_FILE, (b'name="box"', b"[" * 2000 + b"]" * 2000), (b'name="x"', b"1e400")),
    _form(*[_FILE] * 20),
    _oip(b"", _FP32, id="a", outputs=[{"name": "result", "parameters": {"binary_data": True}}]),
    _oip(b"\1\0\0\0x" * 2, _BINARY, parameters={"deadline_ms": 1, "binary_data_output": True}),
    _oip(bytes(8), {**_BINARY, "datatype": "FP32", "parameters": {"binary_data_size": 8}}, {**_FP32, "name": "x"}),
    _oip(b"", {**_FP32, "shape": [300, 2], "data": [1] * 600}),
)

Read = tuple[str, str, bytes]


class HttpMaker(ThriftMaker):
    """Makes requests, one and several ahead, now and then with what does not belong there; mutates as the other."""

    tokens = _TOKENS

    def message(self) -> bytes:
        return b"".join(self.request() for _ in range(self.rng.choice((1, 1, 1, 2, 3, 8))))

    def request(self) -> bytes:
        rng = self.rng
        kind, body, *more = self.body()
        is_usual = rng.random() < 0.7
        method = b"POST" if is_usual else rng.choice((b"POST", b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"get"))
        version = rng.choice((b"HTTP/1.1",) * 12 + (b"HTTP/1.0", b"HTTP/1.2", b"HTTP/0.9"))
        fields = [b"Host: a", *([b"Content-Type: " + kind] if kind else []), *more, *rng.sample(_FIELDS, self.few())]
        is_oip = any(field.startswith(b"Inference-Header") for field in more)
        targets = _OIP_TARGETS if is_oip else _TARGETS
        target = targets[0] if is_usual else rng.choice(targets)
        framing = rng.randrange(12)
        if framing < 5:
            fields.append(b"Content-Length: %d" % len(body))
        elif framing < 10:
            fields.append(b"Transfer-Encoding: chunked")
            body = self.chunks(body)
        elif framing == 10:
            fields.append(b"Content-Length: " + rng.choice((b"0", b"007", b"1, 1", b"+1", b"-1", b"9" * 30, b"")))
        rng.shuffle(fields)
        line = rng.choice((b"\r\n",) * 20 + (b"\n",))
        head = line.join([b" ".join((method, target, version)), *fields, b"", b""])
        return rng.choice((b"",) * 9 + (b"\r\n",)) + head + body

    def few(self) -> int:
        return self.rng.choice((0, 0, 0, 0, 1, 1, 2, 4))

    def chunks(self, body: bytes) -> bytes:
        rng, out, at = self.rng, b"", 0
        most = max(1, len(body) // rng.choice((1, 3, 70)))
        while at < len(body):
            piece = body[at : at + rng.randint(1, most)]
            extension = rng.choice((b"",) * 6 + (b";a", b';a="b;c"', b" ", b";" + b"e" * 200))
            out += rng.choice((b"%x", b"%X", b"0%x")) % len(piece) + extension + b"\r\n" + piece + b"\r\n"
            at += len(piece)
        trailers = rng.choice((b"",) * 6 + (b"A: b\r\n", b"Content-Length: 9\r\n", b"A: b\r\n" * 70, b" a\r\n"))
        return out + b"0\r\n" + trailers + b"\r\n"

    def body(self) -> tuple[bytes, ...]:
        """One of ``_BODIES``, its bytes sometimes changed."""
        kind, body, *more = self.rng.choice(_BODIES)
        return kind, self.mutant(body, body) if self.rng.random() < 0.6 else body, *more


def plain_reading(data: bytes) -> Iterator[Read]:
    """Method, target and body of each request, as RFC 9112 says it of those that are right; ends at one that is not."""
    while head := re.match(rb"(?:\r?\n)*(.*?)\r?\n\r?\n", data, re.DOTALL):
        data = data[head.end() :]
        line, *lines = re.split(rb"\r?\n", head[1])
        fields = {name.lower(): value.strip(b" \t") for name, _, value in (one.partition(b":") for one in lines)}
        try:
            method, target, _ = line.decode().split(" ")
            if b"transfer-encoding" in fields:
                body, data = _dechunk(data)
            else:
                size = int(fields.get(b"content-length", b"0").split(b",")[0])
                body, data = data[:size], data[size:]
        except ValueError:
            return
        path, _, query = re.sub(r"(?i)^https?://[^/?]*", "", target).partition("?")
        yield method, f"{path or '/'}?{query}" if query else path or "/", body


def _dechunk(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while line := re.match(rb"([0-9A-Fa-f]+)[^\r\n]*\r\n", data):
        size, start = int(line[1], 16), line.end()
        if size == 0:
            trailers = re.match(rb"(?:[^\n]+\n)*?\r?\n", data[start:])
            return body, data[start + trailers.end() :] if trailers else b""
        body, data = body + data[start : start + size], data[start + size + 2 :]
    raise ValueError("no chunk")


_RESPONSE = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]+\r\n((?:[A-Za-z-]+: [ -~]+\r\n)+)\r\n", re.ASCII)


def what_is_wrong(reply: bytes, is_head: bool, is_last: bool) -> str:
    """With an answer; empty where nothing is."""
    head = _RESPONSE.match(reply)
    if head is None:
        return f"no answer: {reply[:80]!r}"
    fields = dict(line.split(b": ", 1) for line in head[2].splitlines())
    body, status = reply[head.end() :], int(head[1])
    if (fields.get(b"Connection") == b"close") != is_last:
        return f"an answer that is the last: {is_last}, it says {fields.get(b'Connection')!r}"
    if is_head:
        return "an answer to HEAD has a body" if body else ""
    if int(fields[b"Content-Length"]) != len(body):
        return f"a body of {len(body)} bytes, said to have {fields[b'Content-Length']!r}"
    text_bytes = int(fields.get(b"Inference-Header-Content-Length", len(body)))
    answer = json.loads(body[:text_bytes])
    if status == 200:
        return ""
    if status not in (400, 404, 405, 413, 415, 422, 500, 504):
        return f"status {status}"
    if status == 500 and answer["code"] != "too_large":
        return f"status 500: {answer}"
    return f"an error of {len(body)} bytes" if len(body) > 2600 else ""

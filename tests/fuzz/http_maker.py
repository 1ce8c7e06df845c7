"""Requests over HTTP, mutants of them, and a second opinion on how they are read and answered."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from thrift_maker import ThriftMaker

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
_DISPOSITIONS = (
    *(b'form-data; name="data"; filename="a.jpg"',) * 4, b'form-data; name="outputs"', b'form-data; name="conf"',
    b'form-data; name="box"', b"form-data", b"attachment", b"form-data; name=\"\xff\"; filename*=utf-8''%ff"
)  # fmt: skip
_DATATYPES = ("BYTES", "FP32", "UINT8", "INT64", "BOOL", "FP16", "BF16", "")
_NAMES = ("data", "result", "node_name", "error", "", "é", "x" * 300, "context", "node\n")
_NUMBERS = (0, 1, -1, 2.5, 1e308, 2**31, 2**63, -(2**63), 2**70, 1e-320, True, None)
_TEXTS = ("", "a", "größe", "\x00", "\ud83d\ude00", "/etc/a", "x" * 1500)
_DTYPES = ("uint8", "float32", "bool", "int64", "float16", "object", "uint9", "", "U8", "complex128")

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
        targets = _OIP_TARGETS if more else _TARGETS
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
        """Its type, the bytes, sometimes changed, and a field that belongs to it."""
        rng = self.rng
        kind, body, *more = rng.choice((self.raw, self.json, self.json, self.form, self.oip))()
        return kind, self.mutant(body, body) if rng.random() < 0.4 else body, *more

    def raw(self) -> tuple[bytes, bytes]:
        kind = self.rng.choice((b"", b"image/jpeg", b"application/x-www-form-urlencoded", b"\xff/a", b"a" * 300))
        return kind, self.rng.choice((b"", b"\xff\xd8\xff", b"x" * 3000, b"POST /infer HTTP/1.1\r\nHost: a\r\n\r\n"))

    def json(self) -> tuple[bytes, bytes]:
        rng = self.rng
        asked: dict[str, Any] = {"inputs": {"data": self.value()}}
        asked["inputs"].update({rng.choice(_NAMES): self.value() for _ in range(self.few())})
        for _ in range(self.few()):
            key = rng.choice(("outputs", "node_name", "deadline_ms", "x"))
            asked[key] = rng.choice((None, "result", ["data"], [], 5, -1, "", {}, ["x"] * 300, rng.choice(_NUMBERS)))
        body = rng.choice((asked,) * 12 + ([asked], {}, {"inputs": 3}))
        kind = rng.choice((b"application/json", b"Application/JSON; charset=utf-8"))
        return kind, json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")

    def value(self, depth: int = 0) -> Any:
        rng = self.rng
        choice = rng.randrange(9 if depth < 3 else 5)
        if choice == 0:
            return rng.choice(_TEXTS)
        if choice == 1:
            return rng.choice(_NUMBERS)
        if choice == 2:
            return {"b64": rng.choice((base64.b64encode(rng.randbytes(9)).decode(), "%", "A", 3, "é"))}
        if choice < 5:
            return self.tensor()
        if choice == 5:
            return [self.value(depth + 1)] * rng.choice((0, 1, 2, 5, 300 if depth == 0 else 3))
        if choice < 8:
            return self.plain_list(is_long=depth == 0)
        return {rng.choice(("dtype", "shape", "data", "b64", "x")): self.value(depth + 1) for _ in range(3)}

    def plain_list(self, is_long: bool = False) -> list[Any]:
        """Of numbers, texts and lists, some of them too long, too deep, or with what does not belong there."""
        rng = self.rng
        elements = (*_NUMBERS, *_TEXTS, math.nan, -math.inf, [], [[]], [1, "a"], {"b64": ""}, {}, 10**400)
        items: list[Any] = [rng.choice(_NUMBERS[:-1] if rng.random() < 0.7 else elements) for _ in range(self.few())]
        for _ in range(rng.choice((0, 0, 0, 1, 2, 31, 32, 40))):
            items = [items]
        return items * rng.choice((1,) * 12 + (2, *((5000 // (1 + len(items)),) if is_long else ())))

    def tensor(self) -> dict[str, Any]:
        rng = self.rng
        shape = [rng.choice((0, 1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 3, 40)))]
        size = 1
        for one in shape[:6]:
            size *= one
        data: Any = [rng.choice((0, 1, 255, *_NUMBERS)) for _ in range(min(size, 40))]
        if rng.random() < 0.1:
            data = [data] * 2
        if rng.random() < 0.1:
            shape = [rng.choice((*_NUMBERS, "1"))] * rng.choice((1, 2, 33))
        return {"dtype": rng.choice((*_DTYPES[:5], *_DTYPES)), "shape": shape, "data": data}

    def oip(self) -> tuple[bytes, bytes, bytes]:
        """Of the Open Inference Protocol: tensors as JSON, and behind it as bytes."""
        rng, inputs, binary = self.rng, [], b""
        rows = rng.choice((1, 1, 1, 2, 0, 300))
        for name in rng.choice((["data"], ["data"], ["data", "extra"], [])):
            given: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [rows, 2], "data": [1] * (2 * rows)}
            if rng.random() < 0.5:
                piece = bytes(8 * rows)
                if rng.random() < 0.5:
                    piece = b"".join(rng.choice((1, 1, 0, 2**32 - 1)).to_bytes(4, "little") + b"x" for _ in range(rows))
                    given.update(datatype="BYTES", shape=[rows])
                del given["data"]
                given["parameters"] = {"binary_data_size": len(piece)}
                binary += piece
            if rng.random() < 0.4:
                odd = {
                    "name": rng.choice(_NAMES),
                    "datatype": rng.choice(_DATATYPES),
                    "shape": rng.choice(([], [-1], [rows, 2**62, 4], [0], "1", [rows])),
                    "data": rng.choice((["a"] * rows, [self.value()], self.value(), [[1, 2]] * rows)),
                    "parameters": {"binary_data_size": rng.choice((0, 5, -1, True, 2**70))},
                }
                given.update({key: odd[key] for key in rng.sample(sorted(odd), rng.choice((1, 1, 2)))})
            inputs.append(given)
        asked: dict[str, Any] = {"inputs": inputs}
        for _ in range(self.few()):
            key = rng.choice(("id", "outputs", "parameters", "inputs", "x"))
            options = {"deadline_ms": rng.choice(_NUMBERS), "binary_data_output": True}
            asked[key] = rng.choice(("a", [{"name": "result", "parameters": {"binary_data": True}}], options, [], 3))
        text = json.dumps(asked).encode()
        size = rng.choice((len(text),) * 6 + (0, len(text) + 1, 2**40))
        return b"application/octet-stream", text + binary, b"Inference-Header-Content-Length: %d" % size

    def form(self) -> tuple[bytes, bytes]:
        rng, boundary = self.rng, self.rng.choice((b"xyz", b"x" * 70, b"a b", b""))
        out = b""
        for index in range(rng.choice((1, 1, 1, 2, 3, 20))):
            disposition = rng.choice((*_DISPOSITIONS, b'form-data; name="%s"' % rng.choice(_NAMES).encode()))
            more = rng.choice((b"",) * 5 + (b"Content-Type: image/jpeg\r\n", b"A" * 300 + b": b\r\n", b"A: b\r\n" * 20))
            content = rng.choice(
                (b"image", b"", b"result", b"\xff" * 3000, b"\r\n--" + boundary[:-1], b"x" * index, self.field())
            )
            out += b"--%s\r\nContent-Disposition: %s\r\n%s\r\n%s\r\n" % (boundary, disposition, more, content)
        end = rng.choice((b"--%s--\r\n",) * 6 + (b"--%s\r\n", b"--%s-", b"--%s--" + b"x" * 200)) % boundary
        quoted = rng.choice((boundary, b'"' + boundary + b'"'))
        return b"multipart/form-data; boundary=" + quoted, out + end

    def field(self) -> bytes:
        """The text of a field, most of them nearly JSON."""
        rng = self.rng
        text = json.dumps(self.plain_list() if rng.random() < 0.6 else rng.choice(_NUMBERS)).encode()
        return rng.choice((text, text, b" %s\r\n" % text, text[:-1], b"[" * 2000 + b"]" * 2000, b"9" * 4000, b"1e400"))


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

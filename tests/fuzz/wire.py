"""Mutated messages through the readers and the handlers; ``python tests/fuzz/wire.py --seconds 60 --protocol http``.

A message is made as a tree of fields (of every method of the IDL), as a head and a body (JSON, forms, chunks; with
``compressed`` in gzip or deflate), or as a message of gRPC, compressed or not, with wrong types and sizes among them,
then changed byte by byte. Of each mutant is checked: it raises what is declared and
nothing else; each call is answered once; an error is short; it takes less than 50 ms; cut in pieces, the stream gives
the same messages; a request over HTTP has the body that a plain reading of RFC 9112 gives. Of each process: its memory
does not grow.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import random
import sys
import time
import zlib
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fuzz.compressed_maker import CompressedMaker, GrpcMaker, plain_inflated
from fuzz.http_maker import HttpMaker, plain_reading, what_is_wrong
from fuzz.thrift_maker import ThriftMaker
from kit.services import FakePipe
from torchpipe_server.front.services import HttpService, Services, ThriftService
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.thrift import Message
from torchpipe_server.worker.service import usual_service

from torchpipe_py import Signature
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.errors import DecodeError, InvalidRequest, UnknownNode
from torchpipe_py.serving import Bound, RequestTooLargeError, RpcRequest, WireAnswer, parse_message
from torchpipe_py.wire.compression import MAGIC, MOST_RATIO, RATIO_FREE_BYTES, Inflater
from torchpipe_py.wire.http import HttpRequest

SEEDS = Path(__file__).parent / "seeds"
LIMITS = Options("test", max_message_bytes=2**20, max_text_bytes=2**12, max_items=2**12)
BODY_BYTES, JSON_BYTES = 2**15, 2**14
MOST_SECONDS = 0.05
MOST_GROWTH = 8 * 2**20
POOL = 400
MAKERS: dict[str, type[ThriftMaker]] = {"thrift": ThriftMaker, "http": HttpMaker, "compressed": CompressedMaker}
if find_spec("grpc"):
    MAKERS["grpc"] = GrpcMaker
INFLATED = Bound(BODY_BYTES, "--max-message-bytes")
STATUSES = "UNAVAILABLE", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"


_NODE = {"instances": 1, "max": 1, "alive": 1, "batches": 0, "queue_ms": 0, "batch_wait_ms": 0, "compute_ms": 0}


class EchoPipe(FakePipe):
    """Answers at once: what it got, an error, or nothing."""

    models = (SimpleNamespace(root="node", name="node", version="1", node_name="node"),)
    is_refusing = True  # so that requests are judged before their inputs are read, too
    hint_if_unknown = ""

    def stats(self) -> dict[str, Any]:
        return {"max_inflight": 1000, "admitted": 0, "nodes": {"node": _NODE}}

    def check_loaded(self, name: str) -> None:
        """All models are loaded."""

    def signature(self, node_name: str | None) -> Signature:
        return Signature()

    def dispatch(self, data: dict[str, Any], on_done: Any, timeout: float | None = None) -> None:
        if not isinstance(data.get("node_name", ""), str) or data.get("node_name"):
            raise UnknownNode("no such root")
        data["result"] = result = data.get("data")
        is_empty = isinstance(result, bytes) and not result  # an array may be a result too
        on_done(data, DecodeError("no image") if is_empty else None)


@dataclass
class Tally:
    """What was done and found; ``findings`` are (what is wrong, the bytes)."""

    mutants: int = 0
    calls: int = 0
    slowest: float = 0.0
    findings: list[tuple[str, bytes]] = field(default_factory=list)


class Judge:
    """Runs a mutant and says what is wrong with it; empty where nothing is."""

    def __init__(self) -> None:
        run: Any = EchoPipe()
        options = Options("pipe.toml", deadline_ms=1000.0, max_text_bytes=JSON_BYTES, max_reply_bytes=2**20)
        served = usual_service(options, run)
        thrift, http = ThriftService(served.methods, LIMITS), HttpService(served.routes, BODY_BYTES, 2**20)
        self.services = Services(thrift, http)
        self.calls = 0
        self.seconds = 0.0

    def wrong(self, data: bytes, rng: random.Random) -> str:
        began = time.process_time()
        messages, ended = self.read([data])
        contents = [content(message) for message in messages]  # which answering takes
        replies = "".join(self.answer(message) for message in messages)
        self.seconds = time.process_time() - began
        if replies:
            return replies
        plain = plain_reading(data)
        for message, (*request, _, _, _) in zip(messages, contents, strict=True):
            if isinstance(message, HttpRequest) and (read := next(plain, None)) != tuple(request):
                return f"{message.name} is read as {request!r}, plainly as {read!r}"[:400]
        pieces, at = [], 0
        step = rng.choice((1, 5)) if len(data) < 300 and rng.random() < 0.1 else len(data) // 2
        while at < len(data):
            size = 1 + int(rng.random() * step)
            pieces.append(data[at : at + size])
            at += size
        again, ended_again = self.read(pieces)
        if contents != [content(one) for one in again]:
            return "in pieces there are other messages"
        return "" if ended == ended_again else f"in pieces it ends with {ended_again!r}, in one with {ended!r}"

    def read(self, pieces: list[bytes]) -> tuple[list[Message | HttpRequest], str]:
        """The messages, and how the stream ends."""
        reader: Any = None
        start, messages = b"", []
        try:
            for piece in pieces:
                if reader is None:
                    start += piece
                    service = self.services.of(start)
                    if service is None:
                        continue
                    reader, piece = service.reader(), start
                reader.feed(piece)
                while (message := reader.next()) is not None or reader.is_paused:
                    messages += [] if message is None else [message]
        except ProtocolError as error:
            return messages, error.kind
        return messages, "unfinished" if reader is None or reader.pending_bytes else ""

    def answer(self, message: Message | HttpRequest) -> str:
        self.calls += 1
        service: Any = self.services.http if isinstance(message, HttpRequest) else self.services.thrift
        results: list[Any] = []
        body = message.body if isinstance(message, HttpRequest) else b""
        try:
            method, args = service.decode(message)
            inflater = service.inflater(message)
            if inflater is not None:
                problem = self.inflate(inflater, body, args)
                if problem:
                    return problem
            method.start(args, results.append)
        except Exception as error:
            results.append(error)
        if len(results) != 1:
            return f"{message.name} has {len(results)} answers"
        reply, _, outcome = service.reply(message, results[0])
        if outcome == "internal":
            return f"{message.name}: a defect, {results[0]!r}"[:300]
        if isinstance(message, HttpRequest):
            return what_is_wrong(reply, message.method == "HEAD", message.is_last)
        if message.is_oneway != (not reply):
            return f"{message.name}, oneway: {message.is_oneway}, has a reply of {len(reply)} bytes"
        if outcome != "ok" and message.name != "infer_many" and len(reply) > 2600:
            return f"{message.name}: an error of {len(reply)} bytes"
        return ""

    def inflate(self, inflater: Any, body: bytes, request: HttpRequest) -> str:
        """Put the inflated body into the request; raises what the inflater raises."""
        coding = "gzip" if "gzip" in request.fields["content-encoding"].lower() else "deflate"
        inflated, error = inflate(inflater, random.Random(len(body)))
        plain = plain_inflated(body, coding, BODY_BYTES, MOST_RATIO, RATIO_FREE_BYTES)
        if inflated != plain:
            return f"{coding} of {len(body)} bytes inflates to {_size(inflated)}, plainly to {_size(plain)}"
        if error is not None:
            raise error
        request.inflated(inflated or b"")
        return ""


class GrpcJudge(Judge):
    """The same for a message of gRPC, which is one request."""

    def __init__(self) -> None:
        super().__init__()
        run: Any = EchoPipe()
        options = Options("pipe.toml", deadline_ms=1000.0, max_text_bytes=JSON_BYTES, grpc_port=0)
        rpcs = [rpc for rpc in usual_service(options, run).rpcs if not rpc.is_watch]
        self.rpcs = [rpc for rpc in rpcs if rpc.path.endswith("Infer")] * len(rpcs) + rpcs

    def wrong(self, data: bytes, rng: random.Random) -> str:
        began = time.process_time()
        self.calls += 1
        rpc, results = self.rpcs[zlib.crc32(data) % len(self.rpcs)], list[Any]()
        plain: bytes | None = data
        try:
            if data.startswith(MAGIC):
                inflated, error = inflate(Inflater(data, "gzip", INFLATED), rng)
                plain = plain_inflated(data, "gzip", BODY_BYTES, MOST_RATIO, RATIO_FREE_BYTES)
                if inflated != plain:
                    return f"{len(data)} bytes inflate to {_size(inflated)}, plainly to {_size(plain)}"
                if error is not None:
                    raise error
                data = inflated or b""
            message = parse_message(rpc.method.args, data, LIMITS.max_items, Bound(JSON_BYTES, "--max-text-bytes"))
            rpc.method.start(RpcRequest(message, {}), results.append)
        except Exception as error:
            results.append(error)
        self.seconds = time.process_time() - began
        if len(results) != 1:
            return f"{rpc.path} has {len(results)} answers"
        answer = WireAnswer.of(rpc.method, results[0], Bound(2**20, "--max-reply-bytes"))
        if answer.outcome == "internal":
            return f"{rpc.path}: a defect, {results[0]!r}"[:300]
        if answer.code is not None and answer.code not in STATUSES:
            return f"{rpc.path}: status {answer.code}"
        return f"{rpc.path}: an error of {len(answer.text)} bytes" if len(answer.text) > 2600 else ""


def inflate(inflater: Any, rng: random.Random) -> tuple[bytes | None, Exception | None]:
    """What it inflates to, in steps of one size, or the error."""
    step = rng.choice((1000, 2**16, 2**20))
    try:
        while not inflater.step(step):
            pass
    except (InvalidRequest, RequestTooLargeError) as error:
        return None, error
    return inflater.take(), None


def _size(inflated: bytes | None) -> str:
    return "nothing" if inflated is None else f"{len(inflated)} bytes"


def content(message: Any) -> tuple[Any, ...]:
    if isinstance(message, HttpRequest):
        target = f"{message.path}?{message.query}" if message.query else message.path
        return message.method, target, message.body, message.fields, message.size, message.is_last
    return message.name, message.is_oneway, message.seqid, message.protocol, repr(message.args), str(message.error)


def kept_bytes(pool: list[bytes]) -> int:
    """Memory of this process, less the messages that are mutated and what the allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss) - sum(map(len, pool))


def fuzz(seed: int, mutants: int, seconds: float, protocol: str = "thrift") -> Tally:
    """Until so many mutants or so many seconds are through."""
    logging.disable(logging.CRITICAL)
    rng, judge, tally = random.Random(seed), GrpcJudge() if protocol == "grpc" else Judge(), Tally()
    maker = MAKERS[protocol](rng)
    pool = [maker.message() for _ in range(POOL)]
    until, kept_first = time.monotonic() + seconds, 0
    while tally.mutants < mutants and not (tally.mutants % 64 == 0 and time.monotonic() > until):
        tally.mutants += 1
        if tally.mutants % 8 == 0:
            pool[int(rng.random() * POOL)] = maker.message()
        data = maker.mutant(pool[int(rng.random() * POOL)], pool[int(rng.random() * POOL)])
        problem = judge.wrong(data, rng)
        if not problem and judge.seconds > MOST_SECONDS:
            times = [judge.seconds]
            for _ in range(4):  # a busy machine or the collector may have been it
                judge.wrong(data, rng)
                times.append(judge.seconds)
            judge.seconds = min(times)
            problem = f"{judge.seconds:.3f} s" if judge.seconds > MOST_SECONDS else ""
        tally.slowest = max(tally.slowest, judge.seconds)
        if problem and len(tally.findings) < 20:
            tally.findings.append((problem, data))
        if tally.mutants == 20_000:
            kept_first = kept_bytes(pool)
        elif kept_first and tally.mutants % 50_000 == 0 and kept_bytes(pool) > kept_first + MOST_GROWTH:
            tally.findings.append((f"the process grew by more than {MOST_GROWTH} bytes", b""))
            break
    tally.calls = judge.calls
    logging.disable(logging.NOTSET)
    return tally


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--protocol", choices=MAKERS, default="thrift")
    options = parser.parse_args()
    began = time.monotonic()
    tally = fuzz(options.seed, options.mutants, options.seconds, options.protocol)
    spent = time.monotonic() - began
    speed = f"{spent:.0f} s, {tally.mutants / spent:.0f} a second, the slowest took {1000 * tally.slowest:.1f} ms"
    print(f"{tally.mutants} mutants, {tally.calls} calls answered, {speed}")
    for index, (problem, data) in enumerate(tally.findings):
        path = Path(f"{options.protocol}_finding_{options.seed}_{index}.bin")
        path.write_bytes(data)
        print(f"{path}: {problem}")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())

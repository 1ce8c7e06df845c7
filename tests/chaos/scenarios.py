"""One event of each kind, done to a service; each function returns what was measured and what is wrong with it.

``fault`` plants a defect (``faults``) that the judge has to find. The defaults are the short form; the long one is in
``scripts/soak.py``.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos import judges
from chaos.clients import Answer, Load, Manners, echo
from chaos.service import DEMO, MEBIBYTE, ROOT, WAIT, Service, eventually
from chaos.tally import Report, Tally, percentile
from chaos.wire import ClosedError, HttpWire, Wire, batch_of, connect, pack_batch, pack_call, pack_many

CODES = judges.TYPED


def overload(
    seconds: float = 2.0,
    service_ms: float = 10.0,
    p99: float = 0.01,
    share: float = 0.9,
    limit: int = 4,
    within: float = 2.0,
    more_seconds: float = 0.0,
    fault: str = "",
) -> Report:
    """Three times of what it can do; ``limit`` is ``max_inflight``, ``share`` what has to be left of its peak.

    ``more_seconds``: for how many more the overload may last until that is reached, where the machine is busy.
    """
    with Service("--max-inflight", str(limit), backend="ChaosEcho", most=1, service_ms=service_ms, fault=fault) as it:
        it.ready()
        began = time.monotonic()
        with Load(it.port, 3) as load:
            time.sleep(seconds / 2)
        peak = load.ok / (time.monotonic() - began)
        before = it.memory()
        samples = [before]
        clients, offered = 30, 3000 / service_ms
        with Load(it.port, clients, manners=Manners(rate=offered / clients, answer_within=WAIT)) as load:
            until = time.monotonic() + more_seconds
            while True:
                began, done = time.monotonic(), load.ok
                while time.monotonic() - began < seconds:
                    time.sleep(seconds / 20)
                    samples.append(it.memory())
                goodput = (load.ok - done) / (time.monotonic() - began)
                if time.monotonic() >= until or (goodput >= share * peak and load.retry_hints):
                    break
        after = Load(it.port, 1, total=50)
        is_normal = eventually(lambda: it.inflight == 0, within)
        with after:
            after.join()
        tally = load.tally
        problems = [
            *judges.answered(tally, WAIT, ("ok", "overloaded")),
            *judges.overloaded(peak, goodput, tally, p99, list(load.retry_hints), share),
            *judges.above("memory under overload, MiB", (max(samples) - before) / MEBIBYTE, 16),
            *judges.differs(f"whether it was normal again within {within:g} s", is_normal, True),
            *judges.answered(after.tally, within),
        ]
        rejections = [1000 * percentile(tally.seconds.get("overloaded", []), share) for share in (0.5, 0.99)]
        figures = {
            "peak_qps": round(peak),
            "offered_qps": round(offered),
            "goodput_qps": round(goodput),
            "rejection_p50_ms": round(rejections[0], 2),
            "rejection_p99_ms": round(rejections[1], 2),
            "memory_mib": round((max(samples) - before) / MEBIBYTE, 1),
            **tally.figures(),
        }
        return Report("overload", figures, problems)


def worker_killed(
    workers: int = 1,
    kills: int = 2,
    every: float = 1.5,
    within: float = 5.0,
    answer_within: float = 10.0,
    fault: str = "",
) -> Report:
    """``kill -9`` again and again under load."""
    manners = Manners(answer_within=answer_within)
    with Service("--workers", str(workers), instance_num=2, service_ms=2, fault=fault) as it:
        it.ready()
        times: list[tuple[float, float]] = []
        with Load(it.port, 8, manners=manners) as load:
            for _ in range(kills):
                served = load.ok
                time.sleep(every)
                eventually(lambda before=served: load.ok > before)  # type: ignore[misc]
                victim = random.choice(it.workers)
                killed = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                eventually(lambda pid=victim: pid not in it.workers, answer_within)  # type: ignore[misc]
                eventually(lambda: len(it.workers) == workers, answer_within)
                times.append((killed, time.monotonic()))
        tally = load.tally
        last = Load(it.port, 4, manners=manners, total=40)
        with last:
            last.join()
        longest = max(back - killed for killed, back in times)
        problems = [
            *judges.answered(tally, within, CODES),
            *judges.closed_by_kills(tally.closed, times),
            *judges.above("seconds until a worker is back", longest, within),
            *judges.answered(last.tally, within),
        ]
        figures = {"workers": workers, "kills": len(times), "back_s": round(longest, 2), **tally.figures()}
        return Report("worker killed", figures, problems)


def clients_gone(requests: int = 600, fault: str = "", within: float = 10.0) -> Report:
    """Half of the requests are abandoned: some in the middle of the message, the others before the answer."""
    with Service(service_ms=2, fault=fault) as it:
        it.ready()
        with Load(it.port, 8, total=80) as warm:
            warm.join()
        eventually(lambda: it.open_connections == 0)
        before = it.descriptors(), it.threads()
        with Load(it.port, 16, manners=Manners(abandon_every=2), total=requests) as load:
            load.join()
        seen: list[int] = []

        def is_back() -> bool:
            seen.append(it.descriptors())  # the questions that follow have a connection each
            return it.inflight == it.open_connections == 0 and seen[-1] <= before[0] and it.threads() <= before[1]

        eventually(is_back, within)
        after = seen[-1], it.threads()
        figures = {
            "inflight": it.inflight,
            "open": it.open_connections,
            "descriptors": f"{before[0]} -> {after[0]}",
            "threads": f"{before[1]} -> {after[1]}",
            **load.tally.figures(),
        }
        problems = [
            *judges.answered(load.tally, WAIT),
            *judges.differs("requests in flight", figures["inflight"], 0),
            *judges.differs("connections open", figures["open"], 0),
            *judges.above("descriptors", after[0], before[0]),
            *judges.above("threads", after[1], before[1]),
        ]
        return Report("clients gone", figures, problems)


def malformed(messages: int = 2000, fault: str = "", seed: int = 1) -> Report:
    """Mutated messages, one a connection, while another client is served."""
    rng = random.Random(seed)
    with Service("--message-seconds", "1", fault=fault) as it:
        it.ready()
        with Load(it.port, 1, total=100) as warm:
            warm.join()
        started, before = it.workers, it.memory()
        slow = connect(it.port, WAIT)
        with Load(it.port, 1, manners=Manners(rate=200)) as load:
            began = time.monotonic()
            trickle = threading.Thread(target=_trickle, args=(slow,), daemon=True)
            trickle.start()
            with ThreadPoolExecutor(4) as pool:
                hung = sum(pool.map(lambda data: _throw(it.port, data), [*_CRAFTED, *_mutants(rng, messages)]))
            trickle.join(WAIT)
            spent = time.monotonic() - began
        slow.close()
        eventually(lambda: it.open_connections == 0)
        growth = (it.memory() - before) / MEBIBYTE
        figures = {
            "messages": messages,
            "seconds": round(spent, 1),
            "growth_mib": round(growth, 1),
            "open": it.open_connections,
            **load.tally.figures(),
        }
        problems = [
            *judges.answered(load.tally, WAIT),
            *judges.differs("connections closed on the client that did nothing wrong", len(load.tally.closed), 0),
            *judges.differs("the workers", it.workers, started),
            *judges.differs("whether the slow client was closed", not trickle.is_alive(), True),
            *judges.differs("broken connections that were not closed or answered", hung, 0),
            *judges.above("memory, MiB", growth, 16),
            *judges.differs("connections open", figures["open"], 0),
        ]
        return Report("malformed bytes", figures, problems)


def oversize(limit: int = MEBIBYTE, served_limit: int = 0, fault: str = "") -> Report:
    """``served_limit`` is what the service is told, for a control: ``limit`` if 0."""
    with Service("--max-message-bytes", str(served_limit or limit), fault=fault) as it:
        it.ready()
        codes = {}
        for size in (limit, limit + 1):
            with connect(it.port, WAIT) as wire, suppress(ClosedError):
                wire.send(batch_of(size))
                codes[size] = wire.receive().code
        problems = judges.differs("the answers", list(codes.values()), ["ok", "too_large"])
        return Report("oversize", {str(size): code for size, code in codes.items()}, problems)


def stopped(requests: int = 100, idle: int = 50, fault: str = "", within: float = 30.0) -> Report:
    """SIGTERM with so many in flight and idle clients beside them. None is answered before an idle client is gone: then
    all were in flight when the worker heard of the stop, however long that took."""
    with (
        TemporaryDirectory() as folder,
        Service(most=1, service_ms=20, instance_num=4, gate=str(gate := Path(folder) / "gate"), fault=fault) as it,
    ):
        it.ready()
        quiet = [connect(it.port, WAIT) for _ in range(idle)]
        wires = [connect(it.port, WAIT, wire=HttpWire if number % 2 else Wire) for number in range(requests)]
        for number, wire in enumerate(wires):
            wire.send(wire.pack(b"%d" % number, number))
        are_in_flight = eventually(lambda: it.inflight == requests)
        it.signal()
        began = time.monotonic()
        quiet[0].read_all()
        gate.touch()
        tally = Tally()
        for number, wire in enumerate(wires):
            tally.sent += 1
            try:
                reply = wire.receive()
            except ClosedError:
                tally.lost += 1
            else:
                if reply.answers == [(str(number), float(len(str(number))))] and reply.seqid == number:
                    tally.add(reply.code, time.monotonic() - began)
                else:
                    tally.crossed += 1
        code = it.wait(within + 5)
        spent = time.monotonic() - began
        for wire in (*quiet, *wires):
            wire.close()
        problems = [
            *judges.differs("whether all were in flight", are_in_flight, True),
            *judges.answered(tally, within),
            *judges.differs("the exit code", code, 0),
            *judges.above("seconds to the end", spent, within),
        ]
        return Report("SIGTERM", {"exit": code, "seconds": round(spent, 2), **tally.figures()}, problems)


def corrupt_item(size: int = 32, positions: Sequence[int] = range(32), fault: str = "") -> Report:
    """One item of a list is no image; the others get what they get without it, to the last bit."""
    images = [path.read_bytes() for path in sorted((ROOT / "configs/demo/images").glob("*.jpg"))][:size]
    wrong = []
    with Service(config=DEMO, fault=fault) as it, connect(it.ready().port, WAIT) as wire:
        wire.send(pack_many(images))
        clean = wire.receive().answers
        for position in positions:
            wire.send(pack_many([*images[:position], images[position][:40], *images[position + 1 :]]))
            answers = wire.receive().answers
            expected = [*clean[:position], ("decode_error", -1.0), *clean[position + 1 :]]
            if answers != expected:
                wrong.append(position)
    problems = [f"positions {wrong} change what others get"] if wrong or len(clean) != size else []
    return Report("corrupt item", {"positions": len(positions), "wrong": len(wrong)}, problems)


def soak(seconds: float = 6.0, most: float = 20 * MEBIBYTE, leak_bytes: int = 0, share: float = 0.8) -> Report:
    """At that share of its capacity; ``leak_bytes`` of each request is the planted fault.

    Longer than ``seconds``, where the machine is too busy for a thousand requests and 40 samples in that time.
    """
    with Service(service_ms=2, most=4, leak_bytes=leak_bytes) as it:
        it.ready()
        began = time.monotonic()
        with Load(it.port, 8) as load:
            time.sleep(min(5.0, seconds / 4))
            eventually(lambda: load.ok)
        capacity = load.ok / (time.monotonic() - began)
        resident, devices = [], []
        began = time.monotonic()
        with Load(it.port, 8, manners=Manners(rate=share * capacity / 8)) as load:
            until = began + seconds
            while time.monotonic() < until or load.sent < 1000 or len(resident) < 40:
                time.sleep(max(0.05, seconds / 400))
                resident.append(it.memory())
                devices.append(sum(gpu["used_bytes"] for gpu in it.stats()["gpus"]))
        tally, spent = load.tally, time.monotonic() - began
        figures = {
            "seconds": round(spent, 1),
            "capacity_qps": round(capacity),
            "load_qps": round(tally.sent / spent),
            "first_mib": round(resident[0] / MEBIBYTE, 1),
            "half_mib": round(resident[len(resident) // 2] / MEBIBYTE, 1),
            "last_mib": round(resident[-1] / MEBIBYTE, 1),
            "gpu_last_mib": round(devices[-1] / MEBIBYTE, 1),
            **tally.figures(),
        }
        problems = [
            *judges.answered(tally, WAIT),
            *judges.grew(resident, int(most), "resident memory"),
            *judges.grew(devices, int(most), "GPU memory"),
        ]
        return Report("soak", figures, problems)


def concurrency(threads: int = 64, calls: int = 10, workers: int = 1, fault: str = "") -> Report:
    """The demo, an image of each thread's own in turn with others, against answers that were got one by one."""
    images = [path.read_bytes() for path in sorted((ROOT / "configs/demo/images").glob("*.jpg"))]
    with Service("--workers", str(workers), config=DEMO, fault=fault) as it, connect(it.ready().port, WAIT) as wire:
        stored: list[Answer] = []
        for image in images:
            wire.send(pack_batch(image))
            stored.append(wire.receive().answers[0])

        def ask(client: int, number: int) -> tuple[bytes, Answer]:
            index = (7 * client + number) % len(images)
            return images[index], stored[index]

        began = time.monotonic()
        with Load(it.port, threads, ask, total=threads * calls) as load:
            load.join()
        spent = time.monotonic() - began
        figures = {"distinct": len(set(stored)), "qps": round(load.tally.sent / spent), **load.tally.figures()}
        problems = [
            *judges.answered(load.tally, WAIT),
            *judges.above("images whose answer another one has", len(images) - len(set(stored)), 2),
        ]
        return Report("concurrency", figures, problems)


def mixed(
    requests: int = 4000,
    seconds: float = 6.0,
    workers: int = 3,
    clients: int = 16,
    kill_every: float = 1.5,
    reload_every: float = 1.7,
    within: float = 10.0,
    fault: str = "",
    say: Callable[[str], object] = lambda line: None,
) -> Report:
    """Requests, spread over ``seconds``, with kills, reloads and disconnects at once."""
    kills: list[tuple[float, float]] = []
    reloads = 0
    rng = random.Random(requests)
    with Service("--workers", str(workers), instance_num=2, fault=fault) as it:
        it.ready()
        manners = Manners(requests / seconds / clients, abandon_every=97, reconnect_every=211, answer_within=within)
        began = last_said = time.monotonic()
        next_kill, next_reload = began + kill_every / 2, began + reload_every / 2
        with Load(it.port, clients, manners=manners, total=requests) as load:
            while load.is_running:
                time.sleep(0.05)
                now = time.monotonic()
                if now >= next_kill:
                    # A worker that has only just started counts as one that cannot, if it dies.
                    able = [row for row in it.stats()["workers"] if row["state"] == "ready" and row["uptime_s"] > 1.5]
                    if able:
                        victim = rng.choice(able)["pid"]
                        with suppress(ProcessLookupError):
                            os.kill(victim, signal.SIGKILL)
                            eventually(lambda pid=victim: pid not in it.known_workers())  # type: ignore[misc]
                            kills.append((now, time.monotonic()))
                        next_kill = now + kill_every
                if now >= next_reload:
                    it.signal(signal.SIGHUP)
                    reloads += 1
                    next_reload = now + reload_every
                if now - last_said > 10:
                    last_said = now
                    say(f"{load.sent} requests, {len(kills)} kills, {reloads} reloads, {now - began:.0f} s")
        spent = time.monotonic() - began
        tally = load.tally
        is_idle = eventually(lambda: it.inflight == it.open_connections == 0)
        it.signal()
        code = it.wait()
        figures = {
            **tally.figures(),
            "kills": len(kills),
            "reloads": reloads,
            "seconds": round(spent, 1),
            "qps": round(tally.sent / spent),
            "exit": code,
        }
        problems = [
            *judges.answered(tally, within, CODES),
            *judges.closed_by_kills(tally.closed, kills),
            *judges.differs("whether nothing is open in the end", is_idle, True),
            *judges.differs("the exit code", code, 0),
        ]
        return Report("mixed", figures, problems)


def hanging(hang_seconds: float = 1.0, answer_within: float = 8.0) -> Report:
    """A stopped worker is killed and replaced, and its connections go on; ``hang_seconds`` 0 is the control."""
    with Service("--hang-seconds", str(hang_seconds), "--workers", "2") as it:
        it.ready()
        with Load(it.port, 8, manners=Manners(answer_within=answer_within)) as load:
            eventually(lambda: load.sent > 100)
            victim = it.workers[0]
            os.kill(victim, signal.SIGSTOP)
            stopped_at = time.monotonic()
            eventually(lambda: victim not in it.workers and len(it.workers) == 2, answer_within)
            back_at = time.monotonic()
        tally = load.tally
        problems = [
            *judges.answered(tally, answer_within, CODES),
            *judges.closed_by_kills(tally.closed, [(stopped_at, back_at)]),
            *judges.differs("whether the stopped worker is there", victim in it.workers, False),
        ]
        return Report("hang", {"back_s": round(back_at - stopped_at, 2), **tally.figures()}, problems)


def cannot_start(backend: str = "ChaosRaise", within: float = 60.0, word: str = "") -> Report:
    """The service ends, and says why."""
    with Service(backend=backend) as it:
        began = time.monotonic()
        code = it.wait(within)
        spent = time.monotonic() - began
        it.processes()
    problems = [
        *judges.differs("the exit code", code, 1),
        *judges.differs(f"whether it says {word!r}", word in it.stderr, True),
        *judges.differs("whether it says why in a line", "torchpipe-serve: " in it.stderr, True),
    ]
    return Report("cannot start", {"backend": backend, "exit": code, "seconds": round(spent, 1)}, problems)


def crash_loop(seconds: float = 6.0, fault: str = "") -> Report:
    """A worker that is ready, and dies right after that, each time: the service stays, and tries ever more rarely."""

    def tried() -> int:
        return it.stderr.count("ended as soon as it was ready")

    with Service(backend="ChaosCrash", once_ready=True, fault=fault) as it:
        # NOTE: not ready(): where nodes are shared, the service does not say that it serves while its engine dies.
        eventually(tried)
        eventually(lambda: it.process.poll() is not None or tried() > 6, seconds)
        is_over, attempts = it.process.poll() is not None, tried()
        goes_on = eventually(lambda: tried() >= 3)
        it.signal()
        code = it.wait()
        it.processes()
    problems = [
        *judges.differs("whether it has ended by itself", is_over, False),
        *judges.differs("whether there were at most 6 attempts", attempts <= 6, True),
        *judges.differs("whether it goes on trying", goes_on, True),
        *judges.differs("whether it was stopped", code is not None, True),
    ]
    return Report("crash loop", {"exit": code, "attempts": attempts, "seconds": seconds}, problems)


def bad_reload(answer_within: float = 10.0, fault: str = "") -> Report:
    """SIGHUP with a configuration that cannot be read, names no backend, crashes, raises: everything stays."""
    broken: dict[str, Callable[[Service], object]] = {
        "no TOML": lambda it: it.config.write_text("[node\n"),
        "no such backend": lambda it: it.write(backend="Nonesuch"),
        "raises": lambda it: it.write(backend="ChaosRaise"),
        "crashes": lambda it: it.write(backend="ChaosCrash"),
    }
    with Service(fault=fault) as it:
        it.ready()
        before = it.workers
        problems: list[str] = []
        with Load(it.port, 2, manners=Manners(rate=100)) as load:
            for index, (name, break_it) in enumerate(broken.items()):
                break_it(it)
                it.signal(signal.SIGHUP)
                if not eventually(lambda count=index + 1: it.stderr.count("not reloaded") == count, answer_within):  # type: ignore[misc]
                    problems.append(f"{name}: nothing says that it was not reloaded")
            problems += judges.differs("the workers", it.workers, before)
            it.write()
            it.signal(signal.SIGHUP)
            eventually(lambda: before[0] not in (now := it.workers) and len(now) == 1, answer_within)
            problems += judges.differs("whether a good one is taken after that", before[0] in it.workers, False)
        problems += judges.answered(load.tally, answer_within)
        problems += judges.closed_by_kills(load.tally.closed, [])
        return Report("bad reload", load.tally.figures(), problems)


def supervisor_killed(workers: int = 2, within: float = 10.0, fault: str = "") -> Report:
    """Nothing is left of the service, and what was in work is answered."""
    with ExitStack() as stack:
        port = stack.enter_context(_reserved_port())
        flags = ("--port", str(port), "--workers", str(workers))
        it = stack.enter_context(Service(*flags, service_ms=1000, fault=fault))
        wire = stack.enter_context(connect(it.ready().port, WAIT))
        wire.send(pack_batch(b"in work"))
        eventually(lambda: it.inflight == 1, 5.0)
        shared = it.shared_files()
        it.process.kill()
        answer = ""
        with suppress(ClosedError):
            answer = wire.receive().answers[0][0]
        began = time.monotonic()
        eventually(lambda: not it.alive(), within)
        left = [one.pid for one in it.alive()]
        spent = time.monotonic() - began
        problems = [
            *judges.differs("the answer of the request in work", answer, "in work"),
            *judges.differs("processes left behind", len(left), 0),
            *judges.differs("whether the port is free", _is_free(port), True),
            *judges.differs("files in shared memory", [file for file in shared if Path(file).exists()], []),
        ]
        return Report("supervisor killed", {"left": len(left), "seconds": round(spent, 2)}, problems)


# -- malformed bytes ------------------------------------------------------------------------------------------------


def _deep(depth: int) -> bytes:
    """An argument that is a list of a list of ..."""
    return pack_call("infer_batch", struct.pack(">bh", 15, 9) + struct.pack(">bi", 15, 1) * depth + b"\0" * 8)


_CRAFTED = [
    _deep(65),
    _deep(10_000),
    pack_call("infer_batch", struct.pack(">bhi", 11, 1, -1)),
    pack_call("infer_batch", struct.pack(">bhi", 11, 1, 2**31 - 1)),
    pack_call("infer_batch", struct.pack(">bhbi", 15, 1, 12, 2**31 - 1)),
    pack_call("infer_batch", struct.pack(">bhbi", 15, 1, 12, -5)),
    struct.pack(">I", 2**31 - 1) + pack_call("ping"),
    struct.pack(">i", -2) + pack_call("ping"),
    b"\0" * 64,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /infer HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
    b"\r\n" * 10_000,
    b"\xff" * 4096,
]


def _mutants(rng: random.Random, count: int) -> list[bytes]:
    seeds = [pack_batch(b"image"), pack_many([b"one", b"two"]), pack_call("ping")]
    seeds += [struct.pack(">I", len(one)) + one for one in seeds]
    head = b"POST /infer HTTP/1.1\r\nHost: a\r\n"
    seeds += [
        head + b"Content-Length: 5\r\n\r\nimage",
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nimage\r\n0\r\n\r\n",
    ]
    return [_mutant(rng, rng.choice(seeds)) for _ in range(count)]


def _mutant(rng: random.Random, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0"])
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del data[at : at + rng.randint(1, 8)]
        if not data:
            break
    return bytes(data)


def _throw(port: int, data: bytes) -> bool:
    """Whether the server leaves the connection hanging: it neither answers nor closes, once nothing more can come."""
    try:
        with connect(port, WAIT, answer_within=0.5) as wire:
            wire.send(data)
            wire.sock.shutdown(socket.SHUT_WR)
            wire.read_all()
            return False
    except TimeoutError:
        return True
    except (ClosedError, OSError):
        return False


def _trickle(wire: Any) -> None:
    """A byte a second, until the server has enough of it."""
    data = pack_batch(b"x" * 100)
    for at in range(len(data)):
        try:
            wire.sock.sendall(data[at : at + 1])
            wire.sock.settimeout(1.0)
            if not wire.sock.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return


@contextmanager
def _reserved_port() -> Iterator[int]:
    """One that a service may have, and that the system gives to nobody else, also when the service is gone."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


__all__ = [
    "bad_reload", "cannot_start", "clients_gone", "concurrency", "corrupt_item", "crash_loop", "echo", "hanging",
    "malformed", "mixed", "overload", "oversize", "soak", "stopped", "supervisor_killed", "worker_killed",
]  # fmt: skip

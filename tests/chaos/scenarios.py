"""One event of each kind, done to a service; each function returns what was measured and what is wrong with it.

The defaults are the short form; the long one is in ``scripts/soak.py``.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_maker import HttpMaker
from kit.clients import connect, pack_batch, read_all
from kit.services import reserved_port
from kit.waits import WAIT
from thrift_maker import ThriftMaker

from chaos.clients import TYPED, Load, above, answered, closed_by_kills, differs, grew
from chaos.service import MEBIBYTE, Service, eventually


@dataclass
class Report:
    """``problems`` is what is wrong: empty is passed."""

    name: str
    figures: dict[str, Any]
    problems: list[str]

    def __str__(self) -> str:
        told = ", ".join(f"{key} {value}" for key, value in self.figures.items())
        return f"{self.name}: {'FAILED' if self.problems else 'passed'}: {'; '.join(self.problems)}\n  {told}"


def overload(
    seconds: float = 2.0, service_ms: float = 10.0, p99: float = 20.0, share: float = 0.2, more_seconds: float = WAIT
) -> Report:
    """Three times of what it can do; ``share`` is what has to be left of its peak.

    ``more_seconds``: for how many more the overload may last until that is reached, where the machine is busy.
    """
    with Service("--max-inflight", "4", backend="ChaosEcho", most=1, service_ms=service_ms) as it:
        it.wait_started()
        began = time.monotonic()
        with Load(it.port, 3) as load:
            time.sleep(seconds / 2)
        peak = load.ok / (time.monotonic() - began)
        samples = [it.sum("rss")]
        clients, offered = 30, 3000 / service_ms
        with Load(it.port, clients, rate=offered / clients) as load:
            until = time.monotonic() + more_seconds
            while True:
                began, done = time.monotonic(), load.ok
                while time.monotonic() - began < seconds:
                    time.sleep(seconds / 20)
                    samples.append(it.sum("rss"))
                goodput = (load.ok - done) / (time.monotonic() - began)
                if time.monotonic() >= until or (goodput >= share * peak and load.tally.hints):
                    break
        is_normal = eventually(lambda: it.inflight == 0)
        with Load(it.port, 1, total=50) as after:
            after.join()
        tally, growth = load.tally, (max(samples) - samples[0]) / MEBIBYTE
        problems = [
            *answered(tally, WAIT, ("ok", "overloaded")),
            *above("answers a second at capacity, times the share", share * peak, goodput),
            *differs("whether something was rejected", tally.ends["overloaded"] > 0, True),
            *differs("whether each rejection says when to come back", all(hint for hint in tally.hints), True),
            *above("p99 of rejections, s", tally.percentile("overloaded", 0.99), p99),
            *above("memory under overload, MiB", growth, 16),
            *differs("whether it was normal again", is_normal, True),
            *answered(after.tally, WAIT),
        ]
        figures = {"peak_qps": round(peak), "offered_qps": round(offered), "goodput_qps": round(goodput)}
        return Report("overload", {**figures, "memory_mib": round(growth, 1), **tally.figures()}, problems)


def clients_gone(requests: int = 600) -> Report:
    """Half of the requests are abandoned: some in the middle of the message, the others before the answer."""
    with Service(service_ms=2) as it:
        it.wait_started()
        with Load(it.port, 8, total=80) as warm:
            warm.join()
        eventually(lambda: it.open_connections == 0)
        before = it.sum("num_fds"), it.sum("num_threads")
        with Load(it.port, 16, abandon_every=2, total=requests) as load:
            load.join()

        def figures() -> dict[str, int]:
            descriptors, threads = it.sum("num_fds"), it.sum("num_threads")
            more = {"descriptors": max(0, descriptors - before[0]), "threads": max(0, threads - before[1])}
            return {"in flight": it.inflight, "open": it.open_connections, **more}

        eventually(lambda: not any(figures().values()))
        left = {what: count for what, count in figures().items() if count}
        problems = [*answered(load.tally, WAIT), *differs("what is left", left, {})]
        return Report("clients gone", load.tally.figures(), problems)


def soak(seconds: float = 4.0, most: float = 4 * MEBIBYTE, leak_bytes: int = 0, share: float = 0.8) -> Report:
    """At that share of its capacity; ``leak_bytes`` of each request is the planted fault.

    Longer than ``seconds``, where the machine is too busy for a thousand requests and 40 samples in that time.
    """
    with Service(service_ms=2, most=4, leak_bytes=leak_bytes) as it:
        it.wait_started()
        began = time.monotonic()
        with Load(it.port, 8) as load:
            time.sleep(min(5.0, seconds / 4))
            eventually(lambda: load.ok)
        capacity = load.ok / (time.monotonic() - began)
        resident, devices = [], []
        began = time.monotonic()
        with Load(it.port, 8, rate=share * capacity / 8) as load:
            while time.monotonic() < began + seconds or load.tally.sent < 1000 or len(resident) < 40:
                time.sleep(max(0.05, seconds / 400))
                resident.append(it.sum("rss"))
                devices.append(sum(gpu["used_bytes"] for gpu in it.stats["gpus"]))
        problems = [
            *answered(load.tally, WAIT),
            *grew(resident, int(most), "resident memory"),
            *grew(devices, int(most), "GPU memory"),
        ]
        mib = [round(samples[at] / MEBIBYTE, 1) for samples in (resident, devices) for at in (0, -1)]
        figures = {"capacity_qps": round(capacity), "first, last MiB": mib[:2], "of the GPU": mib[2:]}
        return Report("soak", {**figures, **load.tally.figures()}, problems)


def mixed(
    requests: int = 4000,
    seconds: float = 6.0,
    workers: int = 3,
    clients: int = 16,
    every: float = 1.5,
    within: float = WAIT,
    say: Callable[[str], object] = lambda line: None,
) -> Report:
    """Requests, spread over ``seconds``, with kills, reloads and disconnects at once."""
    kills: list[tuple[float, float]] = []
    reloads = 0
    with Service("--workers", str(workers), instance_num=2) as it:
        it.wait_started()
        began = last_said = time.monotonic()
        next_kill, next_reload = began + every / 2, began + 0.6 * every
        load = Load(it.port, clients, total=requests, rate=requests / seconds / clients, abandon_every=97)
        with load:
            while load.is_running:
                time.sleep(0.05)
                now = time.monotonic()
                if now >= next_kill:
                    # A worker that has only just started counts as one that cannot, if it dies.
                    able = [row for row in it.stats["workers"] if row["state"] == "ready" and row["uptime_s"] > 1.5]
                    if able:
                        victim = random.choice(able)["pid"]
                        with suppress(ProcessLookupError):
                            os.kill(victim, signal.SIGKILL)
                            eventually(lambda pid=victim: pid not in [one["pid"] for one in it.stats["workers"]])  # type: ignore[misc]
                            kills.append((now, time.monotonic()))
                        next_kill = now + every
                if now >= next_reload:
                    it.signal(signal.SIGHUP)
                    reloads += 1
                    next_reload = now + 1.15 * every
                if now - last_said > 10:
                    last_said = now
                    say(f"{load.tally.sent} requests, {len(kills)} kills, {reloads} reloads, {now - began:.0f} s")
        tally = load.tally
        is_idle = eventually(lambda: it.inflight == it.open_connections == 0)
        it.signal()
        code = it.exit_code()
        problems = [
            *answered(tally, within, TYPED),
            *closed_by_kills(tally.closed, kills),
            *differs("whether nothing is open in the end", is_idle, True),
            *differs("the exit code", code, 0),
        ]
        return Report("mixed", {**tally.figures(), "kills": len(kills), "reloads": reloads, "exit": code}, problems)


def hanging(hang_seconds: float = 3.0) -> Report:
    """A stopped worker is killed and replaced, and its connections go on."""
    with Service("--hang-seconds", str(hang_seconds), "--workers", "2") as it:
        it.wait_started()
        with Load(it.port, 8) as load:
            eventually(lambda: load.ok > 100)
            victim = it.pids()[0]
            os.kill(victim, signal.SIGSTOP)
            stopped_at = time.monotonic()
            is_replaced = eventually(lambda: victim not in it.pids() and len(it.pids()) == 2)
            back_at = time.monotonic()
        problems = [
            *answered(load.tally, WAIT, TYPED),
            *closed_by_kills(load.tally.closed, [(stopped_at, back_at)]),
            *differs("whether the stopped worker was replaced", is_replaced, True),
        ]
        return Report("hang", {"back_s": round(back_at - stopped_at, 2), **load.tally.figures()}, problems)


def cannot_start(backend: str = "ChaosRaise", word: str = "") -> Report:
    """The service ends, and says why."""
    with Service(backend=backend) as it:
        code = it.exit_code(3 * WAIT)
        it.processes()
    problems = [
        *differs("the exit code", code, 1),
        *differs(f"whether it says {word!r}", word in it.stderr, True),
        *differs("whether it says why in a line", "torchpipe-serve: " in it.stderr, True),
    ]
    return Report("cannot start", {"backend": backend, "exit": code}, problems)


def crash_loop(seconds: float = 6.0) -> Report:
    """A worker that is ready, and dies right after that, each time: the service stays, and tries ever more rarely."""

    def tried() -> int:
        return it.stderr.count("ended as soon as it was ready")

    with Service(backend="ChaosCrash", once_ready=True) as it:
        eventually(tried)
        eventually(lambda: it.process.poll() is not None or tried() > 6, seconds)
        is_over, attempts = it.process.poll() is not None, tried()
        goes_on = eventually(lambda: tried() >= 3)
        it.signal()
        code = it.exit_code()
        it.processes()
    problems = [
        *differs("whether it has ended by itself", is_over, False),
        *above("attempts", attempts, 6),
        *differs("whether it goes on trying", goes_on, True),
        *differs("whether it was stopped", code is not None, True),
    ]
    return Report("crash loop", {"exit": code, "attempts": attempts}, problems)


def bad_reload() -> Report:
    """SIGHUP with a configuration that cannot be read, names no backend, crashes, raises: everything stays."""
    broken: dict[str, Callable[[Service], object]] = {
        "no TOML": lambda it: it.config.write_text("[node\n"),
        "no such backend": lambda it: it.write(backend="Nonesuch"),
        "raises": lambda it: it.write(backend="ChaosRaise"),
        "crashes": lambda it: it.write(backend="ChaosCrash"),
    }
    with Service() as it:
        it.wait_started()
        before = it.pids()
        problems: list[str] = []
        with Load(it.port, 2, rate=100) as load:
            for index, (name, break_it) in enumerate(broken.items()):
                break_it(it)
                it.signal(signal.SIGHUP)
                if not eventually(lambda count=index + 1: it.stderr.count("not reloaded") == count):  # type: ignore[misc]
                    problems.append(f"{name}: nothing says that it was not reloaded")
            problems += differs("the workers", it.pids(), before)
            it.write()
            it.signal(signal.SIGHUP)
            is_new = eventually(lambda: before[0] not in (now := it.pids()) and len(now) == 1)
            problems += differs("whether a good one is taken after that", is_new, True)
        problems += answered(load.tally, WAIT)
        problems += closed_by_kills(load.tally.closed, [])
        return Report("bad reload", load.tally.figures(), problems)


def models(rounds: int = 2, mebibytes: int = 32) -> Report:
    """Two models of three versions come and go while a third is asked; memory and descriptors are as before."""
    held = {"held_mib": mebibytes}
    actions = [(action, name) for action in ("unload", "load") for name in ("one", "two")]
    with Service(models={"one/1": held, "one/2": held, "two": held, "steady": {}}) as it:
        it.wait_started()
        problems: list[str] = []

        def change(action: str, name: str) -> float:
            status, answer = it.control(action, name)
            problems.extend(differs(f"the answer to {action} {name}, {answer}", status, 200))
            return float(answer.get("seconds", 0))

        def settled(low: float, high: float) -> bool:
            return eventually(lambda: len(it.workers) == 1 and low <= it.sum("rss") / MEBIBYTE <= high)

        seconds = [change(*each) for each in actions]  # from here on every figure is that of a reload
        eventually(lambda: it.open_connections == 0 and len(it.workers) == 1)
        loaded, descriptors = it.sum("rss") / MEBIBYTE, it.sum("num_fds")
        with Load(it.port, 4, rate=50, model="steady") as load:
            for _ in range(rounds):
                seconds += [change(*each) for each in actions[:2]]
                problems += differs("memory without them", settled(0, loaded - 2.5 * mebibytes), True)
                seconds += [change(*each) for each in actions[2:]]
            it.write("two", backend="ChaosRaise")
            before = it.pids()
            refused = [it.control(*each)[0] for each in (("load", "two"), ("load", "..%2Ftwo"), ("unload", "none"))]
            problems += differs("answers to what cannot be", (refused, it.pids()), ([400] * 3, before))
        problems += differs("whether memory is as before", settled(0.95 * loaded, 1.05 * loaded), True)
        problems += differs(
            "descriptors", (eventually(lambda: it.sum("num_fds") <= descriptors), it.sum("num_fds"))[0], True
        )
        problems += [*answered(load.tally, WAIT), *closed_by_kills(load.tally.closed, [])]
        figures = {"changes": len(seconds), "mean_s": round(sum(seconds) / len(seconds), 2), "longest": max(seconds)}
        memory = {"rss_mib": round(loaded), "after": round(it.sum("rss") / MEBIBYTE), "fds": descriptors}
        return Report("models", {**figures, **memory, **load.tally.figures()}, problems)


def supervisor_killed() -> Report:
    """Nothing is left of the service, and what was in work is answered."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        it = stack.enter_context(Service("--port", str(port), "--workers", "2", service_ms=1000))
        sock = stack.enter_context(connect(it.wait_started().port))
        sock.sendall(pack_batch(b"in work"))
        eventually(lambda: it.inflight == 1)
        shared = it.shared_files()
        it.process.kill()
        answer = read_all(sock)
        eventually(lambda: not it.alive())
        problems = [
            *differs("whether the request in work was answered", b"in work" in answer, True),
            *differs("processes left behind", len(it.alive()), 0),
            *differs("whether the port is free", _is_free(port), True),
            *differs("files in shared memory", [file for file in shared if Path(file).exists()], []),
        ]
        return Report("supervisor killed", {}, problems)


# -- malformed bytes ------------------------------------------------------------------------------------------------


def malformed(messages: int = 600, seed: int = 1) -> Report:
    """Mutated messages, one a connection, while another client is served."""
    with Service("--message-seconds", "1") as it:
        it.wait_started()
        with Load(it.port, 1, total=100) as warm:
            warm.join()
        started, before = it.pids(), it.sum("rss")
        with Load(it.port, 1, rate=200) as load, connect(it.port) as slow:
            trickle = threading.Thread(target=_trickle, args=(slow,), daemon=True)
            trickle.start()
            makers = [maker(random.Random(seed)) for maker in (ThriftMaker, HttpMaker)]
            mutants = [maker.mutant(maker.message(), maker.message()) for maker in makers for _ in range(messages // 2)]
            with ThreadPoolExecutor(4) as pool:
                hung = sum(pool.map(lambda data: _throw(it.port, data), mutants))
            trickle.join(WAIT)
        is_idle = eventually(lambda: it.open_connections == 0)
        growth = (it.sum("rss") - before) / MEBIBYTE
        problems = [
            *answered(load.tally, WAIT),
            *differs("connections closed on the client that did nothing wrong", len(load.tally.closed), 0),
            *differs("the workers", it.pids(), started),
            *differs("whether the slow client was closed", not trickle.is_alive(), True),
            *differs("broken connections that were not closed or answered", hung, 0),
            *above("memory, MiB", growth, 16),
            *differs("whether nothing is open in the end", is_idle, True),
        ]
        return Report("malformed bytes", {"growth_mib": round(growth, 1), **load.tally.figures()}, problems)


def _throw(port: int, data: bytes) -> bool:
    """Whether the server leaves the connection hanging: it neither answers nor closes, once nothing more can come."""
    with connect(port) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
        except TimeoutError:
            return True
        except OSError:
            pass
    return False


def _trickle(sock: socket.socket) -> None:
    """A byte a second, until the server has enough of it."""
    sock.settimeout(1.0)
    for byte in pack_batch(b"x" * 100):
        try:
            sock.sendall(bytes([byte]))
            if not sock.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True

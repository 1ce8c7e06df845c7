"""One event of each kind, done to a service; each function judges what the service did, and returns its figures.

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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.http_maker import HttpMaker
from fuzz.thrift_maker import ThriftMaker
from kit.clients import ask, connect, pack_batch, read_all
from kit.services import reserved_port
from kit.waits import WAIT, eventually

from chaos.clients import TYPED, Load, check_answers, check_closed, growth
from chaos.service import MEBIBYTE, Service

Figures = dict[str, Any]


def overload(
    seconds: float = 2.0, service_ms: float = 10.0, p99: float = 20.0, share: float = 0.2, more_seconds: float = WAIT
) -> Figures:
    """Three times of what it can do; ``share`` is what has to be left of its peak.

    ``more_seconds``: for how many more the overload may last until that is reached, where the machine is busy.
    """
    with Service("--max-inflight", "4", most=1, service_ms=service_ms) as it:
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
        eventually(lambda: it.inflight == 0)
        with Load(it.port, 1, total=50) as after:
            after.join()
    tally, grown = load.tally, (max(samples) - samples[0]) / MEBIBYTE
    check_answers(tally, WAIT, ("ok", "overloaded"))
    check_answers(after.tally, WAIT)
    assert goodput >= share * peak, f"{goodput:.0f} answers a second of {peak:.0f} at capacity"
    assert tally.ends["overloaded"]
    assert all(tally.hints), "a rejection does not say when to come back"
    refused_s = tally.percentile("overloaded", 0.99)
    assert refused_s <= p99, f"rejections take {refused_s:g} s (p99)"
    assert grown <= 16, f"{grown:.0f} MiB more under overload"
    rates = {"peak_qps": round(peak), "offered_qps": round(offered), "goodput_qps": round(goodput)}
    return {**rates, "memory_mib": round(grown, 1), **tally.figures()}


def clients_gone(requests: int = 600) -> Figures:
    """Half of the requests are abandoned: some in the middle of the message, the others before the answer."""
    with Service(service_ms=2) as it:
        it.wait_started()
        with Load(it.port, 8, total=80) as warm:
            warm.join()
        eventually(lambda: it.open_connections == 0)
        before = it.sum("num_fds"), it.sum("num_threads")
        with Load(it.port, 16, abandon_every=2, total=requests) as load:
            load.join()
        eventually(lambda: it.inflight == it.open_connections == 0, "requests or connections are left")
        eventually(lambda: it.sum("num_fds") <= before[0] and it.sum("num_threads") <= before[1], "more than before")
    check_answers(load.tally, WAIT)
    return load.tally.figures()


def soak(seconds: float = 4.0, most: float = 4 * MEBIBYTE, leak_bytes: int = 0, share: float = 0.8) -> Figures:
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
    check_answers(load.tally, WAIT)
    for samples, what in ((resident, "resident memory"), (devices, "GPU memory")):
        assert growth(samples) <= most, f"{what} grows by {growth(samples)} bytes"
    mib = [round(samples[at] / MEBIBYTE, 1) for samples in (resident, devices) for at in (0, -1)]
    figures = {"capacity_qps": round(capacity), "first, last MiB": mib[:2], "of the GPU": mib[2:]}
    return {**figures, **load.tally.figures()}


def mixed(
    requests: int = 4000,
    seconds: float = 6.0,
    workers: int = 3,
    clients: int = 16,
    every: float = 1.5,
    within: float = WAIT,
    say: Callable[[str], object] = lambda line: None,
) -> Figures:
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
        eventually(lambda: it.inflight == it.open_connections == 0)
        it.signal()
        assert it.wait() == 0
    check_answers(load.tally, within, TYPED)
    check_closed(load.tally, kills)
    return {**load.tally.figures(), "kills": len(kills), "reloads": reloads}


def hanging(hang_seconds: float = 3.0) -> Figures:
    """A stopped worker is killed and replaced, and its connections go on."""
    with Service("--hang-seconds", str(hang_seconds), "--workers", "2") as it:
        it.wait_started()
        with Load(it.port, 8) as load:
            eventually(lambda: load.ok > 100)
            victim = it.pids()[0]
            os.kill(victim, signal.SIGSTOP)
            stopped_at = time.monotonic()
            eventually(lambda: victim not in it.pids() and len(it.pids()) == 2, "it is not replaced")
            back_at = time.monotonic()
    check_answers(load.tally, WAIT, TYPED)
    check_closed(load.tally, [(stopped_at, back_at)])
    return {"back_s": round(back_at - stopped_at, 2), **load.tally.figures()}


def cannot_start(fault: str, said: str) -> Figures:
    """The service ends, and says why."""
    with Service(fault=fault) as it:
        assert it.wait(3 * WAIT) == 1
        it.processes()
    assert said in it.stderr
    assert "torchpipe-serve: " in it.stderr
    return {}


CANNOT_START = {
    "cannot start: raises": partial(cannot_start, "raises", "planted failure"),
    "cannot start: crashes": partial(cannot_start, "crashes", "given up after 5 attempts"),
}


def crash_loop(seconds: float = 6.0) -> Figures:
    """A worker that is ready, and dies right after that, each time: the service stays, and tries ever more rarely."""

    def tried() -> int:
        return it.stderr.count("ended as soon as it was ready")

    with Service(fault="crashes once ready") as it:
        eventually(tried)
        with suppress(AssertionError):
            eventually(lambda: it.process.poll() is not None or tried() > 6, seconds=seconds)
        assert it.process.poll() is None, "it has ended by itself"
        attempts = tried()
        assert attempts <= 6
        eventually(lambda: tried() >= 3, "it does not go on trying")
        it.signal()
        it.wait()
        it.processes()
    return {"attempts": attempts}


def bad_reload() -> Figures:
    """SIGHUP with a configuration that cannot be read, names no backend, crashes, raises: everything stays."""
    broken: list[Callable[[Service], object]] = [
        lambda it: it.config.write_text("[node\n"),
        lambda it: it.write(backend="Nonesuch"),
        lambda it: it.write(fault="raises"),
        lambda it: it.write(fault="crashes"),
    ]
    with Service() as it:
        it.wait_started()
        before = it.pids()
        with Load(it.port, 2, rate=100) as load:
            for count, break_it in enumerate(broken, start=1):
                break_it(it)
                it.signal(signal.SIGHUP)
                eventually(lambda count=count: it.stderr.count("not reloaded") == count)  # type: ignore[misc]
            assert it.pids() == before
            it.write()
            it.signal(signal.SIGHUP)
            eventually(lambda: before[0] not in (now := it.pids()) and len(now) == 1, "a good one is not taken")
    check_answers(load.tally, WAIT)
    check_closed(load.tally)
    return load.tally.figures()


def models(rounds: int = 2, mebibytes: int = 32) -> Figures:
    """Two models of three versions come and go while a third is asked; memory and descriptors are as before."""
    held = {"held_mib": mebibytes}
    actions = [(action, name) for action in ("unload", "load") for name in ("one", "two")]
    with Service(models={"one/1": held, "one/2": held, "two": held, "steady": {}}) as it:
        it.wait_started()

        def control(action: str, name: str) -> tuple[int, Any]:
            return ask(it.http_port, b"", f"/v2/repository/models/{name}/{action}")

        def change(action: str, name: str) -> float:
            status, answer = control(action, name)
            assert status == 200, answer
            return float(answer["seconds"])

        def settle(low: float, high: float) -> None:
            eventually(lambda: len(it.workers) == 1 and low <= it.sum("rss") / MEBIBYTE <= high, "memory is another")

        with Load(it.port, 1, total=10, model="steady") as warm:
            warm.join()
        eventually(lambda: it.open_connections == 0)
        loaded, descriptors = it.sum("rss") / MEBIBYTE, it.sum("num_fds")
        seconds, workers = [change(*each) for each in actions], it.workers
        with Load(it.port, 4, rate=50, model="steady") as load:
            for _ in range(rounds):
                seconds += [change(*each) for each in actions[:2]]
                settle(0, loaded - 2.5 * mebibytes)
                seconds += [change(*each) for each in actions[2:]]
            it.write("two", fault="raises")
            before = it.pids()
            refused = [control(*each)[0] for each in (("load", "two"), ("load", "..%2Ftwo"), ("unload", "none"))]
            assert (refused, it.pids(), it.workers) == ([400] * 3, before, workers)
        settle(0.95 * loaded, 1.05 * loaded)
        eventually(lambda: it.sum("num_fds") <= descriptors, "descriptors are left")
        memory = {"rss_mib": round(loaded), "after": round(it.sum("rss") / MEBIBYTE), "fds": descriptors}
    check_answers(load.tally, WAIT)
    check_closed(load.tally)
    figures = {"changes": len(seconds), "mean_s": round(sum(seconds) / len(seconds), 2), "longest": max(seconds)}
    return {**figures, **memory, **load.tally.figures()}


def supervisor_killed() -> Figures:
    """Nothing is left of the service, and what was in work is answered."""
    with reserved_port() as port, Service("--port", str(port), "--workers", "2", service_ms=1000) as it:
        with connect(it.wait_started().port) as sock:
            sock.sendall(pack_batch(b"in work"))
            eventually(lambda: it.inflight == 1)
            shared = it.shared_files()
            it.process.kill()
            assert b"in work" in read_all(sock)
        eventually(lambda: not it.alive(), "processes are left")
        socket.create_server(("127.0.0.1", port)).close()
        assert [file for file in shared if Path(file).exists()] == []
    return {}


def malformed(messages: int = 600, seed: int = 1) -> Figures:
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
            assert not trickle.is_alive(), "the slow client was not closed"
        eventually(lambda: it.open_connections == 0)
        grown = (it.sum("rss") - before) / MEBIBYTE
        assert it.pids() == started
    check_answers(load.tally, WAIT)
    check_closed(load.tally)
    assert hung == 0, f"{hung} broken connections were neither closed nor answered"
    assert grown <= 16, f"{grown:.0f} MiB more"
    return {"growth_mib": round(grown, 1), **load.tally.figures()}


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
    """A byte every tenth of a second, until the server has enough of it."""
    sock.settimeout(0.1)
    for byte in pack_batch(b"x" * 100):
        with suppress(TimeoutError):
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(4096):
                    return
            except ConnectionError:
                return

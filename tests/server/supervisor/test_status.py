"""The HTTP port of a real service: health, figures, metrics, the picture, the page."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser, text_of
from fakes import WAIT
from prometheus_client.parser import text_string_to_metric_families
from service import DEMO, IDL, ROOT, Client, Process, connect, eventually, read_all, reserved_port
from test_service_lifecycle import Plugin
from thrift.Thrift import TApplicationException
from thrift.transport.TTransport import TTransportException
from torchpipe_server.options import MONITORING_PATHS
from torchpipe_server.supervisor import status

from torchpipe_py.runtime.statistics import BOUNDS_MS

JPEG = next((ROOT / "configs/demo/images").glob("*.jpg")).read_bytes()
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Answer:
    def __init__(self, port: int, path: str, method: str = "GET") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        connection.request(method, path)
        answer = connection.getresponse()
        self.status, self.kind = answer.status, answer.getheader("Content-Type")
        self.length = int(answer.getheader("Content-Length") or 0)
        self.body = answer.read()
        connection.close()

    @property
    def text(self) -> str:
        return self.body.decode()


class Served:
    """A process, and its HTTP port."""

    def __init__(self, process: Process) -> None:
        self.process, self.port = process.wait_started(), process.port
        line = process.process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        self.http_port = int(line.partition("127.0.0.1:")[2].partition("/")[0])

    def get(self, path: str, method: str = "GET") -> Answer:
        return Answer(self.http_port, path, method)

    def told(self, path: str) -> Answer:
        """Asked again while the supervisor takes too long to say: the machine is busy, or stood still."""
        answers: list[Answer] = []
        eventually(lambda: (answers.append(self.get(path)), answers[-1].status != 503)[1])
        return answers[-1]

    def stats(self) -> dict[str, Any]:
        answer = self.told("/stats")
        assert (answer.status, answer.kind) == (200, "application/json")
        found: dict[str, Any] = json.loads(answer.body)
        return found

    def families(self) -> dict[str, Any]:
        answer = self.told("/metrics")
        assert (answer.status, answer.kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {family.name: family for family in text_string_to_metric_families(answer.text)}

    def is_settled(self) -> bool:
        """No connection of an earlier test is left."""
        stats = self.stats()
        return stats["connections"]["open"] == 0 and stats["requests"]["inflight"] == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with Process("--http-port", "0", "--workers", "2") as process:
        yield Served(process)


@pytest.fixture
def served(shared: Served) -> Served:
    eventually(shared.is_settled)
    return shared


def test_figures_are_utf_8_and_half_a_character_is_escaped():
    assert status._StatusAnswers({"größe": "…\ud800"}).stats.body == r'{"größe": "…\ud800"}'.encode()


# -- health ---------------------------------------------------------------------------------------------------------


def test_live_and_ready(served: Served):
    for path, text in (("/live", "live\n"), ("/ready", "ready\n"), ("/ready?verbose=1", "ready\n")):
        answer = served.get(path)
        assert (answer.status, answer.text, answer.kind) == (200, text, "text/plain; charset=utf-8")


def test_an_unknown_path_names_the_nearest(served: Served):
    for path, nearest in (("/metric", "'/metrics'"), ("/Stats", "'/stats'"), ("/healthz/ready", "'/ready'")):
        answer = served.get(path)
        assert answer.status == 404
        assert answer.text.rstrip() == f"no {path}; did you mean {nearest}?"
    assert served.get("/" + "x" * 5000).status == 404


def test_head_has_the_head_of_get(served: Served):
    for path in ("/", "/live", "/graph.svg", "/nowhere"):
        head, get = served.get(path, "HEAD"), served.get(path)
        assert (head.status, head.kind, head.length, head.body) == (get.status, get.kind, get.length, b"")
        assert get.length == len(get.body)


def test_nothing_can_be_changed_there(served: Served):
    for method in ("POST", "PUT", "DELETE"):
        assert served.get("/stats", method).status == 501


def test_each_port_names_the_other(served: Served):
    elsewhere = f"this port is for monitoring, images go to --port {served.port}\n"
    answer = served.get("/infer", "POST")
    assert (answer.status, answer.text) == (501, f"POST is not served, only GET, HEAD; {elsewhere}")
    answer = served.get("/v2/health/ready")
    assert (answer.status, answer.text) == (404, f"no /v2/health/ready; {elsewhere}")
    for path in MONITORING_PATHS:
        assert served.told(path).status == 200
        answer = Answer(served.port, path)
        assert answer.status == 404
        said = json.loads(answer.body)["error"]
        assert said.startswith(f"no {path}; monitoring is on --http-port {served.http_port}; ")


def test_the_files_of_the_page(served: Served):
    kinds = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
    for path, kind in kinds.items():
        answer = served.get(path)
        assert (answer.status, answer.kind) == (200, f"{kind}; charset=utf-8")
        name = path.lstrip("/") or "index.html"
        assert answer.body == (ROOT / "server/torchpipe_server/supervisor/page" / name).read_bytes()


def test_the_picture(served: Served):
    answer = served.get("/graph.svg")
    assert (answer.status, answer.kind) == (200, "image/svg+xml")
    root = ElementTree.fromstring(answer.body)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    nodes = [element.get("data-node") for element in root.iter() if element.get("data-node")]
    assert sorted(nodes) == ["decode", "model"]
    assert served.stats()["graph_id"] == hashlib.sha256(answer.body).hexdigest()[:16]


def test_garbage_harms_nobody(served: Served):
    for data in (b"\0" * 100, b"\x16\x03\x01" * 50, b"GET\r\n\r\n", b"x" * 100_000 + b"\r\n\r\n"):
        # It may hang up before all of it is sent.
        with connect(served.http_port) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)
    assert served.get("/live").status == 200
    assert "Traceback" not in served.process.stderr


def test_a_connection_may_ask_again(served: Served):
    connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=WAIT)
    for path in ("/live", "/nowhere", "/stats", "/metrics"):
        connection.request("GET", path)
        connection.getresponse().read()
    connection.close()


# -- figures --------------------------------------------------------------------------------------------------------

KEYS = {
    "": "state ready version config pid uptime_s time graph_id connections restarts restarts_by_reason workers engines "
    "bounds_ms requests nodes hand_over log_lines_dropped gpus",
    "connections": "open max accepted refused evicted",
    "requests": "inflight by_method latency",
    "hand_over": "requests slot_wait_ms there_ms in_engine_ms back_ms",
    "latency": "counts sum_ms",
    "worker": "index pid state responding connections inflight restarts uptime_s rss_bytes",
    "node": "instances alive min max queued busy oldest_batch_s requests batches failed expired batch_sizes queue_ms "
    "batch_wait_ms compute_ms instance_compute_ms histograms",
    "histograms": "queue batch_wait compute",
}


def assert_keys(found: dict[str, Any], kind: str) -> None:
    assert set(found) == set(KEYS[kind].split())


def test_every_key_of_the_figures(served: Served):
    stats = served.stats()
    assert_keys(stats, "")
    for kind in ("connections", "requests", "hand_over"):
        assert_keys(stats[kind], kind)
    assert_keys(stats["requests"]["latency"], "latency")
    for worker in stats["workers"]:
        assert_keys(worker, "worker")
    for node in stats["nodes"].values():
        assert_keys(node, "node")
        assert_keys(node["histograms"], "histograms")
    assert (stats["state"], stats["ready"], stats["config"], stats["restarts"]) == ("ready", True, DEMO, 0)
    assert stats["pid"] == served.process.pid
    assert stats["uptime_s"] > 0
    assert abs(stats["time"] - time.time()) < 60
    assert stats["bounds_ms"] == BOUNDS_MS
    assert stats["gpus"] == []
    assert [worker["index"] for worker in stats["workers"]] == [0, 1]
    assert sorted(worker["pid"] for worker in stats["workers"]) == served.process.workers
    for worker in stats["workers"]:
        assert (worker["state"], worker["responding"], worker["restarts"]) == ("ready", True, 0)
        assert worker["rss_bytes"] > 2**20


def grown(old: Any, new: Any) -> Any:
    """By how much, number by number."""
    if isinstance(new, dict):
        return {key: grown((old or {}).get(key), value) for key, value in new.items()}
    if isinstance(new, list):
        return [grown(one, other) for one, other in zip(old or [0] * len(new), new, strict=True)]
    return new - (old or 0)


def calls(outcomes: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Without what did not happen."""
    kept = {name: {key: count for key, count in found.items() if count} for name, found in outcomes.items()}
    return {name: found for name, found in kept.items() if found}


SENT = {
    "infer_batch": {"ok": 20, "decode_error": 4},
    "infer_many": {"ok": 4, "decode_error": 4},
    "infer": {"ok": 4},
    "ping": {"ok": 4},
    "unknown": {"unknown_method": 4},
}
REQUESTS = 20 + 4 + 4 * 3 + 4 * 2 + 4  # of the pipeline


def send_some(client: Client) -> None:
    for _ in range(5):
        client.infer_batch(JPEG)
    assert client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"x")).code == "decode_error"
    client.infer_many([JPEG] * 3)
    client.infer_many([JPEG, b"x"])
    client.infer({"data": IDL.Value(bytes=JPEG)})
    client.ping()
    with pytest.raises(TApplicationException):
        client.call("no_such_method")


def test_figures_are_those_of_what_was_sent(served: Served):
    before = served.stats()
    with ExitStack() as stack:
        for _ in range(4):
            send_some(stack.enter_context(Client(served.port)))
        compare(served, before)
    eventually(served.is_settled)


def compare(served: Served, before: dict[str, Any]) -> None:
    total = sum(sum(SENT[name].values()) for name in ("infer_batch", "infer_many", "infer"))
    eventually(lambda: calls(grown(before["requests"], served.stats()["requests"])["by_method"]) == SENT)
    # The last request is answered a moment before its instance is idle.
    eventually(lambda: not any(node["busy"] for node in served.stats()["nodes"].values()))
    after = served.stats()
    requests = grown(before["requests"], after["requests"])
    assert calls(requests["by_method"]) == SENT
    assert sum(requests["latency"]["counts"]) == total
    assert 0 < requests["latency"]["sum_ms"] < 1000 * WAIT * total
    assert after["connections"]["open"] == before["connections"]["open"] + 4
    assert after["connections"]["accepted"] == before["connections"]["accepted"] + 4
    assert [worker["connections"] for worker in after["workers"]] == [2, 2]
    for name, count in {"decode": REQUESTS, "model": REQUESTS - 8}.items():
        node = grown(before["nodes"].get(name), after["nodes"][name])
        assert node["requests"] == count
        assert sum(int(size) * times for size, times in node["batch_sizes"].items()) == count
        assert sum(node["batch_sizes"].values()) == node["batches"]
        assert sum(node["histograms"]["queue"]) == count
        assert sum(node["histograms"]["batch_wait"]) <= count, "requests that cannot be batched wait for no batch"
        assert sum(node["histograms"]["compute"]) == node["batches"]
        assert sum(node["instance_compute_ms"]) == pytest.approx(node["compute_ms"])
        assert (node["failed"], node["expired"]) == (0, 0), "an image that cannot be read is no failure of the backend"
        now = after["nodes"][name]
        assert (now["queued"], now["busy"], now["oldest_batch_s"]) == (0, 0, 0.0)
        assert now["alive"] == now["instances"]


def test_metrics_are_the_figures(served: Served):
    with Client(served.port) as client:
        send_some(client)
        eventually(lambda: served.stats()["requests"]["by_method"].get("unknown"))
        seen = None

        def is_steady() -> bool:
            nonlocal seen
            before, seen = seen, served.stats()["requests"]
            return before == seen

        eventually(is_steady)
        stats, families = served.stats(), served.families()
    found = {}
    for sample in families["torchpipe_requests"].samples:
        found.setdefault(sample.labels["method"], {})[sample.labels["outcome"]] = sample.value
    assert found == stats["requests"]["by_method"]
    single = {
        "torchpipe_connections": stats["connections"]["open"],
        "torchpipe_connections_accepted": stats["connections"]["accepted"],
        "torchpipe_connections_refused": stats["connections"]["refused"],
        "torchpipe_connections_evicted": stats["connections"]["evicted"],
        "torchpipe_worker_restarts": 0,
        "torchpipe_requests_pending": 0,
        "torchpipe_ready": 1,
    }
    assert {name: families[name].samples[0].value for name in single} == single
    assert [one.value for one in families["torchpipe_workers"].samples] == [2]
    counters = {"requests": "requests", "batches": "batches", "failures": "failed", "expired": "expired"}
    for metric, key in counters.items():
        values = {one.labels["node"]: one.value for one in families[f"torchpipe_node_{metric}"].samples}
        assert values == {name: node[key] for name, node in stats["nodes"].items()}
    assert_histogram(families["torchpipe_request_seconds"], stats["requests"]["latency"]["sum_ms"] / 1000)
    for name, node in stats["nodes"].items():
        for key in ("queue", "batch_wait", "compute"):
            assert_histogram(families[f"torchpipe_node_{key}_seconds"], node[f"{key}_ms"] / 1000, node=name)
        assert_histogram(families["torchpipe_node_batch_size"], node["requests"], node=name)


def assert_histogram(family: Any, total: float, **labels: str) -> None:
    """Buckets are cumulated, end with all, and there is a sum."""
    mine = [one for one in family.samples if labels.items() <= one.labels.items()]
    buckets = [(float(one.labels["le"]), one.value) for one in mine if one.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    (count,) = [one.value for one in mine if one.name.endswith("_count")]
    assert buckets[-1] == (math.inf, count)
    assert [one.value for one in mine if one.name.endswith("_sum")] == [pytest.approx(total)]


def test_a_worker_that_does_not_answer_is_told_as_such_and_the_rest_is_there(served: Served):
    worker = served.stats()["workers"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        assert served.get("/live").status == 200
        eventually(lambda: [one["responding"] for one in served.stats()["workers"]] == [False, True])
        assert served.get("/ready").status == 200
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: all(one["responding"] for one in served.stats()["workers"]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_under_load(served: Served, tmp_path: Path):
    """In a browser, before the service itself."""
    with Load(served.port):
        page = Browser(tmp_path / "profile").run(f"http://127.0.0.1:{served.http_port}/", 8)
    assert page.banner == ""
    assert (page.text("config"), page.text("state")) == (DEMO, "ready")
    assert float(page.totals["QPS"][0].replace(",", "").rstrip("k")) > 0
    assert page.totals["connections"][0] != "0"
    assert page.totals["latency p99"][0].endswith(" ms")
    assert set(page.table("nodes")) == {"decode", "model"}
    assert text_of(page.table("nodes")["model"]["rate /s"]) not in ("–", "0")
    assert len(page.table("workers")) == 2
    boxes = page.boxes()
    assert set(boxes) == {"decode", "model"}
    assert all(text_of(box["rate"]) not in ("– /s", "0 /s") for box in boxes.values())


# -- what must not fall ---------------------------------------------------------------------------------------------


class Load:
    """Clients that go on, whatever becomes of a request; ``answered`` counts by outcome."""

    def __init__(self, port: int, count: int = 4) -> None:
        self.port, self.answered = port, {"ok": 0, "error": 0, "closed": 0, "over": 0}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                with Client(self.port) as client:
                    self._count(self._ask(client))
        except BaseException as error:
            self.failure = error

    def _ask(self, client: Client) -> str:
        """Until the connection is closed, or it is over."""
        while not self._is_over.wait(0.002):
            try:
                client.infer_batch(JPEG)
                self._count("ok")
            except IDL.InferenceError:
                self._count("error")
            except (TTransportException, EOFError, ConnectionError):
                return "closed"
        return "over"

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.answered[outcome] += 1

    def wait_answered(self, count: int) -> None:
        wanted = self.answered["ok"] + count
        eventually(lambda: self.failure or self.answered["ok"] >= wanted)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT)
        assert self.failure is None, repr(self.failure)


def counters_of(served: Served) -> Series:
    """Counters and the parts of histograms, which are counters too."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in served.families().values()
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def assert_no_fall(old: Series, new: Series) -> None:
    assert set(old) <= set(new), "a series is gone"
    # Sums of floats in another order differ in their last digits.
    fallen = {key: (value, new[key]) for key, value in old.items() if new[key] < value * (1 - 1e-9)}
    assert fallen == {}


def test_counters_never_fall_when_a_worker_dies_or_a_reload_replaces_all():
    """What a killed worker did since it was last asked, a second ago at most, is in no figure; nothing that was told is
    taken back."""
    with Process("--http-port", "0", "--workers", "2") as process:
        served = Served(process)
        with Load(served.port) as load:
            last = counters_of(served)

            def look() -> None:
                nonlocal last
                new = counters_of(served)
                assert_no_fall(last, new)
                last = new

            def look_until(is_true: Callable[[], object]) -> None:
                eventually(lambda: (look(), is_true())[1])

            load.wait_answered(50)
            look()
            first = process.workers
            os.kill(first[0], signal.SIGKILL)
            look_until(lambda: served.stats()["restarts"] == 1)
            look_until(lambda: [one["state"] for one in served.stats()["workers"]] == ["ready", "ready"])
            load.wait_answered(50)
            look()
            before, closed = process.workers, load.answered["closed"]
            assert closed <= 4, "those whose reply was being written, nobody knows how far"
            process.signal(signal.SIGHUP)
            look_until(lambda: not set(before) & set(process.workers) and len(process.workers) == 2)
            load.wait_answered(50)
            look()
        eventually(served.is_settled)
        look()
        told = served.stats()["requests"]["by_method"]["infer_batch"]
        assert load.answered["closed"] == closed, "a reload closes none"
        assert sum(told.values()) <= load.answered["ok"] + load.answered["error"] + closed
        assert told.get("worker_died", 0) == load.answered["error"] <= 4
        assert served.stats()["restarts"] == 1
        process.signal()
        assert process.wait() == 0


def test_figures_of_a_worker_that_ended_in_order_are_complete():
    """A reload loses no count: each worker says its figures once more at its end."""
    with Process("--http-port", "0") as process:
        served = Served(process)
        with Client(served.port) as client:
            for _ in range(25):
                client.infer_batch(JPEG)
            (before,) = process.workers
            process.signal(signal.SIGHUP)
            eventually(lambda: len(process.workers) == 1 and process.workers != [before])
            client.infer_batch(JPEG)
            eventually(lambda: served.stats()["requests"]["by_method"]["infer_batch"] == {"ok": 26})
            assert served.stats()["nodes"]["model"]["requests"] == 26


# -- before and after -----------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as reserved:
        yield reserved


def test_it_is_alive_but_not_ready_while_it_loads_and_while_it_drains(tmp_path: Path, port: int):
    plugin = Plugin(tmp_path)

    def statuses() -> list[int]:
        return [Answer(port, path).status for path in ("/live", "/ready", "/graph.svg", "/metrics")]

    with plugin.process("--http-port", str(port), BLOCK_SETUP="1") as process:
        plugin.wait_entered("setup")
        assert statuses() == [200, 503, 503, 200]
        assert Answer(port, "/ready").text == "not ready\n"
        stats = json.loads(Answer(port, "/stats").body)
        assert (stats["state"], stats["ready"], stats["nodes"]) == ("starting", False, {})
        assert [one["state"] for one in stats["workers"]] == ["starting"]
        plugin.open()
        process.wait_started()
        assert statuses() == [200, 200, 200, 200]
        (tmp_path / "open").unlink()
        with Client(process.port) as client:
            seqid = client.send_batch(b"last")
            plugin.wait_entered("forward")
            process.signal()
            eventually(lambda: Answer(port, "/ready").status == 503)

            def is_draining() -> bool:
                stats = json.loads(Answer(port, "/stats").body)
                return (stats["state"], stats["ready"], stats["requests"]["inflight"]) == ("stopping", False, 1)

            eventually(is_draining)  # a busy machine may have told the figures without those of its worker
            assert Answer(port, "/live").status == 200
            plugin.open()
            assert client.receive(seqid).label == "last"
        assert process.wait() == 0


def start_without(module: str, http_port: int) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules[{module!r}] = None; from torchpipe_server import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", code, DEMO, "--host=127.0.0.1", "--port=0", f"--http-port={http_port}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start_without("no_such_module", port)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"torchpipe-serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("name", ["httptools", "multipart", "prometheus_client", "thriftpy2"])
def test_a_missing_library_is_told(name):
    done = start_without(name, 0)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"{name} is not installed (pip install" in done.stderr

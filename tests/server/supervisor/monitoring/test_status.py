"""The HTTP port of a real service: health, figures, metrics, the picture, the page."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.clients import Load
from kit.clients import IDL, Client, ask, fetch
from kit.monitored import Monitored
from kit.services import DEMO, ROOT, SteeredProcess, reserved_port
from kit.waits import eventually, run
from prometheus_client.parser import text_string_to_metric_families
from thriftpy2.thrift import TApplicationException
from torchpipe_server.options import MONITORING_PATHS

from torchpipe_py import cli
from torchpipe_py.runtime.record.statistics import BOUNDS_MS
from torchpipe_py.wire import answers

PAGE = ROOT / "server/torchpipe_server/supervisor/monitoring/page"
JPEG = next((ROOT / "configs/demo/images").glob("*.jpg")).read_bytes()


class Served(Monitored):
    def families(self) -> dict[str, Any]:
        status, fields, body = fetch(self.http_port, "/metrics")
        assert (status, fields["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return {family.name: family for family in text_string_to_metric_families(body.decode())}

    def is_settled(self) -> bool:
        """No connection of an earlier test is left."""
        return self.open_connections == self.inflight == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with Served("--workers", "2") as served:
        served.wait_started()
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    eventually(shared.is_settled)
    return shared


# -- health ---------------------------------------------------------------------------------------------------------

TEXT = "text/plain; charset=utf-8"
NAMES = "content-type", "content-length"


def test_pages_of_allowed_origins_read_figures():
    page, allowed = {"Origin": "https://app.example"}, "access-control-allow-origin"
    with Served("--workers", "1", "--cors-origin", page["Origin"]) as served:
        served.wait_started()
        for path in ("/stats", "/ready", "/nowhere"):
            assert fetch(served.http_port, path, **page).fields[allowed] == page["Origin"]
            assert allowed not in fetch(served.http_port, path, Origin="https://evil.example").fields
        answer = fetch(served.http_port, "/stats", "OPTIONS", Access_Control_Request_Method="GET", **page)
        assert (answer.status, answer.fields["access-control-allow-methods"]) == (200, "GET")


def test_each_path_has_its_status_and_type(served: Served):
    """``HEAD`` has the head of ``GET``; another verb changes nothing, and each port names the other."""
    elsewhere = f"this port is for monitoring, images go to --port {served.port}\n"
    for path, code, kind, text in (
        ("/live", 200, TEXT, "live\n"),
        ("/ready?verbose=1", 200, TEXT, "ready\n"),
        ("/page.js", 200, "text/javascript; charset=utf-8", (PAGE / "page.js").read_text()),
        ("/page.css", 200, "text/css; charset=utf-8", (PAGE / "page.css").read_text()),
        ("/", 200, "text/html; charset=utf-8", (PAGE / "index.html").read_text()),
        ("/graph.svg", 200, "image/svg+xml", None),
        ("/metric", 404, TEXT, "no /metric; did you mean '/metrics'?\n"),
        ("/Stats", 404, TEXT, "no /Stats; did you mean '/stats'?\n"),
        ("/healthz/ready", 404, TEXT, "no /healthz/ready; did you mean '/ready'?\n"),
        ("/v2/health/ready", 404, TEXT, f"no /v2/health/ready; {elsewhere}"),
        ("/" + "x" * 5000, 404, TEXT, None),
    ):
        answer, head = fetch(served.http_port, path), fetch(served.http_port, path, "HEAD")
        assert (answer.status, answer.fields["content-type"]) == (code, kind)
        assert text is None or answer.body.decode() == text
        assert (head.status, head.body) == (code, b"")
        assert [head.fields[name] for name in NAMES] == [answer.fields[name] for name in NAMES]
    for method in ("POST", "PUT", "DELETE"):
        answer = fetch(served.http_port, "/infer", method)
        said = f"{method} is not supported, only GET, HEAD; {elsewhere}"
        assert (answer.status, answer.body.decode()) == (501, said)
    for path in MONITORING_PATHS:
        assert fetch(served.http_port, path).status == 200
        status, said = ask(served.port, b"", path, "GET")
        if path == "/":  # that port has a page of its own
            assert "monitoring" in said
        else:
            monitoring = f"no {path}; monitoring is on --http-port {served.http_port}; "
            assert (status, said["error"].startswith(monitoring)) == (404, True)


def test_metrics_are_compressed_for_prometheus(served: Served) -> None:
    answer = fetch(served.http_port, "/metrics", Accept_Encoding="gzip;q=1.0,identity;q=0.5")
    assert (answer.fields["content-encoding"], answer.fields["vary"]) == ("gzip", "Accept-Encoding")
    assert gzip.decompress(answer.body).startswith(b"# HELP ")


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        *((host, True) for host in ("127.0.0.1:80", "localhost:8080", "[::1]:80", "torchpipe:80", "a.localhost")),
        *((host, False) for host in ("evil.example", "EVIL.example.:8080", "127.0.0.1.evil.example", "1.2.3.4.5:80")),
    ],
)
def test_refuses_unknown_host_names(served: Served, host: str, is_served: bool):
    """DNS rebinding: a name that somebody else owns leads to this machine."""
    answers = {path: fetch(served.http_port, path, Host=host) for path in ("/stats", "/", "/graph.svg", "/nowhere")}
    statuses = [answer.status for answer in answers.values()]
    assert statuses == ([200, 200, 200, 404] if is_served else [403] * 4)
    assert fetch(served.http_port, "/live", Host=host).status == 200, "a probe gets its answer"
    for answer in answers.values():
        for policy in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
            assert policy in answer.fields["content-security-policy"]
        assert answer.fields["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("transport", ["buffered", "framed", "http"])
def test_load_tester_names_the_port_for_images(
    served: Served, transport: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take SIGTERM
    where = "--port", str(served.http_port), "--transport", transport
    assert cli.main(["load", "--img_dir", str(ROOT / "configs/demo/images"), *where]) == 1
    elsewhere = f"images go to --port {served.port}" if transport == "http" else "the service's --port where this is"
    assert elsewhere in capsys.readouterr().err


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_dashboard_and_alerts_use_existing_metrics(served: Served, file: str) -> None:
    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    there = {name + end for name, family in served.families().items() for end in ends[family.type]}
    text = (ROOT / "scripts/deploy" / file).read_text()
    assert set(re.findall(r"\btorchpipe_\w+", text)) - there == set()
    codes = {code for found in re.findall(r'outcome=~\\?"([\w|]+)', text) for code in found.split("|")}
    assert codes - answers.STATUSES.keys() == set() != codes


# -- figures --------------------------------------------------------------------------------------------------------

KEYS = {
    "": "state ready version config pid uptime_s time graph_id connections restarts restarts_by_reason reloads "
    "reload_successful workers engines "
    "bounds_ms requests nodes hand_over log_lines_dropped gpus page_port streams models metrics",
    "connections": "open max accepted refused evicted",
    "requests": "inflight by_model by_method latency_ms histograms",
    "hand_over": "requests slot_wait_ms there_ms in_engine_ms back_ms",
    "worker": "index pid state responding connections inflight restarts uptime_s rss_bytes",
    "node": "instances alive min max queued busy oldest_batch_s requests batches failed expired shed batch_sizes "
    "queue_ms batch_wait_ms compute_ms instance_compute_ms histograms",
    "histograms": "queue batch_wait compute",
}


def test_statistics_have_all_documented_keys(served: Served):
    stats = served.stats
    (worker, _), (node, _) = stats["workers"], stats["nodes"].values()
    parts = {"": stats, "worker": worker, "node": node, "histograms": node["histograms"]}
    parts |= {kind: stats[kind] for kind in ("connections", "requests", "hand_over")}
    assert {kind: sorted(part) for kind, part in parts.items()} == {kind: sorted(KEYS[kind].split()) for kind in KEYS}
    assert list(stats["requests"]["histograms"]) == ["latency"]
    assert (stats["state"], stats["ready"], stats["config"], stats["pid"]) == ("ready", True, DEMO, served.pid)
    assert stats["graph_id"] == hashlib.sha256(fetch(served.http_port, "/graph.svg").body).hexdigest()[:16]
    assert stats["bounds_ms"] == BOUNDS_MS
    assert sorted(worker["pid"] for worker in stats["workers"]) == served.workers
    assert all((worker["state"], worker["responding"]) == ("ready", True) for worker in stats["workers"])


SENT = {
    "infer_batch": {"ok": 5, "decode_error": 1},
    "infer_many": {"ok": 1, "decode_error": 1},
    "infer": {"ok": 1},
    "ping": {"ok": 1},
    "unknown": {"unknown_method": 1},
}
REQUESTS = {"decode": 5 + 1 + 3 + 2 + 1, "model": 5 + 3 + 1 + 1}  # of the pipeline


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


def since(before: Any, now: Any) -> Any:
    """By how much each number has grown, without those that have not."""
    if not isinstance(now, dict):
        return now - (before or 0)
    grown = {key: since((before or {}).get(key), value) for key, value in now.items()}
    return {key: value for key, value in grown.items() if value}


def test_statistics_and_metrics_count_requests(served: Served):
    """And the metrics are the figures."""
    before = served.stats
    with Client(served.port) as client:
        send_some(client)

        def sent() -> Any:
            grown = since(before["requests"]["by_method"], served.stats["requests"]["by_method"])
            return {method: grown.get(method) for method in SENT}  # a worker may tell of earlier ones only now

        eventually(lambda: sent() == SENT)
        # The last request is answered a moment before its instance is idle.
        eventually(lambda: not any(node["busy"] for node in served.stats["nodes"].values()))
        stats, families = served.stats, served.families()
    for name, count in REQUESTS.items():
        node = stats["nodes"][name]
        assert node["requests"] - before["nodes"][name]["requests"] == count
        assert node["requests"] == sum(int(size) * times for size, times in node["batch_sizes"].items())
        assert sum(node["batch_sizes"].values()) == sum(node["histograms"]["compute"]) == node["batches"]
        assert (node["failed"], node["expired"], node["shed"]) == (0, 0, 0), (
            "an image that cannot be read is no failure"
        )
        assert (node["queued"], node["busy"], node["oldest_batch_s"]) == (0, 0, 0.0)
    found: dict[str, dict[str, float]] = {}
    for sample in families["torchpipe_requests"].samples:
        found.setdefault(sample.labels["method"], {})[sample.labels["outcome"]] = sample.value
    assert found == stats["requests"]["by_method"]


def test_stopped_worker_is_reported_beside_the_statistics_of_the_others(served: Served):
    worker = served.stats["workers"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        assert served.get("live")[0] == 200
        eventually(lambda: [one["responding"] for one in served.stats["workers"]] == [False, True])
        assert served.is_ready
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: all(one["responding"] for one in served.stats["workers"]))


# -- what must not fall ---------------------------------------------------------------------------------------------


def counters_of(served: Served) -> dict[str, float]:
    """Counters and the parts of histograms, which are counters too."""
    return {
        f"{sample.name} {sample.labels}": sample.value
        for family in served.families().values()
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


class Light(Served, SteeredProcess):
    """Without a model."""


def test_counters_never_fall_across_deaths_and_reloads(tmp_path: Path):
    """What a killed worker did since it was last asked, a second ago at most, is in no figure; nothing that was told is
    taken back."""
    with Light(tmp_path, "--workers", "2") as served:
        served.wait_started()
        with Load(served.port, 4, lambda client, number: (b"abc", ("abc", 3.0))) as load:
            last = counters_of(served)

            def look() -> None:
                nonlocal last
                new = counters_of(served)
                assert set(last) <= set(new), "a series is gone"
                # Sums of floats in another order differ in their last digits.
                assert [key for key, value in last.items() if new[key] < value * (1 - 1e-9)] == []
                last = new

            def look_until(is_true: Callable[[], object]) -> None:
                eventually(lambda: (look(), is_true())[1])

            eventually(load.served())
            look()
            first = served.workers
            os.kill(first[0], signal.SIGKILL)
            look_until(lambda: served.stats["restarts"] == 1)
            look_until(lambda: [one["state"] for one in served.stats["workers"]] == ["ready", "ready"])
            eventually(load.served())
            look()
            before, closed = served.workers, load.tally.ends["connection_lost"]
            assert closed <= 4, "those whose reply was being written, nobody knows how far"
            served.signal(signal.SIGHUP)
            look_until(lambda: not set(before) & set(served.workers) and len(served.workers) == 2)
            eventually(load.served())
            look()
        eventually(served.is_settled)
        look()
        ends, told = load.tally.ends, Counter[str]()
        for outcomes in served.stats["requests"]["by_method"].values():  # what the supervisor answers is "http"
            told.update(outcomes)
        assert set(ends) <= {"ok", "worker_died", "unavailable", "connection_lost"}
        assert ends["connection_lost"] == closed, "a reload closes none"
        assert sum(told.values()) <= ends.total() + 1
        assert told["worker_died"] == ends["worker_died"] <= 4
        assert served.stats["restarts"] == 1
        served.signal()
        assert served.wait() == 0


# -- before and after -----------------------------------------------------------------------------------------------


def test_alive_but_not_ready_while_loading_and_draining(tmp_path: Path):
    (tmp_path / "hold").touch()

    def statuses() -> list[int]:
        return [fetch(port, path).status for path in ("/live", "/ready", "/graph.svg", "/metrics")]

    with reserved_port() as port, SteeredProcess(tmp_path, "--http-port", str(port)) as process:
        process.wait_entered()
        assert statuses() == [200, 503, 503, 200]
        assert fetch(port, "/ready").body == b"not ready\n"
        stats = ask(port, b"", "/stats", "GET")[1]
        assert (stats["state"], stats["ready"], stats["nodes"]) == ("starting", False, {})
        assert [one["state"] for one in stats["workers"]] == ["starting"]
        (tmp_path / "hold").unlink()
        process.wait_started()
        assert statuses() == [200, 200, 200, 200]
        with Client(process.port) as client:
            seqid = client.send_batch(b"block")
            process.wait_entered()
            process.signal()
            eventually(lambda: fetch(port, "/ready").status == 503)

            def is_draining() -> bool:
                stats = ask(port, b"", "/stats", "GET")[1]
                return (stats["state"], stats["ready"], stats["requests"]["inflight"]) == ("stopping", False, 1)

            eventually(is_draining)  # a busy machine may have told the figures without those of its worker
            assert fetch(port, "/live").status == 200
            process.open()
            assert client.receive(seqid).label == "block"
        assert process.wait() == 0


@pytest.mark.parametrize("name", ["httptools", "msgspec", "prometheus_client"])
def test_names_a_missing_library(name):
    code = f"import sys; sys.modules[{name!r}] = None; from torchpipe_server import cli; sys.exit(cli.main())"
    done = run(sys.executable, "-c", code, DEMO, "--host=127.0.0.1", "--port=0", "--http-port=0", cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"{name} is not installed (pip install" in done.stderr

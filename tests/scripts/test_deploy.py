"""The files in scripts/deploy: for systemd, Kubernetes, KServe, Prometheus, Grafana; nginx with client certificates,
HAProxy for several."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.clients import IDL, connect
from kit.proxies import listens, make_certificates, nginx
from kit.services import Process, reserved_port, serving
from kit.waits import WAIT, eventually, run
from thriftpy2.rpc import make_client
from torchpipe_client import Client
from torchpipe_server.options import MONITORING_PATHS, Options, parse_options
from torchpipe_server.worker.service import usual_service

from torchpipe_py import pipe
from torchpipe_py.plan.config import parse_toml

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "scripts/deploy/torchpipe.service"
NGINX = ROOT / "scripts/deploy/nginx.conf"
HAPROXY = ROOT / "scripts/deploy/haproxy.cfg"
DOCKERFILE = ROOT / "scripts/deploy/Dockerfile"
KUBERNETES = ROOT / "scripts/deploy/kubernetes.yaml"
KSERVE = ROOT / "scripts/deploy/kserve.yaml"
PING = b"\x80\x01\x00\x01\x00\x00\x00\x04ping\x00\x00\x00\x01\x00"
MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit_and_finds_it_safe(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub("ExecStart=[^ ]*", "ExecStart=/bin/true", UNIT.read_text()))
    version = run("systemd-analyze", "--version").stdout.split()
    if int(version[1]) < 250:
        pytest.skip("this systemd-analyze cannot look at a file")
    verified = run("systemd-analyze", "verify", unit)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = run("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit)
    assert rated.returncode == 0, rated.stdout[-1000:]


# -- Kubernetes ------------------------------------------------------------------------------------------------------


def found(pattern: str, path: Path = KUBERNETES) -> list[Any]:
    """Matches of a pattern in a file without its comments, at least one."""
    matches = re.findall(pattern, re.sub(r"(?m)^ *#.*", "", path.read_text()))
    assert matches, f"{pattern} is no longer in {path}"
    return matches


def test_the_pods_run_the_image_with_flags_that_there_are_and_ports_that_it_opens() -> None:
    (entry,) = found(r"ENTRYPOINT (\[.*\])", DOCKERFILE)
    (given,) = found(r" args: \[(.*)\]")
    program, *flags = json.loads(entry)
    options = parse_options([*flags, *(word.strip('" ') for word in given.split(","))])
    assert (program, options.host, options.http_host) == ("torchpipe-serve", "0.0.0.0", "0.0.0.0")
    ports = {name: int(port) for name, port in found(r"name: (\w+), containerPort: (\d+)")}
    assert ports == {"requests": options.port, "monitoring": options.http_port}
    assert found(r"port: (\d+), targetPort: (\w+)") == [(str(options.port), "requests")]
    assert found(r"prometheus.io/port: \"(\d+)\", prometheus.io/path: (\S+)}") == [(str(options.http_port), "/metrics")]
    assert_probed(KUBERNETES, options, "monitoring")


def assert_probed(path: Path, options: Options, port: str) -> None:
    """Assert that probes use this port and existing paths, and that a pod has enough time to end."""
    probes = found(r"(\w+)Probe: {httpGet: {path: (\S+), port: (\w+)}", path)
    wanted = {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
    assert {name: path for name, path, _ in probes} == wanted
    assert {asked for *_, asked in probes} == {port}
    assert {*wanted.values(), "/metrics"} <= set(MONITORING_PATHS)
    (pause,) = found(r"preStop: {exec: {command: \[sleep, \"(\d+)\"\]}}", path)
    (grace,) = found(r"terminationGracePeriodSeconds: (\d+)", path)
    assert int(grace) >= int(pause) + options.drain_seconds + 10


def test_the_runtime_of_kserve_has_flags_that_there_are_and_ports_that_it_opens() -> None:
    (given,) = found(r" args: \[(.*)\]", KSERVE)
    options = parse_options([word.strip('" ') for word in given.split(",")])
    assert (options.config, options.host, options.http_host) == ("/mnt/models", "0.0.0.0", "0.0.0.0")
    assert found(r"containerPort: (\d+)", KSERVE) == [str(options.port), str(options.grpc_port)] == ["8080", "9000"]
    (scraped,) = found(r"prometheus.kserve.io/port: \"(\d+)\", prometheus.kserve.io/path: /metrics", KSERVE)
    assert scraped == str(options.http_port)
    assert_probed(KSERVE, options, scraped)
    assert found(r"[mM]odelFormats?: \[?{name: (\w+)", KSERVE) == ["torchpipe"] * 2


@pytest.mark.parametrize(("folder", "image"), [("deploy", ":1"), ("deploy-gpu", ":1-gpu")])
def test_kustomize_builds_a_deployment_with_flags_that_there_are(folder: str, image: str) -> None:
    (given,) = found(r" args: \[(.*)\]", ROOT / "scripts" / folder / "kustomization.yaml")
    config = Path(parse_options([word.strip('" ') for word in given.split(",")]).config)
    assert parse_toml(str(KUBERNETES.with_name(config.name)))
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    built = run("kubectl", "kustomize", ROOT / "scripts" / folder)
    assert (built.returncode, built.stderr) == (0, "")
    assert f"image: registry.example/classifier{image}\n" in built.stdout
    assert re.search(r"configMap:\n +name: classifier-\w{10}\n", built.stdout)


# -- monitoring ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus)")
def test_each_alert_is_raised_by_its_fault_and_not_without() -> None:
    tried = run("promtool", "test", "rules", Path(__file__).parent / "alerts.yaml")
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_alerts_divide_by_the_requests_that_run_the_pipe() -> None:
    text = (ROOT / "scripts/deploy/alerts.yaml").read_text()
    divisors = re.findall(r'/ sum by [^{]+{method!~"([^"]+)"', text)
    assert len(divisors) == text.count(" / sum ") == 2
    (others,) = set(divisors)
    options = parse_options(["configs/demo.toml", "--grpc-port", "0"])
    with pipe({"backend": "Identity"}) as made:
        served = usual_service(options, made, control=lambda *_: None)
        named = [*served.methods, *dict(served.routes.methods()), *(rpc.label for rpc in served.rpcs)]
        assert {name for name in named if not re.fullmatch(others, name)} == served.names_with_pipe()


def test_the_dashboard_asks_the_data_source_that_is_chosen() -> None:
    board = json.loads((ROOT / "scripts/deploy/grafana.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    (source, *_) = board["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    asked = [
        each["datasource"]["uid"]
        for panel in panels
        for each in (panel, *panel.get("targets", ()))
        if "datasource" in each
    ]
    assert set(asked) == {f"${{{source['name']}}}"}


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[int]:
    """The port of nginx, as configured in scripts/deploy, before a service; its certificates lie in ``tmp_path``."""
    for program in ("nginx", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if not MODULE.exists():
        pytest.skip("nginx has no stream module here (libnginx-mod-stream)")
    make_certificates(tmp_path)
    with reserved_port() as port, serving("Identity") as server:
        changes = {
            "modules/ngx_stream_module.so": str(MODULE),
            "/etc/torchpipe/clients-ca.crt": str(tmp_path / "ca.crt"),
            "127.0.0.1:8888": f"127.0.0.1:{server.port}",
        }
        with nginx(NGINX, tmp_path, port, changes):
            yield port


def test_a_client_with_a_certificate_is_answered(proxy: int, tmp_path: Path) -> None:
    files = {"cafile": "ca.crt", "certfile": "client.crt", "keyfile": "client.key"}
    paths = {name: str(tmp_path / file) for name, file in files.items()}
    client = make_client(IDL.InferenceService, "127.0.0.1", proxy, timeout=int(WAIT * 1000), **paths)
    client.ping()
    client.close()
    log = tmp_path / "torchpipe.log"
    eventually(lambda: log.exists() and '127.0.0.1 "CN=client"' in log.read_text(), "nginx logs no client")


@pytest.mark.parametrize("certificate", ["none", "other", "no TLS"])
def test_a_client_without_one_is_refused(proxy: int, tmp_path: Path, certificate: str) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    if certificate == "other":
        context.load_cert_chain(tmp_path / "other.crt", tmp_path / "other.key")
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", proxy), WAIT) as sock:
        if certificate != "no TLS":
            sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
        sock.sendall(PING)
        answer = sock.recv(100)
    assert b"ping" not in answer


# -- several machines ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_clients_of_a_balancer_notice_nothing_when_a_service_ends(tmp_path: Path) -> None:
    image = (ROOT / "configs/demo/images/ring_00.jpg").read_bytes()
    with (
        socket.socket() as bound,  # from here on, so that nobody takes the port meanwhile
        Process("--http-port", "0") as one,
        Process("--http-port", "0") as two,
    ):
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        text = HAPROXY.read_text().replace("0.0.0.0:8888", f"fd@{bound.fileno()}").replace("inter 1s", "inter 50ms")
        text = text.replace("timeout connect 2s", "timeout connect 30s\n    timeout check 30s")  # of a busy machine
        for service, there in ((one, "10.0.0.1:8888 port 8080"), (two, "10.0.0.2:8888 port 8080")):
            service.wait_started()
            status = re.search(r":(\d+)/", service.process.stdout.readline())[1]
            assert there in text, f"{there} is no longer in {HAPROXY}"
            text = text.replace(there, f"127.0.0.1:{service.port} port {status}")
        config = tmp_path / "haproxy.cfg"
        config.write_text(text)
        descriptor = {"pass_fds": (bound.fileno(),)}
        tested = run("haproxy", "-c", "-f", config, **descriptor)
        assert tested.returncode == 0, tested.stderr
        process = subprocess.Popen(["haproxy", "-f", config, "-db"], stderr=subprocess.DEVNULL, **descriptor)
        try:
            eventually(lambda: listens(port), "haproxy does not listen")
            with Client(f"127.0.0.1:{port}") as client:
                labels = [client.infer_batch(image).label for _ in range(4)]
                one.signal()
                while one.process.poll() is None:
                    labels.append(client.infer_batch(image).label)
                labels += [client.infer_batch(image).label for _ in range(4)]
            assert set(labels) == {"ring"}
            with connect(port) as sock:
                sock.sendall(b"POST /infer HTTP/1.1\r\nHost: a\r\nConnection: close\r\n")
                sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(image), image))
                answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert b'"label": "ring"' in answer
        finally:
            process.terminate()
            process.wait(WAIT)

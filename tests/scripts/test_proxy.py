"""scripts/deploy/nginx-http.conf before services of this process: keys, variants, a shadow, TLS, gRPC."""

from __future__ import annotations

import re
import shutil
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

httpx = pytest.importorskip("httpx")

from kit.proxies import make_certificates, nginx  # noqa: E402
from kit.services import LocalServer, reserved_port, serving  # noqa: E402
from kit.waits import WAIT, eventually  # noqa: E402

NGINX = Path(__file__).parents[2] / "scripts/deploy/nginx-http.conf"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""What nginx keeps in folders of its own, which an ordinary user may not write."""
pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


class Proxy(NamedTuple):
    client: httpx.Client
    services: dict[str, LocalServer]
    folder: Path
    port: int

    def infer(self, **headers: str) -> httpx.Response:
        return self.client.post("/infer", content=b"a picture", headers={"X-Api-Key": "k1", **headers})

    def count(self, name: str) -> int:
        """The requests that a service has counted."""
        return sum(self.services[name].by_method.get("POST /infer", {}).values())


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    make_certificates(folder)
    (folder / "keys.conf").write_text('"k1" "shop";\n"k2" "lab";\n')
    with ExitStack() as stack:
        forwarded = {"forward_headers": "x-client-name,x-api-key"}
        names = ("stable", "canary", "shadow")
        services = {name: stack.enter_context(serving("Identity", **forwarded)) for name in names}
        gone, port = stack.enter_context(reserved_port()), stack.enter_context(reserved_port())
        grpc = stack.enter_context(serving("Identity", grpc_port=0)).grpc_port
        changes = {
            "127.0.0.1:8888": f"127.0.0.1:{services['stable'].port}",
            "127.0.0.1:8889": f"127.0.0.1:{services['canary'].port}",
            "127.0.0.1:8890": f"127.0.0.1:{services['shadow'].port}",
            "127.0.0.1:8001": f"127.0.0.1:{grpc}",
            '        10% 1;\n        * "";': '        50% 1;\n        * "";',
            "        canary canary;\n": "        canary canary;\n        gone gone;\n",
            "    upstream grpc {": f"    upstream gone {{ server 127.0.0.1:{gone}; }}\n    upstream grpc {{",
            "http {\n": "http {\n" + "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in TEMPORARY),
        }
        with nginx(NGINX, folder, port, changes):
            context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            url = f"https://127.0.0.1:{port}"
            with httpx.Client(base_url=url, verify=context, timeout=WAIT, trust_env=False) as client:
                yield Proxy(client, services, folder, port)


def test_answers_a_known_key_and_passes_on_the_name_instead(proxy: Proxy) -> None:
    headers = {"X-Api-Key": "k1", "X-Client-Name": "a lie"}
    answer = proxy.client.post("/infer?outputs=parameters", content=b"a picture", headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"parameters": {"x-client-name": "shop"}})
    log = proxy.folder / "torchpipe-http.log"
    eventually(lambda: log.exists() and '"shop"' in log.read_text(), "nginx logs no client")


def test_refuses_a_missing_and_an_unknown_key(proxy: Proxy) -> None:
    before = proxy.count("stable") + proxy.count("canary")
    answers = [proxy.client.post("/infer", content=b"x", headers=headers) for headers in ({}, {"X-Api-Key": "k12"})]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].json()["code"] == "unauthorized"
    assert proxy.count("stable") + proxy.count("canary") == before


def test_draws_a_variant_for_each_request_and_keeps_that_of_a_user(proxy: Proxy) -> None:
    drawn = {name: proxy.count(name) for name in ("stable", "canary")}
    answers = [proxy.infer(**{"X-User-Id": f"user {number}"}) for number in range(200)]
    variants = [answer.headers["X-Variant"] for answer in answers]
    assert 1 <= variants.count("canary") <= 30  # of 200 users; the same ones in each run
    for name, before in drawn.items():
        assert proxy.count(name) - before == variants.count(name)
    again = [proxy.infer(**{"X-User-Id": f"user {number}"}).headers["X-Variant"] for number in range(20)]
    assert again == variants[:20]
    assert proxy.infer(**{"X-Variant": "canary"}).headers["X-Variant"] == "canary"


def test_stable_answers_when_a_variant_is_gone(proxy: Proxy) -> None:
    answer = proxy.infer(**{"X-Variant": "gone"})
    assert (answer.status_code, answer.headers["X-Variant"]) == (200, "stable")


def test_the_services_own_errors_pass_through(proxy: Proxy) -> None:
    answer = proxy.client.post("/infer?node_name=x", content=b"x", headers={"X-Api-Key": "k1", "X-Variant": "canary"})
    assert (answer.status_code, answer.headers["X-Variant"]) == (404, "canary")
    assert answer.json()["code"] == "unknown_node"


def test_the_shadow_gets_a_copy_of_a_share_of_the_requests(proxy: Proxy) -> None:
    before = proxy.count("shadow")

    def is_copied() -> bool:
        proxy.infer()
        return proxy.count("shadow") > before

    eventually(is_copied, "the shadow gets nothing")
    assert proxy.services["shadow"].by_method["POST /infer"]["ok"] > 0


def test_grpc_needs_a_key_too(proxy: Proxy) -> None:
    grpc = pytest.importorskip("grpc")
    credentials = grpc.ssl_channel_credentials((proxy.folder / "ca.crt").read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{proxy.port}", credentials) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", metadata=[("x-api-key", "k2")], timeout=WAIT) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            live(b"", timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_address_in_the_file_stands_under_yours() -> None:
    text = NGINX.read_text()
    for line in re.findall(r".*(?:listen|server |include|ssl_certificate).*[\d/].*", text):
        assert "# Yours:" in text[: text.index(line)][-900:], line

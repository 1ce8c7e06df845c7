"""nginx, as scripts/deploy configures it, with certificates of a moment."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kit.waits import WAIT, eventually, run


def make_certificates(folder: Path) -> None:
    """An authority, certificates of a server and a client signed by it, and an unsigned one."""
    new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    commands = [(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")]
    commands += [(*new, "-x509", "-days", "2", "-subj", "/CN=mallory", "-keyout", "other.key", "-out", "other.crt")]
    (folder / "server.ext").write_text("subjectAltName=IP:127.0.0.1")
    (folder / "client.ext").write_text("extendedKeyUsage=clientAuth")
    for name in ("server", "client"):
        commands.append((*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"))
        signed = ("openssl", "x509", "-req", "-days", "2", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        commands.append((*signed, "-extfile", f"{name}.ext", "-in", f"{name}.csr", "-out", f"{name}.crt"))
    for command in commands:
        done = run(*command, cwd=folder)
        assert done.returncode == 0, done.stderr


@contextmanager
def nginx(file: Path, folder: Path, port: int, changes: Mapping[str, str]) -> Iterator[None]:
    """nginx at ``port`` with the configuration ``file``, once it listens; its files and logs lie in ``folder``.

    ``changes`` has what else stands for what in the file. A text that is no longer there fails the test.
    """
    text = file.read_text()
    usual = {
        "0.0.0.0:9443": f"127.0.0.1:{port}",
        "/etc/torchpipe/": f"{folder}/",
        "/var/log/nginx/": f"{folder}/",
    }
    for there, here in {**changes, **usual}.items():
        assert there in text, f"{there} is no longer in {file}"
        text = text.replace(there, here)
    config, log = folder / "nginx.conf", folder / "error.log"
    config.write_text(f"daemon off; pid {folder}/nginx.pid; error_log {log};\n{text}")
    command = ["nginx", "-p", str(folder), "-c", str(config), "-e", str(log)]
    tested = run(*command, "-t")
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: listens(port), "nginx does not listen")
        yield
    finally:
        process.terminate()
        process.wait(WAIT)


def listens(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0

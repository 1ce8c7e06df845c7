"""Which processes are the server's."""

from __future__ import annotations

import socket
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.cpu import psutil


def is_local(host: str) -> bool:
    """Whether `host` names an address of this machine: one that a socket can be bound to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def find_server(host: str, port: int, given: int | None) -> list[int]:
    """The processes whose CPU time is the server's: the given one, or those that listen on `port` of this machine.

    Empty when they cannot be found out. Raises `CannotRunError` when the given one does not exist.
    """
    if psutil is None:
        return []
    if given is not None:
        if not psutil.pid_exists(given):
            raise CannotRunError(f"--server_pid {given}: no such process")
        return [given]
    return _listeners(port) if is_local(host) else []


def _listeners(port: int) -> list[int]:
    assert psutil is not None
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return []
    found = {s.pid for s in sockets if _listens(s, port) and s.pid}
    return sorted(found | {pid for one in found for pid in _siblings(one, port)})


def _listens(sock: Any, port: int) -> bool:
    assert psutil is not None
    return bool(sock.status == psutil.CONN_LISTEN and sock.laddr.port == port)


def _siblings(pid: int, port: int) -> list[int]:
    """Processes with the same parent that listen too: of workers that inherited one socket, psutil names but one."""
    assert psutil is not None
    try:
        parent = psutil.Process(pid).parent()
        family = [] if parent is None else parent.children()
    except psutil.Error:
        return []
    return [one.pid for one in family if _shares(one, port)]


def _shares(process: Any, port: int) -> bool:
    assert psutil is not None
    try:
        ask = getattr(process, "net_connections", None) or process.connections  # psutil before 6
        return any(_listens(sock, port) for sock in ask(kind="tcp"))
    except (psutil.Error, OSError):
        return False

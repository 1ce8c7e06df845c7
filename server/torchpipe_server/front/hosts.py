"""The names that a port may be addressed by, against DNS rebinding.

A web page can point its own domain at this machine. A browser then takes the service for the page's own server, and
the page may call it and read the answers. Such requests have the page's domain in their Host field.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from torchpipe_py import TorchpipeError
from torchpipe_py.serving import HttpRequest

_PORT = re.compile(r":\d*$")


class ForbiddenError(TorchpipeError):
    """A request that this service does not take from its sender."""

    code = "forbidden"


class HostGuard:
    """Refuses requests that are addressed to a domain nobody allowed.

    An IP address, a name without a dot and ``*.localhost`` cannot be a page's domain and are always allowed; so are
    the names of ``allowed``, separated by commas, in which ``*`` stands for anything. Every request is checked where
    the port's ``address`` is a loopback address or ``allowed`` has names, except those for the paths of ``exempt``;
    elsewhere only requests that change the service are.
    """

    def __init__(self, address: str, allowed: str = "", exempt: frozenset[str] = frozenset()) -> None:
        self._names = tuple(_name(part.strip()) for part in allowed.split(",") if part.strip())
        self._checks_all = bool(self._names) or is_loopback(address)
        self._exempt = exempt

    def check(self, request: HttpRequest, is_change: bool = False) -> None:
        """Raise ``ForbiddenError`` if the request's host is not allowed. ``is_change``: it changes the service."""
        if not (self._checks_all or is_change) or _is_known(request.host, self._names):
            return
        if request.path not in self._exempt:
            name = _PORT.sub("", request.host)[:80]
            raise ForbiddenError(f"requests addressed to {name!r} are not answered here; see --allowed-hosts")


def is_loopback(address: str) -> bool:
    """Whether the address, or the name ``localhost``, is reached from this machine alone."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address == "localhost"
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


@lru_cache(maxsize=256)
def _is_known(host: str, names: tuple[str, ...]) -> bool:
    name = _name(host)
    if "." not in name or name.startswith("[") or name.endswith(".localhost"):
        return True
    if any(fnmatchcase(name, allowed) for allowed in names):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The host without its port, as names are compared."""
    return _PORT.sub("", host).lower().rstrip(".")

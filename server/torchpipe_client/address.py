"""Where the service is."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """Of a service, as it is written in messages."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host:port``, an IPv6 address in brackets. Raises ``ValueError``."""
        host, _, port = text.rpartition(":")
        if (
            not host
            or not port.isdecimal()
            or not 0 < int(port) < 65536
            or (":" in host and host[0] + host[-1] != "[]")
        ):
            raise ValueError(f"address {text!r}: expected host:port, as 127.0.0.1:8888 or [::1]:8888")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

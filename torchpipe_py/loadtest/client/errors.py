"""Why a call had no answer."""

from __future__ import annotations


class ConnectionClosed(ConnectionError):
    """The server closed the connection in place of an answer."""


class ReplyError(Exception):
    """A reply that does not belong to the call: another sequence id, another number of results."""

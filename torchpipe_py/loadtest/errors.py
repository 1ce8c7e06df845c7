"""What goes wrong: a run that does not take place, a call without an answer."""

from __future__ import annotations


class CannotRunError(Exception):
    """The run did not start; the message is one line for the person who started it."""


class ConnectionClosed(ConnectionError):
    """The server closed the connection in place of an answer."""


class ReplyError(Exception):
    """A reply that does not belong to the call: another sequence id, another number of results."""

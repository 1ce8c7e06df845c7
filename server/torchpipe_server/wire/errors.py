"""Errors of unreadable byte streams, for every protocol."""

from __future__ import annotations


class ProtocolError(Exception):
    """A broken byte stream, in which no later message can be found.

    kind: "not_thrift", "bad_version", "bad_message", "bad_frame", "bad_type", "bad_varint", "negative_size",
        "too_large" or "too_deep"; for HTTP also "bad_request". detail: one line for people.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail

"""Why a stream of bytes cannot be read, in every protocol."""

from __future__ import annotations


class ProtocolError(Exception):
    """The byte stream is broken: no later message of this connection can be found.

    kind: "not_thrift", "bad_version", "bad_message", "bad_frame", "bad_type", "bad_varint", "negative_size",
        "too_large" or "too_deep"; of HTTP also "bad_request". detail: one line for a person.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail

"""A Thrift service around a ``torchpipe_py`` pipe. ``Handler`` is the base class of services of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpipe_server.methods.custom import Handler

__all__ = ["Handler"]


def __getattr__(name: str) -> Any:
    """``Handler``, imported when it is asked for: the command line is there at once."""
    if name == "Handler":
        from torchpipe_server.methods.custom import Handler

        return Handler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

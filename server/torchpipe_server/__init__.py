"""Serves a ``torchpipe_py`` pipe over Thrift and HTTP. ``Handler`` is the base class for custom services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpipe_server.methods.custom import Handler

__all__ = ["Handler"]


def __getattr__(name: str) -> Any:
    """Import ``Handler`` on first use, so that the command line starts quickly."""
    if name == "Handler":
        from torchpipe_server.methods.custom import Handler

        return Handler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

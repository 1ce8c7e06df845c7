"""Serves a ``torchpipe_py`` pipe over Thrift and HTTP.

``Handler`` is the base class for custom services, ``HttpAnswer`` an answer of their routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpipe_py.serving import HttpAnswer
    from torchpipe_server.methods.custom import Handler

__all__ = ["Handler", "HttpAnswer"]


def __getattr__(name: str) -> Any:
    """Import the classes on first use, so that the command line starts quickly."""
    if name == "Handler":
        from torchpipe_server.methods.custom import Handler

        return Handler
    if name == "HttpAnswer":
        from torchpipe_py.serving import HttpAnswer

        return HttpAnswer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

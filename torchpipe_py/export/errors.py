"""What the export raises on purpose."""

from __future__ import annotations

from torchpipe_py.errors import TorchpipeError


class ExportError(TorchpipeError, RuntimeError):
    """A model that cannot be exported as asked; the message says what to change."""

    code = "export"


def one_line(error: BaseException) -> str:
    """Type and message of somebody else's exception, 200 characters at most."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

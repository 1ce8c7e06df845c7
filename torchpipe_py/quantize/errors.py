"""What quantising raises on purpose."""

from __future__ import annotations

from torchpipe_py.errors import TorchpipeError


class QuantizeError(TorchpipeError, RuntimeError):
    """A model that cannot be quantised as asked, or is not good enough afterwards; nothing is written."""

    code = "quantize"

"""Log lines: nobody waits for them, and no client writes one."""

from __future__ import annotations

import logging
import os

from torchpipe_server.logs.formats import JsonFormatter, TextFormatter
from torchpipe_server.logs.handler import QueuedHandler
from torchpipe_server.options import Options


def set_up_logging(options: Options) -> None:
    """Everything goes where stderr leads now, in the form and from the level on that the options say."""
    formatter = JsonFormatter() if options.log_format == "json" else TextFormatter()
    logging.basicConfig(level=options.log_level.upper(), handlers=[QueuedHandler(os.dup(2), formatter)], force=True)


def dropped_lines() -> int:
    """How many log lines of this process were dropped."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler))

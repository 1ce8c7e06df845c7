"""Log lines: writing them blocks no other thread, and clients cannot forge them."""

from __future__ import annotations

import logging
import os

from torchpipe_server.logs.formats import JsonFormatter, TextFormatter
from torchpipe_server.logs.handler import LogWriter
from torchpipe_server.options import Options


def set_up_logging(options: Options) -> None:
    """Log to the current stderr, in the format and from the level that the options set."""
    formatter = JsonFormatter() if options.log_format == "json" else TextFormatter()
    logging.basicConfig(level=options.log_level.upper(), handlers=[LogWriter(os.dup(2), formatter)], force=True)


def dropped_lines() -> int:
    """The number of log lines that this process dropped."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LogWriter))

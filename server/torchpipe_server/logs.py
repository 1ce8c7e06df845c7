"""Log lines: text for a person, JSON for a machine."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

from torchpipe_server.options import Options


def set_up_logging(options: Options) -> None:
    """Everything goes to stderr, in the form and from the level on that the options say."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else text)
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """An object a line: time (ISO 8601, UTC), level, logger, pid, message, the record's ``fields``, any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)

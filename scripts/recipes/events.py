"""Figures of a training in a file of events, which TensorBoard reads; written without it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from recipes.tfrecord import message_type, write_record

_PROTO = """
name: "event.proto" syntax: "proto3"
message_type { name: "Value"
  field { name: "tag" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "simple_value" number: 2 type: TYPE_FLOAT label: LABEL_OPTIONAL }
}
message_type { name: "Summary"
  field { name: "value" number: 1 type: TYPE_MESSAGE type_name: ".Value" label: LABEL_REPEATED }
}
message_type { name: "Event"
  field { name: "wall_time" number: 1 type: TYPE_DOUBLE label: LABEL_OPTIONAL }
  field { name: "step" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "file_version" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "summary" number: 5 type: TYPE_MESSAGE type_name: ".Summary" label: LABEL_OPTIONAL }
}
"""
VERSION = "brain.Event:2"


class EventLog:
    """Writes a file of events in ``folder``, which is created; a training that goes on adds another file there.

    ``OSError`` if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._append(file_version=VERSION)

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Append figures by their tags, of a step."""
        values = [{"tag": tag, "simple_value": value} for tag, value in figures.items()]
        self._append(step=step, summary={"value": values})

    def _append(self, **fields: object) -> None:
        event = message_type(_PROTO, "Event")(wall_time=time.time(), **fields)
        with open(self._path, "ab") as file:
            write_record(file, event.SerializeToString())

"""What may go to another process, and how it is told that something may not."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchpipe_py.errors import first_line
from torchpipe_py.training.errors import TrainingError

SENDABLE = "workers_decode needs what can be pickled: functions and classes at the top of a module"


def packed(value: Any, names: dict[str, Any]) -> Any:
    """``value`` pickled; as it is, where that works only while a process is started (a lock of multiprocessing, say).

    ``TrainingError`` for what cannot be pickled; of ``names``, the parts of ``value``, it names the first that cannot.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        if _is_inherited(error):
            return value
        name, found = next(_unsendable(names), ("what goes to the workers", error))
        raise TrainingError(f"{name} cannot be sent to the workers ({first_line(found)}); {SENDABLE}") from error


def unpacked_value(value: Any) -> Any:
    """What ``packed`` was given."""
    return pickle.loads(value) if isinstance(value, bytes) else value


def as_bytes(value: Any) -> bytes:
    """``value`` pickled, its Tensors by their place in shared memory."""
    return bytes(ForkingPickler.dumps(value))


def _unsendable(names: dict[str, Any]) -> Any:
    for name, value in names.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            if not _is_inherited(error):
                yield name, error


def _is_inherited(error: Exception) -> bool:
    return type(error) is RuntimeError and "inheritance" in str(error)

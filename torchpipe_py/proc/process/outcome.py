"""What becomes of a request's dict when a backend of another process has run on a copy of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import first_line
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.proc.process.transport import check_travels, loaded_torch

_IMMUTABLE = frozenset((bytes, str, int, float, bool, type(None)))


class ItemOutcome(NamedTuple):
    """A dict after ``forward``: ``kept`` maps keys to keys of the request whose value they hold, the others changed."""

    kept: dict[Any, Any]
    changed: dict[Any, Any]

    @classmethod
    def of(cls, before: Data, after: Data, keeps_arrays: bool = False) -> ItemOutcome:
        """What the caller has already stays there: values that nobody can have changed in place.

        Where the other process ``keeps_arrays`` for itself, arrays and tensors stay too under the key they had,
        whatever it does with them. Under another key, as a result, say, they are what it has made of them.
        """
        kept, changed = {}, {}
        arrays = (np.ndarray, *_tensors()) if keeps_arrays else ()
        for key, value in after.items():
            kind = type(value)
            if kind in _IMMUTABLE:
                for source in (key, *before):
                    if source in before and before[source] is value:
                        kept[key] = source
                        break
                else:
                    changed[key] = value
            elif kind in arrays and key in before and before[key] is value:
                kept[key] = key
            else:
                changed[key] = value
        return cls(kept, changed)

    def apply(self, item: Data, sent: Data) -> None:
        """Make the dict what the other process made of what was sent of it; what was not sent stays."""
        kept = {key: sent[source] for key, source in self.kept.items()}
        for key in [*sent]:
            if key not in kept and key not in self.changed:
                del item[key]
        item.update(kept)
        item.update(self.changed)


def take_outcome(item: Data, sent: Data, packed: Any) -> BaseException | None:
    """``apply`` to the dict what was packed of its outcome; what that raises is given back.

    NOTE: the dict may be of a class of the caller's own, and whoever takes answers goes on whatever that does.
    """
    try:
        changed, kept = packed
        ItemOutcome(kept, changed).apply(item, sent)
    except BaseException as error:
        return error
    return None


def _tensors() -> tuple[type, ...]:
    torch = loaded_torch()
    return () if torch is None else (torch.Tensor,)


def visible(item: Data, label: str) -> Data:
    """What of the dict can be sent; ``TypeError`` where ``data`` cannot."""
    found = {}
    for key, value in item.items():
        try:
            check_travels((key, value))
        except Exception as error:
            if key == TASK_DATA_KEY:
                raise TypeError(f"{label}: {key!r} cannot go to another process: {first_line(error)}") from error
        else:
            found[key] = value
    return found


def stuck(outcomes: list[ItemOutcome], error: Exception) -> Exception:
    """A ``TypeError`` that names the key whose value cannot be sent back."""
    for key, changed in (item for outcome in outcomes for item in outcome.changed.items()):
        try:
            check_travels((key, changed))
        except Exception as reason:
            return TypeError(f"{key!r} cannot come back from another process: {first_line(reason)}")
    return error

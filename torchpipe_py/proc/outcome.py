"""What becomes of a request's dict when a backend of another process has run on a copy of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import first_line
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.proc.codec import Packed, check_travels, loaded_torch, pack

_IMMUTABLE = frozenset((bytes, str, int, float, bool, type(None)))


class ItemOutcome(NamedTuple):
    """A dict after ``forward``: ``kept`` maps keys to keys of the request whose value they hold, the others changed."""

    changed: dict[Any, Any]
    kept: dict[Any, Any]

    @classmethod
    def of(cls, before: Data, after: Data, keeps_arrays: bool = False) -> ItemOutcome:
        """What the caller has already stays there: values that nobody can have changed in place.

        Where the other process ``keeps_arrays`` for itself, arrays and tensors stay too under the key they had,
        whatever it does with them. Under another key, as a result, say, they are what it has made of them.
        """
        kept, changed = {}, {}
        torch = loaded_torch() if keeps_arrays else None
        arrays = (np.ndarray, *([] if torch is None else [torch.Tensor])) if keeps_arrays else ()
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
        return cls(changed, kept)

    def apply(self, item: Data, sent: Data) -> None:
        """Make the dict what the other process made of what was sent of it; what was not sent stays."""
        kept = {key: sent[source] for key, source in self.kept.items()}
        for key in [*sent]:
            if key not in kept and key not in self.changed:
                del item[key]
        item.update(kept)
        item.update(self.changed)


def take_outcome(item: Data, sent: Data, outcome: Any) -> BaseException | None:
    """``apply`` an outcome as it was packed to the dict; what that raises is given back.

    NOTE: the dict may be of a class of the caller's own, and whoever takes answers goes on whatever that does.
    """
    try:
        ItemOutcome(*outcome).apply(item, sent)
    except BaseException as error:
        return error
    return None


def pack_sent(items: list[Data], label: str) -> tuple[list[Data], Packed]:
    """What of each item can be sent, and that as a message: of one, its dict. ``TypeError`` where ``data`` cannot."""
    try:
        return items, _packed(items)
    except Exception:
        sent = [_visible(item, label) for item in items]
        return sent, _packed(sent)


def pack_outcomes(outcomes: list[ItemOutcome]) -> Packed:
    """What became of items, of each as ``take_outcome`` takes it, in a list unless it is one.

    Raises whatever pickling raises, and ``TypeError`` where a key has what cannot be sent.
    """
    try:
        if len(outcomes) == 1:
            return pack(*outcomes[0])
        return Packed.of([tuple(outcome) for outcome in outcomes])
    except Exception as error:
        failure = error
    for key, changed in (item for outcome in outcomes for item in outcome.changed.items()):
        try:
            check_travels((key, changed))
        except Exception as reason:
            failure = TypeError(f"{key!r} cannot come back from another process: {first_line(reason)}")
            break
    raise failure


def _packed(items: list[Data]) -> Packed:
    return pack(items[0]) if len(items) == 1 else Packed.of(items)


def _visible(item: Data, label: str) -> Data:
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

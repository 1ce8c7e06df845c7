"""The settings of ``mosec_service.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Decoders(NamedTuple):
    """Processes of the first stage, and whether the image goes on as a pickle, mosec's default, or as its bytes."""

    processes: int
    is_pickled: bool = False


class Batching(NamedTuple):
    """Processes of the second stage, the images of a batch at most, and how long it waits for them."""

    most: int
    wait_ms: int
    processes: int = 1


class Split(NamedTuple):
    """What is served: a node of a configuration that takes Mats of ``side`` squared and has ``(label, score)``."""

    node: Mapping[str, Any]
    side: int
    decoders: Sequence[Decoders]
    batchings: Sequence[Batching]


def route(decoders: Decoders, batching: Batching) -> str:
    """The path of the two stages."""
    how = "pickle" if decoders.is_pickled else "bytes"
    return f"/{decoders.processes}{how}/{batching.most}in{batching.wait_ms}by{batching.processes}"


def read_split(text: str) -> Split:
    """What ``json.dumps`` made of one."""
    node, side, decoders, batchings = json.loads(text)
    return Split(node, side, [Decoders(*one) for one in decoders], [Batching(*one) for one in batchings])

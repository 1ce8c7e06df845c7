"""What clients send: the images of a folder, and each client's share of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchpipe_py.images.files import find_images, label_of
from torchpipe_py.loadtest.errors import CannotRunError

_LONGEST_WARMUP = 50


@dataclass(frozen=True)
class Payload:
    """What all clients send: a body for each image, and the label expected for it, or None where none is known."""

    bodies: list[bytes]
    labels: list[str | None]


def load_images(directory: Path, labelled: bool) -> Payload:
    """The images below ``directory`` as they are; ``CannotRunError`` where there is none, or one cannot be read.

    ``labelled``: each has the label that its folder or its name says.
    """
    try:
        paths = find_images(directory)
    except OSError as error:
        raise CannotRunError(f"--img_dir {error}") from error
    labels = [label_of(path, directory) if labelled else None for path in paths]
    try:
        return Payload([path.read_bytes() for path in paths], labels)
    except OSError as error:
        raise CannotRunError(f"{error.filename}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Plan:
    """One client's part of the run: ``share`` images, ``batch`` per call, and ``warmup`` calls before the start.

    A client goes through the images in their order, again and again, from ``first_image`` on; clients start apart.
    """

    index: int
    share: int
    batch: int
    warmup: int
    first_image: int

    @property
    def calls(self) -> int:
        return -(-self.share // self.batch)


def make_plans(clients: int, batch: int, total: int, images: int, warmup: int | None) -> list[Plan]:
    """One plan per client; shares differ by one at most and sum to ``total`` images.

    ``warmup`` is in calls per client; None is 5 % of its calls, at least 1 and at most 50.
    """
    plans = []
    for index in range(clients):
        share = total // clients + (index < total % clients)
        calls = -(-share // batch)
        warm = min(_LONGEST_WARMUP, max(1, calls // 20)) if warmup is None else warmup
        plans.append(Plan(index, share, batch, warm, index * images // clients))
    return plans


class Rotation:
    """The images that a client sends next, as indices: all of them in order, from its plan's first on."""

    def __init__(self, first: int, images: int) -> None:
        self._next, self._images = first, images

    def take(self, count: int) -> list[int]:
        """The next ``count``."""
        first = self._next
        self._next = (first + count) % self._images
        return [(first + offset) % self._images for offset in range(count)]

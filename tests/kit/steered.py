"""A backend that does what its data says, in this process or any other: ``--import tests/kit/steered.py``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from torchpipe_py import Backend, DecodeError, Isolation, NoResult, Param, register_backend, registry

FILE = str(Path(__file__).resolve())


class Steered(Backend):
    """The result is (text of the data and ``mark``, length of the data), unless the first word of the text is one of

    - ``raise``: a ``ValueError``; ``none``, ``corrupt``: a ``NoResult``, a ``DecodeError``; ``large``: 1 MiB
    - ``value NAME``, ``error NAME``: what a test has put under that name in ``values`` is the result, or the error
    - ``block``: waits for the event ``opened``, or the file ``open`` in ``folder``
    - ``die``, ``abort``: the process ends; ``die once`` only the first time in ``folder``

    ``setup`` blocks while there is the file ``hold``. Data that is neither bytes nor a text is the result.
    """

    mark = Param(str, "", doc="what is added to the label")
    folder = Param(str, "", doc="where files say what goes on")
    most = Param(int, 1, doc="largest batch")

    values: ClassVar[Mapping[str, Any]] = {}
    seen: ClassVar[list[Any]] = []
    """The data of every item that came to ``forward`` in this process."""
    opened: ClassVar[threading.Event] = threading.Event()
    entered: ClassVar[threading.Semaphore] = threading.Semaphore(0)

    def setup(self) -> None:
        if self.mark == "fail":
            raise OSError("no such model")
        if self._exists("hold"):
            self._touch("entered")
        while self._exists("hold"):
            self._wait()

    def max(self) -> int:
        return self.most

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            data = item["data"]
            Steered.seen.append(data)
            item["result"] = data
            if isinstance(data, (bytes, bytearray, memoryview, str)):
                self._answer(item, data if isinstance(data, str) else bytes(data).decode())

    def _answer(self, item: dict[str, Any], text: str) -> None:
        word, _, name = text.partition(" ")
        item["result"] = (text + self.mark, float(len(text)))
        if word == "raise":
            raise ValueError("on request")
        if word == "block":
            self._touch("entered")
            opened = Steered.opened  # that of the next test is another one
            Steered.entered.release()
            while not opened.is_set() and not self._exists("open"):
                self._wait()
        if word == "abort":
            os.abort()
        if word == "die" and not (name == "once" and self._exists("died")):
            self._touch("died")
            os._exit(9)
        if word == "value":
            item["result"] = self.values[name]
        if word == "large":
            item["result"] = ("x" * 2**20, 1.0)
        if word in ("none", "corrupt", "error"):
            del item["result"]
            errors = {"none": NoResult("on request"), "corrupt": DecodeError("no image")}
            item["error"] = errors[word] if word in errors else self.values[name]

    def _touch(self, name: str) -> None:
        if self.folder:
            (Path(self.folder) / name).touch()

    def _exists(self, name: str) -> bool:
        return bool(self.folder) and (Path(self.folder) / name).exists()

    def _wait(self) -> None:
        """A moment; a process whose parent is gone has nobody to wait for."""
        Steered.opened.wait(0.005)
        if self.folder and os.getppid() == 1:
            os._exit(1)


class SteeredDecoder(Steered):
    """Its result is a Mat, as a decoder's has to be, which may be isolated."""

    isolation = Isolation.MOVES

    def _answer(self, item: dict[str, Any], text: str) -> None:
        super()._answer(item, text)
        item["result"] = np.frombuffer(text.encode(), np.uint8).reshape(1, -1, 1)


if __name__ != "kit.steered":  # by --import
    register_backend(Steered)
    register_backend(SteeredDecoder)


@contextmanager
def steering(**values: Any) -> Iterator[type[Steered]]:
    """``Steered`` is known to pipes of this process, and ``values`` to it. At the end whatever blocks goes on."""
    Steered.values, Steered.seen = values, []
    Steered.entered, Steered.opened = threading.Semaphore(0), threading.Event()
    with registry.default.restored() as default:
        default.register_backend(Steered, "Steered")
        try:
            yield Steered
        finally:
            Steered.opened.set()

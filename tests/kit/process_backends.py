"""Backends for worker processes: in a module of their own that is quick to import, and known by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kit.waits import eventually
from torchpipe_py import Backend, BackendUnavailable, ConfigError, ItemBackend, Param, Signature, TensorSpec
from torchpipe_py.metrics import Counter, Gauge, Histogram
from torchpipe_py.values import to_str

Data = dict[str, Any]


class Obedient(Backend):
    """Does what the string ``data`` says; up to four items at a time. ``result`` is (pid, items, what came of it)."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            value = getattr(self, str(item["data"]), self.plain)(item)
            item.setdefault("result", (os.getpid(), len(items), value))

    def max(self) -> int:
        return 4

    def signature(self) -> Signature:
        return Signature(outputs=(TensorSpec("pid"),))

    def plain(self, item: Data) -> Any:
        return item["data"]

    def die(self, item: Data) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, item: Data) -> None:
        os._exit(3)

    def allocate(self, item: Data) -> int:
        return len(bytearray(item["mebibytes"] * 2**20))

    def zeros(self, item: Data) -> Any:
        return np.zeros(item["size"], np.uint8)

    def raise_value_error(self, item: Data) -> None:
        raise ValueError("no such value")

    def raise_stubborn(self, item: Data) -> None:
        raise StubbornError("two", "parts")

    def raise_long(self, item: Data) -> None:
        raise ValueError("x" * 2**20)

    def give_lambda(self, item: Data) -> None:
        item["answer"] = lambda: 1

    def give_stubborn(self, item: Data) -> None:
        item["error"] = StubbornError("two", "parts")

    def edit(self, item: Data) -> None:
        del item["removed"]
        item["changed"] += 1
        item["array"] = item["array"] + [7, 0]
        item["added"] = item["same"]
        item.pop("data")


class Single(Obedient):
    """Takes one item at a time."""

    def max(self) -> int:
        return 1

    def is_large(self, item: Data) -> bool:
        return "large" in item

    def hold(self, item: Data) -> None:
        """Say who does it, then wait until the gate, a FIFO, has been written and closed."""
        Path(item["file"]).write_text(str(os.getpid()), encoding="utf-8")
        Path(item["gate"]).read_bytes()


class Fill(ItemBackend):
    """``result`` is an array of ``data``."""

    def forward_item(self, item: Data) -> None:
        item["result"] = np.full((100, 100), item["data"], np.uint8)


class StubbornError(Exception):
    """Can be pickled and not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Unfit(ItemBackend):
    """Cannot be set up, as ``how`` says."""

    how = Param(to_str, doc="the error")

    def setup(self) -> None:
        if self.how == "die":
            os._exit(5)
        if self.how.startswith("once "):
            path = Path(self.how.removeprefix("once "))
            if path.exists():
                os._exit(6)
            path.touch()
            return
        kinds = {"unavailable": BackendUnavailable, "config": ConfigError, "stubborn": StubbornUnavailable}
        raise kinds.get(self.how, OSError)("not on this machine")

    def forward_item(self, item: Data) -> None:
        os._exit(7)


class StubbornUnavailable(BackendUnavailable):
    """Cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class Duck:
    """Not a Backend."""

    def init(self, config: dict[str, Any]) -> None:
        self.config = config

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = (os.getpid(), item["data"], self.config, len(items))

    def max(self) -> int:
        return 3


class Closing(ItemBackend):
    """Writes a file in ``close``; raises or hangs there if it is to."""

    file = Param(to_str, doc="written in close")

    def forward_item(self, item: Data) -> None:
        item["result"] = os.getpid()

    def close(self) -> None:
        Path(self.file).write_text("closed", encoding="utf-8")
        if self.file.endswith("hang"):
            threading.Event().wait()
        if self.file.endswith("raise"):
            raise ValueError("will not close")


class Remote:
    """Counts in a process of its own."""

    def init(self, config: dict[str, Any]) -> None:
        self.found = Counter("faces", "Faces found", ["camera"])
        self.level = Gauge("level", "Fill level")
        self.seconds = Histogram("match_seconds", "Time of a match", buckets=[0.1, 1.0])

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            self.found.labels(item["data"]).inc()
            self.level.set(item["data"])
            self.seconds.observe(item["data"])
            item["result"] = True


class Levelled:
    """Sets gauges to ``data``, a level; ends its process for -1."""

    def init(self, config: dict[str, Any]) -> None:
        self.level = Gauge("level", "Fill level")
        self.by_size = Gauge("by_size", "Fill level", ["is_large"])

    def forward(self, items: list[dict[str, Any]]) -> None:
        (item,) = items
        if item["data"] < 0:
            os._exit(1)
        self.level.set(item["data"])
        self.by_size.labels(item["data"] > 10).set(item["data"])
        item["result"] = os.getpid()
        if "path" in item:
            # Both instances have an item before one of them gives its result.
            Path(item["path"], str(item["data"])).touch()
            eventually(lambda: len(os.listdir(item["path"])) == 2)

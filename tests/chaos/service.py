"""A service with the backend of ``chaos_backends``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit.monitored import Monitored
from kit.services import LIGHT, ROOT

MEBIBYTE = 2**20
BACKENDS = str(Path(__file__).with_name("chaos_backends.py"))


class Service(Monitored):
    """``node`` says how the backend is configured; ``models`` the same for each file of a folder in its place."""

    def __init__(self, *args: str, models: dict[str, dict[str, Any]] | None = None, **node: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.config = Path(self._folder.name) / "chaos.toml"
        for name, keys in ({"chaos": node} if models is None else models).items():
            self.write(name, **keys)
        flags = ("--log-level", "warning", "--import", BACKENDS, *args)
        config = self.config if models is None else self.config.parent
        super().__init__(*flags, config=str(config), env={"PYTHONPATH": LIGHT})

    def write(self, name: str = "chaos", backend: str = "ChaosEcho", **node: Any) -> None:
        """Write a configuration."""
        keys = {"backend": backend, **node}
        file = self.config.parent / f"{name}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text("[node]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))

    def shared_files(self) -> list[str]:
        """The files in ``/dev/shm`` that its processes have open, or mapped, but those of a Python that lies there."""
        files = {each.path for process in self.processes() for each in [*process.open_files(), *process.memory_maps()]}
        own = (sys.prefix, sys.base_prefix, str(ROOT))
        return sorted(file for file in files if file.startswith("/dev/shm/") and not file.startswith(own))

    def sum(self, figure: str) -> int:
        """``rss`` in bytes, ``num_fds`` or ``num_threads`` of all its processes.

        It asks no port for the processes: that connection would be counted, or not, with the descriptors.
        """
        total = 0
        for process in self.processes():
            total += process.memory_info().rss if figure == "rss" else getattr(process, figure)()
        return total

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._folder.cleanup()

"""The files that an export leaves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torchpipe_py.export.errors import ExportError
from torchpipe_py.files import output_problem, replace_file


@dataclass(frozen=True)
class Files:
    """NAME.onnx, NAME.toml and NAME.labels.txt, and NAME.trt, where TensorRT will keep its engine."""

    name: Path

    @property
    def model(self) -> Path:
        return self._with(".onnx")

    @property
    def toml(self) -> Path:
        return self._with(".toml")

    @property
    def labels(self) -> Path:
        return self._with(".labels.txt")

    @property
    def engine(self) -> Path:
        return self._with(".trt")

    def _with(self, suffix: str) -> Path:
        return self.name.with_name(self.name.name + suffix)

    def check(self, force: bool) -> None:
        """``ExportError`` where one of them is there, unless it may be replaced, or where none can be written."""
        # Folders that are missing are made.
        folder = next(parent for parent in self.model.parents if os.path.lexists(parent))
        if problem := output_problem(folder / self.model.name, replaces=True):
            raise ExportError(f"--out {self.name}: {problem}")
        there = [str(path) for path in (self.model, self.toml, self.labels) if os.path.exists(path)]
        if there and not force:
            raise ExportError(f"{', '.join(there)}: there already; --force replaces, --out NAME gives another name")

    def take(self, made: Files) -> None:
        """Put what was made elsewhere in its place: each file whole, the TOML last; ``ExportError`` if that fails."""
        try:
            self.name.parent.mkdir(parents=True, exist_ok=True)
            for source, target in ((made.model, self.model), (made.labels, self.labels), (made.toml, self.toml)):
                if source.exists():
                    replace_file(target, source.read_bytes())
        except OSError as error:
            raise ExportError(f"--out {self.name}: {error.strerror}") from error

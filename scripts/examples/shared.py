"""``configs/examples/postprocess.py`` as a module: what the pipelines run is what the networks are trained for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

POSTPROCESS = Path(__file__).parents[2] / "configs" / "examples" / "postprocess.py"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


postprocess = _load(POSTPROCESS)

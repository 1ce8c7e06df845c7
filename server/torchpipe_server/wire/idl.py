"""The contract ``inference.thrift`` as Python classes, made by thriftpy2 from the one file there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import thriftpy2

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the file lies in this package, in a checkout in the folder idl/.
_CANDIDATES = (_PACKAGE / "inference.thrift", _PACKAGE.parents[1] / "idl" / "inference.thrift")


def load_idl() -> Any:
    """The module of the structs, exceptions and the service."""
    path = next((path for path in _CANDIDATES if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"inference.thrift is neither at {' nor at '.join(map(str, _CANDIDATES))}")
    return thriftpy2.load(str(path), module_name="inference_thrift")

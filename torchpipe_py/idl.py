"""The service's contracts: ``idl/inference.thrift`` as a file and as Python classes, and ``oip.proto`` as a file."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the file beside this module, a checkout in its folder idl/.
_CANDIDATES = (_PACKAGE / "inference.thrift", _PACKAGE.parent / "idl" / "inference.thrift")


def proto_path() -> Path:
    """The path of the Open Inference Protocol for gRPC."""
    return _PACKAGE / "methods" / "rpc" / "proto" / "oip.proto"


def idl_path() -> Path:
    """The path of the Thrift contract."""
    path = next((path for path in _CANDIDATES if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"inference.thrift is neither at {' nor at '.join(map(str, _CANDIDATES))}")
    return path


def load_idl() -> ModuleType:
    """The Thrift contract as a module of thriftpy2: structs, exceptions, ``InferenceService``.

    Raises ``ImportError`` without thriftpy2.
    """
    import thriftpy2

    idl: ModuleType = thriftpy2.load(str(idl_path()), module_name="inference_thrift")
    return idl

"""The messages over gRPC, of the files in ``proto``: the protocol's, and those of gRPC's health and reflection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

OIP = "inference.GRPCInferenceService"

# NOTE: a pool of their own: that of the process may hold Triton's messages, which have the same names.
POOL = DescriptorPool()
_FILES: Any = FileDescriptorSet.FromString((Path(__file__).parent / "proto" / "messages.binpb").read_bytes())
for _file in _FILES.file:
    POOL.Add(_file)
SERVICES = [f"{file.package}.{service.name}" for file in _FILES.file for service in file.service]


def message(name: str) -> Any:
    """The class of the message of this full name."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))


def methods() -> list[Any]:
    """The descriptors of all methods of all services."""
    return [method for name in SERVICES for method in POOL.FindServiceByName(name).methods]


def _file_of(symbol: str) -> Any:
    """The file that declares it; ``KeyError`` for a name of nothing. The pool itself finds no methods."""
    service, _, name = symbol.rpartition(".")
    if service in SERVICES and name in POOL.FindServiceByName(service).methods_by_name:
        symbol = service
    return POOL.FindFileContainingSymbol(symbol)


def reflected(asked: Any) -> dict[str, Any]:
    """The fields of the answer to a ``ServerReflectionRequest``."""
    kind = asked.WhichOneof("message_request")
    if kind == "list_services":
        return {"list_services_response": {"service": [{"name": name} for name in SERVICES]}}
    try:
        if kind == "file_by_filename":
            file = POOL.FindFileByName(asked.file_by_filename)
        elif kind == "file_containing_symbol":
            file = _file_of(asked.file_containing_symbol)
        else:
            return {"error_response": {"error_code": 12, "error_message": "there are no extensions"}}
    except KeyError:
        return {"error_response": {"error_code": 5, "error_message": "no such file or symbol"}}
    files = [file, *file.dependencies]
    return {"file_descriptor_response": {"file_descriptor_proto": [each.serialized_pb for each in files]}}

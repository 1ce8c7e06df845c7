"""Names of this package that the service and Ray Serve use, beside its public ones.

Two modules are imported where their optional libraries are in use: ``methods.tracing`` (OpenTelemetry) and
``methods.rpc.messages`` (protobuf). Nothing else of the package is theirs.

- A pipe of tables: ``plan_pipeline``, ``Pipes``; nodes that processes share: ``shared_nodes``, ``EngineClient``.
- Methods of a service and their routes: ``Inference``, ``Routes``, ``Served``; streams: ``Streams``.
- A request in work: ``Call``; what reads long ones: ``LongMessages``.
- Requests and answers as they are sent: ``read_request``, ``answers``, ``compression``, ``errors``, ``values``.
- Processes, threads, logs: ``ChildProcess``, ``limit_threads``, ``describe``.
- Certificates of ``torchpipe compile``: ``read_certified``.
- Statistics and pictures of a pipe: ``folded``, ``live_svg``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchpipe_py import metrics
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.certificate import CertifiedTables, is_same_certificate, read_certified
from torchpipe_py.cores import NVIDIA, limit_threads, usable_cores
from torchpipe_py.errors import counted, describe, log_failure, logger, nearest
from torchpipe_py.files import leave_deleted_folder
from torchpipe_py.idl import load_idl
from torchpipe_py.malloc import keep_freed_memory, release_freed_memory
from torchpipe_py.methods.call import UNREAD, Call, CallState, call_from_any_thread
from torchpipe_py.methods.long_messages import LongMessages
from torchpipe_py.methods.many import FairAdmission, ReplyBudget
from torchpipe_py.methods.openapi import openapi_document
from torchpipe_py.methods.roots import Root, Roots, check_count
from torchpipe_py.methods.routes import (
    JSON,
    OK,
    AnswerStream,
    Cancellable,
    Done,
    Method,
    Route,
    Routes,
    Rpc,
    RpcAnswer,
    RpcRequest,
    Served,
    StreamSource,
    TraceFields,
    json_answer,
    protocol_of,
    route,
    trace_fields,
)
from torchpipe_py.methods.rpc.wire import WireAnswer, parse_message
from torchpipe_py.methods.timing import timed
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.plan.config import Tables, used_backends
from torchpipe_py.plan.folder import NO_MODEL, UNLOADED, Folder, list_models, name_of, read_folder, version_of
from torchpipe_py.plan.sharing import (
    engine_part,
    same_shared,
    sections,
    shared_files,
    shared_nodes,
    usual_engines,
    usual_workers,
)
from torchpipe_py.proc.child import ChildProcess, Joined, describe_ending
from torchpipe_py.proc.engine import EngineClient, EngineServer, pipe_of_worker, watch_on
from torchpipe_py.registry import import_all
from torchpipe_py.runtime.admission import Deadlines, QueueTarget, limited_ms
from torchpipe_py.runtime.pipes import Pipes
from torchpipe_py.runtime.record.pictures import Picture
from torchpipe_py.runtime.record.statistics import (
    BOUNDS_MS,
    COUNTS,
    NODE_COUNTERS,
    NODE_GAUGES,
    NODE_TIMES,
    PLACES,
    SINCE_START,
    TOTALS,
    add,
    folded,
)
from torchpipe_py.runtime.record.visits import Timeline
from torchpipe_py.streams import Frame, Streams
from torchpipe_py.streams.boxes import draw_boxes
from torchpipe_py.streams.config import read_streams
from torchpipe_py.tools.draw.render import live_svg
from torchpipe_py.values import to_strings
from torchpipe_py.wire import answers, compression, errors, values
from torchpipe_py.wire.answers import failure
from torchpipe_py.wire.errors import (
    Bound,
    ReplyTooLargeError,
    RequestTooLargeError,
    RouteError,
    describe_error,
    reason,
    report,
)
from torchpipe_py.wire.http import SMALL_BYTES, HttpAnswer, HttpRequest, joined_fields
from torchpipe_py.wire.json_values import encode_json, to_text
from torchpipe_py.wire.parameters import ForwardedHeaders
from torchpipe_py.wire.values import check_name, check_names, output_of, size_of

if TYPE_CHECKING:
    from torchpipe_py.methods.inference import Inference
    from torchpipe_py.methods.oip.core import Control, Model, Models, Totals
    from torchpipe_py.wire.infer import (
        answer_of,
        deadline_ms_of,
        is_long_json,
        priority_in,
        priority_of,
        read_parameters,
        read_request,
    )

__all__ = [
    "BOUNDS_MS",
    "COUNTS",
    "JSON",
    "NODE_COUNTERS",
    "NODE_GAUGES",
    "NODE_TIMES",
    "NO_MODEL",
    "NVIDIA",
    "OK",
    "PLACES",
    "SINCE_START",
    "SMALL_BYTES",
    "TOTALS",
    "UNLOADED",
    "UNREAD",
    "AnswerStream",
    "ArgumentParser",
    "Bound",
    "Call",
    "CallState",
    "Cancellable",
    "CertifiedTables",
    "ChildProcess",
    "Control",
    "Deadlines",
    "Done",
    "EngineClient",
    "EngineServer",
    "FairAdmission",
    "Folder",
    "ForwardedHeaders",
    "Frame",
    "HttpAnswer",
    "HttpRequest",
    "Inference",
    "Joined",
    "LongMessages",
    "Method",
    "Model",
    "Models",
    "Picture",
    "Pipeline",
    "Pipes",
    "QueueTarget",
    "ReplyBudget",
    "ReplyTooLargeError",
    "RequestTooLargeError",
    "Root",
    "Roots",
    "Route",
    "RouteError",
    "Routes",
    "Rpc",
    "RpcAnswer",
    "RpcRequest",
    "Served",
    "StreamSource",
    "Streams",
    "Tables",
    "Timeline",
    "Totals",
    "TraceFields",
    "WireAnswer",
    "add",
    "answer_of",
    "answers",
    "call_from_any_thread",
    "check_count",
    "check_name",
    "check_names",
    "compression",
    "counted",
    "deadline_ms_of",
    "describe",
    "describe_ending",
    "describe_error",
    "draw_boxes",
    "encode_json",
    "engine_part",
    "errors",
    "failure",
    "folded",
    "import_all",
    "is_long_json",
    "is_same_certificate",
    "joined_fields",
    "json_answer",
    "keep_freed_memory",
    "leave_deleted_folder",
    "limit_threads",
    "limited_ms",
    "list_models",
    "live_svg",
    "load_idl",
    "log_failure",
    "logger",
    "metrics",
    "name_of",
    "nearest",
    "openapi_document",
    "output_of",
    "parse_message",
    "pipe_of_worker",
    "plan_pipeline",
    "priority_in",
    "priority_of",
    "protocol_of",
    "read_certified",
    "read_folder",
    "read_parameters",
    "read_request",
    "read_streams",
    "reason",
    "release_freed_memory",
    "report",
    "route",
    "same_shared",
    "sections",
    "shared_files",
    "shared_nodes",
    "size_of",
    "timed",
    "to_strings",
    "to_text",
    "trace_fields",
    "usable_cores",
    "used_backends",
    "usual_engines",
    "usual_workers",
    "values",
    "version_of",
    "watch_on",
]

_IMPORTED_ON_USE = {
    "methods.inference": ("Inference",),
    "methods.oip.core": (
        "Control",
        "Model",
        "Models",
        "Totals",
    ),
    "wire.infer": (
        "answer_of",
        "deadline_ms_of",
        "is_long_json",
        "priority_in",
        "priority_of",
        "read_parameters",
        "read_request",
    ),
}
"""Modules that need msgspec: the command line imports this one before it can say that the library is missing."""

if not TYPE_CHECKING:  # a type checker must not take every name for an attribute

    def __getattr__(name: str) -> Any:
        for module, names in _IMPORTED_ON_USE.items():
            if name in names:
                return getattr(importlib.import_module(f"torchpipe_py.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

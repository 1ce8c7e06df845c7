"""A TOML file becomes a thread-safe, multi-instance, dynamically batching pipeline."""

from torchpipe_py.backends.base import Backend, Isolation, ItemBackend
from torchpipe_py.backends.control.jump import Jump, MapReduce
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import Signature, TensorSpec
from torchpipe_py.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    DeadlineExceeded,
    DecodeError,
    EngineUnavailable,
    InvalidRequest,
    ModelUnavailable,
    NoResult,
    Overloaded,
    PipeClosed,
    SetupError,
    TorchpipeError,
    UnknownNode,
    WorkerDied,
)
from torchpipe_py.filters import Status
from torchpipe_py.keys import (
    TASK_BOX_KEY,
    TASK_COLOR_KEY,
    TASK_CONTEXT_KEY,
    TASK_DATA_KEY,
    TASK_ERROR_KEY,
    TASK_NODE_NAME_KEY,
    TASK_PRIORITY_KEY,
    TASK_RESULT_KEY,
)
from torchpipe_py.plan.config import parse_toml
from torchpipe_py.plan.folder import parse_folder
from torchpipe_py.registry import Registry, import_code, register_backend, register_filter, register_postprocessor
from torchpipe_py.results import Detections
from torchpipe_py.runtime.pipe import Ticket, pipe

__version__ = "1.0.0rc2"

__all__ = [
    "TASK_BOX_KEY",
    "TASK_COLOR_KEY",
    "TASK_CONTEXT_KEY",
    "TASK_DATA_KEY",
    "TASK_ERROR_KEY",
    "TASK_NODE_NAME_KEY",
    "TASK_PRIORITY_KEY",
    "TASK_RESULT_KEY",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeError",
    "Detections",
    "EngineUnavailable",
    "InvalidRequest",
    "Isolation",
    "ItemBackend",
    "Jump",
    "MapReduce",
    "ModelUnavailable",
    "NoResult",
    "Overloaded",
    "Param",
    "PipeClosed",
    "Registry",
    "SetupError",
    "Signature",
    "Status",
    "TensorSpec",
    "Ticket",
    "TorchpipeError",
    "UnknownNode",
    "WorkerDied",
    "import_code",
    "parse_folder",
    "parse_toml",
    "pipe",
    "register_backend",
    "register_filter",
    "register_postprocessor",
]

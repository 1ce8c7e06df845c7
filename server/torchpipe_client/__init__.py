"""Clients of ``torchpipe-serve``: ``Client`` for threads, ``AsyncClient`` for asyncio.

Needs thriftpy2, and NumPy where arrays are sent or received. Imports neither ``torchpipe_py`` nor PyTorch.
"""

from torchpipe_client.aio import AsyncClient
from torchpipe_client.client import Client
from torchpipe_client.detections import Detections
from torchpipe_client.errors import (
    BackendError,
    BadReply,
    ClientClosed,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InferenceError,
    InvalidRequest,
    NoResult,
    NotConnected,
    Overloaded,
    PipeClosed,
    TimedOut,
    Unavailable,
    UnknownNode,
    WorkerDied,
)
from torchpipe_client.values import Result

__all__ = [
    "AsyncClient",
    "BackendError",
    "BadReply",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "DeadlineExceeded",
    "DecodeError",
    "Detections",
    "InferenceError",
    "InvalidRequest",
    "NoResult",
    "NotConnected",
    "Overloaded",
    "PipeClosed",
    "Result",
    "TimedOut",
    "Unavailable",
    "UnknownNode",
    "WorkerDied",
]

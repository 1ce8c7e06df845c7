"""The service, its model and their figures in the protocol's and Triton's words."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from time import perf_counter, time
from typing import Any

import torchpipe_py
from torchpipe_py.backends.model.normalisation import has_channels_last
from torchpipe_py.backends.signature import Signature, TensorSpec
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.methods.oip.tensors import BYTES, OF_DTYPE

PLATFORM = "torchpipe_py"
SERVER = {
    "name": PLATFORM,
    "version": torchpipe_py.__version__,
    "extensions": [
        *("binary_tensor_data", "classification", "model_configuration", "model_repository", "parameters", "statistics")
    ],
}
"""The answer of ``GET /v2``."""


def model(name: str, versions: Sequence[str], signature: Signature | None) -> dict[str, Any]:
    """The answer of ``GET /v2/models/{model}``, without inputs and outputs if the request has to name a root."""
    return {"name": name, "versions": list(versions), "platform": PLATFORM, **_declared(signature)}


def config(name: str, signature: Signature | None, most: int) -> dict[str, Any]:
    """The answer of ``GET /v2/models/{model}/config``: Triton's members that apply; shapes without the batch."""
    declared = _declared(signature)
    has_batch = signature is None or not any(spec.rows_mix for spec in signature.inputs)
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most if has_batch else 1,
        "input": [_configured_input(tensor) for tensor in declared["inputs"]],
        "output": [_configured(tensor) for tensor in declared["outputs"]],
        "dynamic_batching": {},
    }


def _declared(signature: Signature | None) -> dict[str, list[dict[str, Any]]]:
    if signature is None:
        return {"inputs": [], "outputs": []}
    return {
        "inputs": _tensors(signature.inputs) or _undeclared(TASK_DATA_KEY, [-1, 1]),
        "outputs": _tensors(signature.outputs, is_input=False) or _undeclared(TASK_RESULT_KEY, [-1]),
    }


def _undeclared(name: str, shape: list[int]) -> list[dict[str, Any]]:
    """The tensor of backends that declare none: bytes, and JSON for values that are neither numbers nor text."""
    parameters = {"declared": False, "content_type": "application/json"}
    return [{"name": name, "datatype": BYTES, "shape": shape, "parameters": parameters}]


def _tensors(specs: Sequence[TensorSpec], is_input: bool = True) -> list[dict[str, Any]]:
    """The tensors; none if the type of one is unknown, or the shape of an input."""
    if not all(spec.dtype in OF_DTYPE and (spec.dims or not is_input) for spec in specs):
        return []
    return [
        {
            "name": spec.name,
            "datatype": OF_DTYPE[spec.dtype],
            # A scalar is sent as one number. The protocol has no form for a shape that is unknown altogether.
            "shape": [1] if spec.is_scalar else [_first(spec), *[-1 if n is None else n for n in spec.dims[1:]]],
            **({"parameters": {"optional": True}} if spec.is_optional else {}),
        }
        for spec in specs
    ]


def _first(spec: TensorSpec) -> int:
    return 1 if spec.rows_mix else -1


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    kind, shape = "STRING" if tensor["datatype"] == BYTES else tensor["datatype"], tensor["shape"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": shape if shape == [1] else shape[1:]}


def _configured_input(tensor: Mapping[str, Any]) -> dict[str, Any]:
    optional = {"optional": True} if tensor.get("parameters", {}).get("optional") else {}
    return {**_configured(tensor), "format": _layout(tensor), **optional}


def _layout(tensor: Mapping[str, Any]) -> str:
    """The place of the channels of an image of 1, 3 or 4 channels."""
    shape = tensor["shape"]
    if len(shape) != 4 or not {shape[1], shape[3]} & {1, 3, 4}:
        return "FORMAT_NONE"
    return "FORMAT_NHWC" if has_channels_last(shape) else "FORMAT_NCHW"


class Figures:
    """Counts and times of requests that succeeded or failed; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = {"success": {"count": 0, "ns": 0}, "fail": {"count": 0, "ns": 0}}
        self._items = 0
        self._last = 0.0

    def add(self, items: int, began: float, is_success: bool) -> None:
        """Add a finished request of so many items, which began at this time of ``perf_counter``."""
        requests, ns = self._requests["success" if is_success else "fail"], int(1e9 * (perf_counter() - began))
        with self._lock:
            requests["count"] += 1
            requests["ns"] += ns
            self._items += items if is_success else 0
            self._last = time()

    def counts(self) -> dict[str, int]:
        """Totals since the start: requests that succeeded and failed, with their nanoseconds, and items.

        ``last_ms`` is the time of the last request, in milliseconds since 1970.
        """
        with self._lock:
            each = {
                f"{outcome}_{key}": value
                for outcome, counted in self._requests.items()
                for key, value in counted.items()
            }
            return {**each, "items": self._items, "last_ms": int(1000 * self._last)}


def statistics(
    name: str, version: str, counts: Mapping[str, int], nodes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One of Triton's ``model_stats``. ``counts`` are those of ``Figures`` and ``admitted``, ``nodes`` the model's.

    An execution is a batch of the node that takes the largest. Times are sums over nodes; what a batch takes counts
    once, not for each of its requests.
    """
    waited = sum(node["queue_ms"] + node["batch_wait_ms"] for node in nodes)
    computed = sum(node["compute_ms"] for node in nodes)
    # NOTE: perf_analyzer ends if their counts differ.
    times = {"queue": waited, "compute_infer": computed, "compute_input": 0, "compute_output": 0}
    return {
        "name": name,
        "version": version,
        "last_inference": counts["last_ms"],
        "inference_count": counts["items"],
        "execution_count": max(nodes, key=lambda node: int(node["max"]))["batches"] if nodes else 0,
        "inference_stats": {
            **{kind: {"count": counts[f"{kind}_count"], "ns": counts[f"{kind}_ns"]} for kind in ("success", "fail")},
            **{kind: {"count": counts["admitted"], "ns": int(1e6 * ms)} for kind, ms in times.items()},
            **{kind: {"count": 0, "ns": 0} for kind in ("cache_hit", "cache_miss")},
        },
        "batch_stats": [],
    }

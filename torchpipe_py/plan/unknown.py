"""Suggestions for unknown keys and backends."""

from __future__ import annotations

from collections.abc import Iterable

from torchpipe_py.errors import nearest

SERVICE_FLAGS = (
    *("host", "port", "http-host", "http-port", "grpc-port", "workers", "devices", "engines", "handler", "import"),
    *("max-connections", "max-connections-per-address", "max-calls-per-connection", "max-message-bytes"),
    *("max-text-bytes", "max-reply-bytes"),
    *("max-held-bytes", "max-items", "max-batch", "max-depth", "message-seconds", "idle-seconds", "drain-seconds"),
    *("deadline-ms", "queue-target-ms", "server-timing", "repository-control", "exit-on-error", "no-page"),
    *("allowed-hosts", "cors-origin", "forward-headers"),
    *("hang-seconds", "start-seconds", "log-level", "log-format", "log-requests", "trace-ratio", "streams"),
    "require-certificate",
)
"""Options of ``torchpipe-serve`` that may be mistaken for keys."""


_INSTANCES = "it is 'instance_num' here: the number of instances, each with its own thread"
_LARGEST = "the largest batch is 'max' here"
_PROCESSES = (
    "instances of a node, each on a thread, are 'instance_num' here; --workers of torchpipe-serve are processes"
)
_WAIT = "it is 'batching_timeout' here, in milliseconds"
_IN_FLIGHT = "'max_inflight' at the top bounds the requests in flight"
_DEVICE = "the CUDA device is 'device_id' here, its number"
_DEADLINE = "a request brings its deadline; --deadline-ms of torchpipe-serve is the longest, in milliseconds"
_MAP = "it is 'map' here, of the node that reads"
_SCORE = "a detection must exceed 'threshold' here, of a detector's postprocessor"
_OVERLAP = "it is 'iou' here, of a detector's postprocessor"
_AGNOSTIC = "it is 'class_agnostic' here, of a detector's postprocessor"
_SIDES = "a picture's size is 'max_h' and 'max_w' of LetterBoxMat here, 'resize_h' and 'resize_w' of ResizeMat"
ELSEWHERE = {
    "accelerator": _DEVICE,
    "agnostic_nms": _AGNOSTIC,
    "batch_size": _LARGEST,
    "batch_timeout": _WAIT,
    "batch_wait_timeout_s": _WAIT,
    "conf": _SCORE,
    "conf_thres": _SCORE,
    "conf_threshold": _SCORE,
    "confidence": _SCORE,
    "count": _INSTANCES,
    "default_timeout_microseconds": _DEADLINE,
    "device": _DEVICE,
    "gpus": _DEVICE,
    "half": "it is 'precision' of TensorrtTensor here; an ONNX file has its own",
    "img_size": _SIDES,
    "imgsz": _SIDES,
    "input_map": _MAP,
    "instance_group": _INSTANCES,
    "iou_thres": _OVERLAP,
    "iou_threshold": _OVERLAP,
    "max_batch_size": _LARGEST,
    "max_ongoing_requests": _IN_FLIGHT,
    "max_queue_delay_microseconds": _WAIT,
    "max_queue_size": _IN_FLIGHT,
    "max_queued_requests": _IN_FLIGHT,
    "max_wait_time": _WAIT,
    "nms": "a YOLO's postprocessor does NMS here, by 'iou'; of an export with nms=True, EndToEndBoxes does none",
    "nms_threshold": _OVERLAP,
    "num": _INSTANCES,
    "num_gpus": _DEVICE,
    "num_replicas": _INSTANCES,
    "num_threads": _PROCESSES,
    "num_workers": _PROCESSES,
    "output_map": _MAP,
    "platform": "it is 'backend' here",
    "preferred_batch_size": f"{_LARGEST}; no size is preferred",
    "request_timeout_s": _DEADLINE,
    "resize_x": "it is 'resize_w' here, in pixels",
    "resize_y": "it is 'resize_h' here, in pixels",
    "timeout": _DEADLINE,
    "workers_per_device": _PROCESSES,
}
"""Keys of other servers and their equivalents here; docs/migrating.md and docs/detectors.md list them too."""

_NORMALISE = (
    "'mean' and 'std' of the model's node normalise, of pixels from 0 to 255; NormalizeMat and NormalizeTensor do it "
    "for a model that cannot have them inside"
)
BACKENDS_ELSEWHERE = {
    "normalize": _NORMALISE,
    "onnx": "OnnxTensor",
    "onnxruntime": "OnnxTensor",
    "onnxruntime_onnx": "OnnxTensor",
    "pytorch": "TorchTensor",
    "pytorch_libtorch": "TorchTensor",
    "tensorrt": "TensorrtTensor",
    "tensorrt_plan": "TensorrtTensor",
    "torch": "TorchTensor",
    "torchscript": "TorchTensor",
    "totensor": "Mat2Tensor",
}
"""Backends of other servers and torchvision transforms, in lower case, and their equivalents here."""


def backend_instead_of(name: str, valid: Iterable[str]) -> str:
    """A clause for an error message that suggests a replacement for an unknown backend."""
    here = BACKENDS_ELSEWHERE.get(name.lower())
    if here is None:
        return nearest(name, valid)
    return here if " " in here else f"it is {here!r} here"


def instead_of(key: str, valid: Iterable[str]) -> str:
    """A clause for an error message that suggests a replacement for an unknown key."""
    return elsewhere(key) or nearest(key, valid)


def elsewhere(key: str) -> str:
    """The hint for a key of another server or an option of torchpipe-serve; empty for other keys."""
    if key.replace("-", "_") == "max_batch":
        return f"{_LARGEST}; --max-batch of torchpipe-serve bounds the images of one infer_many"
    if is_service_flag(key):
        return f"--{key.replace('_', '-')} is an option of torchpipe-serve"
    return ELSEWHERE.get(key.rpartition("::")[2].replace("-", "_"), "")


def is_service_flag(key: str) -> bool:
    """Whether a key is an option of torchpipe-serve."""
    return key.replace("_", "-") in SERVICE_FLAGS

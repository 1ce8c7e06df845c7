"""All differences between TensorRT 8.6, 10 and 11, and its lean runtime.

========================  =======================  =============================  ================================
what                      8.6                      10.x                           11
========================  =======================  =============================  ================================
explicit batch            a network flag           always, the flag is ignored    always, the flag is gone
fp16                      ``BuilderFlag.FP16``     the same, deprecated           gone: types are the ONNX model's
layers kept in fp32       ``layer.precision``      the same, deprecated           gone: types are the ONNX model's
strongly typed network    not there                a network flag                 always
contexts of one profile   a preview feature        always                         always
cuBLAS, cuDNN tactics     on unless switched off   off                            gone
memory of a context       ``device_memory``        ``set_device_memory``          the same
TF32 for fp32             on unless switched off   the same                       the same
========================  =======================  =============================  ================================

8.6 and 10 therefore get weakly typed networks and flags, 11 an ONNX model converted to fp16 beforehand
(``half.half_model``). Sources: NVIDIA's release notes and migration guide of each version, and the names that the
bindings of 10.16 and 11.4 have.

The lean runtime, ``tensorrt_lean``, builds no engines. It runs those that were built with
``BuilderFlag.VERSION_COMPATIBLE``, by its own or an older version. Such an engine carries the lean runtime of the
version that built it, as code, which the newer one loads; so only calls that both versions have may be used.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchpipe_py.backends.model.onnx_graph import no_layer
from torchpipe_py.encryption.model_file import REDACTED
from torchpipe_py.errors import BackendUnavailable

logger = logging.getLogger("torchpipe_py.tensorrt")

OLDEST = (8, 6)
MODULES = ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings")  # the last one is in the wheels of the lean runtime


def load_tensorrt() -> Any:
    """Import TensorRT, or its lean runtime if only that is installed.

    Raises ``BackendUnavailable`` if both are missing, or if the installed one is broken or older than 8.6.
    """
    for name in MODULES:
        try:
            tensorrt = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a missing shared library may raise any error
            raise BackendUnavailable(f"TensorRT is installed but cannot be loaded: {error}") from error
        if version(tensorrt) < OLDEST:
            raise BackendUnavailable(f"TensorRT {tensorrt.__version__} is too old; 8.6 or newer is needed")
        return tensorrt
    raise BackendUnavailable("TensorRT is not installed (pip install 'torchpipe_py[tensorrt]')")


def version(trt: Any) -> tuple[int, int]:
    """Major and minor number."""
    major, minor = str(trt.__version__).split(".")[:2]
    return int(major), int(minor)


def is_lean(trt: Any) -> bool:
    """Whether this is the lean runtime, which builds no engines."""
    return not hasattr(trt, "Builder")


def is_strongly_typed(trt: Any) -> bool:
    """Whether the ONNX model alone decides about precision."""
    return not hasattr(trt.BuilderFlag, "FP16")


def network_flags(trt: Any) -> int:
    """Flags for ``create_network``: explicit batch where it is a choice."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH", None)
    return 0 if flag is None or version(trt) >= (10, 0) else 1 << int(flag)


def configure(trt: Any, config: Any, workspace_bytes: int, version_compatible: bool) -> None:
    """Settings of every build: workspace, no external libraries, several contexts on one profile, layer information."""
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if version(trt) < (10, 0):
        config.set_tactic_sources(
            config.get_tactic_sources()
            & ~(1 << int(trt.TacticSource.CUBLAS))
            & ~(1 << int(trt.TacticSource.CUBLAS_LT))
            & ~(1 << int(trt.TacticSource.CUDNN))
        )
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)


def set_precision(
    trt: Any,
    network: Any,
    config: Any,
    precision: str,
    fp32_layers: Sequence[str],
    *,
    insists: bool = False,
    is_secret: bool = False,
) -> None:
    """Allow ``precision`` in a weakly typed network, or demand it; strongly typed ones have their own types.

    The int8 of a quantised model is always allowed: otherwise TensorRT refuses it.
    """
    flag = trt.BuilderFlag
    if precision == "fp32":
        config.clear_flag(flag.TF32)  # so that fp32 means fp32; PyTorch rounds convolutions to TF32 by default
    if is_strongly_typed(trt):
        return
    if precision != "fp32":
        config.set_flag(flag.FP16)
    if has_quantization(trt, network):
        config.set_flag(flag.INT8)
    if insists:
        _demand_fp16(trt, network, fp32_layers)
    if fp32_layers:
        _keep_fp32(trt, network, fp32_layers, is_secret)
    if insists or fp32_layers:
        config.set_flag(flag.OBEY_PRECISION_CONSTRAINTS)


def has_quantization(trt: Any, network: Any) -> bool:
    """Whether the model was quantised: it holds QuantizeLinear nodes."""
    kind = trt.LayerType.QUANTIZE
    return any(network.get_layer(index).type == kind for index in range(network.num_layers))


def _demand_fp16(trt: Any, network: Any, fp32_layers: Sequence[str]) -> None:
    kinds = (trt.LayerType.CONVOLUTION, trt.LayerType.DECONVOLUTION, trt.LayerType.MATRIX_MULTIPLY)
    for layer in map(network.get_layer, range(network.num_layers)):
        if layer.type in kinds and layer.name not in fp32_layers:
            layer.precision = trt.float16


def _keep_fp32(trt: Any, network: Any, names: Sequence[str], is_secret: bool) -> None:
    layers = {network.get_layer(index).name: network.get_layer(index) for index in range(network.num_layers)}
    for name in names:
        layer = layers.get(name)
        if layer is None:
            raise no_layer(name, layers, is_secret)
        layer.precision = trt.float32
        for index in range(layer.num_outputs):
            if layer.get_output(index).dtype in (trt.float32, trt.float16):
                layer.set_output_type(index, trt.float32)


def profile_range(engine: Any, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The smallest and largest shape of an input in a profile."""
    least, _, most = engine.get_tensor_profile_shape(name, profile)
    return tuple(least), tuple(most)


def context_memory(engine: Any) -> int:
    """Bytes of device memory that an execution context works in."""
    return int(engine.device_memory_size_v2 if hasattr(engine, "device_memory_size_v2") else engine.device_memory_size)


def load_plugins(trt: Any, trt_logger: Any) -> None:
    """TensorRT's own plugins; the lean runtime has them inside."""
    if not is_lean(trt):
        trt.init_libnvinfer_plugins(trt_logger, "")


def new_context(trt: Any, engine: Any, memory: int, size: int) -> Any:
    """An execution context that works in the ``size`` bytes of device memory at address ``memory``."""
    if version(trt) < (10, 0):
        context = engine.create_execution_context_without_device_memory()
        if context is not None:
            context.device_memory = memory
    else:
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is not None:
            context.set_device_memory(memory, size)
    return context


# -- messages ---------------------------------------------------------------------------------------------------


class Messages:
    """TensorRT's only logger in this process: warnings and worse go to ``logging``, errors are kept for exceptions.

    After ``keep_secret`` it reports only that there was a message: the text may name layers of an encrypted model, and
    may come from any thread.
    """

    def __init__(self, trt: Any) -> None:
        self.lock = threading.RLock()
        self._is_secret = False
        self._errors: deque[str] = deque(maxlen=20)
        errors = self._errors
        levels = {
            trt.ILogger.INTERNAL_ERROR: logging.DEBUG,  # included in the exception
            trt.ILogger.ERROR: logging.DEBUG,
            trt.ILogger.WARNING: logging.INFO,
        }
        failures = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

        def is_secret() -> bool:
            return self._is_secret

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                message = REDACTED if is_secret() else message
                if severity in failures:
                    errors.append(message.strip())
                logger.log(levels.get(severity, logging.DEBUG), "%s", message)

        self.logger = Logger()

    def keep_secret(self) -> None:
        """Hide the text of all messages from now on, permanently."""
        self._is_secret = True

    @contextmanager
    def collected(self) -> Iterator[deque[str]]:
        """A context that collects TensorRT's errors; one thread at a time, since they do not name their thread."""
        with self.lock:
            self._errors.clear()
            yield self._errors

    def last(self) -> str:
        """The latest error of any thread."""
        return self._errors[-1] if self._errors else "TensorRT gives no reason"


@functools.lru_cache(maxsize=1)
def messages(trt: Any) -> Messages:
    """The process's messages: TensorRT keeps the first logger it is given, and objects must not outlive it."""
    return Messages(trt)


def said(errors: Sequence[str]) -> str:
    """TensorRT's own words, for an exception."""
    return "; ".join(dict.fromkeys(errors)) or "TensorRT gives no reason"

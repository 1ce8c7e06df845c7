"""Builds a TensorRT engine from an ONNX model, and keeps it in a file between starts."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torchpipe_py.backends.model.check import Bounds, Shape
from torchpipe_py.backends.model.engine import api
from torchpipe_py.backends.model.engine.cache import EngineCache
from torchpipe_py.backends.model.engine.precision import (
    check_half,
    check_precision,
    half_model,
    is_ignored,
    is_quantised,
    multiplying_layers,
)
from torchpipe_py.backends.model.normalisation import Normalisation
from torchpipe_py.backends.model.onnx_graph import node_name
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.encryption.cipher import Cipher
from torchpipe_py.encryption.model_file import REDACTED
from torchpipe_py.errors import BackendUnavailable, ConfigError, logger

KEY_FORMAT = 1  # raise it if engines must be rebuilt for a reason that no other part of the key shows
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine depends on besides the machine. ``onnx`` includes the normalisation.

    ``cipher``: of an encrypted model. Then no message quotes TensorRT, and the cache is encrypted.
    """

    model: str
    onnx: bytes
    least: Bounds
    most: Bounds
    precision: str = "fp16"
    fp32_layers: tuple[str, ...] = ()
    normalisation: Normalisation = field(default_factory=Normalisation)
    workspace: int = 1024
    version_compatible: bool = False
    cipher: Cipher | None = None

    @property
    def is_secret(self) -> bool:
        """Whether no message may name a layer."""
        return self.cipher is not None

    def key(self, trt: Any, gpu: str) -> dict[str, Any]:
        """The inputs of a build, as readable text; an engine file is loaded only if its key is equal."""
        return {
            "format": KEY_FORMAT,
            "ONNX model": hashlib.sha256(self.onnx).hexdigest(),
            "TensorRT": str(trt.__version__),
            "GPU": gpu,
            "precision": self.precision,
            "precision::fp32": sorted(self.fp32_layers),
            "min": str(self.least),
            "max": str(self.most),
            "mean": [],
            "std": [],
            **{key: list(numbers) for key, numbers in self.normalisation.by_key().items()},
            "workspace": self.workspace,
            "version_compatible": self.version_compatible,
        }


def cached_engine(trt: Any, spec: EngineSpec, cache_path: str, gpu: str) -> Any:
    """The engine of ``spec`` on the current device: from the cache where that is right, else built and kept there.

    Without ``cache_path`` it is built at every start.
    """
    if not cache_path:
        if api.is_lean(trt):
            raise BackendUnavailable(f"{spec.model}: {_only_runs(trt)}")
        logger.warning("%s: no model::cache is given, the engine is built at every start", spec.model)
        return new_engine(trt, spec, None)[0]
    cache, key = EngineCache(cache_path, spec.cipher), spec.key(trt, gpu)
    engine, _ = _kept_engine(trt, cache, key)
    if engine is not None:  # without the lock: files are replaced atomically, and the disk may be read-only
        return engine
    with cache.locked():
        engine, reason = _kept_engine(trt, cache, key)
        if engine is not None:
            return engine
        logger.warning("engine %s: %s; building it from %s", cache_path, reason, spec.model)
        engine, content = new_engine(trt, spec, cache)
        cache.store(content, key)
    return engine


def _kept_engine(trt: Any, cache: EngineCache, key: dict[str, Any]) -> tuple[Any, str]:
    """The engine in the cache if its key matches and TensorRT loads it; otherwise ``None`` and the reason.

    Raises ``BackendUnavailable`` instead if only the lean runtime is installed, which cannot build another.
    """
    content, reason = cache.load(key)
    engine = None
    if content is not None:
        try:
            engine = load_engine(trt, content, str(cache.path), key["version_compatible"])
        except ConfigError as error:
            reason = str(error)
    if engine is None and api.is_lean(trt):
        raise BackendUnavailable(f"engine {cache.path}: {reason}; {_only_runs(trt)}")
    return engine, reason


def _only_runs(trt: Any) -> str:
    return (
        f"the lean runtime of TensorRT {trt.__version__} builds no engine: build it where TensorRT is installed, with "
        "version_compatible = true and model::cache, and bring that file here with its .key"
    )


def load_engine(trt: Any, content: bytes, name: str, version_compatible: bool = False) -> Any:
    """``content`` as an ``ICudaEngine`` on the current device; ``ConfigError`` if TensorRT refuses it."""
    said_by = api.messages(trt)
    with said_by.collected() as errors:
        api.load_plugins(trt, said_by.logger)
        runtime = trt.Runtime(said_by.logger)
        if version_compatible:
            runtime.engine_host_code_allowed = True  # the lean runtime inside it, of the version that built it
        engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise ConfigError(
                f"{name}: TensorRT {trt.__version__} cannot load this engine; engines fit one version of TensorRT and "
                f"one kind of GPU: {api.said(errors)}"
            )
    return engine


def new_engine(trt: Any, spec: EngineSpec, cache: EngineCache | None) -> tuple[Any, bytes]:
    """Build an engine for the current device; return it and the content of its file.

    ``ConfigError`` if it does not compute in the requested precision. A weakly typed network leaves that to TensorRT,
    which chooses fp32 if it measures it as faster, mostly for small layers: if it does so for all layers, the
    engine is built again with fp16 demanded.
    """
    engine, content = _loaded(trt, spec, cache, insists=False)
    if spec.precision == "best":
        return engine, content
    layers = multiplying_layers(trt, engine, _largest_shapes(trt, engine))
    if spec.precision == "fp16" and not api.is_strongly_typed(trt) and is_ignored(layers, "fp16", spec.fp32_layers):
        logger.warning("%s: TensorRT chose fp32 for all layers; building it again with fp16 demanded", spec.model)
        engine, content = _loaded(trt, spec, cache, insists=True)
        layers = multiplying_layers(trt, engine, _largest_shapes(trt, engine))
    check_precision(spec.model, str(trt.__version__), layers, spec.precision, spec.fp32_layers, spec.is_secret)
    return engine, content


def _loaded(trt: Any, spec: EngineSpec, cache: EngineCache | None, insists: bool) -> tuple[Any, bytes]:
    content = build_engine(trt, spec, cache, insists)
    return load_engine(trt, content, spec.model, spec.version_compatible), content


def _largest_shapes(trt: Any, engine: Any) -> dict[str, tuple[int, ...]]:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    return {name: api.profile_range(engine, name, 0)[1] for name in inputs}


def build_engine(trt: Any, spec: EngineSpec, cache: EngineCache | None, insists: bool = False) -> bytes:
    """Build for the current device; takes tens of seconds, with a line in the log every five."""
    said_by = api.messages(trt)
    with said_by.collected() as errors, _progress(spec):
        api.load_plugins(trt, said_by.logger)
        builder = trt.Builder(said_by.logger)
        network = builder.create_network(api.network_flags(trt))
        _parse(trt, spec, network, said_by.logger)
        config = builder.create_builder_config()
        api.configure(trt, config, spec.workspace << 20, spec.version_compatible)
        if spec.precision == "int8" and not api.has_quantization(trt, network):
            raise ConfigError(f"{spec.model}: precision = int8 needs a quantised model, with QuantizeLinear nodes")
        api.set_precision(
            trt,
            network,
            config,
            spec.precision,
            spec.fp32_layers,
            insists=insists,
            is_secret=spec.is_secret,
        )
        for least, most in zip(spec.least.profiles, spec.most.profiles, strict=True):
            config.add_optimization_profile(_profile(builder, network, spec.model, least, most))
        _load_timing(config, cache)
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise ConfigError(f"{spec.model}: TensorRT {trt.__version__} cannot build an engine: {api.said(errors)}")
        _store_timing(config, cache)
        return bytes(serialized)


def _parse(trt: Any, spec: EngineSpec, network: Any, trt_logger: Any) -> None:
    content = spec.onnx
    if api.is_strongly_typed(trt) and spec.precision in ("fp16", "best") and not is_quantised(content):
        content = half_model(content, spec.fp32_layers, spec.is_secret)
        is_normalised = bool(spec.normalisation)
        check_half(spec.model, spec.onnx, content, spec.fp32_layers, spec.least, is_normalised, spec.is_secret)
    parser = trt.OnnxParser(network, trt_logger)
    if not parser.parse(content):
        problems = [parser.get_error(index) for index in range(parser.num_errors)]
        words = "; ".join(f"{node_name(content, problem.node())}: {problem.desc()}" for problem in problems)
        words = REDACTED if spec.cipher else words
        raise ConfigError(f"{spec.model}: TensorRT {trt.__version__} cannot take this ONNX model: {words}")


def _profile(builder: Any, network: Any, model: str, least: Sequence[Shape], most: Sequence[Shape]) -> Any:
    """One optimisation profile, tuned for its largest shapes."""
    profile = builder.create_optimization_profile()
    count = network.num_inputs
    for given in (least, most):
        if len(given) not in (1, count):
            raise ConfigError(f"{model}: min and max give {len(given)} inputs, the model has {count}")
    for index in range(count):
        value = network.get_input(index)
        dims = tuple(value.shape)
        low, high = (_full_shape(model, value.name, dims, given[min(index, len(given) - 1)]) for given in (least, most))
        profile.set_shape(value.name, low, high, high)
    return profile


def _full_shape(model: str, name: str, dims: Shape, given: Shape) -> Shape:
    """``given``, completed by the model's dimensions if it is only a batch size."""
    shape = given if len(given) > 1 else (given[0], *dims[1:])
    wanted = shown_dims([None if dim < 0 else dim for dim in dims])
    if len(shape) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, shape, strict=False)):
        got = shown_dims(shape)
        hint = "; export it with a dynamic batch" if dims and dims[0] > 0 else ""
        if dims and dims[0] == 1 and shape[1:] == dims[1:]:
            hint += ", or set max = 1"
        raise ConfigError(f"{model}: input {name!r} is {wanted}, min and max say {got}{hint}")
    if -1 in shape:
        raise ConfigError(f"{model}: input {name!r} is {wanted}; give its range in min and max, like 1x3x224x224")
    return shape


def _load_timing(config: Any, cache: EngineCache | None) -> None:
    timing = config.create_timing_cache(b"" if cache is None else cache.timing())
    if timing is None or not config.set_timing_cache(
        timing, False
    ):  # damaged, or of another version or GPU: start with an empty one
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _store_timing(config: Any, cache: EngineCache | None) -> None:
    timing = config.get_timing_cache()
    if cache is not None and timing is not None:
        cache.store_timing(bytes(timing.serialize()))


@contextmanager
def _progress(spec: EngineSpec) -> Iterator[None]:
    """Log progress now and then: TensorRT 8.6 logs nothing while it measures kernels."""
    done = threading.Event()
    start = perf_counter()

    def tell() -> None:
        while not done.wait(PROGRESS_SECONDS):
            logger.warning("%s: building the engine, %.0f s", spec.model, perf_counter() - start)

    thread = threading.Thread(target=tell, name="torchpipe_py engine build", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        logger.warning("%s: engine build ended after %.0f s", spec.model, perf_counter() - start)

"""Models by TensorRT."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.base import BatchRange, Data
from torchpipe_py.backends.cuda import Guard, on_stream
from torchpipe_py.backends.model.check import EXACT, HALF, QUANTISED
from torchpipe_py.backends.model.cuda_model import CudaRunner
from torchpipe_py.backends.model.engine import api
from torchpipe_py.backends.model.engine.build import EngineSpec, cached_engine, load_engine
from torchpipe_py.backends.model.model import ModelBackend, Shapes
from torchpipe_py.backends.model.normalisation import Normalisation
from torchpipe_py.backends.model.onnx_graph import model_bytes, not_onnx
from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import BackendUnavailable, ConfigError, InvalidRequest
from torchpipe_py.files import ENGINE
from torchpipe_py.values import to_bool, to_int, to_str, to_strings

_DTYPES = (
    "float32",
    "float16",
    "int8",
    "int32",
    "bool",
    "uint8",
    "int64",
    "bfloat16",
)  # names in PyTorch and TensorRT; older TensorRT lacks some

_OF_ONNX = "mean, std and model::cache go with an ONNX model"


@on_stream
class TensorrtTensor(ModelBackend):
    """An ONNX model as a TensorRT engine on a GPU, or an engine file: Mats or tensors in, Tensors 1×… out.

    The engine is built for batches of ``min`` to ``max`` (shapes like ``4x3x224x224`` where the model leaves more than
    the batch open; inputs separated by ``,``, profiles by ``;``), tuned for the largest, and kept in ``model::cache``
    with a key of everything it depends on. The instances of a node share it. Each batch size is one CUDA graph; a batch
    between two sizes is padded. Needs TensorRT 8.6 or newer and a CUDA device.
    """

    reads = ()
    needs_cuda = True
    use_graphs = True
    runs_pairs = False  # an engine runs no batch beyond its profiles
    default_dtype = None
    guard: Guard

    cache = Param(to_str, "", key="model::cache", kept=True, doc="file that keeps the engine between starts")
    precision = Param(to_str, "fp16", choices=("fp32", "fp16", "int8", "best"), doc="arithmetic of the engine")
    fp32_layers = Param(to_strings, (), key="precision::fp32", doc="names of layers that stay in fp32")
    version_compatible = Param(to_bool, False, doc="an engine that newer versions of TensorRT run as well")
    workspace = Param(
        to_int,
        1024,
        low=1,
        also=("max_workspace_size",),
        doc="most memory a layer may use besides weights and tensors, MiB",
    )

    @classmethod
    def file_problem(cls, file: ModelFile) -> str:
        if file.is_onnx:
            problem = not_onnx(file).replace("file:", "file, as its name says:", 1)
        else:
            kind = file.kind_unless(ENGINE)
            problem = kind and f"not an engine, and its name is not *.onnx: {kind}"
        return problem and f"model {file.path}: {problem}"

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
        yield from super().remarks(params, own)
        if not ModelFile(params["model"]).is_onnx:
            for key in (*Normalisation.of(params).by_key(), *["model::cache"] * bool(params["cache"])):
                yield Remark(key, f"model {params['model']} is an engine: {_OF_ONNX}")

    def setup(self) -> None:
        import torch

        super().setup()
        self._torch: Any = torch
        self._runner = CudaRunner(self)
        self._trt = api.load_tensorrt()
        if api.is_lean(self._trt) and not self.version_compatible:
            raise BackendUnavailable(
                f"the lean runtime of TensorRT {self._trt.__version__} runs version-compatible engines only; install "
                "TensorRT, or set version_compatible = true where the engine is built and here"
            )
        own = {name: value for name, value in self.params.items() if name != "postprocessor_params"}  # a dict
        key = ("engine", str(self.guard.device), *own.items())
        self._engine = self.config.shared.get(key, self._load)
        self._read_engine()
        self._contexts: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._scratch: Any = None
        shapes = self.check_at_load()
        if shapes and all(spec.dims[1:] == shape for spec, shape in zip(self.inputs, shapes, strict=True)):
            self._runner.warm_up(shapes)

    def close(self) -> None:
        self._contexts = {}
        self._scratch = self._engine = None
        if hasattr(self, "_runner"):  # else it was not set up
            self._runner.close()
            # NOTE: it refers to this backend; the two would keep the engine until a garbage collection.
            del self._runner

    def read(self, item: Data) -> tuple[Shapes, list[Any]]:
        return self._runner.read(item)

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return self._runner.run_on_host(inputs)

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        self._runner.run_group(shapes, items, rows)

    def _load(self) -> Any:
        """The engine, once for all instances."""
        if self.file.has_key:
            api.messages(self._trt).keep_secret()
        if not self.file.is_onnx:
            if self.normalisation or self.cache:
                raise ConfigError(f"model {self.model} is an engine: {_OF_ONNX}")
            return load_engine(self._trt, self.file.read(), self.model, bool(self.version_compatible))
        spec = EngineSpec(
            model=self.model,
            onnx=model_bytes(self.file, self.normalisation),
            least=self.min_batch,
            most=self.max_batch,
            precision=self.precision,
            fp32_layers=self.fp32_layers,
            normalisation=self.normalisation,
            workspace=self.workspace,
            version_compatible=bool(self.version_compatible),
            cipher=self.file.cipher(),
        )
        properties = self._torch.cuda.get_device_properties(self.guard.device)
        gpu = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        return cached_engine(self._trt, spec, self.cache, gpu)

    def _read_engine(self) -> None:
        """Names, types and shapes of inputs and outputs; ``ConfigError`` if ``min`` and ``max`` do not fit."""
        engine, trt = self._engine, self._trt
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]
        inputs, outputs = ([self._declared(name) for name in names] for names in (self._inputs, self._outputs))
        for spec in inputs:
            if not spec.dims:
                raise ConfigError(f"model {self.model}: input {spec.name!r} is a scalar; expected a batch dimension")
        self._profiles = [
            [api.profile_range(engine, name, profile) for name in self._inputs]
            for profile in range(engine.num_optimization_profiles)
        ]
        for size in (self.min(), self.max()):
            if not any(low[0] <= size <= high[0] for ranges in self._profiles for low, high in ranges[:1]):
                ranges_of_batches = ", ".join(f"{ranges[0][0][0]}..{ranges[0][1][0]}" for ranges in self._profiles)
                raise ConfigError(
                    f"model {self.model}: a batch of {size} is outside the engine's profiles ({ranges_of_batches})"
                )
        self.declare(inputs, outputs)

    def _declared(self, name: str) -> TensorSpec:
        dims = tuple([dim if dim >= 0 else None for dim in self._engine.get_tensor_shape(name)])
        return TensorSpec(name, dims, str(self._type(name)).removeprefix("torch."))

    def tolerance(self) -> float:
        if not self.file.is_onnx or self.file.holds(b"QuantizeLinear"):
            return QUANTISED  # an engine does not report its precision
        return {"fp32": EXACT, "fp16": HALF}.get(self.precision, QUANTISED)

    def trial_sizes(self, count: int, shapes: Shapes) -> BatchRange:
        sizes = [
            size for size in self._runner.sizes if self._profile_for([(size, *shape) for shape in shapes]) is not None
        ]
        if not sizes:
            raise InvalidRequest(self._no_profile(self.min(), shapes))
        return sizes[0], next((size for size in sizes if size >= count), sizes[-1])

    def _type(self, name: str) -> Any:
        dtype = self._engine.get_tensor_dtype(name)
        kind = next((kind for kind in _DTYPES if getattr(self._trt, kind, None) == dtype), None)
        if kind is None:
            raise ConfigError(f"model {self.model}: tensor {name!r} is a {dtype}, for which PyTorch has no type")
        return getattr(self._torch, kind)

    def size_for(self, count: int, shapes: Shapes) -> int:
        for size in self._runner.sizes:
            if size >= count and self._profile_for([(size, *shape) for shape in shapes]) is not None:
                return size
        raise InvalidRequest(self._no_profile(count, shapes))

    def _no_profile(self, count: int, shapes: Shapes) -> str:
        given = ", ".join(map(shown_dims, shapes))
        return f"no profile of the engine takes {count} of {given}; min and max set what it is built for"

    def _profile_for(self, shapes: Sequence[tuple[int, ...]]) -> int | None:
        """The first profile that takes inputs of these shapes, batch included."""
        for index, ranges in enumerate(self._profiles):
            bounds = [zip(low, shape, high, strict=True) for (low, high), shape in zip(ranges, shapes, strict=True)]
            if all(least <= dim <= most for bound in bounds for least, dim, most in bound):
                return index
        return None

    def forget(self, shapes: Shapes) -> None:
        for key in [key for key in self._contexts if tuple(shape[1:] for shape in key) == shapes]:
            del self._contexts[key]

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        shapes = tuple([tuple(tensor.shape) for tensor in inputs])
        context = self._context(shapes)
        outputs = []
        stream = self._torch.cuda.current_stream().cuda_stream
        with_tensors = list(zip(self._inputs, inputs, strict=True))
        for name in self._outputs:
            shape = self._output_shape(context, name, shapes)
            outputs.append(self._torch.empty(shape, dtype=self._type(name), device=self.guard.device))
            with_tensors.append((name, outputs[-1]))
        for name, tensor in with_tensors:
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(stream):
            raise RuntimeError(f"TensorRT did not run the batch: {api.messages(self._trt).last()}")
        return outputs

    def _output_shape(self, context: Any, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        try:
            shape = tuple(context.get_tensor_shape(name))
        except ValueError:  # unknown dimensions have no length
            given, why = ", ".join(map(shown_dims, shapes)), api.messages(self._trt).last()
            raise ValueError(f"the model has no output for inputs of {given}: {why}") from None
        if any(dim < 0 for dim in shape):
            raise ValueError(
                f"output {name!r} has a shape that depends on the data; OnnxTensor and TorchTensor take such models"
            )
        return shape

    def _context(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """A separate execution context for each set of shapes, since a captured graph keeps using its context."""
        context = self._contexts.get(shapes)
        if context is not None:
            return context
        profile = self._profile_for(shapes)
        stream = self._torch.cuda.current_stream()
        with self.config.shared.get("making contexts", threading.Lock):
            context = self._new_context()
            if context is None or not context.set_optimization_profile_async(profile, stream.cuda_stream):
                raise RuntimeError(f"TensorRT gives no execution context: {api.messages(self._trt).last()}")
        for name, shape in zip(self._inputs, shapes, strict=True):
            if not context.set_input_shape(name, shape):
                raise ValueError(f"input {name!r} of {'x'.join(map(str, shape))}: {api.messages(self._trt).last()}")
        self._contexts[shapes] = context
        return context

    def _new_context(self) -> Any:
        """A context that shares scratch memory with the others, since an instance runs one batch at a time.

        A version-compatible engine's context has its own memory: the call to set it differs between the version that
        built the engine and this one.
        """
        if self.version_compatible:
            return self._engine.create_execution_context()
        size = api.context_memory(self._engine)
        if self._scratch is None:
            self._scratch = self._torch.empty(max(size, 1), dtype=self._torch.uint8, device=self.guard.device)
        return api.new_context(self._trt, self._engine, self._scratch.data_ptr(), size)

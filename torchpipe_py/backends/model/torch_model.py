"""Models run by PyTorch, which needs no TensorRT."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, Literal

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.cuda import Guard, on_stream
from torchpipe_py.backends.model.check import BFLOAT16, EXACT, HALF, TF32
from torchpipe_py.backends.model.cuda_model import CudaRunner, row_tensor
from torchpipe_py.backends.model.model import ModelBackend, Shapes
from torchpipe_py.backends.model.normalisation import FLOATS, Normalisation, Scale
from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import BackendUnavailable, ConfigError, first_line
from torchpipe_py.files import archive_kind
from torchpipe_py.values import to_bool, to_str

# Tested with PyTorch 2.13: a file of each kind overwrote a file or ran a command while it was loaded.
_RUNS = {
    "torchscript": "runs its __setstate__, a TorchScript program that can write any file",
    "export": "unpickles its sample inputs, which can run any command",
    "aotinductor": "loads its shared library, which is native code",
}

_UNSEEN = "runs code in it"

_exported_loading = threading.Lock()
"""PyTorch loads one exported program at a time."""

Specs = tuple[TensorSpec, ...]

_DTYPES = ("float32", "float16", "bfloat16", "uint8")

_NEEDS_FLOATS = "mean and std need a floating input: export the model with one, or let it normalise by itself"


@on_stream
class TorchTensor(ModelBackend):
    """A TorchScript file, or a ``.pt2`` of ``torch.export`` or AOTInductor: Mats or tensors in, Tensors 1×… out.

    On a GPU each batch size is captured as a CUDA graph at its first use; ``cuda_graph = false`` is for models that
    cannot be captured, because they wait for the GPU or look at values. ``mean`` and ``std`` are applied as the first
    step of the graph, to the inputs that ``OnnxTensor`` would apply them to; if the model does not declare shapes, the
    shapes of a request count. The instances of a node share the model.

    Loading any of these files runs the code in it. So ``ConfigError`` unless the node has ``trusted = true``,
    which declares that you trust everyone who could write the file as much as your own code.
    """

    reads = ()
    ignored_keys = dict.fromkeys(
        ("model::cache", "precision", "precision::fp32", "version_compatible", "workspace", "max_workspace_size"),
        "PyTorch keeps no engine and computes in the model's own precision; TensorrtTensor has it",
    )

    input_type = Param(to_str, "float32", choices=_DTYPES, doc="dtype of the model's inputs")
    cuda_graph = Param(to_bool, True, doc="capture a CUDA graph for each batch size")
    trusted = Param(to_bool, False, doc="allow the code in the model file, which runs when it is loaded")

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
        yield from super().remarks(params, own)
        if params["input_type"] not in FLOATS:
            for key in Normalisation.of(params).by_key():
                yield Remark(key, f"input_type is {params['input_type']}; {_NEEDS_FLOATS}")
        if params["trusted"]:
            return
        file = ModelFile(params["model"], params["key_file"], params["key_env"])
        try:
            what_runs = _UNSEEN if file.has_key else _RUNS[_kind(file, file.path)]
        except ConfigError:
            return  # a missing file: reported with the model
        yield Remark("trusted", _distrust(file.path, what_runs))

    @classmethod
    def file_problem(cls, file: ModelFile) -> str:
        try:
            _kind(file, file.path)
        except ConfigError as error:
            return str(error)
        return ""

    default_dtype: Any = None
    guard: Guard

    def setup(self) -> None:
        import torch

        super().setup()
        self._torch: Any = torch
        self.use_graphs = bool(self.cuda_graph)
        self.default_dtype = getattr(torch, self.input_type)
        self._runner = CudaRunner(self)
        self._arrays: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        key = ("module", str(self.guard.device), self.model)
        loaded = self.config.shared.get(key, lambda: load_module(self.file, self.guard.device, bool(self.trusted)))
        self._module, inputs, outputs = loaded
        self.declare(inputs, outputs)
        self._check_types()
        self.check_at_load()

    def close(self) -> None:
        self._module = None
        if hasattr(self, "_runner"):  # else it was not set up
            self._runner.close()
            # NOTE: it refers to this backend; the two would keep the module until a garbage collection.
            del self._runner

    def read(self, item: Data) -> tuple[Shapes, list[Any]]:
        return self._runner.read(item)

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return self._runner.run_on_host(inputs)

    def size_for(self, count: int, shapes: Shapes) -> int:
        return self._runner.least_size(count)

    def forget(self, shapes: Shapes) -> None:
        """Nothing is kept for single shapes."""

    def tolerance(self) -> float:
        if self.input_type == "float32":
            return EXACT if not self.guard.is_cuda else TF32
        return {"float16": HALF, "bfloat16": BFLOAT16}.get(self.input_type, HALF)

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        inputs = list(inputs)
        for index, mean, std in self._scale_arrays(tuple([tuple(each.shape[1:]) for each in inputs])):
            each = inputs[index]
            # In float32 for an input of 16 bits, as inside an ONNX model.
            inputs[index] = ((each.to(mean.dtype) - mean) / std).to(each.dtype)
        try:
            with self._torch.inference_mode():
                outputs = self._module(*inputs)
        except Exception as error:
            problem = self.file.without_words(error)
            if self.guard.is_cuda and self._torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.model} cannot be captured as a CUDA graph ({first_line(problem)}); set cuda_graph = false"
                ) from problem
            if problem is error:
                raise
            raise problem from None
        if isinstance(outputs, dict):
            outputs = list(outputs.values())
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        for output in outputs:
            if not isinstance(output, self._torch.Tensor):
                kind = type(output).__name__
                raise TypeError(
                    f"{self.model} has an output of type {kind}; expected tensors, or a list or dict of them"
                )
        return outputs

    def _scale_arrays(self, shapes: Shapes) -> list[tuple[int, Any, Any]]:
        """Mean and std, on the device, for each input of ``shapes`` that has some, by its index."""
        scales = self.scales_of(shapes)
        return [(index, *self._arrays_of(index, scale, len(shapes[index]) + 1)) for index, scale in scales.items()]

    def _arrays_of(self, index: int, scale: Scale, rank: int) -> tuple[Any, Any]:
        # NOTE: kept for good, since a captured graph reads them where they are.
        key = index, scale.axis, rank
        if key not in self._arrays:
            dtype = np.float64 if self._dtype_of(index) == "float64" else np.float32
            mean, std = (self._torch.from_numpy(array).to(self.guard.device) for array in scale.arrays(rank, dtype))
            self._arrays[key] = mean, std
        return self._arrays[key]

    def _dtype_of(self, index: int) -> str:
        declared = self.inputs[index].dtype if self.inputs else ""
        return declared or str(self.input_type)

    def _check_types(self) -> None:
        """Raise ``ConfigError`` for ``mean`` and ``std`` of an input of integers."""
        for index in self.scales or {}:
            if (dtype := self._dtype_of(index)) not in FLOATS:
                name = self.inputs[index].name
                raise ConfigError(f"model {self.model}: input {name!r} takes {dtype}; {_NEEDS_FLOATS}")

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        if self.guard.is_cuda:
            self._runner.run_group(shapes, items, rows)
            return
        # On the CPU: no buffers, no graphs.
        columns = zip(self._runner.input_specs(len(shapes)), shapes, zip(*rows, strict=True), strict=True)
        inputs = [
            self._torch.stack([row_tensor(value, shape).to("cpu", spec.dtype) for value in values])
            for spec, shape, values in columns
        ]
        outputs = self.enqueue(inputs)
        self.layout.check(outputs, self.output_names, len(items))
        # Copy: an output may be memory of the model, which a user could change in place.
        self.write_results(items, [output.clone() for output in outputs])


def load_module(file: ModelFile, device: Any, is_trusted: bool) -> tuple[Callable[..., Any], Specs, Specs]:
    """A model file on ``device``: the callable and its declared inputs and outputs, empty if unknown.

    ``ConfigError`` if it is not such a file, or may not run its code.
    """
    import torch

    path, source = file.path, file.source()
    kind = _kind(file, source)
    if kind == "aotinductor" and file.has_key:
        raise ConfigError(
            f"model {path}: an AOTInductor package is unpacked to files when it is loaded, so it cannot be encrypted; "
            "TorchScript, torch.export's .pt2 and ONNX can"
        )
    if not is_trusted:
        raise ConfigError(_distrust(path, _RUNS[kind]))
    try:
        if kind == "aotinductor":
            return _load_package(torch, path, device), (), ()
        if kind == "torchscript":
            script = torch.jit.load(source, map_location=device).eval()
            return script, _script_inputs(script), ()
        with _exported_loading:
            program = torch.export.load(source)
            names = program.graph_signature.user_inputs, program.graph_signature.user_outputs
            inputs, outputs = (_exported(torch, program, some) for some in names)
            return program.module().to(device), inputs, outputs
    except (BackendUnavailable, ConfigError):
        raise
    except Exception as error:
        problem = file.without_words(error)
        text = f"model {path}: PyTorch {torch.__version__} cannot load it: {first_line(problem)}"
        raise ConfigError(text) from problem


def _distrust(path: str, what_runs: str) -> str:
    return (
        f"model {path}: loading it {what_runs}, with the rights of this process; set trusted = true in its node "
        "if you trust the author of the file, or export it to ONNX, which holds no code"
    )


def _script_inputs(script: Any) -> Specs:
    """The names of TorchScript's inputs, without shapes and types; empty if some are optional."""
    arguments = script.forward.schema.arguments[1:]
    if any(argument.has_default_value() or str(argument.type) != "Tensor" for argument in arguments):
        return ()
    return tuple([TensorSpec(argument.name, (), "") for argument in arguments])


def _exported(torch: Any, program: Any, names: Sequence[Any]) -> Specs:
    """Inputs or outputs of an exported program; empty if some are not tensors."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    tensors: list[Any] = [values.get(name) if isinstance(name, str) else None for name in names]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return ()
    return tuple(
        [
            TensorSpec(
                name,
                tuple([size if isinstance(size, int) else None for size in tensor.shape]),
                str(tensor.dtype).removeprefix("torch."),
            )
            for name, tensor in zip(names, tensors, strict=True)
        ]
    )


def _kind(file: ModelFile, source: str | BytesIO) -> Literal["torchscript", "export", "aotinductor"]:
    """The kind of a model file, by the names in the archive; nothing is unpacked."""
    try:
        kind = archive_kind(source)
        if not isinstance(source, str):
            source.seek(0)  # PyTorch reads from the current position
    except (OSError, zipfile.BadZipFile) as error:
        problem = file.kind() or "it is not a zip archive, as those are"
        raise ConfigError(f"model {file.path}: neither TorchScript nor .pt2: {problem}") from error
    if kind == "checkpoint":
        raise ConfigError(f"model {file.path}: neither TorchScript nor .pt2: {file.kind()}")
    return kind or "export"


def _load_package(torch: Any, path: str, device: Any) -> Any:
    """AOTInductor packages are compiled for one kind of device."""
    from torch._inductor import aoti_load_package

    index = device.index if device.type == "cuda" else -1
    package = aoti_load_package(path, device_index=index)
    compiled_for = package.get_metadata().get("AOTI_DEVICE_KEY", device.type)
    if compiled_for != device.type:
        raise BackendUnavailable(f"model {path} is compiled for {compiled_for}, this node runs on {device.type}")
    return package

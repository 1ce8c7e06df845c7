"""Models by ONNX Runtime, on the CPU anywhere and on CUDA where its provider is installed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.model.check import EXACT, HALF, QUANTISED, TF32, Dims, with_batch
from torchpipe_py.backends.model.inputs import (
    check_numbers,
    fits,
    from_bfloat16,
    laid_out,
    may_overflow,
    misfit,
    optional_values,
    plain_numbers,
    request_values,
    tensor_to_numpy,
    to_bfloat16,
    to_texts,
)
from torchpipe_py.backends.model.model import ModelBackend, Shapes, layout_of
from torchpipe_py.backends.model.onnx_graph import (
    NO_SHAPE,
    SCALAR,
    keep_telemetry_off,
    load_problem,
    model_bytes,
    not_onnx,
    scalar_tensors,
    unserved_tensors,
    unsigned_model,
)
from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import BYTES, TensorSpec
from torchpipe_py.cores import usable_cores
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import BackendUnavailable, ConfigError, InvalidRequest, logger, nearest
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.values import to_int, to_strings
from torchpipe_py.wire.values import dtype_name

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    "tensor(string)": BYTES,
    **{
        f"tensor({name})": name
        for name in (
            *("float16", "bfloat16", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        )
    },
}
"""Our names of ONNX Runtime's types."""

_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16

_ON_DEVICE = ("CUDAExecutionProvider", "TensorrtExecutionProvider")


class OnnxTensor(ModelBackend):
    """An ONNX model by ONNX Runtime: Mats or tensors in, Tensors 1×… out, ``max`` items at a time.

    Inputs are converted to the model's dtype where that loses no more than precision (``uint8`` to ``float32``, say).
    The instances of a node share one session.
    """

    reads = ()
    uses_device = True
    adds_batch = True
    ignored_keys = dict.fromkeys(
        ("model::cache", "precision", "precision::fp32", "version_compatible", "workspace", "max_workspace_size"),
        "ONNX Runtime keeps no engine and computes in the model's own precision; TensorrtTensor has it",
    )

    providers = Param(to_strings, (), doc="execution providers, best first; default: CUDA if installed, then CPU")

    threads = Param(to_int, 0, low=0, doc="threads inside one run; 0 divides the cores among all workers' instances")

    @classmethod
    def file_problem(cls, file: ModelFile) -> str:
        problem = not_onnx(file)
        return problem and f"model {file.path}: {problem}"

    @classmethod
    def remarks(cls, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
        yield from super().remarks(params, own)
        for problem in unserved_tensors(params["model"], takes_scalars=layout_of(params).is_whole):
            yield Remark("model", f"{params['model']}: {problem}")
        if params["providers"]:
            yield from _provider_remarks(params["providers"])

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        return any(name in _ON_DEVICE for name in params["providers"])

    def setup(self) -> None:
        super().setup()
        keep_telemetry_off()
        try:
            import onnxruntime
            import torch
        except ImportError as error:
            raise BackendUnavailable(f"{error.name} is not installed (pip install onnxruntime)") from error
        self._from_numpy: Any = torch.from_numpy
        self._run_options: Any = onnxruntime.RunOptions
        self._session = self.config.shared.get(
            (self.model, self.normalisation, self.providers, self.threads, self.config.device_id),
            lambda: self._load(onnxruntime),
        )
        tensors = (*self._session.get_inputs(), *self._session.get_outputs())
        scalars = scalar_tensors(self.file) if any(not value.shape for value in tensors) else ()
        values = self._session.get_inputs()
        declared = with_batch([_dims(value) for value in values], self.max(), self.layout.is_whole)
        self._inputs = [
            _Input(self.model, value, dims, self.max(), self.layout.is_whole, is_scalar=value.name in scalars)
            for value, dims in zip(values, declared, strict=True)
        ]
        self._only = self._inputs[0] if len(self._inputs) == 1 else None
        self._optional = {
            value.name: _Input(self.model, value, with_batch([_dims(value)], self.max())[0], 1, is_optional=True)
            for value in self._session.get_overridable_initializers()
            if self.min() == 1  # else no request runs alone
        }
        outputs = [_output_spec(self.model, value, scalars) for value in self._session.get_outputs()]
        specs = [*outputs, *[each.spec for each in (*self._inputs, *self._optional.values())]]
        self._has_bfloat16 = any(spec.dtype == "bfloat16" for spec in specs)
        self.declare([given.spec for given in self._inputs], outputs, [each.spec for each in self._optional.values()])
        shapes = self.check_at_load()
        for given, spec in zip(self._inputs, self.inputs, strict=True):
            given.spec = spec
        if shapes is not None:
            self.config.shared.get((self._session, "warm"), lambda: self._warm_up(shapes))

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        options = None
        if len(inputs[0]) > self.max() and not self._is_on_device():  # of the trial: no request needs its memory
            options = self._run_options()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return self._run(inputs, {}, options)

    def _run(
        self, inputs: list[np.ndarray], optional: Mapping[str, np.ndarray], options: Any = None
    ) -> list[np.ndarray]:
        feed = {given.spec.name: given.fed(array) for given, array in zip(self._inputs, inputs, strict=True)}
        feed.update(optional)
        try:
            if self._has_bfloat16:
                return self._run_values(feed)
            outputs: list[np.ndarray] = self._session.run(self.output_names, feed, options)
        except Exception as error:
            if self.file.has_key:
                raise self.file.without_words(error) from None
            raise
        return [_plain(output) for output in outputs]

    def _run_values(self, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run a model with bfloat16, which ONNX Runtime does not exchange as arrays; it is float32 outside."""
        import torch
        from onnxruntime import OrtValue

        values = {}
        for given in (*self._inputs, *self._optional.values()):
            name = given.spec.name
            if name in feed and given.is_bfloat16:
                bits = to_bfloat16(feed[name])
                values[name] = OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
            elif name in feed:
                values[name] = OrtValue.ortvalue_from_numpy(np.ascontiguousarray(feed[name]))
        outputs = self._session.run_with_ort_values(self.output_names, values)
        return [
            from_bfloat16(torch.from_dlpack(output._ortvalue.to_dlpack()).view(torch.int16).numpy())
            if output.data_type() == "tensor(bfloat16)"
            else _plain(output.numpy())
            for output in outputs
        ]

    def tolerance(self) -> float:
        if self.file.holds(b"QuantizeLinear"):
            return QUANTISED
        if any("float16" in value.type for value in (*self._session.get_inputs(), *self._session.get_outputs())):
            return HALF
        return TF32 if self._is_on_device() else EXACT

    def setup_choices(self) -> Iterator[str]:
        yield f"OnnxTensor: {', '.join(self._session.get_providers())}"

    def _is_on_device(self) -> bool:
        return any(name in _ON_DEVICE for name in self._session.get_providers())

    def read(self, item: Data) -> tuple[Shapes, list[np.ndarray]]:
        """Arrays 1×…, and their shapes."""
        if self._only is not None and hasattr(data := item[TASK_DATA_KEY], "dtype"):  # most models have one input
            array = self._only.array(data)
            return (array.shape[1:],), [array]
        values = request_values(item, (*self.inputs, *self.optional))
        arrays = [given.array(value) for given, value in zip(self._inputs, values, strict=True)]
        return tuple([array.shape[1:] for array in arrays]), arrays

    def forward(self, items: list[Data]) -> None:
        # Optional inputs are of a run, not of an item: a request that has some runs alone.
        alone = [item for item in items if optional_values(item, self.optional)] if self.optional else []
        for item in alone:
            super().forward([item])
        together = [item for item in items if item not in alone] if alone else items
        if together:
            super().forward(together)

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        columns = zip(self._inputs, zip(*rows, strict=True), strict=True)
        optional = {
            name: self._optional[name].row(value) for name, value in optional_values(items[0], self.optional).items()
        }
        arrays = self._run([given.stack(column) for given, column in columns], optional)
        self.layout.check(arrays, self.output_names, len(items))
        specs = zip(self.outputs, arrays, strict=True)
        self.write_results(items, [self._result(spec.dtype, array) for spec, array in specs])

    def _result(self, dtype: str, array: np.ndarray) -> Any:
        """A Tensor; of texts an array of objects."""
        if dtype == BYTES:
            return array
        if dtype != "bfloat16":
            return self._from_numpy(array)
        import torch

        return self._from_numpy(to_bfloat16(array).view(np.int16)).view(torch.bfloat16)

    def _load(self, onnxruntime: Any) -> Any:
        options = onnxruntime.SessionOptions()
        sharing = self.config.instance_num * self.config.processes
        options.intra_op_num_threads = self.threads or max(1, usable_cores() // sharing)
        # Spinning threads would take cores from nodes that decode.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4 if self.file.has_key else 3  # errors name layers
        names = self._providers(onnxruntime)
        on_device = {"device_id": str(self.config.device_id)}
        providers = [(name, on_device if name in _ON_DEVICE else {}) for name in names]
        try:
            source = self._source(names)
            if isinstance(source, bytes):  # its weights may be beside the file that it was made from
                folder = os.path.dirname(os.path.abspath(self.model))
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            session = onnxruntime.InferenceSession(source, options, providers=providers)
        except ConfigError:
            raise
        except Exception as error:
            safe_error = self.file.without_words(error)
            raise ConfigError(
                f"model {self.model}: ONNX Runtime cannot load it: {load_problem(self.file, error)}"
            ) from safe_error
        missing = [name for name in names if name not in session.get_providers()]
        if missing and self.providers:
            raise BackendUnavailable(f"{missing[0]} is installed, but ONNX Runtime cannot start it here")
        if missing:
            logger.warning("%s: %s cannot be started here, the model runs without it", self.model, missing[0])
        return session

    def _warm_up(self, shapes: Shapes) -> None:
        """Run zeros of each batch size on a GPU, which selects kernels for each; on a CPU the batch check is enough."""
        if not self._is_on_device():
            return
        try:
            for size in range(self.min(), self.max() + 1):
                self.run_on_host(
                    [np.zeros((size, *shape), each.dtype) for each, shape in zip(self._inputs, shapes, strict=True)]
                )
        except Exception as error:  # the model may fail for zeros
            logger.warning("%s: not warmed up: %s", self.model, error)

    def _source(self, providers: Sequence[str]) -> Any:
        """The path, or the bytes of the model that is to run instead; its weights in other files stay there.

        It is decrypted, has ``mean`` and ``std`` inside, and for a CPU a quantised one becomes unsigned.
        """
        if not any(name in _ON_DEVICE for name in providers) and self.file.holds(b"QuantizeLinear"):
            return unsigned_model(model_bytes(self.file, self.normalisation, with_weights=False))
        if not (self.normalisation or self.file.has_key):
            return self.file.source()
        return model_bytes(self.file, self.normalisation, with_weights=False)

    def _providers(self, onnxruntime: Any) -> list[str]:
        available = onnxruntime.get_available_providers()
        for name in self.providers:
            if name not in available and name in onnxruntime.get_all_providers():
                raise BackendUnavailable(f"this build of ONNX Runtime has no {name}")
            if name not in available:
                raise ConfigError(f"providers: {name!r} is not installed; {nearest(name, available)}")
        if self.providers:
            return list(self.providers)
        return [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]


def _provider_remarks(names: Sequence[str]) -> Iterator[Remark]:
    """Names that no build of ONNX Runtime has; nothing if it is not installed."""
    keep_telemetry_off()
    try:
        import onnxruntime
    except ImportError:
        return
    known = onnxruntime.get_all_providers()
    for name in names:
        if name not in known:
            yield Remark("providers", f"no provider {name!r}; {nearest(name, known)}")


def _output_spec(model: str, value: Any, scalars: Collection[str]) -> TensorSpec:
    if not value.type.startswith("tensor("):
        raise ConfigError(f"model {model}: output {value.name!r} is a {value.type}; outputs are tensors")
    dtype = _dtype_of(model, "output", value)
    return TensorSpec(value.name, _dims(value), dtype, is_scalar=value.name in scalars)


def _dtype_of(model: str, kind: str, value: Any) -> str:
    if value.type not in _DTYPES:
        raise ConfigError(f"model {model}: {kind} {value.name!r} is a {value.type}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[value.type]


def _dims(value: Any) -> tuple[int | None, ...]:
    return tuple([dim if isinstance(dim, int) else None for dim in value.shape])


def _plain(output: np.ndarray) -> np.ndarray:
    """NOTE: ONNX Runtime's ``uint64`` is C's ``unsigned long long``, which PyTorch does not take for one."""
    return output.view(np.uint64) if output.dtype.char == "Q" else output


class _Input:
    """One input of the model and the buffer its batches are stacked in.

    ``dims`` are its dimensions, with a batch of 1 before those that the model takes without one. Where ``is_whole``, a
    scalar is fed as it is.
    """

    def __init__(
        self,
        model: str,
        value: Any,
        dims: Dims,
        most: int,
        is_whole: bool = False,
        is_optional: bool = False,
        is_scalar: bool = False,
    ) -> None:
        dtype = _dtype_of(model, "input", value)
        self.is_bfloat16 = dtype == "bfloat16"  # float32 until the model runs: NumPy has no such type
        self.dtype = np.dtype({"bfloat16": "float32", BYTES: "object"}.get(dtype, dtype))
        dims = (1,) if is_scalar and is_whole else dims
        if is_optional and dims[:1] not in ((1,), (None,)):
            dims = (1, *dims)  # of one request, as it is
        self.spec = TensorSpec(value.name, dims, dtype, is_optional=is_optional)
        self._has_batch = dims == _dims(value)
        if not self.spec.dims:
            raise ConfigError(f"model {model}: input {value.name!r} {SCALAR if is_scalar else NO_SHAPE}")
        self._most = most
        self._buffer: Any = np.empty(0, self.dtype)
        self._fitting: tuple[tuple[int, ...], np.dtype] | None = None  # of the last tensor that needed no conversion

    def array(self, value: Any) -> np.ndarray:
        """A value, 1×… or without its first dimension, as an array 1×… that fits this input; C×H×W becomes 1×C×H×W.

        A Mat H×W×C, or H×W of one channel, for an input of four dimensions, is laid out as the input declares.
        ``InvalidRequest`` for a value that does not fit, or loses more than precision in the input's dtype.
        """
        name, dims = self.spec.name, self.spec.dims
        if len(dims) == 1 and isinstance(value, np.generic):
            value = np.asarray(value)
        elif len(dims) == 1 and isinstance(value, (bool, int, float)) and self.spec.dtype != BYTES:
            value = plain_numbers(value, self.spec.dtype, name)
        is_tensor = not isinstance(value, np.ndarray)
        if self.spec.dtype == BYTES:
            value, is_tensor = to_texts(value, len(dims), name), False
        array = given = tensor_to_numpy(value, name) if is_tensor else value
        if is_tensor and self._fitting == (array.shape, array.dtype):
            return array
        if not is_tensor and len(dims) == 4 and array.ndim in (2, 3) and self.spec.dtype != BYTES:
            array = laid_out(array, dims, name)
        if array.ndim == len(dims) - 1:
            array = array[None]
        if array.shape[:1] != (1,) or not fits(array.shape[1:], dims[1:]):
            raise InvalidRequest(misfit(name, dims[1:], given.shape, self.spec.rows_mix))
        if self.spec.dtype != BYTES:
            check_numbers(array, self.spec.dtype, name)
        # A cast to a smaller type looks at every number.
        is_safe = array.dtype == self.dtype or (
            self.dtype.kind == "f" and not may_overflow(dtype_name(array.dtype), self.spec.dtype)
        )
        if is_tensor and array is given and is_safe:
            self._fitting = array.shape, array.dtype
        return array

    def row(self, value: Any) -> np.ndarray:
        """The value of one request, as the model takes it alone."""
        return self.fed(self.array(value).astype(self.dtype, copy=False))

    def fed(self, batch: np.ndarray) -> np.ndarray:
        """An array N×… as the model takes it: without the batch of one item where it has none."""
        return batch if self._has_batch else batch[0, ...]

    def stack(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """N arrays 1×… of one shape as one array N×… of the input's dtype; valid until the next call."""
        shape = arrays[0].shape[1:]
        if self._buffer.shape[1:] != shape or len(self._buffer) < len(arrays):
            self._buffer = np.empty((max(len(arrays), self._most), *shape), self.dtype)
        batch: np.ndarray = self._buffer[: len(arrays)]
        return np.concatenate(arrays, out=batch, casting="unsafe")  # `array` has looked at the numbers

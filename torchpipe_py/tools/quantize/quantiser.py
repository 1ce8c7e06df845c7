"""ONNX Runtime's static quantiser, set up for TensorRT, and the search for layers that it harms."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchpipe_py.backends.model.normalisation import Normalisation
from torchpipe_py.backends.model.onnx_graph import keep_telemetry_off, model_bytes
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import describe, nearest
from torchpipe_py.files import file_kind
from torchpipe_py.tools.compare_models.figures import changed_classes
from torchpipe_py.tools.export.onnx_file import open_session, quiet
from torchpipe_py.tools.report import ToolError

Arrays = list[np.ndarray]
"""The inputs of a model for one image, each 1×…, in the model's order."""

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that are computed in int8 if their weights are constant."""

BETWEEN = ("Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool")
"""Operators that are also quantised, so that int8 continues from layer to layer."""

OPSET = 13  # the first with scales for each channel

OPTIONS = {
    # Symmetric, with float weights before a pair of nodes and plain biases: all that TensorRT 8.6 supports.
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "AddQDQPairToWeight": True,
    "QuantizeBias": False,
    # A pair before each int8 operator, none between it and its Relu, which both runtimes merge.
    "OpTypesToExcludeOutputQuantization": [*LAYERS, "Add", "Concat"],
    "ForceQuantizeNoInputCheck": True,
    "MatMulConstBOnly": True,
}


class Quantiser:
    """Quantises one model; temporary files lie in ``folder``. Set ``inputs`` before ``write``.

    Raises ``ToolError`` unless it is an ONNX model in float32 that is not quantised yet.
    """

    def __init__(self, path: str, folder: Path) -> None:
        self._path, self._folder = path, folder
        self.inputs: Sequence[Arrays] = ()
        self.model = folder / "float.onnx"
        graph = _prepared(path, folder / "named.onnx", self.model).graph
        constants = {tensor.name for tensor in graph.initializer}
        self.input_names = [value.name for value in graph.input if value.name not in constants]
        self.layers = [node.name for node in graph.node if node.op_type in LAYERS and node.input[1] in constants]
        self._nodes = [node.name for node in graph.node]
        self._inputs = [value for value in graph.input if value.name in self.input_names]
        if not self.layers:
            raise ToolError(f"model {path}: no layer of it can be in int8; those are {', '.join(LAYERS)}")

    def write_probe(self, out: Path) -> None:
        """Write a model that returns its inputs, so that a node with it returns what its model would get."""
        from onnx import helper, save

        given = [type(value)() for value in self._inputs]
        for copied, value in zip(given, self._inputs, strict=True):
            copied.CopyFrom(value)
            copied.name = f"{value.name}_given"
        nodes = [helper.make_node("Identity", [value.name], [f"{value.name}_given"]) for value in self._inputs]
        graph = helper.make_graph(nodes, "probe", self._inputs, given)
        save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), str(out))

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ``ToolError`` for a name that no node of the model has."""
        for name in names:
            if name not in self._nodes:
                raise ToolError(f"precision::fp32: no layer {name!r}; {nearest(name, self.layers)}")

    def write(self, out: Path, *, fp32: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        """Write a model with all layers quantised except ``fp32``, or with ``only`` some."""
        keep_telemetry_off()
        import onnx
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        kept: dict[str, Any] = {}
        if "calibration_cache_path" in inspect.signature(quantize_static).parameters:
            kept["calibration_cache_path"] = self._folder / "ranges.json"
        rows = (dict(zip(self.input_names, arrays, strict=True)) for arrays in self.inputs)
        try:
            with quiet(""):  # its advice goes to the root logger
                quantize_static(
                    str(self.model),
                    str(out),
                    SimpleNamespace(get_next=lambda: next(rows, None)),
                    quant_format=QuantFormat.QDQ,
                    calibrate_method=CalibrationMethod.MinMax,
                    activation_type=QuantType.QInt8,
                    weight_type=QuantType.QInt8,
                    per_channel=True,
                    op_types_to_quantize=[*LAYERS, *BETWEEN],
                    nodes_to_quantize=list(only),
                    nodes_to_exclude=list(fp32),
                    extra_options=dict(OPTIONS),
                    **kept,
                )
        except Exception as error:
            raise _failure(self._path, "quantise", error) from error
        model = onnx.load(str(out))
        used = {node.domain for node in model.graph.node}
        for opset in [opset for opset in model.opset_import if opset.domain not in used]:
            model.opset_import.remove(opset)  # unused operator sets that ONNX Runtime lists
        onnx.save(model, str(out))


def _prepared(path: str, named: Path, out: Path) -> Any:
    """Write the model to ``out`` with names for all nodes, with shapes and without BatchNorm; returns it."""
    keep_telemetry_off()
    import onnx

    model = onnx.load_from_string(model_bytes(ModelFile(path), Normalisation()))
    if not model.graph.node:
        raise ToolError(f"model {path}: not an ONNX file: {file_kind(path) or 'it has no graph'}")
    kinds = {node.op_type for node in model.graph.node}
    quantised = sorted(kind for kind in kinds if "uantize" in kind or "QLinear" in kind or kind.endswith("Integer"))
    if quantised:
        raise ToolError(f"model {path}: it is quantised already: it has {', '.join(quantised)} nodes")
    if any(tensor.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for tensor in weights(model)):
        raise ToolError(f"model {path}: its weights are in half precision; quantise the model in float32")
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    try:
        opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        if opset < OPSET:
            model = onnx.version_converter.convert_version(model, OPSET)
        onnx.save(model, str(named))
        with quiet(""):  # its advice goes to the root logger
            from onnxruntime.quantization.shape_inference import quant_pre_process

            quant_pre_process(str(named), str(out), skip_symbolic_shape=True)
    except Exception as error:
        raise _failure(path, "prepare", error) from error
    return onnx.load(str(out))


def weights(model: Any) -> Iterator[Any]:
    """The constants of an ONNX model with two dimensions or more."""
    return (tensor for tensor in model.graph.initializer if len(tensor.dims) > 1)


def _failure(path: str, verb: str, error: Exception) -> ToolError:
    why = " ".join(describe(error, 300).split())
    return ToolError(f"model {path}: ONNX Runtime cannot {verb} it: {why}")


def search(quantiser: Quantiser, fp32: Sequence[str], most: int, max_drop: float) -> list[str]:
    """Up to ``most`` layers to keep in fp32 besides ``fp32``: the fewest that leave the classes as they are.

    Layers are ranked by how far the outputs move when that layer alone is in int8; 1, 2, 4 … of them are kept, until no
    more than ``max_drop`` of 100 images change their class. It uses the calibration images: those for the check must
    not influence the model.
    """
    if not most:
        return []
    trial = quantiser.model.with_name("trial.onnx")
    wanted = _outputs(quantiser, quantiser.model)

    def changes(kept: Sequence[str]) -> float:
        quantiser.write(trial, fp32=[*fp32, *kept])
        return 100 * changed_classes(wanted, _outputs(quantiser, trial))

    if changes([]) <= max_drop:
        return []
    moves = {}
    for layer in quantiser.layers:
        if layer not in fp32:
            quantiser.write(trial, only=[layer])
            moves[layer] = float(np.linalg.norm(_outputs(quantiser, trial) - wanted))
    ranked = sorted(moves, key=lambda layer: -moves[layer])[:most]
    count = 1
    while count < len(ranked) and changes(ranked[:count]) > max_drop:
        count *= 2
    return ranked[:count]


def _outputs(quantiser: Quantiser, model: Path) -> np.ndarray:
    """The first output for each image, as rows."""
    session = open_session(model)
    feeds = [dict(zip(quantiser.input_names, arrays, strict=True)) for arrays in quantiser.inputs]
    return np.concatenate([session.run(None, feed)[0].reshape(1, -1) for feed in feeds])

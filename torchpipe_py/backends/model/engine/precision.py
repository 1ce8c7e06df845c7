"""The precision of an engine: a model in fp16 for strongly typed networks, and the precision of built engines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.model.check import HALF, QUANTISED, Bounds
from torchpipe_py.backends.model.onnx_graph import keep_telemetry_off, no_layer
from torchpipe_py.encryption.model_file import REDACTED
from torchpipe_py.errors import ConfigError, logger

FP16_MAX = 65504.0
MOST_LAYERS = 5  # in a message


def _shown(names: Sequence[str], is_secret: bool) -> str:
    more = f" and {len(names) - MOST_LAYERS} more" if len(names) > MOST_LAYERS else ""
    return REDACTED if is_secret else ", ".join(names[:MOST_LAYERS]) + more


# -- models in fp16 ----------------------------------------------------------------------------------------------------


def half_model(content: bytes, fp32_nodes: Sequence[str], is_secret: bool = False) -> bytes:
    """The serialised model with weights and arithmetic in fp16; inputs, outputs and ``fp32_nodes`` stay as they are."""
    import onnx

    keep_telemetry_off()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load_from_string(content)
    names = {node.name for node in model.graph.node}
    for name in fp32_nodes:
        if name not in names:
            raise no_layer(name, names, is_secret)
    half = convert_float_to_float16(model, keep_io_types=True, node_block_list=list(fp32_nodes))
    _join_fp32(half.graph, names)
    return bytes(half.SerializeToString())


def _join_fp32(graph: Any, names: set[str]) -> None:
    """Remove pairs of casts, to fp16 and back, that the conversion put between two nodes in fp32.

    ``names``: the node names from before the conversion.
    """
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast" and node.name not in names}
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in casts and casts[name].input[0] in casts:
                node.input[index] = casts[casts[name].input[0]].input[0]


def is_quantised(content: bytes) -> bool:
    """Whether the serialised model has QuantizeLinear nodes, which mark the parts in int8."""
    import onnx

    return any(node.op_type == "QuantizeLinear" for node in onnx.load_from_string(content).graph.node)


def check_half(
    model: str,
    full: bytes,
    half: bytes,
    fp32_nodes: Sequence[str],
    least: Bounds,
    is_normalised: bool,
    is_secret: bool = False,
) -> None:
    """Compare both on generated inputs on the CPU: log outputs that differ; ``ConfigError`` if one is wrong.

    The inputs are pixels of 0..255 for a model that ``is_normalised`` itself, else numbers about 0. Models that ONNX
    Runtime does not run are not compared.
    """
    try:
        tensors, outputs = _run(_with_all_outputs(full), least, is_normalised), _run(half, least, is_normalised)
    except Exception as error:
        logger.info("%s: its fp16 form is not compared with it: %s", model, REDACTED if is_secret else error)
        return
    # NOTE: the CPU has few fp16 kernels, and ONNX Runtime does not round between others, which hides overflows.
    if wide := [name for name in _beyond_fp16(full, tensors) if name not in fp32_nodes]:
        shown = f"{len(wide)} layers" if is_secret else _shown(wide, False)
        raise ConfigError(
            f"{model}: {shown} read or write numbers beyond {FP16_MAX:g}, the largest of fp16; name them in "
            "precision::fp32, or set precision = fp32"
        )
    for name, result in outputs.items():
        expected = tensors[name]
        difference = float(np.linalg.norm(expected - result) / max(float(np.linalg.norm(expected)), 1e-12))
        if difference > QUANTISED:
            raise ConfigError(
                f"{model}: output {name!r} is wrong in fp16, by {difference:.1g} of itself; name the layers that need "
                "more in precision::fp32, or set precision = fp32"
            )
        if difference > HALF:
            logger.warning("%s: output %r differs by %.1g of itself in fp16", model, name, difference)


def _with_all_outputs(content: bytes) -> bytes:
    """The serialised model with every tensor in it as an output."""
    import onnx

    model = onnx.load_from_string(content)
    outputs = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in outputs]
    model.graph.output.extend([onnx.ValueInfoProto(name=name) for name in names])
    return bytes(model.SerializeToString())


def _beyond_fp16(content: bytes, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """The nodes with inputs or outputs that fp16 cannot represent."""
    import onnx

    wide = {name for name, values in tensors.items() if values.size and not np.abs(values).max() <= FP16_MAX}
    nodes = onnx.load_from_string(content).graph.node
    return [node.name or node.op_type for node in nodes if wide.intersection((*node.input, *node.output))]


def _run(content: bytes, least: Bounds, is_normalised: bool) -> dict[str, np.ndarray]:
    """The outputs that are floats, by name, for inputs that are the same each time."""
    keep_telemetry_off()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its messages are in the exception, and may be secret
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    values = session.run(None, _generated_inputs(session.get_inputs(), least, is_normalised))
    named = zip(session.get_outputs(), values, strict=True)
    return {output.name: value for output, value in named if np.issubdtype(value.dtype, np.floating)}


def _generated_inputs(inputs: Sequence[Any], least: Bounds, is_normalised: bool) -> dict[str, np.ndarray]:
    """Random inputs of the smallest shapes; ``ValueError`` for an open dimension, or a type without fractions."""
    rng = np.random.default_rng(0)
    feed = {}
    for index, given in enumerate(inputs):
        bound = least.shape(index)
        dims = bound if len(bound) > 1 else (*bound, *given.shape[1:])
        if given.type != "tensor(float)" or not all(isinstance(dim, int) for dim in dims):
            raise ValueError(f"its input {given.name!r} is a {given.type} of {given.shape}")
        numbers = rng.uniform(0, 255, dims) if is_normalised else rng.standard_normal(dims)
        feed[given.name] = numbers.astype(np.float32)
    return feed


# -- precision of engines -----------------------------------------------------------------------------------------

_MULTIPLIES = re.compile(r"conv|gemm|matmul|matrixmultiply|fullyconnected|fprop|mha", re.IGNORECASE)
# Names of types, of weights and tensors, in the inspector's output of versions 8.6 to 11.
_TYPES = {"int8": r"Int8", "fp8": r"FP8", "bf16": r"BF16|BFloat16", "fp16": r"FP16|Half", "fp32": r"FP32|Float"}
# Kernels are named after the types they multiply: for example sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_…. Those
# that round float32 to TF32 read and write float32.
_KERNELS = {
    "int8": r"i8i8|i8f32|i8i32|int8|imma",
    "fp8": r"e4m3|e5m2",
    "bf16": r"bf16",
    "fp16": r"f16f16|f16f32|fp16|h884|h1688|h16816|hmma",
    "fp32": r"f32f32|tf32|fp32|sgemm|scudnn|ffma",
}


class Layer(NamedTuple):
    """A layer that multiplies: ``precision`` is ``fp32``, ``fp16`` and so on, ``made_of`` the ONNX nodes in it."""

    name: str
    precision: str
    made_of: str


def multiplying_layers(trt: Any, engine: Any, shapes: Mapping[str, Sequence[int]]) -> list[Layer]:
    """The convolutions and matrix products of an engine for which TensorRT reports the precision.

    ``shapes``: of the inputs, with batch, since tensors have a format for known shapes only. The engine must
    have been built with ``ProfilingVerbosity.DETAILED``.
    """
    inspector = engine.create_engine_inspector()
    if inspector is None:
        return []
    context = engine.create_execution_context()
    if context is not None and all(context.set_input_shape(name, tuple(shape)) for name, shape in shapes.items()):
        inspector.execution_context = context
    try:
        # NOTE: not strict, since TensorRT 8.6 leaves a control character (0x1e) between the ONNX nodes of a layer.
        information = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON), strict=False)
    except ValueError as error:
        logger.info("TensorRT's layer information is not valid JSON: %s", error)
        return []
    return [layer for layer in map(_layer, information.get("Layers", ())) if layer is not None]


def _layer(information: Any) -> Layer | None:
    if not isinstance(information, dict):  # only a name, for an engine built without DETAILED
        return None
    tactic = str(information.get("TacticName", ""))
    if not _MULTIPLIES.search(f"{information.get('LayerType', '')} {information.get('ParameterType', '')} {tactic}"):
        return None
    weights = information.get("Weights")
    tensors = [
        tensor
        for tensor in (*information.get("Inputs", ()), *information.get("Outputs", ()))
        if isinstance(tensor, dict)
    ]
    keys = ("DataType", "Format/Datatype", "Format")
    types = [next((str(tensor[key]) for key in keys if key in tensor), "") for tensor in tensors]
    # From the weights, otherwise the kernel, otherwise the narrowest of the tensors.
    precision = (
        _named(_TYPES, str(weights.get("Type", "")) if isinstance(weights, dict) else "")
        or _named(_KERNELS, tactic)
        or _named(_TYPES, " ".join(types))
    )
    return (
        Layer(str(information["Name"]), precision, f"{information['Name']} {information.get('Metadata', '')}")
        if precision
        else None
    )


def _named(patterns: Mapping[str, str], text: str) -> str:
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, text)), "")


def strays(layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str]) -> list[Layer]:
    """The layers in another precision: not ``precision``, nor a quantised model's int8, nor fp32 by ``fp32_layers``."""

    def is_kept(layer: Layer) -> bool:
        nodes = re.split(r"[\s()\[\]{},+]+", layer.made_of)
        return layer.precision == "fp32" and not set(fp32_layers).isdisjoint(nodes)

    return [layer for layer in layers if layer.precision not in (precision, "int8") and not is_kept(layer)]


def is_ignored(layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str]) -> bool:
    """Whether no layer runs in ``precision``, although some could."""
    used = {precision, "int8"}.intersection(layer.precision for layer in layers)
    return not used and bool(strays(layers, precision, fp32_layers))


def check_precision(
    model: str, version: str, layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str], is_secret: bool
) -> None:
    """Log the layers in another precision; ``ConfigError`` if none runs in ``precision``."""
    if not layers:
        logger.info("%s: TensorRT %s does not report the engine's precision", model, version)
    others = strays(layers, precision, fp32_layers)
    if not others:
        return
    shown = _shown([f"{layer.name} in {layer.precision}" for layer in others], is_secret)
    if is_ignored(layers, precision, fp32_layers):
        raise ConfigError(
            f"{model}: precision = {precision}, but no layer of the engine that TensorRT {version} built runs in it: "
            f"{shown}; set precision = {others[0].precision} if that is what you want"
        )
    logger.warning(
        "%s: precision = %s, but %d of %d layers run otherwise: %s", model, precision, len(others), len(layers), shown
    )

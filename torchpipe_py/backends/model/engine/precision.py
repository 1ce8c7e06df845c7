"""Whether an engine computes in the precision that was asked for, as TensorRT's inspector tells it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchpipe_py.encryption.model_file import UNSAID
from torchpipe_py.errors import ConfigError

logger = logging.getLogger("torchpipe_py")

SHOWN = 5  # layers that a message names

_MULTIPLIES = re.compile(r"conv|gemm|matmul|matrixmultiply|fullyconnected|fprop|mha", re.IGNORECASE)
# What the inspector calls a type, of weights and of tensors, in versions 8.6 to 11.
_TYPES = {"int8": r"Int8", "fp8": r"FP8", "bf16": r"BF16|BFloat16", "fp16": r"FP16|Half", "fp32": r"FP32|Float"}
# Kernels are named after the types they multiply: sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_… for one. Those that
# round float32 to TF32 take and give float32.
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
    """The convolutions and matrix products of an engine, those whose precision TensorRT tells.

    ``shapes`` are those of the inputs, batch included: tensors have a format for known shapes only. The engine must
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
        logger.info("TensorRT tells of the layers in what is no JSON: %s", error)
        return []
    return [layer for layer in map(_layer, information.get("Layers", ())) if layer is not None]


def _layer(told: Any) -> Layer | None:
    if not isinstance(told, dict):  # a name alone, of an engine that was built without DETAILED
        return None
    kind = " ".join(str(told.get(key, "")) for key in ("LayerType", "ParameterType", "TacticName"))
    precision = _precision(told) if _MULTIPLIES.search(kind) else ""
    if not precision:
        return None
    return Layer(str(told["Name"]), precision, f"{told['Name']} {told.get('Metadata', '')}")


def _precision(told: Mapping[str, Any]) -> str:
    """Of the weights, else of the kernel, else the narrowest of the tensors; empty where nothing says it."""
    weights = told.get("Weights")
    kind = str(weights.get("Type", "")) if isinstance(weights, dict) else ""
    return (
        _named(_TYPES, [kind]) or _named(_KERNELS, [str(told.get("TacticName", ""))]) or _named(_TYPES, _tensors(told))
    )


def _tensors(told: Mapping[str, Any]) -> Iterator[str]:
    for tensor in (*told.get("Inputs", ()), *told.get("Outputs", ())):
        if isinstance(tensor, dict):
            yield next((str(tensor[key]) for key in ("DataType", "Format/Datatype", "Format") if key in tensor), "")


def _named(patterns: Mapping[str, str], texts: Iterable[str]) -> str:
    joined = " ".join(texts)
    return next((kind for kind, pattern in patterns.items() if re.search(pattern, joined)), "")


def strays(layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str]) -> list[Layer]:
    """Those that run otherwise: neither in ``precision``, nor in a quantised model's int8, nor in fp32 as named."""
    return [layer for layer in layers if layer.precision not in (precision, "int8") and not _kept(layer, fp32_layers)]


def is_ignored(layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str]) -> bool:
    """Whether all layers that are free to run in ``precision`` run otherwise."""
    taken = {precision, "int8"}.intersection(layer.precision for layer in layers)
    return not taken and bool(strays(layers, precision, fp32_layers))


def check_precision(
    model: str, version: str, layers: Sequence[Layer], precision: str, fp32_layers: Sequence[str], is_secret: bool
) -> None:
    """A line that names the layers that run otherwise; ``ConfigError`` where none runs in ``precision``."""
    if not layers:
        logger.info("%s: TensorRT %s does not tell what the engine computes in", model, version)
    others = strays(layers, precision, fp32_layers)
    if not others:
        return
    shown = ", ".join(f"{layer.name} in {layer.precision}" for layer in others[:SHOWN])
    shown += f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    shown = UNSAID if is_secret else shown
    if is_ignored(layers, precision, fp32_layers):
        raise ConfigError(
            f"{model}: precision = {precision}, but no layer of the engine that TensorRT {version} built runs in it: "
            f"{shown}; set precision = {others[0].precision} if that is what you want"
        )
    logger.warning(
        "%s: precision = %s, but %d of %d layers run otherwise: %s", model, precision, len(others), len(layers), shown
    )


def _kept(layer: Layer, fp32_layers: Sequence[str]) -> bool:
    """Whether it holds a layer that ``precision::fp32`` names."""
    return layer.precision == "fp32" and bool(
        set(fp32_layers).intersection(re.split(r"[\s()\[\]{},+]+", layer.made_of))
    )

"""ONNX models in fp16, which is what a strongly typed network computes in if its model does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.model.check import HALF, QUANTISED, Bounds
from torchpipe_py.backends.model.onnx_graph import keep_telemetry_off, no_layer
from torchpipe_py.encryption.model_file import UNSAID
from torchpipe_py.errors import ConfigError

logger = logging.getLogger("torchpipe_py")

LARGEST = 65504.0  # number of fp16
SHOWN = 5  # layers that a message names


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
    """Let a node in fp32 read what another gives, where the conversion put two casts between, to fp16 and back.

    ``names`` are those of the nodes from before it.
    """
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast" and node.name not in names}
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in casts and casts[name].input[0] in casts:
                node.input[index] = casts[casts[name].input[0]].input[0]


def is_quantised(content: bytes) -> bool:
    """Whether the serialised model holds QuantizeLinear nodes, and so says itself what runs in int8."""
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
    """Run both on made-up inputs on the CPU: a line where an output differs, ``ConfigError`` where it cannot be right.

    The inputs are pixels of 0..255 for a model that ``is_normalised`` itself, else numbers about 0. Models that ONNX
    Runtime does not run are not compared.
    """
    try:
        tensors, outputs = _run(_telling(full), least, is_normalised), _run(half, least, is_normalised)
    except Exception as error:
        logger.info("%s: its fp16 form is not compared with it: %s", model, UNSAID if is_secret else error)
        return
    # NOTE: the CPU has few fp16 kernels, and between two others ONNX Runtime does not round: it hides what overflows.
    if wide := [name for name in _beyond_fp16(full, tensors) if name not in fp32_nodes]:
        shown = ", ".join(wide[:SHOWN]) + (f" and {len(wide) - SHOWN} more" if len(wide) > SHOWN else "")
        shown = f"{len(wide)} layers" if is_secret else shown
        raise ConfigError(
            f"{model}: {shown} take or give numbers beyond {LARGEST:g}, the largest of fp16; name them in "
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


def _telling(content: bytes) -> bytes:
    """The serialised model with every tensor in it as an output."""
    import onnx

    model = onnx.load_from_string(content)
    known = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in known]
    model.graph.output.extend([onnx.ValueInfoProto(name=name) for name in names])
    return bytes(model.SerializeToString())


def _beyond_fp16(content: bytes, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """The nodes that take or give numbers which fp16 has not."""
    import onnx

    wide = {name for name, values in tensors.items() if values.size and not np.abs(values).max() <= LARGEST}
    nodes = onnx.load_from_string(content).graph.node
    return [node.name or node.op_type for node in nodes if wide.intersection((*node.input, *node.output))]


def _run(content: bytes, least: Bounds, is_normalised: bool) -> dict[str, np.ndarray]:
    """The outputs that are floats, by name, for inputs that are the same each time."""
    keep_telemetry_off()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it says is in the exception, and may be secret
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    values = session.run(None, _made_up(session.get_inputs(), least, is_normalised))
    named = zip(session.get_outputs(), values, strict=True)
    return {output.name: value for output, value in named if np.issubdtype(value.dtype, np.floating)}


def _made_up(inputs: Sequence[Any], least: Bounds, is_normalised: bool) -> dict[str, np.ndarray]:
    """Inputs of the smallest shapes; ``ValueError`` where a dimension is open, or a type is none of floats."""
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

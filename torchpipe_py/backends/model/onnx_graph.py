"""Reads and rewrites ONNX files."""

from __future__ import annotations

import mmap
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.encryption.model_file import REDACTED, ModelFile, outside_files
from torchpipe_py.errors import ConfigError, counted, nearest
from torchpipe_py.wire.protobuf import varint


def keep_telemetry_off() -> None:
    """Before ONNX Runtime is imported: from 1.29 on it reports the names and hashes of models to its maker.

    ``ORT_DISABLE_TELEMETRY=0`` in the environment leaves it on.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def model_bytes(file: ModelFile, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """The model, with the weights it keeps in other files, serialised; ``mean`` and ``std`` inside where given."""
    if mean or std:
        return normalized_model(file, mean, std)
    return bytes(_load(file).SerializeToString())


def no_layer(name: str, names: Iterable[str], is_secret: bool) -> ConfigError:
    """The error for an unknown layer ``name``; it suggests the nearest one, unless the names are secret."""
    return ConfigError(f"precision::fp32: no layer {name!r}; {REDACTED if is_secret else nearest(name, names)}")


_KEEPS_SIGN = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "MaxPool", "AveragePool", "GlobalAveragePool"),
        *("Flatten", "Reshape", "Squeeze", "Unsqueeze", "Transpose"),
    }
)
"""Operators whose output has no values below 0 if their first input has none."""


def unsigned_model(content: bytes) -> bytes:
    """The serialised model with uint8 in place of int8 after each Relu, for ONNX Runtime on a CPU.

    In a model for TensorRT all zero points are 0. ONNX Runtime fuses a convolution and its Relu only if the zero point
    is the lowest number of the type, as in uint8. Scales and numbers do not change, except that numbers up to twice
    the largest of int8 are not clipped. A model with branches (If, Loop) is returned unchanged.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(content)
    graph = model.graph
    if any(attribute.g.node or attribute.graphs for node in graph.node for attribute in node.attribute):
        return content
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {output.name for output in graph.output}
    readers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    positive: set[str] = set()  # tensors with nothing below 0
    unsigned: set[str] = set()  # zero points
    for node in graph.node:  # in the order of the data
        if node.op_type != "Relu" and not (node.op_type in _KEEPS_SIGN and node.input[0] in positive):
            continue
        positive.update(node.output)
        pairs = readers[node.output[0]]
        zero = constants.get(node.input[2]) if len(node.input) == 3 else None
        if node.op_type != "QuantizeLinear" or zero is None or node.output[0] in outputs:
            continue
        if zero.data_type != onnx.TensorProto.INT8 or numpy_helper.to_array(zero).any():
            continue
        if all(pair.op_type == "DequantizeLinear" and len(pair.input) == 3 for pair in pairs):
            array = numpy_helper.to_array(zero).astype(np.uint8)
            graph.initializer.append(numpy_helper.from_array(array, f"{node.output[0]}_unsigned"))
            unsigned.add(graph.initializer[-1].name)
            for changed in (node, *pairs):
                changed.input[2] = graph.initializer[-1].name
    for node in [node for node in graph.node if node.op_type == "Relu" and node.output[0] not in outputs]:
        after = readers[node.output[0]]
        if all(reader.op_type == "QuantizeLinear" and unsigned.intersection(reader.input) for reader in after):
            for reader in after:
                reader.input[0] = node.input[0]  # uint8 clips at 0, as Relu does
            graph.node.remove(node)
    return bytes(model.SerializeToString())


def node_name(content: bytes, index: int) -> str:
    """Operator and name of a node of the serialised model, for error messages; its index if that cannot be read."""
    import onnx

    try:
        node = onnx.load_from_string(content).graph.node[index]
    except Exception:
        return f"node {index}"
    return f"{node.op_type} {node.name!r}"


def _load(file: ModelFile) -> Any:
    import onnx

    source = file.source()
    try:
        model = onnx.load(source)
    except Exception as error:
        if missing := missing_weights(file):
            raise ConfigError(f"model {file.path}: {missing}") from None
        safe_error = file.without_words(error)
        reason = (file.kind() if type(error).__name__ == "DecodeError" else "") or safe_error
        raise ConfigError(f"model {file.path}: not an ONNX file: {reason}") from safe_error
    if not model.HasField("graph"):
        raise ConfigError(f"model {file.path}: not an ONNX file: {file.kind() or 'it has no graph'}")
    if not isinstance(source, str) and outside_files(model):
        raise ConfigError(
            f"model {file.path}: its weights are in a second file, which is not encrypted; torchpipe encrypt "
            "takes the ONNX file with both in one folder"
        )
    return model


def missing_weights(file: ModelFile) -> str:
    """The problem if external weights of a plain model are missing; else an empty string."""
    import onnx

    try:
        names = () if file.has_key else outside_files(onnx.load(file.path, load_external_data=False))
    except Exception:  # it is not a model
        return ""
    folder = os.path.dirname(file.path)
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    return f"its weights lie in {', '.join(missing)} beside it, which is missing: move both together" * bool(missing)


def normalized_model(file: ModelFile, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """The model with ``(x - mean) / std`` as its first two nodes, serialised.

    ``mean`` and ``std`` have one number, or one for each channel; an empty one means 0 or 1. ``x`` is the only
    input, N×C×H×W or an image 3×H×W, or of several the only one of four dimensions, and of a floating type. Same order
    of operations as ``torchvision.transforms.Normalize``.
    """
    from onnx import helper, numpy_helper

    path, model = file.path, _load(file)
    graph = model.graph
    constants = {constant.name for constant in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1:
        count, inputs = len(inputs), [value for value in inputs if len(value.type.tensor_type.shape.dim) == 4]
        if len(inputs) != 1:
            has = f"of its {count} inputs {len(inputs)} have four dimensions"
            raise ConfigError(f"model {path}: mean and std need a model with one input NxCxHxW; {has}")
    name, dims = inputs[0].name, inputs[0].type.tensor_type.shape.dim
    dtype = helper.tensor_dtype_to_np_dtype(inputs[0].type.tensor_type.elem_type)
    is_bare = len(dims) == 3 and dims[0].dim_value == 3  # an image without a batch dimension
    if not (len(dims) == 4 or is_bare) or not np.issubdtype(dtype, np.floating):
        raise ConfigError(f"model {path}: mean and std need a floating input NxCxHxW; {name!r} is not")
    channels = dims[-3].dim_value or None
    if dims[-1].dim_value in (1, 3, 4) and channels not in (1, 3, 4):
        raise ConfigError(f"model {path}: mean and std need an input NxCxHxW; {name!r} looks like NxHxWxC")
    shifted, scaled = f"{name}_minus_mean", f"{name}_normalized"
    if any(output.name == name for output in graph.output):
        raise ConfigError(f"model {path}: its input is its output; there is nothing to normalise")
    _rename_uses(graph, name, scaled)
    graph.initializer.extend(
        [
            numpy_helper.from_array(_per_channel(mean, 0.0, channels, "mean", dtype, len(dims)), f"{name}_mean"),
            numpy_helper.from_array(_per_channel(std, 1.0, channels, "std", dtype, len(dims)), f"{name}_std"),
        ]
    )
    graph.node.insert(0, helper.make_node("Sub", [name, f"{name}_mean"], [shifted], name=shifted))
    graph.node.insert(1, helper.make_node("Div", [shifted, f"{name}_std"], [scaled], name=scaled))
    return bytes(model.SerializeToString())


def _rename_uses(graph: Any, name: str, new: str) -> None:
    """Let every node read ``new`` instead of ``name``, in the bodies of If and Loop as well."""
    for node in graph.node:
        for index, used in enumerate(node.input):
            if used == name:
                node.input[index] = new
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _rename_uses(body, name, new)
    for output in graph.output:
        if output.name == name:  # a body may return an outer value
            output.name = new


def _per_channel(
    values: Sequence[float], default: float, channels: int | None, key: str, dtype: np.dtype, rank: int
) -> np.ndarray:
    """``values`` as an array of ``rank`` dimensions (1×C×1×1 for four) to be broadcast over …×C×H×W."""
    numbers = tuple(values) or (default,)
    if channels is not None and len(numbers) not in (1, channels):
        raise ConfigError(f"{key} has {len(numbers)} numbers, the model's input has {counted(channels, 'channel')}")
    return np.array(numbers, dtype).reshape(*[1] * (rank - 3), -1, 1, 1)


# -- headers ----------------------------------------------------------------------------------------------------------

# Field numbers in onnx.proto: of a model, graph, tensor, input or output, its type, and a dimension.
_METADATA, _KEY, _VALUE = 14, 1, 2
_GRAPH, _INITIALIZER, _INPUT, _OUTPUT, _TENSOR_NAME = 7, 5, 11, 12, 8
_NAME, _TYPE, _TENSOR_TYPE, _SHAPE, _DIM, _DIM_VALUE = 1, 2, 1, 2, 1, 1
_ELEMENT_TYPE = 1

ELEMENT_TYPES = {
    **{1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "bytes"},
    **{9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"},
}
"""Our names of ``onnx.TensorProto``'s types of elements that requests and answers may have."""

NORMALISATION = "torchpipe.normalisation"
"""The key in a model's metadata."""

_NOTED = re.compile(r'mean = "[0-9., e+-]{1,200}" and std = "[0-9., e+-]{1,200}"')

Span = tuple[int, int]
"""Start and end of a range of bytes in the file."""


def declared_tensors(path: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs of an ONNX file, without their types; empty for any other file.

    Read in a millisecond, without the onnx package, which would load the weights, half a second for 100 MB.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            (graph,) = _fields(content, (0, len(content)))[_GRAPH]
            fields = _fields(content, graph)
            # In old files, weights are listed as inputs, too.
            constants = {_text(content, _fields(content, span)[_TENSOR_NAME]) for span in fields[_INITIALIZER]}
            inputs = [_declared(content, span) for span in fields[_INPUT]]
            outputs = [_declared(content, span) for span in fields[_OUTPUT]]
            return [spec for spec in inputs if spec.name not in constants], outputs
    except (OSError, ValueError, IndexError):  # empty, cut off, or not an ONNX file
        return [], []


def scalar_outputs(file: ModelFile) -> set[str]:
    """The outputs that an ONNX file declares to have no dimensions, unlike those whose shape it leaves open."""
    import onnx

    try:
        model = onnx.load(file.source(), load_external_data=False)
        types = {output.name: output.type.tensor_type for output in model.graph.output}
    except Exception:  # ONNX Runtime has read it, so this is not worth an error
        return set()
    return {name for name, declared in types.items() if declared.HasField("shape") and not declared.shape.dim}


def unserved_tensors(path: str) -> Iterator[str]:
    """What inputs and outputs of an ONNX file no request can have or get, as far as it says; none for other files."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            (graph,) = _fields(content, (0, len(content)))[_GRAPH]
            fields = _fields(content, graph)
            constants = {_text(content, _fields(content, span)[_TENSOR_NAME]) for span in fields[_INITIALIZER]}
            for what, number in (("input", _INPUT), ("output", _OUTPUT)):
                for span in fields[number]:
                    yield from _unserved(content, what, span, constants)
    except (OSError, ValueError, IndexError):
        return


def _unserved(content: mmap.mmap, what: str, value: Span, constants: Collection[str]) -> Iterator[str]:
    fields = _fields(content, value)
    name, types = _text(content, fields[_NAME]), fields[_TYPE]
    if not types:
        return
    (declared,) = types
    tensors = _fields(content, declared)[_TENSOR_TYPE]
    if not tensors:
        yield f"{what} {name!r} is not a tensor"
        return
    inner = _fields(content, tensors[-1])
    (number,) = [varint(content, start)[0] for start, _ in inner[_ELEMENT_TYPE]] or [0]
    if number and number not in ELEMENT_TYPES:
        yield f"{what} {name!r} has elements of ONNX's type {number}; supported: {', '.join(ELEMENT_TYPES.values())}"
    shapes = inner[_SHAPE]
    if what == "input" and shapes and name not in constants and not _fields(content, shapes[-1])[_DIM]:
        yield f"input {name!r} is a scalar; expected a batch dimension"


def note_normalisation(path: str, mean: str, std: str) -> None:
    """Write into the metadata of an ONNX file that its input is to be normalised by these values of a node."""
    import onnx

    model = onnx.load(path)
    onnx.helper.set_model_props(model, {NORMALISATION: f'mean = "{mean}" and std = "{std}"'})
    onnx.save(model, path)


def noted_normalisation(path: str) -> str:
    """The note of ``note_normalisation``; empty for any other file."""
    match = _NOTED.fullmatch(metadata(ModelFile(path)).get(NORMALISATION, ""))
    return "" if match is None else match[0]


def metadata(file: ModelFile) -> dict[str, str]:
    """The metadata of an ONNX file; empty for any other file. An untrusted file may contain any text.

    ``ConfigError`` if an encrypted file cannot be decrypted.
    """
    if file.has_key:
        return _metadata(file.read())
    try:
        with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _metadata(content)
    except (OSError, ValueError):  # missing or empty
        return {}


def _metadata(content: Any) -> dict[str, str]:
    try:
        entries = [_fields(content, span) for span in _fields(content, (0, len(content)))[_METADATA]]
        return {_text(content, entry[_KEY]): _text(content, entry[_VALUE]) for entry in entries}
    except (ValueError, IndexError):  # cut off, or not an ONNX file
        return {}


def has_channels_last(dims: Sequence[int | None]) -> bool:
    """Whether four sizes look like N×H×W×C."""
    return dims[3] in (1, 3, 4) and dims[1] not in (1, 3, 4)


def _declared(content: mmap.mmap, value: Span) -> TensorSpec:
    fields = _fields(content, value)
    name = _text(content, fields[_NAME])
    spans = fields[_TYPE]
    for number in (_TENSOR_TYPE, _SHAPE, _DIM):
        spans = [inner for span in spans for inner in _fields(content, span)[number]]
    sizes = [sum(varint(content, start)[0] for start, _ in _fields(content, dim)[_DIM_VALUE]) for dim in spans]
    # Some exporters write -1 for any size, as ONNX Runtime reads it.
    return TensorSpec(name, tuple([size if 0 < size < 2**63 else None for size in sizes]))


def _text(content: mmap.mmap, spans: Sequence[Span]) -> str:
    return b"".join([content[start:end] for start, end in spans]).decode()


def _fields(content: mmap.mmap, message: Span) -> dict[int, list[Span]]:
    """A message's fields by their numbers. ``ValueError`` and ``IndexError`` if it is not a protobuf message."""
    fields: dict[int, list[Span]] = defaultdict(list)
    at, end = message
    while at < end:
        tag, start = varint(content, at)
        kind = tag & 7
        if kind == 0:
            at = varint(content, start)[1]
        elif kind == 2:
            length, start = varint(content, start)
            at = start + length
        elif kind in (1, 5):
            at = start + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"a field of type {kind}")
        if at > end:
            raise ValueError("a field that ends after its message")
        fields[tag >> 3].append((start, at))
    return fields

"""Reads and rewrites ONNX files."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.backends.model.normalisation import FLOATS, INTEGERS, Normalisation, NormalisationError, Scale
from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.encryption.model_file import REDACTED, ModelFile, outside_files
from torchpipe_py.errors import ConfigError, nearest
from torchpipe_py.files import FileContent
from torchpipe_py.wire.protobuf import Span, fields_of, text_of, varint


def keep_telemetry_off() -> None:
    """Before ONNX Runtime is imported: from 1.29 on it reports the names and hashes of models to its maker.

    ``ORT_DISABLE_TELEMETRY=0`` in the environment leaves it on.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def model_bytes(file: ModelFile, normalisation: Normalisation, with_weights: bool = True) -> bytes:
    """The model serialised, with ``normalisation`` inside if there is any.

    Weights that it keeps in other files are inside; else, ``with_weights`` false, they stay where they are.
    """
    if normalisation:
        return normalized_model(file, normalisation, with_weights)
    return _serialised(file, _load(file, with_weights))


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


SMALL = 2**10
"""Bytes of a tensor in another file up to which it is read with the graph: zero points and shapes are looked at."""


def _load(file: ModelFile, with_weights: bool) -> Any:
    import onnx

    source = file.source()
    try:
        model = onnx.load(source, load_external_data=with_weights)
        if isinstance(source, str) and not with_weights:
            _read_small(model, os.path.dirname(source))
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


_LARGEST_ELEMENT = 16  # bytes


def _read_small(model: Any, folder: str) -> None:
    """Read the small ones of the graph's tensors that are in other files."""
    from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor

    for tensor in model.graph.initializer:
        if tensor.data_location != tensor.EXTERNAL:
            continue
        # The length may be left out: then the tensor is all that the file has from its offset on.
        length = ExternalDataInfo(tensor).length or math.prod(tensor.dims) * _LARGEST_ELEMENT
        if 0 < length <= SMALL:
            load_external_data_for_tensor(tensor, folder)
            tensor.data_location = tensor.DEFAULT
            del tensor.external_data[:]


def _serialised(file: ModelFile, model: Any) -> bytes:
    """``ConfigError`` for a model that is too large for one message, weights included."""
    try:
        return bytes(model.SerializeToString())
    except Exception as error:
        why = "with the weights of other files it exceeds 2 GiB; OnnxTensor leaves them where they are"
        raise ConfigError(f"model {file.path}: {why}") from error


_SOURCE = re.compile(r"[^\s:]*\.(?:cc|h):\d+ [\w:<>*&~ ]+\([^()]*\) ?")
"""Where in ONNX Runtime's source an error comes from."""


def load_problem(file: ModelFile, error: Exception) -> str:
    """Why ONNX Runtime cannot load the file: what it is instead, or ONNX Runtime's words."""
    if problem := missing_weights(file):
        return problem
    is_no_model = "rotobuf" in str(error) or "does not have a graph" in str(error)
    kind = file.kind() if is_no_model else ""
    return kind or " ".join(_SOURCE.sub(" ", str(file.without_words(error))).split())


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


def normalized_model(file: ModelFile, normalisation: Normalisation, with_weights: bool = True) -> bytes:
    """The model with ``(x - mean) / std`` as the first nodes after each input that has a scale, serialised.

    ``with_weights``: see ``model_bytes``.

    Same order of operations as ``torchvision.transforms.Normalize``, in float32 or, for an input of float64, in that.
    An input of integers keeps its type, if the model does no more than move its values before it casts them to floats.
    ``ConfigError`` for numbers that do not fit the model's inputs.
    """
    from onnx import TensorProto, helper, numpy_helper

    model = _load(file, with_weights)
    graph = model.graph
    constants = {constant.name for constant in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    specs = [_spec_of(value) for value in inputs]
    outputs = {output.name for output in graph.output}
    try:
        scales = normalisation.scales(specs)
        for index in scales:
            _check_scaled(graph, specs[index], outputs)
    except NormalisationError as error:
        raise ConfigError(f"model {file.path}: {error.key}: {error}") from None
    taken = _names_in(graph)
    nodes = []
    for index, scale in scales.items():
        name, dtype = specs[index].name, specs[index].dtype
        types = {"float32": (TensorProto.FLOAT, np.float32), "float64": (TensorProto.DOUBLE, np.float64)}
        kind, number = types.get(dtype, types["float32"])
        whole, mean, std, shifted, scaled, result = (
            _unused(f"{name}_{word}", taken) for word in ("float", "mean", "std", "minus_mean", "scaled", "normalized")
        )
        _rename_uses(graph, name, result)
        arrays = scale.arrays(len(specs[index].dims), number)
        graph.initializer.extend(
            [numpy_helper.from_array(array, each) for array, each in zip(arrays, (mean, std), strict=True)]
        )
        is_cast = dtype not in types
        back = is_cast and dtype not in INTEGERS
        if is_cast:
            nodes.append(helper.make_node("Cast", [name], [whole], name=whole, to=kind))
        nodes.append(helper.make_node("Sub", [whole if is_cast else name, mean], [shifted], name=shifted))
        nodes.append(helper.make_node("Div", [shifted, std], [scaled if back else result], name=scaled))
        if back:
            own = inputs[index].type.tensor_type.elem_type
            nodes.append(helper.make_node("Cast", [scaled], [result], name=result, to=own))
        if is_cast and not back:
            _forget_types(graph, result)
    for place, node in enumerate(nodes):
        graph.node.insert(place, node)
    return _serialised(file, model)


def _spec_of(value: Any) -> TensorSpec:
    """The declaration of an input, as ``declared_tensors`` reads it."""
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim]
    return TensorSpec(value.name, tuple(dims), _element_type(tensor.elem_type))


_MOVES = frozenset({"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather"})
"""Operators that move the values of their first input, of any type, and change none."""


def _check_scaled(graph: Any, spec: TensorSpec, outputs: set[str]) -> None:
    """Raise ``NormalisationError`` if an input cannot be normalised inside the model."""
    if spec.name in outputs:
        raise NormalisationError("mean", f"input {spec.name!r} is an output; there is nothing to normalise")
    if spec.dtype not in INTEGERS:
        return
    moved = [spec.name]
    is_cast = False
    for name in moved:
        for node in _readers(graph, name):
            if node.op_type == "Cast" and _casts_to_float(node):
                is_cast = True
            elif node.op_type in _MOVES and node.input[0] == name and not (set(node.input[1:]) & {name}):
                moved.extend(node.output)
            elif node.op_type != "Shape":
                raise NormalisationError("mean", _uncast(spec, f"{node.op_type} reads it"))
    if not is_cast or not set(moved).isdisjoint(outputs):
        raise NormalisationError("mean", _uncast(spec, "nothing casts it" if not is_cast else "it is an output, too"))


def _uncast(spec: TensorSpec, why: str) -> str:
    return (
        f"input {spec.name!r} takes {spec.dtype}, and is not just cast to floats: {why}; leave mean and std out if the "
        "model normalises by itself, or else export it with an input of float32"
    )


def _casts_to_float(node: Any) -> bool:
    (to,) = [attribute.i for attribute in node.attribute if attribute.name == "to"] or [0]
    return ELEMENT_TYPES.get(to) in FLOATS


def _readers(graph: Any, name: str) -> Iterator[Any]:
    """The nodes that read a value; one with a body that does is among them."""
    for node in graph.node:
        bodies = [body for each in node.attribute for body in (each.g, *each.graphs)]
        if name in node.input or any(next(_readers(body, name), None) is not None for body in bodies):
            yield node


def _forget_types(graph: Any, name: str) -> None:
    """Drop the declared types of what ``name`` is moved to, since it is of floats now."""
    moved = [name]
    for each in moved:
        moved.extend([out for node in _readers(graph, each) if node.op_type in _MOVES for out in node.output])
    kept = [value for value in graph.value_info if value.name not in moved]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _names_in(graph: Any) -> set[str]:
    """The names of all values and nodes of a graph, without those in bodies of If and Loop."""
    named = [graph.initializer, graph.input, graph.output, graph.node]
    return {each.name for part in named for each in part} | {name for node in graph.node for name in node.output}


def _unused(name: str, taken: set[str]) -> str:
    """``name``, or with a number if it is taken; it is taken from then on."""
    names = (name, *(f"{name}_{number}" for number in range(1, len(taken) + 2)))
    free = next(each for each in names if each not in taken)
    taken.add(free)
    return free


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


# -- headers ----------------------------------------------------------------------------------------------------------

# Field numbers in onnx.proto: of a model, graph, tensor, input or output, its type, and a dimension.
_METADATA, _KEY, _VALUE = 14, 1, 2
_GRAPH, _INITIALIZER, _INPUT, _OUTPUT, _TENSOR_NAME = 7, 5, 11, 12, 8
_OPSET = 8
_NAME, _TYPE, _TENSOR_TYPE, _SHAPE, _DIM, _DIM_VALUE = 1, 2, 1, 2, 1, 1
_ELEMENT_TYPE = 1

ELEMENT_TYPES = {
    **{1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "bytes"},
    **{9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"},
}
"""Our names of ``onnx.TensorProto``'s types of elements that requests and answers may have."""
_OTHER_TYPES = {
    14: "complex64", 15: "complex128", 17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz",
    21: "uint4", 22: "int4", 23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2", 27: "float6e2m3",
    28: "float6e3m2",
}  # fmt: skip
"""ONNX's names of other types."""


def _element_type(number: int) -> str:
    """Our name of a type of elements, or a description of one that no request can have."""
    return ELEMENT_TYPES.get(number, f"elements of type {_OTHER_TYPES.get(number, number)}")


_OTHER_KINDS = {4: "a sequence", 5: "a map", 8: "a sparse tensor", 9: "optional"}
"""Kinds of values other than tensors, by the fields of a ``TypeProto``."""
NO_SHAPE = "has no declared shape; expected a batch dimension"
SCALAR = "is a scalar; one without a batch needs max = 1, and a postprocessor that leaves outputs whole"
"""Problems of an input."""

NORMALISATION = "torchpipe.normalisation"
"""The key in a model's metadata."""

_NOTED = re.compile(r'mean = "[0-9., e+-]{1,200}" and std = "[0-9., e+-]{1,200}"')


@dataclass(frozen=True)
class Header:
    """Inputs and outputs that an ONNX file declares; ``problem`` says why there are none in another file."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    problem: str = ""


def read_header(path: str) -> Header:
    """The header of a file.

    Read in a millisecond, without the onnx package, which would load the weights, half a second for 100 MB.
    """
    try:
        with open(path, "rb") as file:
            content = FileContent(file)
            model = fields_of(content, (0, len(content)))
            if len(model[_GRAPH]) != 1:
                return Header([], [], "it has no graph")
            if not model[_OPSET]:
                return Header([], [], "it names no set of operators, perhaps since it is cut off")
            fields = fields_of(content, model[_GRAPH][0])
            # In old files, weights are listed as inputs, too.
            names = {text_of(content, fields_of(content, span)[_TENSOR_NAME]) for span in fields[_INITIALIZER]}
            inputs = [_declared(content, span) for span in fields[_INPUT]]
            outputs = [_declared(content, span) for span in fields[_OUTPUT]]
            return Header([spec for spec in inputs if spec.name not in names], outputs)
    except (OSError, ValueError, IndexError):  # empty, or not an ONNX file
        return Header([], [], "its content is not that of one, or is cut off")


def not_onnx(file: ModelFile) -> str:
    """The problem if a plain file is not an ONNX file that is whole; else an empty string."""
    problem = read_header(file.path).problem
    with open(file.path, "rb") as content:
        is_ort = content.read(8)[4:] == b"ORTM"  # ONNX Runtime's own format, which it takes too
    if not problem or is_ort:
        return ""
    return f"not an ONNX file: {file.kind() or problem}"


def declared_tensors(path: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs of an ONNX file; empty for any other file."""
    header = read_header(path)
    return header.inputs, header.outputs


def scaled_inputs_problem(path: str, scales: Mapping[int, Scale], inputs: Sequence[TensorSpec]) -> str:
    """Why ``normalized_model`` will refuse inputs that have a scale, by the nodes that read them; else empty."""
    outputs = {spec.name for spec in declared_tensors(path)[1]}
    scaled = [inputs[index] for index in scales]
    if not any(spec.dtype in INTEGERS or spec.name in outputs for spec in scaled):
        return ""  # without loading the model
    import onnx

    try:
        graph = onnx.load(path, load_external_data=False).graph
        for spec in scaled:
            _check_scaled(graph, spec, outputs)
    except NormalisationError as error:
        return str(error)
    return ""


_KEEPS_VALUES = frozenset({"Cast", "Transpose", "Identity", "Split", "Slice", "Gather", "Unsqueeze", "Squeeze"})
"""Operators that change no value of an image, only where it is."""
_NODE, _NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _ATTRIBUTE_TENSOR = 1, 1, 2, 4, 5, 5
_MOST_CONSTANT = 2**16
"""Bytes of a constant that is looked at: one number, or one for each channel."""


def scale_of_pixels(path: str, name: str) -> float | None:
    """255 or 1 if an ONNX file begins by normalising pixels 0 to 255, or 0 to 1, of the input ``name``.

    ``None`` if it does not, or is not such a file. Weights are not loaded.
    """
    try:
        with open(path, "rb") as file:
            operator, constants = _first_arithmetic(FileContent(file), name)
    except (OSError, ValueError, IndexError):  # empty, or not an ONNX file
        return None
    if not constants:
        return None
    most = max(float(np.abs(array).max(initial=0.0)) for array in constants)
    if operator == "Mul":
        return 255.0 if most < 0.05 else 1.0
    return 255.0 if most > 2 else 1.0


def _first_arithmetic(content: FileContent, name: str) -> tuple[str, list[np.ndarray]]:
    """The first operator of arithmetic on a value, after others that only move it, with its constants; or none."""
    (graph,) = fields_of(content, (0, len(content)))[_GRAPH]
    parts = fields_of(content, graph)
    nodes = [fields_of(content, span) for span in parts[_NODE]]
    inputs = [[text_of(content, [span]) for span in node[_NODE_INPUT]] for node in nodes]
    for _ in nodes:  # a damaged file may have a cycle
        readers = {
            index: operator
            for index, node in enumerate(nodes)
            if name in inputs[index] and (operator := text_of(content, node[_OPERATOR])) != "Shape"
        }
        if len(set(readers.values())) != 1:
            return "", []
        index, operator = next(iter(readers.items()))
        if operator not in _KEEPS_VALUES:
            break
        name = text_of(content, nodes[index][_NODE_OUTPUT][:1])
    else:
        return "", []
    if operator not in ("Sub", "Div", "Mul", "Add"):
        return "", []
    weights = {text_of(content, fields_of(content, span)[_TENSOR_NAME]): span for span in parts[_INITIALIZER]}
    for node in nodes:
        if text_of(content, node[_OPERATOR]) == "Constant" and node[_ATTRIBUTE]:
            tensors = fields_of(content, node[_ATTRIBUTE][0])[_ATTRIBUTE_TENSOR]
            weights.update({text_of(content, node[_NODE_OUTPUT][:1]): span for span in tensors})
    spans = [weights[each] for each in inputs[index] if each in weights]
    return operator, [array for span in spans if (array := _small_array(content, span)) is not None]


def _small_array(content: FileContent, span: Span) -> np.ndarray | None:
    """The numbers of a tensor; ``None`` for a large one, and for one in another file."""
    if span[1] - span[0] > _MOST_CONSTANT:
        return None
    import onnx

    try:
        tensor = onnx.TensorProto.FromString(content[span[0] : span[1]])
        return None if tensor.external_data else onnx.numpy_helper.to_array(tensor)
    except Exception:  # of types without numbers, or damaged; loading the file says so
        return None


def scalar_tensors(file: ModelFile) -> set[str]:
    """The inputs and outputs that an ONNX file declares to have no dimensions, unlike those whose shape is open."""
    import onnx

    try:
        model = onnx.load(file.source(), load_external_data=False)
        types = {each.name: each.type.tensor_type for each in (*model.graph.input, *model.graph.output)}
    except Exception:  # ONNX Runtime has read it, so this is not worth an error
        return set()
    return {name for name, declared in types.items() if declared.HasField("shape") and not declared.shape.dim}


def unserved_tensors(path: str, takes_scalars: bool) -> Iterator[str]:
    """Inputs and outputs of an ONNX file that no request can have or get, as far as it says; none for other files.

    An input may be a scalar where the node ``takes_scalars``.
    """
    try:
        with open(path, "rb") as file:
            content = FileContent(file)
            (graph,) = fields_of(content, (0, len(content)))[_GRAPH]
            fields = fields_of(content, graph)
            constants = {text_of(content, fields_of(content, span)[_TENSOR_NAME]) for span in fields[_INITIALIZER]}
            if not fields[_INPUT]:
                yield "it has no input for a request's data"
            for what, number in (("input", _INPUT), ("output", _OUTPUT)):
                for span in fields[number]:
                    yield from _unserved(content, what, span, constants, takes_scalars)
    except (OSError, ValueError, IndexError):
        return


def _unserved(
    content: bytes | FileContent, what: str, value: Span, constants: Collection[str], takes_scalars: bool
) -> Iterator[str]:
    fields = fields_of(content, value)
    name, types = text_of(content, fields[_NAME]), fields[_TYPE]
    if not types:
        return
    (declared,) = types
    tensors = fields_of(content, declared)[_TENSOR_TYPE]
    if not tensors:
        kind = next((kind for field, kind in _OTHER_KINDS.items() if field in fields_of(content, declared)), "")
        yield f"{what} {name!r} is {kind and f'{kind}, '}not a tensor"
        return
    inner = fields_of(content, tensors[-1])
    (number,) = [varint(content, start)[0] for start, _ in inner[_ELEMENT_TYPE]] or [0]
    if number and number not in ELEMENT_TYPES:
        yield f"{what} {name!r} has {_element_type(number)}; supported: {', '.join(ELEMENT_TYPES.values())}"
    shapes = inner[_SHAPE]
    if what == "input" and name not in constants:
        if not shapes:
            yield f"input {name!r} {NO_SHAPE}"
        elif not takes_scalars and not fields_of(content, shapes[-1])[_DIM]:
            yield f"input {name!r} {SCALAR}"


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
        with open(file.path, "rb") as opened:
            return _metadata(FileContent(opened))
    except (OSError, ValueError):  # missing or empty
        return {}


def _metadata(content: bytes | FileContent) -> dict[str, str]:
    try:
        entries = [fields_of(content, span) for span in fields_of(content, (0, len(content)))[_METADATA]]
        return {text_of(content, entry[_KEY]): text_of(content, entry[_VALUE]) for entry in entries}
    except (ValueError, IndexError):  # cut off, or not an ONNX file
        return {}


def _declared(content: bytes | FileContent, value: Span) -> TensorSpec:
    fields = fields_of(content, value)
    name = text_of(content, fields[_NAME])
    tensors = [inner for span in fields[_TYPE] for inner in fields_of(content, span)[_TENSOR_TYPE]]
    kinds = [varint(content, start)[0] for span in tensors for start, _ in fields_of(content, span)[_ELEMENT_TYPE]]
    spans = tensors
    for number in (_SHAPE, _DIM):
        spans = [inner for span in spans for inner in fields_of(content, span)[number]]
    sizes = [sum(varint(content, start)[0] for start, _ in fields_of(content, dim)[_DIM_VALUE]) for dim in spans]
    # Some exporters write -1 for any size, as ONNX Runtime reads it.
    dims = tuple([size if 0 < size < 2**63 else None for size in sizes])
    return TensorSpec(name, dims, _element_type(kinds[-1]) if kinds else "")

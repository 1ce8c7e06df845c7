"""A pipe's results of the items of a request, as tensors of its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.errors import InvalidRequest, NoResult, nearest
from torchpipe_py.methods.oip.requests import MOST_ITEM_VALUES, InferRequest
from torchpipe_py.methods.oip.tensors import BYTES, Output, numbers, texts
from torchpipe_py.results import Detections
from torchpipe_py.wire import answers, detections
from torchpipe_py.wire.json_values import to_text
from torchpipe_py.wire.values import are_arrays, is_array, is_label_and_score, is_ranking, output_of, to_float

RESULT = "result"
MOST_FLOAT32 = 3.4e38
SMALLER = "ask for fewer outputs, or with binary_data"


def kept(data: Mapping[str, Any], request: InferRequest, specs: Sequence[TensorSpec] = ()) -> dict[str, Any]:
    """The values of an item's dict that the answer needs. Raises the dict's ``error`` if one is missing.

    ``specs`` declare the pipe's result; their names come before the keys of the dict.
    """
    if not request.outputs:
        return {RESULT: output_of(data, RESULT)}
    own = {spec.name for spec in specs}
    names = [output.name for output in request.outputs]
    values = {name: data[name] for name in names if name in data and name not in own}
    if len(values) < len(names):
        values[RESULT] = output_of(data, RESULT)
    return values


def outputs_of(
    items: Sequence[Mapping[str, Any]], request: InferRequest, specs: Sequence[TensorSpec]
) -> list[tuple[Output, bool]]:
    """The tensors of the answer, and whether each is binary. ``specs`` declare the pipe's result."""
    names = [spec.name for spec in specs]
    if not request.outputs:
        made = _made([item[RESULT] for item in items], names, detections.FIELDS)
        return [(output, request.is_binary) for output in made.values()]
    values = [item[RESULT] for item in items] if all(RESULT in item for item in items) else []
    are_detections = _all_are(Detections, values)
    made = _made(values, names, [output.name for output in request.outputs]) if values else {}
    outputs = []
    for name, is_binary, classes in request.outputs:
        output = made.get(name)
        if output is None and any(name not in item for item in items):
            known = detections.fields_of(values) if are_detections else list(made) or names or [RESULT]
            raise InvalidRequest(f"no output {name[:40]!r}; {nearest(name[:40], known)}")
        output = output or to_output(name, [item[name] for item in items])
        if classes:
            labels = next((spec.labels for spec in specs if spec.name == name), ())
            is_labelled = made.keys() == {"label", "score"} or are_detections
            output = _best_classes(output, len(items), classes, labels, is_labelled)
        outputs.append((output, is_binary))
    return outputs


def _made(values: Sequence[Any], names: Sequence[str], fields: Collection[str]) -> dict[str, Output]:
    """The tensors of all items' results by name; of detections those among ``fields``."""
    if not _all_are(Detections, values):
        return {output.name: output for output in _of_results(values, names)}
    return {name: _joined(name, [tensor]) for name, tensor in detections.tensors_of(RESULT, values, fields).items()}


def _best_classes(output: Output, items: int, most: int, labels: Sequence[str], is_labelled: bool) -> Output:
    """Triton's classification: the ``most`` largest numbers of each item's vector, or all if it has fewer.

    They are texts ``number:index:label``, the largest first, or ``number:index`` without labels.
    """
    name, datatype, shape, data = output
    size = 0 if is_labelled or isinstance(data, list) else data.size // items
    if size < 2 or max(shape[1:] or shape) != size:
        what = "labels, not numbers of all classes" if is_labelled else f"{datatype} of shape {list(shape)}"
        raise InvalidRequest(
            f"output {name[:40]!r}: classification takes a vector of numbers for each item, and this is {what}; "
            "the postprocessors SoftmaxCpu and cpu give one"
        )
    if (count := items * min(most, size)) > MOST_ITEM_VALUES:
        raise InvalidRequest(f"output {name[:40]!r}: classification: {count} texts; the limit is {MOST_ITEM_VALUES}")
    labelled = []
    for row in output.numbers().reshape(items, size):
        best = _largest(row, count // items)
        for number, index in zip(row[best].tolist(), best.tolist(), strict=True):
            text = f"{number:f}:{index}" if isinstance(number, float) else f"{number:d}:{index}"
            label = labels[index] if index < len(labels) else ""
            labelled.append(answers.utf8_text(f"{text}:{label}" if label else text))
    return texts(name, labelled, [items, count // items])


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """The indices of a vector's ``count`` largest numbers, the largest and of equals the first one first, NaN last."""
    keys = -row if row.dtype.kind == "f" else ~row
    # A million numbers take 0.2 s to sort, during which the instance does nothing else, and 4 ms to partition.
    chosen = np.flatnonzero(~(keys > np.partition(keys, count - 1)[count - 1]))
    return chosen[np.argsort(keys[chosen], kind="stable")[:count]]


def _of_results(values: Sequence[Any], names: Sequence[str]) -> list[Output]:
    """The results of all items: tensors under the model's own names, labels and scores, or one under ``result``."""
    name = names[0] if len(names) == 1 else RESULT
    if not isinstance(values[0], (list, tuple)):
        return [to_output(name, values)]
    if all(map(is_label_and_score, values)):
        return _labelled([[value] for value in values], [len(values)])
    if _are_rankings(values, names):
        most = max(map(len, values))
        return _labelled([[*value, *[("", 0.0)] * (most - len(value))] for value in values], [len(values), most])
    if all(map(are_arrays, values)) and len({len(value) for value in values}) == 1:
        count = len(values[0])
        own = names if len(names) == count else [f"{RESULT}_{index}" for index in range(count)]
        return [to_output(name, column) for name, column in zip(own, zip(*values, strict=True), strict=True)]
    return [to_output(name, values)]


def _are_rankings(values: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether all are lists of ``(label, score)``, of which some may be empty."""
    if not all(is_ranking(value) or (isinstance(value, list) and not value) for value in values):
        return False
    return any(values) or list(names) == ["label", "score"]


def _labelled(rankings: Sequence[Sequence[Any]], shape: Sequence[int]) -> list[Output]:
    pairs = [pair for ranking in rankings for pair in ranking]
    scores = [to_float("score", score) for _, score in pairs]
    if not all(-MOST_FLOAT32 <= score <= MOST_FLOAT32 for score in scores):
        raise NoResult("'score' contains NaN, infinity or numbers beyond FP32")
    return [
        texts("label", [answers.utf8_text(str(label)) for label, _ in pairs], shape),
        Output("score", "FP32", shape, np.array(scores, np.float32)),
    ]


def to_output(name: str, values: Sequence[Any]) -> Output:
    """One tensor of all values: arrays are concatenated, other values are one element each, as JSON if need be."""
    if all(map(is_array, values)):
        return _joined(name, values)
    if _all_are((str, bytes, bytearray), values):
        return texts(name, map(_encoded, values))
    for datatype, kinds, dtype in _SCALARS:
        if _all_are(kinds, values):
            try:
                return Output(name, datatype, [len(values)], np.array(values, dtype))
            except (OverflowError, TypeError):  # beyond 64 bits; a timedelta64, which NumPy counts as an integer
                break
    return texts(name, [answers.utf8_json(to_text(name, value)) for value in values])


def _all_are(kinds: Any, values: Sequence[Any]) -> bool:
    """Whether there are values, all of these kinds."""
    return bool(values) and isinstance(values[0], kinds) and all(isinstance(value, kinds) for value in values)


def _encoded(value: str | bytes | bytearray) -> bytes:
    return answers.utf8_text(value) if isinstance(value, str) else bytes(value)


_SCALARS: Sequence[tuple[str, Any, Any]] = (
    ("BOOL", (bool, np.bool_), np.bool_),
    ("INT64", (int, np.integer), np.int64),
    ("FP64", (float, np.floating), np.float64),
)


def _joined(name: str, values: Sequence[Any]) -> Output:
    """One item's array as it is, or arrays 1×… of one shape as N×…."""
    (datatype, first), *others = [numbers(name, value) for value in values]
    if not first.ndim:
        first, others = first[None], [(other, array[None]) for other, array in others]
    for index, (other, array) in enumerate(others, 1):
        if other != datatype or array.shape != first.shape or array.shape[:1] != (1,):
            shapes = f"{datatype} of shape {list(first.shape)}, of item [{index}] {other} of shape {list(array.shape)}"
            raise NoResult(
                f"{name!r} of item [0] is {shapes}: only arrays 1x… of one shape make a batch; send such items singly"
            )
    array = np.concatenate([first, *[array for _, array in others]]) if others else first
    if datatype == BYTES:
        elements = array.ravel().tolist()
        if not all(isinstance(element, (str, bytes)) for element in elements):
            raise NoResult(f"{name!r} is an array of objects other than text and bytes, which has no form on the wire")
        return texts(name, map(_encoded, elements), array.shape)
    return Output(name, datatype, list(array.shape), array)

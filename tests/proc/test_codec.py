"""A request's dict as a message, and what goes to another process and comes back: ``Process``, a shared node."""

from __future__ import annotations

import enum
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, floating_dtypes, integer_dtypes
from kit import process_backends, waits
from kit.engines import workers_of

from torchpipe_py import pipe, registry
from torchpipe_py.proc.codec import FLAT, INLINE, ItemOutcome, Packed, pack, pack_outcomes, pack_sent, padded, unpack


class Ratio(float):
    """A number of a class of its own."""


class Name(str):
    """A text of a class of its own."""


class Blob(bytes):
    """Bytes of a class of their own."""


class Key(str, enum.Enum):
    """A key of a class of its own."""

    ONLY = "only"


def through(packed: Packed) -> Any:
    """What comes out at the other end, which finds the parts in one buffer."""
    buffer = bytearray()
    for part in packed.parts:
        buffer += bytes(padded(part.nbytes))
        start = len(buffer) - padded(part.nbytes)
        buffer[start : start + part.nbytes] = np.frombuffer(part, np.uint8).tobytes()
    return unpack(packed.head, packed.pickled, packed.arrays, buffer, 0, copies=True)


def shown(value: Any) -> Any:
    """The types and the content of a value, NaN or not."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.stride(), str(value.tolist())
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return type(value), value.dtype, value.shape, content
    if isinstance(value, dict):
        return type(value), [(type(key), key, shown(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [*map(shown, value)]
    return type(value), repr(value.tobytes() if isinstance(value, memoryview) else value)


FLAT_ONES = {
    "scalars": {
        "text": "\ud800ä",
        "int": 1 << 9000,
        "nan": float("nan"),
        "flag": True,
        "none": None,
        "": (1, "a", 2.5),
    },
    "bytes": {"none": b"", "few": b"abc", "many": bytes(INLINE + 1)},
    "array": {"data": np.arange(6, dtype=np.float16).reshape(2, 3), "number": np.array(3.0), "flags": np.ones(3, bool)},
    "read-only": {"data": np.frombuffer(b"12345678", np.float32)},
    "tensor": {"data": torch.arange(12.0).reshape(3, 4)[1:], "number": torch.tensor(3), "other": np.zeros(3)},
}
OTHERS = {
    "dict": OrderedDict(data=np.zeros(3)),
    "keys": {1: 2, Key.ONLY: 3, (1, 2): 4},
    "values": {"float": Ratio(2), "text": Name("a"), "bytes": Blob(10_000), "number": np.float32(3), "list": [1]},
    "tuple": {"data": (1, Ratio(2)), "nested": (1, (2,))},
    "empty": {"data": np.zeros((0, 3), np.float32), "tensor": torch.zeros(0, 3)},
    "big-endian": {"data": np.arange(5000, dtype=">i4")},
    "structured": {"data": np.zeros(900, [("name", "U3"), ("value", "<f8")])},
    "without size": {"data": np.zeros(3, "V0")},
    "objects": {"data": np.array([1, "a", None], object)},
    "text": {"data": np.array(["a", "bc"]), "when": np.array(["2026-11-22", "NaT"], "datetime64[s]")},
    "strides": {"data": np.arange(12).reshape(3, 4)[:, ::2]},
    "bfloat16": {"data": torch.ones(3, dtype=torch.bfloat16)},
    "transposed": {"data": torch.arange(6000).reshape(60, 100).T},
    "backwards": {"data": np.arange(60000, dtype=np.int16).reshape(200, 300)[::2, ::-3]},
    "column order": {"data": np.asfortranarray(np.arange(6000.0).reshape(60, 100))},
    "memoryview": {"few": memoryview(b"abc"), "many": memoryview(bytes(INLINE + 1))[::2]},
    "large": {"data": [bytearray(20_000), {"a": (np.arange(20_000), b"x" * 9000)}]},
    "channels last": {"data": torch.rand(2, 3, 40, 50).to(memory_format=torch.channels_last)},
    "part": {"data": [torch.arange(6000)[::2].contiguous(), torch.rand(3).half(), torch.tensor([True])]},
}  # fmt: skip


@pytest.mark.parametrize("name", [*FLAT_ONES, *OTHERS])
def test_message_arrives_unchanged(name: str) -> None:
    """What most requests hold goes flat, anything else as a pickle."""
    values = FLAT_ONES.get(name) or OTHERS[name]
    packed = pack(values, {"kept": "data"})
    assert (packed.arrays == FLAT) == (name in FLAT_ONES)
    found, also = through(packed)
    assert (shown(found) if name in OTHERS else shown(dict(found))) == shown(values)
    assert also == {"kept": "data"}


def test_dtype_of_another_library_arrives_unchanged() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = {"data": np.ones(3, ml_dtypes.bfloat16)}
    assert shown(through(pack(values))[0]) == shown(values)


def test_views_of_tensors_are_sent_without_the_rest() -> None:
    tensors = [torch.rand(3, 1).expand(3, 2000), torch.rand(100, 100)[::3, 1::2], torch.rand(4, 2).conj()]
    (found, _) = through(pack({"data": tensors}))
    for before, after in zip(tensors, found["data"], strict=True):
        assert torch.equal(before, after)
        after.zero_()  # its memory is its own, and may be written


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.empty(2, device="meta"), "a tensor on device meta"), (torch.eye(2).to_sparse(), "layout")],
)
def test_refuses_tensors_outside_of_cpu_memory(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=f"^X: 'data' cannot be pickled: .*{message}"):
        pack_sent([{"data": tensor}], "X")


def test_values_that_cannot_be_pickled_stay_here() -> None:
    lock = threading.Lock()
    [sent], packed = pack_sent([{"data": 1, "lock": lock, "trans": lambda x: x}], "X")
    assert sent == through(packed)[0] == {"data": 1}
    with pytest.raises(TypeError, match=r"^X: 'data' cannot be pickled: .*lock"):
        pack_sent([{"data": lock}], "X")
    with pytest.raises(TypeError, match=r"'answer' cannot be pickled: .*lock"):
        pack_outcomes([ItemOutcome({"result": 1, "answer": lock}, {})])


def test_tensor_arrives_without_its_gradient() -> None:
    (found, _) = through(pack({"data": torch.ones(3, requires_grad=True)}))
    assert shown(found["data"]) == shown(torch.ones(3))
    assert not found["data"].requires_grad


@pytest.mark.parametrize("value", [np.zeros(10), bytes(2 * INLINE)], ids=["array", "bytes"])
def test_object_under_two_keys_stays_one_object(value: Any) -> None:
    (found, _) = through(pack({"data": value, "same": value}))
    assert found["data"] is found["same"]


ITEMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.builds(bytes, st.integers(0, 2 * INLINE))
    | st.lists(st.integers(), max_size=2)
    | st.lists(st.integers() | st.text(max_size=3), max_size=3).map(tuple)
    | arrays(integer_dtypes() | floating_dtypes(), array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@settings(max_examples=25, deadline=None)
@given(values=st.dictionaries(st.text(max_size=5), ITEMS, max_size=4))
def test_any_dict_arrives_unchanged(values: dict[str, Any]) -> None:
    (found, _) = through(pack(values))
    assert {key: shown(value) for key, value in found.items()} == {key: shown(value) for key, value in values.items()}


def test_message_in_a_reference_cycle_is_collected() -> None:
    """A process of its own, since a failure is the end of it."""
    program = """
import gc
from torchpipe_py.proc.codec import Packed
for _ in range(50):
    cycle = [Packed.of({"data": b"x" * 100})]
    cycle.append(cycle)
    del cycle
    gc.collect()
"""
    ended = waits.run(sys.executable, "-c", program)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("pack", [pack, Packed.of, lambda values: pack(ItemOutcome.of({}, values, True).changed)])
@pytest.mark.parametrize("also", [1, [1]])
def test_packs_while_another_thread_imports_torch(pack: Any, also: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    values = {"data": np.zeros(2 * INLINE, np.uint8), "also": also}
    assert pack(values).parts[0].nbytes == 2 * INLINE


@pytest.fixture(scope="module", params=["batches", "singles", "shared"])
def run(request: pytest.FixtureRequest) -> Iterator[pipe]:
    """A pipe whose backend does what ``data`` says."""
    with registry.default.restored() as default:
        cls = process_backends.Single if request.param == "singles" else process_backends.Obedient
        default.register_backend(cls, "X")
        if request.param == "shared":
            with workers_of({"node": {"backend": "X", "shared": True}}) as (worker,):
                yield worker.pipe
        else:
            with pipe({"node": {"backend": "Process[X]"}}) as built:
                built({"data": "x"})  # its threads have started
                yield built


def test_changes_of_the_backend_arrive_in_the_dict(run: pipe) -> None:
    """Keys that were added, changed, deleted; what cannot be sent stays, and one object that is there twice is one."""
    array, same, lock = np.zeros(2), b"bytes" * 9999, threading.Lock()
    given = {"removed": 1, "changed": 1, "array": array, "same": same, "lock": lock}
    item = run({"data": "edit", **given})
    assert item.keys() == {"changed", "array", "same", "added", "lock", "result"}
    assert item["changed"] == 2
    assert item["array"].tolist() == [7, 0]
    assert item["same"] is item["added"] is same
    assert item["lock"] is lock


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "raised": ({"data": "raise_value_error"}, r".*ValueError: no such value"),
    "stubborn": ({"data": "raise_stubborn"}, r".*StubbornError: two parts"),
    "long": ({"data": "raise_long"}, r".*ValueError: xxx"),
    "no way back": ({"data": "give_lambda"}, "'answer' cannot be pickled"),
    "no way there": (
        {"data": threading.Lock()}, "'data' cannot be pickled: cannot pickle '_thread.lock'",
    ),
    "a request": ({"data": np.zeros(2**30, np.uint8)}, r"a request of 1073\d+ bytes is too large"),
    "an answer": ({"data": "zeros", "size": 2**30}, r"an answer of 1073\d+ bytes is too large"),
}  # fmt: skip
"""Large arrays are pages of zeros that nobody has written: no memory."""


@pytest.mark.parametrize("name", ERRORS)
def test_error_fails_its_request_alone(run: pipe, name: str) -> None:
    item, message = ERRORS[name]
    with pytest.raises(Exception, match=message):
        run({**item})
    assert run({"data": "x"})["result"][2] == "x"
    assert run.stats()["inflight"] == 0

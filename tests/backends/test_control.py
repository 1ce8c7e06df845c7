"""MapReduce, what backends say of their tensors, and how an instance waits for its stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register

from torchpipe_py import (
    Backend,
    DecodeError,
    Detections,
    InvalidRequest,
    NoResult,
    Overloaded,
    Signature,
    TensorSpec,
    TorchpipeError,
    UnknownNode,
    pipe,
)
from torchpipe_py.backends.control import jump
from torchpipe_py.backends.cuda import LONGEST_SLEEP, SPIN_SECONDS, StreamWait
from torchpipe_py.backends.signature import ENCODED_IMAGE, LABEL_AND_SCORE, RANKING
from torchpipe_py.wire.answers import failure

# -- ``MapReduce`` -----------------------------------------------------------------------------------------------------


class Tells(Backend):
    """``data`` is the result; an exception or a text is the ``error``."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            if isinstance(item["data"], (BaseException, str)):
                item["error"] = item["data"]
            else:
                item["result"] = item["data"]


class TooDarkError(TorchpipeError):
    """An error of somebody's own, with a code of its own and arguments of its own."""

    code = "too_dark"

    def __init__(self, level: int, least: int) -> None:
        super().__init__(f"{level} is less than {least}")
        self.level = level


def graph(backend: str, register: Register, **keys: Any) -> dict[str, Any]:
    split = {"backend": backend, "jump": "each", "next": "last", **keys}
    return {"all": split, "last": {"map": "all[result:data]"}, "each": {"backend": register(Tells)}}


def ask(config: dict[str, Any], data: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dict, and the figures of the nodes."""
    with pipe(config) as run:
        return run({"data": data, "node_name": "all"}), run.stats()["nodes"]


@pytest.mark.parametrize("backend", ["MapReduce", "S[Identity,MapReduce]"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("a box is four numbers"), 400),
        (DecodeError("no image"), 400),
        (NoResult("nothing found"), 422),
        (TooDarkError(3, 10), 400),
        (Overloaded("later", 70), 429),
    ],
)
def test_the_error_of_an_element_is_that_of_the_request(
    register: Register, backend: str, error: TorchpipeError, status: int
) -> None:
    data, figures = ask(graph(backend, register), [1, error, InvalidRequest("a later one")])
    found = data["error"]
    assert type(found) is type(error)
    assert str(found) == f"element [1] of 3: {error}"
    assert (found.code, found.retry_after_ms, found.__cause__) == (error.code, error.retry_after_ms, error)
    assert "result" not in data
    assert failure(found).status == status
    assert {name: node["failed"] for name, node in figures.items()} == {"all": 0, "each": 0, "last": 0}


PARTS: list[Any] = [1, InvalidRequest("no pixel"), 3, "broken", 5]
BOXES = np.arange(20, dtype=np.float32).reshape(5, 4)


def with_errors(register: Register, on_error: str, **keys: Any) -> dict[str, Any]:
    tables = {"all": {"backend": "MapReduce", "jump": "each", "split": ["data", *keys], "merge": ["result", "k"]}}
    tables["all"] |= {"on_error": on_error}
    tables["each"] = {"backend": register(Tells)}
    with pipe(tables) as run:
        item = {"data": PARTS, "node_name": "all", **{"k": 7, **keys}}
        run(item)
    return item


@pytest.mark.parametrize(
    "boxes",
    [
        list(BOXES),
        tuple(BOXES),
        BOXES,
        torch.from_numpy(BOXES),
        Detections(BOXES, BOXES[::-1, 0], np.arange(5)),
    ],
    ids=lambda boxes: type(boxes).__name__,
)
def test_an_element_with_an_error_can_be_skipped_or_none(register: Register, boxes: Any) -> None:
    item = with_errors(register, "none", box=boxes)
    assert (item["result"], item["k"]) == ([1, None, 3, None, 5], [7, None, 7, None, 7])
    assert item["box"] is boxes
    item = with_errors(register, "skip", box=boxes)
    assert (item["result"], item["k"], item["data"]) == ([1, 3, 5], [7, 7, 7], [1, 3, 5])
    assert type(item["box"]) is type(boxes)
    assert np.array_equal(item["box"].boxes if isinstance(boxes, Detections) else np.stack([*item["box"]]), BOXES[::2])
    assert "error" not in item
    assert str(with_errors(register, "fail", box=boxes)["error"]) == "element [1] of 5: no pixel"


def test_elements_without_error_are_all_there_if_errors_are_skipped(register: Register) -> None:
    for on_error in ("skip", "none"):
        tables = {"all": {"backend": "MapReduce", "jump": "each", "on_error": on_error}}
        with pipe({**tables, "each": {"backend": register(Tells)}}) as run:
            assert run({"data": [1, 2], "node_name": "all"})["result"] == [1, 2]
            assert run({"data": ["a", "b"], "node_name": "all"})["result"] == ([] if on_error == "skip" else [None] * 2)


def test_rows_of_detections_are_their_boxes(register: Register) -> None:
    found = ask(graph("MapReduce", register), Detections(BOXES, BOXES[:, 0], np.arange(5)))[0]["data"]
    assert np.array_equal(np.stack(found), BOXES)


# -- what can be split ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.arange(3), torch.arange(3), np.arange(24).reshape(3, 2, 4)])
def test_rows_have_a_dimension_less(register: Register, array: Any) -> None:
    found = ask(graph("MapReduce", register), array)[0]["data"]
    assert [type(row) for row in found] == [type(array[0])] * 3
    assert [row.tolist() for row in found] == array.tolist()


@pytest.mark.parametrize("array", [np.zeros((0, 4)), torch.zeros(0), torch.zeros((0, 4))])
def test_no_rows_are_an_empty_list(register: Register, array: Any) -> None:
    assert ask(graph("MapReduce", register), array)[0]["result"] == []
    keys = {"split": "data,k", "merge": "result,k"}
    with pipe(graph("MapReduce", register, **keys)) as run:
        assert run({"data": array, "k": [], "node_name": "all"})["result"] == []


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.array(1), "ndarray of no dimension"),
        (torch.tensor(1), "Tensor of no dimension"),
        (np.zeros((4, 5, 3), np.uint8), "an image of 4x5x3; split names the keys that hold lists"),
    ],
)
def test_refuses_values_without_rows(register: Register, array: Any, shown: str) -> None:
    found = ask(graph("MapReduce", register), array)[0]["error"]
    assert type(found) is InvalidRequest
    assert str(found).endswith(f"found {shown}")


def test_an_array_of_many_rows_is_refused_before_they_are_made(register: Register) -> None:
    found = ask(graph("MapReduce", register), np.zeros((jump.MOST_ROWS + 1, 1), np.uint8))[0]["error"]
    assert type(found) is InvalidRequest
    assert str(found) == "the ndarray under 'data' has 65537 rows to split; the limit is 65536"
    with pipe(graph("MapReduce", register, split="data,k")) as run:
        data = run({"data": np.zeros((3, 4)), "k": [1, 2], "node_name": "all"})
    assert str(data["error"]) == "the keys to split hold lists of different lengths: 'data' has 3, 'k' has 2"


# -- what backends say of the tensors they take and give, and who passes it along --------------------------------------


X = TensorSpec("x", (None, 3, None, None), "float32")


Y = TensorSpec("y", (None, 5), "float32")


IMAGE = ENCODED_IMAGE.inputs


RESIZE = {"resize_h": 8, "resize_w": 8}


class Boxes:
    """A class that knows nothing of the package but this."""

    def signature(self) -> Signature:
        return Signature(outputs=(TensorSpec("boxes", (None, 4), "float32"),))

    def forward(self, items: list[dict[str, Any]]) -> None: ...


@pytest.mark.parametrize(
    ("backend", "keys", "expected"),
    [
        ("OnnxTensor", {}, Signature((X,), (Y,))),
        ("OnnxTensor", {"postprocessor": "cpu"}, Signature((X,), (Y,))),
        ("OnnxTensor", {"postprocessor": "SoftmaxCpu"}, Signature((X,), (Y,))),
        ("OnnxTensor", {"postprocessor": "SoftmaxMax"}, Signature((X,), LABEL_AND_SCORE)),
        ("OnnxTensor", {"postprocessor": "TopK"}, Signature((X,), RANKING)),
        ("OnnxTensor", {"postprocessor": "Sigmoid"}, Signature((X,), RANKING)),
        ("OnnxTensor", {"postprocessor": "ArgMax"}, Signature((X,), (TensorSpec("result", (None,), "int64"),))),
        ("SyncTensor[OnnxTensor]", {}, Signature((X,), (Y,))),
        ("FirstAvailable[TensorrtTensor,OnnxTensor]", {}, Signature((X,), (Y,))),
        ("Range[OnnxTensor]", {"range": "1,4", "max": 4}, Signature((X,), (Y,))),
        ("OnnxTensor&OnnxTensor", {"max": "1&4", "instance_num": "1&1"}, Signature((X,), (Y,))),
        ("S[DecodeMat,ResizeMat,Mat2Tensor,OnnxTensor]", RESIZE | {"color": "bgr"}, Signature(IMAGE, (Y,))),
        ("S[DecodeMat,ResizeMat]", RESIZE | {"decode_isolation": "process"}, Signature(IMAGE)),
        ("S[ResizeTensor,OnnxTensor]", RESIZE, Signature((), (Y,))),
        ("Identity", {}, Signature()),
    ],
)
def test_signature_of_combined_backends(classifier: str, backend: str, keys: dict[str, Any], expected: Signature):
    model = {"model": classifier} if "OnnxTensor" in backend else {}
    device = {"device": "cpu"} if "Mat2Tensor" in backend else {}
    with pipe({"backend": backend} | device | model | keys) as p:
        assert p.signature() == expected


def test_of_the_two_ends_of_a_graph(classifier: str, register: Register):
    decode = {"backend": "S[DecodeMat,Mat2Tensor]", "device": "cpu", "color": "bgr", "next": "model"}
    model = {"backend": "OnnxTensor", "model": classifier}
    with pipe({"decode": decode, "model": model, "other": {"backend": register(Boxes)}}) as p:
        assert p.signature("decode") == Signature(IMAGE, (Y,))
        assert p.signature("other") == Boxes().signature()
        with pytest.raises(UnknownNode, match="must name one of the roots: decode, other"):
            p.signature()
        with pytest.raises(UnknownNode, match="did you mean 'decode'"):
            p.signature("decod")


# -- how an instance waits for its stream ------------------------------------------------------------------------------


SLOW = SPIN_SECONDS + LONGEST_SLEEP  # in one sleep


class Gpu:
    """A clock, and a stream on it: work takes a while; a sleep may last longer than they should."""

    def __init__(self) -> None:
        self.now, self.done_at, self.late = 0.0, 0.0, 0.0
        self.sleeps: list[float] = []
        self.spins = 0
        self.stream_wait = StreamWait(self.sleep, lambda: self.now)

    def query(self) -> bool:
        return self.now >= self.done_at

    def synchronize(self) -> None:
        self.spins += 1
        self.now = max(self.now, self.done_at)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.late

    def work(self, seconds: float, batch: int = 1) -> float:
        """A batch of that length; how long it was waited for."""
        began = self.now
        self.done_at = began + seconds
        self.stream_wait.wait(self, batch)
        assert self.query()
        return self.now - began


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def test_long_work_is_slept_through_but_for_its_end(gpu):
    waits = [gpu.work(SLOW) for _ in range(5)]
    assert waits == pytest.approx([SLOW] * 5)
    assert gpu.sleeps == pytest.approx([SLOW - SPIN_SECONDS] * 4)


def test_work_that_becomes_quick_is_slept_through_ever_shorter(gpu):
    """One wait in a thousand that was slow must not make the next ones slow."""
    gpu.work(1000 * SLOW)
    waits = [gpu.work(SLOW) for _ in range(60)]
    assert max(waits) <= SLOW + LONGEST_SLEEP
    assert max(waits[20:]) == pytest.approx(SLOW)


def test_a_machine_that_oversleeps_stops_sleeping(gpu):
    gpu.late = 2 * SPIN_SECONDS
    waits = [gpu.work(SLOW) for _ in range(200)]
    assert max(waits) <= SLOW + gpu.late
    late = [wait for wait in waits[100:] if wait > SLOW * 1.01]
    assert len(late) < 50

"""What the service answers: its methods, by several clients, and every kind of error."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import thriftpy2.rpc
import torch
import torchpipe_server.front.server
from conftest import Register
from fakes import WAIT, Gate, in_threads
from http_client import every_client
from service import (
    FRAMINGS,
    IDL,
    ROOT,
    Client,
    FakePipe,
    LocalServer,
    Process,
    connect,
    eventually,
    pack_batch,
    pack_call,
    pack_string,
    read_all,
    serving,
)
from thriftpy2.protocol import TBinaryProtocolFactory, TCompactProtocolFactory
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TBufferedTransportFactory, TFramedTransportFactory

from torchpipe_py import Backend, NoResult, Overloaded

IMAGES = sorted((ROOT / "configs/demo/images").glob("*.jpg"))
LABELS = (ROOT / "configs/demo/labels.txt").read_text().split()
MEAN, STD = np.float32([123.675, 116.28, 103.53]), np.float32([58.395, 57.12, 57.375])
JPEG = IMAGES[0].read_bytes()

every_framing = pytest.mark.parametrize(
    ("framed", "compact"), FRAMINGS, ids=lambda value: None if isinstance(value, str) else str(int(value))
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Process]:
    with Process() as process:
        yield process.wait_started()


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(ROOT / "configs/demo/model.onnx", providers=["CPUExecutionProvider"])


def expected(session: onnxruntime.InferenceSession, image: bytes) -> tuple[str, float]:
    """Label and score by ONNX Runtime and OpenCV alone."""
    mat = cv2.cvtColor(cv2.resize(cv2.imdecode(np.frombuffer(image, np.uint8), 1), (64, 64)), cv2.COLOR_BGR2RGB)
    chw = ((mat.astype(np.float32) - MEAN) / STD).transpose(2, 0, 1)[None]
    logits = session.run(None, {"input": chw})[0][0]
    powers = np.exp(logits - logits.max())
    return LABELS[int(logits.argmax())], float(powers.max() / powers.sum())


def assert_same(found: tuple[str, float], wanted: tuple[str, float]) -> None:
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=2e-4)


class Echo(Backend):
    """The result is the data."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = item["data"]


class LabelOf(Backend):
    """(label, score) of a request's bytes: the text itself and its length. ``raise`` raises, ``none`` has no result."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            text = item["data"].decode()
            if text == "raise":
                raise ValueError("on request")
            if text == "none":
                item["error"] = NoResult("on request")
            else:
                item["result"] = (text, float(len(text)))


def returns(value: Any) -> type[Backend]:
    class Returns(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = value

    return Returns


def tensor(array: np.ndarray) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=array.dtype.name, shape=list(array.shape), data=array.tobytes()))


def raw(data: bytes) -> dict[str, Any]:
    return {"data": IDL.Value(bytes=data)}


def array_of(value: Any) -> np.ndarray:
    return np.frombuffer(value.data, value.dtype).reshape(value.shape)


# -- the demo configuration ---------------------------------------------------------------------------------------


@every_framing
def test_apache_client_gets_what_onnx_runtime_and_opencv_compute(demo, session, framed, compact):
    with Client(demo.port, framed, compact) as client:
        client.ping()
        for path in IMAGES if framed and compact else IMAGES[::6]:
            image = path.read_bytes()
            found = client.infer_batch(image)
            assert_same(found, expected(session, image))


@every_framing
def test_thriftpy2_client(demo, session, framed, compact):
    with thriftpy2.rpc.client_context(
        IDL.InferenceService,
        "127.0.0.1",
        demo.port,
        trans_factory=TFramedTransportFactory() if framed else TBufferedTransportFactory(),
        proto_factory=TCompactProtocolFactory() if compact else TBinaryProtocolFactory(),
    ) as client:
        assert client.ping() is None
        result = client.infer_batch(IDL.InferenceParams(uuid="x", data=JPEG))
        assert_same((result.label, result.score), expected(session, JPEG))
        with pytest.raises(IDL.InferenceError) as caught:
            client.infer_batch(IDL.InferenceParams(uuid="x", data=b"no image"))
        assert caught.value.code == "decode_error"


def test_client_written_by_hand(demo, session):
    with connect(demo.port) as sock, sock.makefile("rb") as stream:
        sock.sendall(pack_batch(JPEG, seqid=7))
        version, size = struct.unpack(">II", stream.read(8))
        assert (version, stream.read(size)) == (0x80010002, b"infer_batch")
        assert struct.unpack(">i", stream.read(4)) == (7,)
        assert struct.unpack(">bh", stream.read(3)) == (12, 0)  # success
        assert struct.unpack(">bh", stream.read(3)) == (11, 1)  # label
        label = stream.read(struct.unpack(">I", stream.read(4))[0]).decode()
        assert struct.unpack(">bh", stream.read(3)) == (4, 2)  # score
        score = struct.unpack(">d", stream.read(8))[0]
        assert stream.read(2) == b"\0\0"
    assert_same((label, score), expected(session, JPEG))


def test_infer_gives_label_and_score_of_the_demo(demo, session):
    with Client(demo.port) as client:
        outputs = client.infer(raw(JPEG))
        assert sorted(outputs) == ["label", "result", "score"]
        assert_same((outputs["label"].text, outputs["score"].number), expected(session, JPEG))
        assert json.loads(outputs["result"].text) == [outputs["label"].text, outputs["score"].number]


def test_infer_many_keeps_the_order_and_fails_per_item(demo, session):
    images = [path.read_bytes() for path in IMAGES[::5]]
    with Client(demo.port) as client:
        outcomes = client.infer_many([images[0], b"broken", *images[1:], b""])
    assert [one.error.code for one in outcomes if one.error] == ["decode_error"] * 2
    assert outcomes[1].error
    assert outcomes[-1].error
    for image, one in zip(images, [one for one in outcomes if one.result], strict=True):
        assert_same((one.result.label, one.result.score), expected(session, image))


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"x" * 1000, JPEG[:200]], ids=["empty", "soi", "x", "cut"])
def test_a_corrupt_image_is_a_decode_error(demo, data):
    with Client(demo.port) as client:
        error = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=data))
        assert error.code == "decode_error"
        assert error.message
        client.infer_batch(JPEG)


def variants(count: int) -> list[bytes]:
    """Distinct images: blends of two."""
    mats = [cv2.resize(cv2.imread(str(path)), (96, 96)) for path in IMAGES]
    rng = random.Random(3)
    pairs = [(rng.sample(mats, 2), rng.uniform(0.2, 0.8)) for _ in range(count)]
    blends = [cv2.addWeighted(one, share, two, 1 - share, 0) for (one, two), share in pairs]
    return [cv2.imencode(".jpg", blend)[1].tobytes() for blend in blends]


def test_ten_thousand_requests_of_twenty_clients_do_not_cross(demo, session):
    images = variants(400)
    wanted = [expected(session, image) for image in images]
    assert len({round(score, 3) for _, score in wanted}) > 100  # a wrong answer would be seen

    def work(index: int) -> None:
        order = random.Random(index).choices(range(len(images)), k=500)
        framed, compact = FRAMINGS[index % 4]
        with Client(demo.port, framed, compact) as client:
            for start in range(0, 500, 25):
                chosen = order[start : start + 25]
                for one, item in zip(chosen, client.infer_many([images[one] for one in chosen[:20]]), strict=False):
                    assert_same((item.result.label, item.result.score), wanted[one])
                for one in chosen[20:]:
                    assert_same(client.infer_batch(images[one]), wanted[one])

    in_threads(20, work)


# -- values -------------------------------------------------------------------------------------------------------


@every_framing
@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.linspace(-1, 1, 6, dtype=np.float32).reshape(1, 6),
        np.array([-(2**62), 2**62]),
        np.array([[True, False]]),
        np.zeros((0, 4), np.float32),
        np.array(3.5),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_a_tensor_comes_back_as_it_went_in(register: Register, framed, compact, array):
    with serving(register(Echo)) as server, Client(server.port, framed, compact) as client:
        found = client.infer({"data": tensor(array)})["result"].tensor
        assert (found.dtype, found.shape) == (array.dtype.name, list(array.shape))
        np.testing.assert_array_equal(array_of(found), array)


def test_every_kind_of_value_goes_in_and_out(register: Register):
    pair = [tensor(np.arange(3.0)).tensor, tensor(np.arange(2)).tensor]
    values = [
        IDL.Value(bytes=b"\0\xff"),
        IDL.Value(text="größe"),
        IDL.Value(number=-0.5),
        IDL.Value(integer=-(2**63)),
        IDL.Value(tensors=pair),
    ]
    with serving(register(Echo)) as server, Client(server.port) as client:
        for value in values:
            assert client.infer({"data": value})["result"] == value


def test_outputs_names_the_keys_wanted_back(register: Register):
    with serving(register(Echo)) as server, Client(server.port) as client:
        inputs = {"data": IDL.Value(text="a"), "mine": IDL.Value(integer=5)}
        assert client.infer(inputs, outputs=["mine", "result"]) == {
            "mine": IDL.Value(integer=5),
            "result": IDL.Value(text="a"),
        }
        error = client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=inputs, outputs=["other"]))
        assert error.code == "no_result"
        assert "other" in error.message


def two_roots(register: Register) -> dict[str, Any]:
    return {"left": {"backend": register(returns("left"))}, "right": {"backend": register(returns("right"))}}


def test_node_name_chooses_the_root(register: Register):
    with serving(two_roots(register)) as server, Client(server.port) as client:
        for name in ("left", "right"):
            assert client.infer(raw(b""), node_name=name)["result"].text == name
        for name in ("middle", None):
            error = client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=raw(b""), node_name=name))
            assert error.code == "unknown_node"


def test_node_name_of_a_strange_type_is_an_error_of_the_client(register: Register):
    strange = IDL.Value(tensors=[tensor(np.arange(3)).tensor])
    with serving(two_roots(register)) as server, Client(server.port) as client:
        inputs = {**raw(b""), "node_name": strange}
        error = client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=inputs))
        assert error.code in ("unknown_node", "invalid_request")


def bad_tensor(dtype: str, shape: list[int], data: bytes = b"\0" * 8) -> Any:
    return IDL.Value(tensor=IDL.Tensor(dtype=dtype, shape=shape, data=data))


BAD_VALUES = {
    "empty": IDL.Value(),
    "two": IDL.Value(text="a", integer=1),
    "dtype": bad_tensor("float33", [2]),
    "object": bad_tensor("object", [1]),
    "string": bad_tensor("S8", [1]),
    "date": bad_tensor("M8[s]", [1]),
    "record": bad_tensor("i4,i4", [1]),
    "syntax": bad_tensor("i4,,", [1]),
    "no dtype": bad_tensor("", [1]),
    "shape": bad_tensor("uint8", [9]),
    "overflow": bad_tensor("uint8", [2**62, 2**62]),
    "negative": bad_tensor("uint8", [-8]),
    "free": bad_tensor("uint8", [-1]),
    "deep": bad_tensor("uint8", [1] * 100),
    "ragged": bad_tensor("int64", [1], b"\0" * 9),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_bad_value_is_an_invalid_request(register: Register, value):
    with serving(register(Echo)) as server, Client(server.port) as client:
        error = client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs={"data": value}))
        assert error.code == "invalid_request", error.message
        client.ping()


def test_data_is_required(register: Register):
    with serving(register(Echo)) as server, Client(server.port) as client:
        inputs = {"other": IDL.Value(integer=1)}
        assert client.error_of("infer", request=IDL.InferRequest(uuid="x", inputs=inputs)).code == "invalid_request"


# -- infer_many and deadlines -------------------------------------------------------------------------------------


def test_infer_many_of_nothing(register: Register):
    with serving(register(LabelOf)) as server, Client(server.port) as client:
        assert client.infer_many([]) == []
        assert client.infer_many([], deadline_ms=1) == []


def test_infer_many_tells_each_items_error(register: Register):
    with serving(register(LabelOf)) as server, Client(server.port) as client:
        outcomes = client.infer_many([b"a", b"raise", b"bcd", b"none"])
    assert [one.result and one.result.label for one in outcomes] == ["a", None, "bcd", None]
    assert [one.error and one.error.code for one in outcomes] == [None, "backend_error", None, "no_result"]


def test_infer_many_beyond_max_inflight_fails_only_the_excess(register: Register):
    gate = Gate()
    config = {"global": {"max_inflight": 3}, "node": {"backend": register(gate.backend)}}
    with serving(config) as server, gate, Client(server.port) as client:
        seqid = client.send("infer_many", params=[IDL.InferenceParams(uuid="x", data=b"x")] * 5)
        gate.wait_entered()
        eventually(lambda: server.run.stats()["rejected"] == 2)
        gate.open()
        codes = [outcome.error.code for outcome in client.receive(seqid)]
        assert codes == ["no_result"] * 3 + ["overloaded"] * 2  # bytes are no label


@pytest.mark.parametrize("method", ["infer", "infer_many"])
def test_a_deadline_is_answered_while_the_backend_still_blocks(register: Register, method):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client:
        if method == "infer":
            request = IDL.InferRequest(uuid="x", inputs=raw(b"x"), deadline_ms=200)
            codes = [client.error_of("infer", request=request).code]
        else:
            codes = [one.error.code for one in client.infer_many([b"x", b"y"], deadline_ms=200)]
        assert set(codes) == {"deadline_exceeded"}
        assert not gate.opened.is_set()
        client.ping()


def test_no_deadline_is_meant_by_zero_and_less(register: Register):
    with serving(register(LabelOf)) as server, Client(server.port) as client:
        for milliseconds in (0, -1, -(2**31), 2**31 - 1):
            assert client.infer_many([b"a"], deadline_ms=milliseconds)[0].result.label == "a"


def test_a_finished_request_leaves_nothing_behind_until_its_deadline(register: Register):
    """One day of deadline must not keep the image for a day."""
    import gc
    import weakref

    class Witness:
        pass

    witnesses: list[weakref.ref[Witness]] = []

    class Testify(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["witness"] = Witness()
                witnesses.append(weakref.ref(item["witness"]))
                item["result"] = ("a", 1.0)

    with serving(register(Testify)) as server, Client(server.port) as client:
        for _ in range(50):
            client.infer(raw(b"x"), deadline_ms=24 * 3600 * 1000)
            client.infer_many([b"x"], deadline_ms=24 * 3600 * 1000)
        client.ping()

        def alive() -> int:
            gc.collect()
            return sum(one() is not None for one in witnesses)

        eventually(lambda: alive() <= 2, "finished requests are kept until their deadline")


# -- overload and disconnects ---------------------------------------------------------------------------------------


@every_client
def test_overloaded_is_typed_and_says_when_to_come_back(register: Register, client_type):
    gate = Gate()
    config = {"global": {"max_inflight": 1}, "node": {"backend": register(gate.backend)}}
    with serving(config) as server, gate, client_type(server.port) as first, client_type(server.port) as second:
        first.send_batch(b"first")
        gate.wait_entered()
        for _ in range(20):
            error = second.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"second"))
            assert error.code == "overloaded"
            assert error.retry_after_ms >= 1
        gate.open()
        eventually(lambda: server.run.stats()["inflight"] == 0)
        assert gate.batches == [[b"first"]]


@every_client
def test_requests_of_a_client_that_is_gone_are_never_batched(register: Register, caplog, client_type):
    gate = Gate(blocks=lambda data: data == b"block")
    with serving(register(gate.backend)) as server, gate, Client(server.port) as other:
        seqid = other.send_batch(b"block")
        gate.wait_entered()
        leaving = [*(client_type(server.port) for _ in range(4)), Client(server.port)]
        for client in leaving[:4]:
            client.send_batch(b"abandoned")
        leaving[4].send("infer_many", params=[IDL.InferenceParams(uuid="x", data=b"abandoned")] * 3)
        eventually(lambda: server.run.stats()["inflight"] == 8)
        for client in leaving:
            client.close()
        eventually(lambda: server.run.stats()["inflight"] == 1)
        gate.open()
        with pytest.raises(IDL.InferenceError):
            other.receive(seqid)
        eventually(lambda: server.run.stats()["inflight"] == 0)
    assert gate.batches == [[b"block"]]


def test_a_client_that_is_gone_is_no_error_in_the_log(register: Register, caplog):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate:
        client = Client(server.port)
        client.send_batch(b"x")
        gate.wait_entered()
        client.close()
        eventually(lambda: server.run.stats()["inflight"] == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# -- every error is answered --------------------------------------------------------------------------------------


@every_framing
def test_unknown_method(register: Register, framed, compact):
    with serving(register(LabelOf)) as server, Client(server.port, framed, compact) as client:
        for name in ("no_such_method", "größe", "x" * 255):
            with pytest.raises(TApplicationException) as caught:
                client.call(name)
            assert caught.value.type == TApplicationException.UNKNOWN_METHOD
        assert client.infer_batch(b"abc") == ("abc", 3.0)


def answer_kind(server: LocalServer, body: bytes, method: str = "infer_batch") -> tuple[str, int | str]:
    """How wrong arguments are answered; the same connection must go on with the right ones."""
    with Client(server.port) as client:
        client.sock.sendall(pack_call(method, body))
        try:
            client.receive(1)
            kind: tuple[str, int | str] = ("result", "")
        except IDL.InferenceError as error:
            kind = ("typed", error.code)
        except TApplicationException as error:
            kind = ("application", error.type)
        assert client.infer_batch(b"abc") == ("abc", 3.0)
    return kind


PARAMS = struct.pack(">bh", 12, 1)
WRONG_ARGUMENTS = {
    "missing": b"\0",
    "no field": PARAMS + b"\0\0",
    "no data": PARAMS + pack_string(1, b"x") + b"\0\0",
    "integer": struct.pack(">bhi", 8, 1, 5) + b"\0",
    "list": struct.pack(">bhbi", 15, 1, 12, 0) + b"\0",
    "inner type": PARAMS + pack_string(1, b"x") + struct.pack(">bhi", 8, 2, 5) + b"\0\0",
    "not utf-8": PARAMS + pack_string(1, b"\xff\xfe") + pack_string(2, b"abc") + b"\0\0",
    "wrong number": struct.pack(">bh", 12, 9) + pack_string(1, b"x") + b"\0\0",
}


@pytest.mark.parametrize("body", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_arguments_then_right_ones(register: Register, body):
    with serving(register(LabelOf)) as server:
        kind = answer_kind(server, body)
        assert kind in (("application", TApplicationException.PROTOCOL_ERROR), ("typed", "invalid_request"))
        assert answer_kind(server, body, "ping") in (kind, ("result", ""))


@pytest.mark.parametrize("error", [ValueError("oops"), KeyError("k"), ValueError("\ud800"), ValueError("\0\x7f")])
def test_an_exception_of_a_backend_is_answered(register: Register, error):
    class Raises(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            raise error

    with serving(register(Raises)) as server, Client(server.port) as client:
        for _ in range(2):
            with pytest.raises((IDL.InferenceError, TApplicationException)) as caught:
                client.infer_batch(b"x")
            assert getattr(caught.value, "code", "backend_error") == "backend_error"
        client.ping()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("of __str__")


class Unraisable:
    """Not an exception at all."""


@pytest.mark.parametrize(
    "value",
    [Unprintable(), Leaving(), Unraisable(), "text", NoResult("\ud800"), StopIteration()],
    ids=lambda value: type(value).__name__,
)
def test_whatever_stands_under_error_is_answered(register: Register, value):
    class Fails(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["error"] = value

    with serving(register(Fails)) as server, Client(server.port) as client:
        for call in (lambda: client.infer_batch(b"x"), lambda: client.infer(raw(b"x"))):
            with pytest.raises((IDL.InferenceError, TApplicationException)):
                call()


UNENCODABLE = {
    "big": 2**64,
    "very big": 2**200,
    "negative": -(2**63) - 1,
    "object": object(),
    "object array": np.array([object()], object),
    "list of what JSON has not": [1, object()],
    "a number that JSON has not": {"score": float("nan")},
    "a list in itself": (itself := [1], itself.append(itself))[0],
    "inf pair": ("a", 10**400),
    "a score that is no number": ("a", float("nan")),
    "a first score that is no number": [("a", float("inf")), ("b", 0.5)],
}


@every_framing
@pytest.mark.parametrize("value", UNENCODABLE.values(), ids=UNENCODABLE.keys())
def test_a_result_that_cannot_be_encoded_is_answered(register: Register, framed, compact, value):
    with serving(register(returns(value))) as server, Client(server.port, framed, compact) as client:
        for call in (lambda: client.infer(raw(b"x")), lambda: client.infer_batch(b"x")):
            with pytest.raises((IDL.InferenceError, TApplicationException)):
                call()
        client.ping()


@every_framing
def test_half_a_character_is_a_question_mark(register: Register, framed, compact):
    class Labels(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item.update(result=(item["data"].decode() + "\ud800", 0.5), text="\udc80ü", best=[("\ud800", 1.0)])

    with serving(register(Labels)) as server, Client(server.port, framed, compact) as client:
        assert client.infer_batch(b"a") == ("a?", 0.5)
        assert [one.result.label for one in client.infer_many([b"a", b"b"])] == ["a?", "b?"]
        outputs = client.infer(raw(b"a"), outputs=["result", "text"])
        assert (outputs["label"].text, outputs["text"].text) == ("a?", "?ü")
        assert json.loads(outputs["result"].text) == ["a\ud800", 0.5]  # JSON has a form for it
        assert client.infer(raw(b"a"), outputs=["best"])["label"].text == "?"


@every_framing
def test_plain_structures_come_as_json(register: Register, framed, compact):
    boxes = [{"box": np.array([1, 2, 3, 4]), "label": "ü", "score": np.float64(0.5)}, {"box": torch.ones(2)}]
    with serving(register(returns(boxes))) as server, Client(server.port, framed, compact) as client:
        text = client.infer(raw(b"x"))["result"].text
    assert json.loads(text) == [{"box": [1, 2, 3, 4], "label": "ü", "score": 0.5}, {"box": [1.0, 1.0]}]


@every_framing
def test_bfloat16_comes_as_float32(register: Register, framed, compact):
    value = torch.tensor([[1.5, -0.1, 2**127]], dtype=torch.bfloat16)
    for result in (value, [value, value]):
        with serving(register(returns(result))) as server, Client(server.port, framed, compact) as client:
            answer = client.infer(raw(b"x"))["result"]
        for tensor in [answer.tensor] if result is value else answer.tensors:
            assert (tensor.dtype, tensor.shape) == ("float32", [1, 3])
            assert np.frombuffer(tensor.data, "<f4").tolist() == value[0].tolist()


def test_a_type_that_numpy_has_not_is_no_result(register: Register):
    value = torch.zeros(2).to(torch.float8_e5m2)
    with serving(register(returns(value))) as server, Client(server.port) as client:
        error = client.error_of("infer", request=IDL.InferRequest(uuid="u", inputs=raw(b"x")))
    message = "'result' is an array of torch.float8_e5m2, which has no form on the wire"
    assert (error.code, error.message) == ("no_result", message)


@pytest.mark.parametrize(
    ("written", "best", "text"),
    [
        ({"result": ("ü", 0.5)}, ("ü", 0.5), ["ü", 0.5]),
        ({"result": (np.int64(3), 0.25)}, ("3", 0.25), [3, 0.25]),
        ({"result": [("a", 0.75), (2, np.float32(0.25))]}, ("a", 0.75), [["a", 0.75], [2, 0.25]]),  # as of TopK
        ({"result": "b", "score": 0.5, "class": 1}, ("b", 0.5), "b"),  # as of ArgMax
    ],
)
def test_what_postprocessors_write_is_a_label_and_a_score(register: Register, written, best, text):
    class Writes(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item.update(written)

    with serving(register(Writes)) as server, Client(server.port) as client:
        assert client.infer_batch(b"x") == best
        assert [(one.result.label, one.result.score) for one in client.infer_many([b"x"])] == [best]
        outputs = client.infer(raw(b"x"), outputs=["result"])
        kept = outputs["result"].text
        assert (json.loads(kept) if isinstance(text, list) else kept) == text
        if isinstance(text, list):
            assert (outputs["label"].text, outputs["score"].number) == best
        else:
            asked = client.infer(raw(b"x"), outputs=["result", "score", "class"])
            assert (asked["result"].text, asked["score"].number, asked["class"].integer) == ("b", 0.5, 1)


def test_no_class_above_the_threshold_is_no_result(register: Register):
    with serving(register(returns([]))) as server, Client(server.port) as client:
        with pytest.raises(IDL.InferenceError, match="no class has the score that is asked for"):
            client.infer_batch(b"x")
        assert client.infer(raw(b"x"))["result"].text == "[]"


def test_label_and_score_may_be_numpy_scalars(register: Register):
    with serving(register(returns((np.int64(3), np.float32(0.5))))) as server, Client(server.port) as client:
        assert client.infer_batch(b"x") == ("3", 0.5)


class Broken(FakePipe):
    """A pipe whose `dispatch` raises what nobody declared."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        raise self._error


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), MemoryError(), RecursionError("deep"), ValueError("\ud800")])
def test_a_handler_that_raises_is_answered(error):
    with LocalServer(Broken(error)) as server, Client(server.port) as client:
        for _ in range(2):
            with pytest.raises((IDL.InferenceError, TApplicationException)):
                client.infer_batch(b"x")
            assert all(outcome.error is not None for outcome in client.infer_many([b"x"]))
        client.ping()


class Once(FakePipe):
    """A pipe that finishes within `dispatch`."""

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        data["result"] = ("now", 1.0)
        on_done(data, None)
        return FinishedTicket()


class FinishedTicket:
    deadline = None

    def cancel(self, error: BaseException | None = None) -> bool:
        return False


def test_requests_finished_within_dispatch():
    with LocalServer(Once()) as server, Client(server.port) as client:
        seqids = [client.send_batch(b"x") for _ in range(100)]
        assert [client.receive(seqid).label for seqid in seqids] == ["now"] * 100
        assert [one.result.label for one in client.infer_many([b"x"] * 3)] == ["now"] * 3


# -- pipelining -----------------------------------------------------------------------------------------------------


@every_framing
def test_three_hundred_pipelined_pings(register: Register, framed, compact):
    with serving(register(LabelOf)) as server, Client(server.port, framed, compact) as client:
        seqids = [client.send("ping") for _ in range(300)]
        for seqid in seqids:
            client.receive(seqid)


def test_pipelined_requests_are_answered_in_order(register: Register):
    """Two instances: the second of a pair could finish while the first still blocks."""
    gate = Gate(blocks=lambda data: data == b"slow")
    config = {"node": {"backend": register(gate.backend), "instance_num": 4}}
    with serving(config) as server, gate, Client(server.port) as client:
        wanted = []
        for index in range(40):
            data = b"slow" if index == 0 else str(index).encode()
            seqid = client.send_infer(raw(data))
            wanted.append((seqid, data))
        gate.wait_entered()
        client.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.sock.recv(1)
        client.sock.settimeout(WAIT)
        gate.open()
        for seqid, data in wanted:
            assert client.receive(seqid).outputs["result"].bytes == data


def test_a_oneway_message_is_done_and_not_answered(register: Register):
    seen = Gate()
    seen.open()
    with serving(register(seen.backend)) as server, Client(server.port) as client:
        oneway = bytearray(pack_batch(b"oneway", seqid=5))
        oneway[3] = 4
        client.sock.sendall(bytes(oneway))
        unknown = bytearray(pack_call("no_such"))
        unknown[3] = 4
        client.sock.sendall(bytes(unknown))
        client.receive(client.send("ping"))
    assert seen.batches == [[b"oneway"]]


@pytest.mark.parametrize("rest", [b"", pack_batch(b"half")[:9]], ids=["whole", "half"])
def test_a_client_that_is_done_sending_gets_its_answers(register: Register, rest, monkeypatch):
    monkeypatch.setattr(torchpipe_server.front.connection, "ENDED_SECONDS", WAIT)
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, connect(server.port) as sock:
        sock.sendall(
            b"".join(pack_call("ping", seqid=seqid) for seqid in range(5)) + pack_batch(b"last", seqid=7) + rest
        )
        sock.shutdown(socket.SHUT_WR)
        gate.wait_entered()
        eventually(lambda: all(connection.ended_at for connection in server.server._connections))
        gate.open()
        received = read_all(sock)
    assert received.count(b"ping") == 5
    assert b"infer_batch" in received, "the one that was in work is not answered"


@every_client
def test_nothing_is_left_of_a_client_that_is_gone_while_its_request_is_in_work(register: Register, client_type):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate:
        with connect(server.port) as sock:
            sock.sendall(client_type.pack(b"x") * 3)
            gate.wait_entered()
        eventually(lambda: not server.server.connections)
        gate.open()
        eventually(lambda: server.run.stats()["inflight"] == 0)
    assert gate.batches == [[b"x"]]


def test_overloaded_without_a_hint_is_encoded():
    with LocalServer(Broken(Overloaded("x"))) as server, Client(server.port) as client:
        error = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"x"))
        assert (error.code, error.retry_after_ms) == ("overloaded", None)

"""What backends say of the tensors they take and give, and who passes it along."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Register

from torchpipe_py import Backend, Signature, TensorSpec, UnknownNode, pipe
from torchpipe_py.backends.signature import ENCODED_IMAGE, LABEL_AND_SCORE, RANKING

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
        ("OnnxTensor", {"postprocessor": "ArgMax"}, Signature((X,))),
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
def test_what_is_said(classifier: str, backend: str, keys: dict[str, Any], expected: Signature):
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


def test_two_ends_say_nothing(classifier: str):
    model = {"backend": "OnnxTensor", "model": classifier}
    with pipe({"decode": {"backend": "DecodeMat", "color": "bgr", "next": "a,b"}, "a": model, "b": model}) as p:
        assert p.signature() == Signature(IMAGE)


def test_nothing_is_said_that_is_not_known():
    assert Backend.signature(object.__new__(Backend)) == Signature()

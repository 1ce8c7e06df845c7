"""Inputs and outputs by name: which become ``data``, which keys, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from torchpipe_py import InvalidRequest, Signature, TensorSpec, UnknownNode, pipe
from torchpipe_py.methods.roots import Root, Roots

A, B, DATA = (TensorSpec(name, (None, 2), "float32") for name in ("a", "b", "data"))
ORIGINAL = ("image_size", "to_original")
"""Keys that lead from an image to its original."""
OPTIONAL = TensorSpec("o", (None, 2), "float32", is_optional=True)


@pytest.mark.parametrize(
    ("inputs", "given", "expected"),
    [
        ([], {"data": 1}, {"data": 1}),
        ([A], {"data": 1}, {"data": 1}),
        ([A], {"a": 1}, {"data": 1}),
        ([A], {"a": 1, "color": "rgb"}, {"data": 1, "color": "rgb"}),
        ([A, B], {"b": 2, "a": 1}, {"data": {"a": 1, "b": 2}}),
        ([A, B], {"data": [1, 2]}, {"data": [1, 2]}),
        ([DATA, B], {"data": 1, "b": 2}, {"data": {"data": 1, "b": 2}}),
        ([DATA, B], {"data": [1, 2]}, {"data": [1, 2]}),
        ([DATA, OPTIONAL], {"data": 1}, {"data": 1}),
        ([A, OPTIONAL], {"a": 1}, {"data": {"a": 1}}),
        ([A], {"a": 1, "priority": 1, "context": 2}, {"data": 1, "priority": 1, "context": 2}),
    ],
)
def test_own_names_become_data_and_others_keys(inputs: Any, given: Any, expected: Any) -> None:
    assert Root(Signature(tuple(inputs)), {"color"}).item(dict(given)) == expected


@pytest.mark.parametrize(
    ("inputs", "reads", "given", "said"),
    [
        ([A], {"box"}, {"a": 1, "bax": 2}, "unknown input 'bax'; did you mean 'box'?"),
        ([A], set(), {"data": 1, "result": 2}, "unknown input 'result'; valid: a"),
        ([], set(), {"dta": 1}, "unknown input 'dta'; did you mean 'data'?"),
        ([A], None, {"a": 1, "data": 2}, "both 'data', which is the whole input, and its part 'a'"),
        ([A], {"max_box"}, {"a": 1, "Max-Dets": 2}, "unknown input 'Max-Dets'; did you mean the parameter 'max_det'?"),
        ([A], set(), {"max_det": 2}, "unknown input 'max_det'; it is a parameter, which goes into 'parameters'"),
        ([A], set(), {}, "the request has no inputs; valid: a"),
    ],
)
def test_refuses_input_that_nothing_reads(inputs: Any, reads: Any, given: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Root(Signature(tuple(inputs), parameters=("max_det",)), reads).item(given)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("inputs", "reads", "given", "said"),
    [
        ([A, B], set(), {"data": 1, "b": 2}, "unknown input 'data'; valid: a, b; it was a file"),
        ([A, B], None, {"data": 1, "b": 2}, "both 'data', which is the whole input, and its part 'b'; it was a file"),
        ([A, B], set(), {"data": 1}, "the model has 2 inputs, a, b; it was a file"),
        ([A], set(), {"data": 1, "c": 2}, "unknown input 'c'; valid: a"),
    ],
)
def test_says_what_became_data(inputs: Any, reads: Any, given: Any, said: str) -> None:
    root = Root(Signature(tuple(inputs)), reads)
    with pytest.raises(InvalidRequest) as raised:
        root.item(given, whole="it was a file")
    assert str(raised.value) == said
    assert Root(Signature((A, OPTIONAL))).item({"data": 1}, whole="it was a file") == {"data": 1}


@pytest.mark.parametrize("reads", [None, {"parameters"}])
def test_takes_usual_parameters_for_backends_that_declare_none(reads: Any) -> None:
    given = {"conf": 0.5}
    assert Root(Signature((A,)), reads).item({"a": 1}, parameters=given) == {"data": 1, "parameters": given}
    with pytest.raises(InvalidRequest, match="unknown parameter 'conf'; the model reads none"):
        Root(Signature((A,)), {"color"}).item({"a": 1}, parameters=given)


def test_takes_any_key_for_custom_backends_and_what_is_asked_back() -> None:
    assert Root(Signature((A,)), None).item({"a": 1, "mine": 2}) == {"data": 1, "mine": 2}
    assert Root(Signature((A,)), set()).item({"a": 1, "mine": 2}, ["mine"]) == {"data": 1, "mine": 2}


@pytest.mark.parametrize(
    ("outputs", "result", "key", "expected"),
    [
        ([], 7, "result", 7),
        ([A], 7, "a", 7),
        ([A], 7, "result", 7),
        ([A, B], [1, 2], "b", 2),
        ([A, B], ("x", 0.5), "a", "x"),
        ([A, B], [("x", 0.5), ("y", 0.25)], "a", ["x", "y"]),
        ([DATA], 7, "data", 7),
        ([A], 7, "other", "own"),
    ],
)
def test_outputs_by_own_name_then_by_key(outputs: Any, result: Any, key: str, expected: Any) -> None:
    data = {"data": "input", "result": result, "other": "own"}
    assert Root(Signature((), tuple(outputs))).output(data, key) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"backend": "Identity"}, set()),
        ({"backend": "S[DecodeMat,CropMat]"}, {"box", "color", *ORIGINAL}),
        ({"backend": "S[DecodeMat,DynamicResizeMat]"}, {"resize_h", "resize_w", "color", *ORIGINAL}),
        ({"backend": "CopyMakeBorderTensor"}, {"top", "bottom", "left", "right", "color", *ORIGINAL}),
        (
            {"a": {"backend": "Identity", "next": "b"}, "b": {"backend": "Identity", "map": "a[data:data,mine:x]"}},
            {"mine"},
        ),
        (
            {
                "a": {"backend": "MapReduce", "jump": "b", "split": "data,boxes"},
                "b": {"backend": "S[CropMat,Identity]", "filter": "or"},
            },
            {"data", "boxes", "box", "color", *ORIGINAL},
        ),
        ({"backend": "Python[Anything]"}, None),
        ({"backend": "S[Identity,Anything]"}, None),
    ],
)
def test_keys_read_are_those_of_built_in_backends(restored: Any, config: Any, expected: Any) -> None:
    class Anything:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = item["data"]

    restored.register_backend(Anything, "Anything")
    with pipe(config) as run:
        keys = run.keys_read()
        assert (keys if expected is None else keys - {"data"}) == (expected and expected - {"data"})


def test_only_root_has_the_name_of_the_file_too() -> None:
    with pipe({"a": {"backend": "Identity"}}) as run:
        roots = Roots(run, "demo")
        for name in ("demo", "demo/1"):
            assert roots.item({"data": 1}, name, None, ())[1] == {"data": 1}
            assert roots.find(name) is roots.find(None)
            assert roots.model_of(name) == "demo/1"
        with pytest.raises(UnknownNode):
            roots.item({"data": 1}, "demo/2", None, ())
    with pipe({"a": {"backend": "Identity"}, "b": {"backend": "Identity"}}) as run, pytest.raises(UnknownNode):
        Roots(run, "demo").item({"data": 1}, "demo", None, ())


def test_input_node_name_names_one_of_several_roots() -> None:
    with pipe({"a": {"backend": "Identity"}, "b": {"backend": "Identity"}}) as run:
        roots = Roots(run, "test")
        assert roots.item({"data": 1, "node_name": "b"}, None, None, ())[1] == {"data": 1, "node_name": "b"}
        assert roots.item({"data": 1}, "a", 1, ())[1] == {"data": 1, "node_name": "a", "priority": 1}

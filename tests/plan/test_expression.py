"""The expression grammar: text to tree, tree to text, and where it points when it refuses."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.refusals import refusal

from torchpipe_py import ConfigError
from torchpipe_py.plan.expression import MAX_DEPTH, Call, parse_expression


def written(text: str) -> str:
    return "&".join(map(str, parse_expression(text)))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  A\n", "A"),
        ("_a.b-c9", "_a.b-c9"),
        ("A [ B , C ]", "A[B,C]"),
        ("S[( or ) B]", "S[(or)B]"),
    ],
)
def test_parses_valid_text(text: str, normal: str) -> None:
    """Normal text is in ``test_parsing_inverts_formatting``."""
    assert written(text) == normal
    assert written(normal) == normal


def test_parses_nested_backends_and_filters() -> None:
    (tree,) = parse_expression("S[A,(or)B[C]]")
    assert tree == Call("S", (Call("A"), Call("B", (Call("C"),), "or")))
    assert [call.name for call in tree.walk()] == ["S", "A", "B", "C"]


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("", "expected a backend name, found the end", 1),
        ("   ", "expected a backend name, found the end", 4),
        ("A[]", "expected a backend name, found ']'", 3),
        ("A[B", "expected ']', found the end", 4),
        ("A[B C]", "expected ']', found 'C'", 5),
        ("A]", "unexpected ']' after a complete expression", 2),
        ("A,B", "backends in turn are S[A,B]: unexpected ',' after a complete expression", 2),
        ("A&", "expected a backend name, found the end", 3),
        ("&A", "expected a backend name, found '&'", 1),
        ("A[B&C]", "expected ']', found '&'", 4),
        ("(or)A", "for a whole node write filter = …", 1),
        ("A[(or]", "expected ')', found ']'", 6),
        ("A[()B]", "expected a filter name, found ')'", 4),
        ("A[(x[y)B]", "expected ']', found ')'", 7),
        ("A[(or)]", "expected a backend name, found ']'", 7),
        ("1A", "unexpected '1'", 1),
        ("A [ $ ]", "unexpected '$'", 5),
    ],
)
def test_refuses_invalid_text_with_column(text: str, problem: str, column: int) -> None:
    assert refusal(text, parse_expression).endswith(f"{problem} at column {column} of {text!r}")


def test_refuses_too_deep_nesting() -> None:
    assert parse_expression("A[" * (MAX_DEPTH - 1) + "A" + "]" * (MAX_DEPTH - 1))
    with pytest.raises(ConfigError, match=f"nested deeper than {MAX_DEPTH} at column {2 * MAX_DEPTH + 1} "):
        parse_expression("A[" * MAX_DEPTH + "A" + "]" * MAX_DEPTH)
    with pytest.raises(ConfigError, match="nested deeper"):
        parse_expression("A[" * 100_000)


names = st.sampled_from(["A", "_b", "C9", "d.e-F"])
filters = st.none() | names | st.builds("{}[{}]".format, names, names)
arguments = st.recursive(
    st.builds(Call, names, st.just(()), filters),
    lambda inner: st.builds(Call, names, st.lists(inner, min_size=1, max_size=3).map(tuple), filters),
    max_leaves=4,
)
trees = st.builds(Call, names, st.lists(arguments, max_size=3).map(tuple))


@settings(max_examples=20)
@given(st.lists(trees, min_size=1, max_size=2))
def test_parsing_inverts_formatting(variants: list[Call]) -> None:
    text = "&".join(map(str, variants))
    assert parse_expression(text) == tuple(variants)
    assert written(text) == text


@given(st.text() | st.text(alphabet="aB_.-9[](),& \t\n$é"))
def test_random_text_raises_only_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_expression(text) == parse_expression(written(text))

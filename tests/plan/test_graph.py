"""Edges, order, roots, reachability."""

from __future__ import annotations

from typing import Any

import pytest

from torchpipe_py import ConfigError
from torchpipe_py.plan.config import load_config
from torchpipe_py.plan.graph import Graph, both_ways, build_graph


def graph(**successors: str) -> Graph:
    """A graph of nodes ``name="successor"``; an empty successor is none."""
    nodes = {name: {"next": after} if after else {} for name, after in successors.items()}
    return build_graph(load_config({"global": {}, **nodes}))


@pytest.mark.parametrize(
    ("successors", "order", "roots"),
    [
        ({"a": ""}, ("a",), ("a",)),
        ({"a": "b", "b": "c", "c": ""}, ("a", "b", "c"), ("a",)),
        ({"c": "", "b": "c", "a": "b"}, ("a", "b", "c"), ("a",)),
        ({"a": "", "b": ""}, ("b", "a"), ("a", "b")),
        ({"b": "c", "a": "", "c": ""}, ("a", "b", "c"), ("b", "a")),
    ],
)
def test_order_and_roots(successors: dict[str, str], order: tuple[str, ...], roots: tuple[str, ...]) -> None:
    made = graph(**successors)
    assert (made.order, made.roots) == (order, roots)


def test_upstream_is_everything_before() -> None:
    made = graph(c="", b="c", a="b", other="")
    assert made.upstream == {
        "a": frozenset(),
        "b": frozenset("a"),
        "c": frozenset("ab"),
        "other": frozenset(),
    }
    assert made.successors == {"a": ("b",), "b": ("c",), "c": (), "other": ()}


def test_both_ways_is_what_comes_before_and_behind() -> None:
    before = {"a": {"c"}, "b": {"a"}, "c": {"b"}, "behind": {"c"}, "self": {"self"}, "first": set()}
    assert both_ways(before) == {
        "a": ["b", "c"],
        "b": ["a", "c"],
        "c": ["a", "b"],
        "behind": [],
        "self": [],
        "first": [],
    }


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = {f"n{index}": {"next": f"n{index + 1}"} for index in range(3000)}
    made = build_graph(load_config({**nodes, "n3000": {}}))
    assert (made.order[0], made.order[-1], len(made.upstream["n3000"])) == ("n0", "n3000", 3000)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"a": {"next": "a"}}, "config: node 'a': key 'next': a cycle: a -> a"),
        (
            {"a": {"next": "b"}, "b": {"next": "c"}, "c": {"next": "b"}},
            "config: node 'c': key 'next': a cycle: b -> c -> b",
        ),
        ({"one": {"next": "on"}}, "config: node 'one': key 'next': no node 'on'; none is valid here"),
    ],
)
def test_refusals(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_graph(load_config(nodes))
    assert str(caught.value) == message

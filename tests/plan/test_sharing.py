"""Splitting a plan: sections for an engine process, the workers' part, and refused configurations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refusal

from torchpipe_py.backends.base import Backend
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.plan.sharing import Section, engine_part, sections, shared_files, shared_nodes, worker_part


def node(after: str = "", shared: bool = True, **keys: Any) -> dict[str, Any]:
    return {"backend": "Identity", "next": after, "shared": shared, **keys}


def own(after: str = "", **keys: Any) -> dict[str, Any]:
    """A node that each worker runs itself."""
    return node(after, shared=False, **keys)


def parts(config: dict[str, Any]) -> tuple[Pipeline, Pipeline]:
    """The plans of the workers and of the engine process."""
    plan = plan_pipeline(config)
    return worker_part(plan, lambda section, label: BackendPlan(Backend, f"remote {label}", {})), engine_part(plan)


TENSORS = {"backend": "S[DecodeMat,Mat2Tensor]"}


@pytest.mark.parametrize(
    ("config", "there"),
    [
        ({"mats": own("more", **TENSORS)}, "cpu"),
        ({"mats": own("more", device="cuda", **TENSORS)}, "cuda"),
        ({"mats": own("more", device="cpu", **TENSORS)}, "cpu"),
        ({"mats": own("between", **TENSORS), "between": own("more")}, "cpu"),
        ({"mats": own("jump", **TENSORS), "jump": own(backend="Jump", jump="more")}, "cpu"),
        ({"mats": own(**TENSORS), "mats.2": {"next": "more"}}, "cpu"),
    ],
)
def test_workers_keep_tensors_for_a_shared_node_on_the_cpu(config: dict[str, Any], there: str) -> None:
    workers, _ = parts({**config, "more": node(), "other": own(backend="Mat2Tensor")})
    found = {name: part.params["device_type"] for name, part in tensor_parts(workers)}
    assert (found["mats"], found["other"]) == (there, "")


def tensor_parts(pipeline: Pipeline) -> Iterator[tuple[str, BackendPlan]]:
    """Node and plan of each backend with a device for its Tensors."""
    for name, plan in pipeline.plans.items():
        for part in (part for backend in plan.backends for part in backend.parts()):
            if "device_type" in part.params:
                yield name, part


JOIN = "left[result:data],right[result:other]"
FORK = {"root": own("left,right"), "left": own("join"), "right": own("join"), "join": own(map=JOIN)}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"a": own("b"), "b": own()}, []),
        ({"a": node()}, ["a"]),
        ({"a": node("b"), "b": node("c"), "c": node()}, ["a b c"]),
        ({"a": node("b"), "b": own("c"), "c": node()}, ["a", "c"]),
        ({"a": own("b"), "b": node("c"), "c": node("d"), "d": own()}, ["b c"]),
        ({"a": node("b"), "b": node("c", filter="SWAP"), "c": node()}, ["a b c"]),
        ({"a": node("b"), "b": node("c", filter="run"), "c": node(filter="or")}, ["a b c"]),
        # What is decided for more than a node is decided in the worker.
        ({"a": node("b"), "b": node("c", filter="SerialSkip"), "c": node()}, ["a", "b", "c"]),
        ({"a": own("b"), "b": node("c", filter="or"), "c": node()}, ["b", "c"]),
        ({"a": node("b"), "b": node("c"), "c": node(filter="break")}, ["a", "b", "c"]),
        ({"a": node("b"), "b": node(map="a[result:data]")}, ["a", "b"]),
        # A request that ends inside of a section must end behind it as well.
        ({"a": node("b"), "b": node("c"), "c": own(filter="run")}, ["a", "b"]),
        ({"a": node("b"), "b": node("c"), "c": own("d"), "d": own(map="b[result:data]")}, ["a b"]),
        # Forks and joins are the worker's.
        ({"a": node("b,c"), "b": node(), "c": node()}, ["a", "b", "c"]),
        ({"a": own("b,d"), "b": node("c"), "c": node(), "d": own()}, ["b", "c"]),
        ({"a": own("b"), "b": node("c"), "c": node(), "other": own()}, ["b c"]),
        ({**FORK, "root": node("left,right")}, ["root"]),
        ({**FORK, "left": node("join"), "right": node("join")}, ["left", "right"]),
        ({**FORK, "join": node("last", map=JOIN), "last": node()}, ["join last"]),
        ({**FORK, "left": node("more"), "more": node("join")}, ["left", "more"]),
        # What is read besides goes back to the worker.
        ({"a": node("b"), "b": node("c"), "c": node("d"), "d": own(map="c[result:data],a[result:x]")}, ["a", "b", "c"]),
        ({"a": node("b"), "b": node("c"), "c": own("d"), "d": own(map="c[result:data],b[result:x]")}, ["a b"]),
        ({"a": node("b"), "b": node("c"), "c": own("d"), "d": own(map="b[data:x],c[result:data]")}, ["a", "b"]),
        # Two graphs.
        ({"a": node("b"), "b": node(), "c": node("d"), "d": node()}, ["a b", "c d"]),
    ],
)
def test_splits_shared_nodes_into_sections(config: dict[str, Any], found: list[str]) -> None:
    assert sections(plan_pipeline(config)) == [Section(tuple(one.split())) for one in found]


def test_a_worker_has_one_node_for_each_section() -> None:
    config = {
        "a": own("b"),
        "b": node("c", filter="run", instance_num=3, batching_timeout=5),
        "c": node("d"),
        "d": own("e"),
        "e": own(map="c[result:data],d[result:x]"),
    }
    worker, _ = parts({"global": {"max_inflight": 7}, **config})
    assert worker.graph.order == ("a", "b", "d", "e")
    assert worker.graph.readers == {"a": (), "b": ("e",), "d": ("e",), "e": ()}
    b = worker.plans["b"]
    assert (b.label, b.spec.next, b.spec.filter) == ("remote Identity -> Identity", ("d",), "run")
    assert (b.spec.instance_num, b.spec.batching_timeout) == ((1,), 0.0)
    assert worker.spec.max_inflight == 7


@pytest.mark.parametrize("backend", ["Jump", "MapReduce", "S[Identity,Jump]"])
def test_a_worker_jumps_to_a_shared_graph(backend: str) -> None:
    worker, engine = parts({"a": own(backend=backend, jump="b", **SPLIT[backend]), "b": node("c"), "c": node()})
    assert worker.graph.jumps == {"a": ("b",)}
    assert "a" in worker.graph.upstream["b"]
    assert worker.graph.roots == ("a", "b")
    assert engine.graph.successors == {"b": ("c",), "c": ()}


SPLIT: dict[str, dict[str, Any]] = {"Jump": {}, "MapReduce": {"split": "data"}, "S[Identity,Jump]": {}}


# -- what is refused ------------------------------------------------------------------------------------------------

JUMPS = {"a": node(backend="Jump", jump="b"), "b": own()}
AGAIN: dict[str, Any] = {"a": node("a.again"), "a.again": {"next": "a.more"}, "a.more": {}}
ALL: dict[str, Any] = {"a": {"next": "a.again"}, "a.again": {}, "b": {"backend": "Jump", "jump": "c"}, "c": {}}
CANNOT = "key 'shared': '{}' cannot be shared: {}"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (JUMPS, ["node 'a': " + CANNOT.format("a", "it runs another graph; share nodes of that graph instead")]),
        (AGAIN, ["node 'a': " + CANNOT.format("a", "its instances run a.again, a.more as well; leave the key out")]),
        (
            {"global": {"shared": True}, **ALL},
            [
                "global: " + CANNOT.format("a", "its instances run a.again as well; shared = false in [a] leaves it"),
                "global: " + CANNOT.format("b", "it runs another graph; shared = false in [b] leaves it out"),
            ],
        ),
    ],
)
def test_reports_all_sharing_errors_at_once(config: dict[str, Any], told: list[str]) -> None:
    lines = refusal(config).split("\n")
    assert len(lines) == len(told)
    assert all(line.startswith(f"config: {words}") for line, words in zip(lines, told, strict=True))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"a": own(), "b": node()}, ["b"]),
        ({"a": own(), "b": own()}, []),
        ({"global": {"shared": "1"}, "a": {}}, ["a"]),
        ({"global": {"shared": True}, "a": {"shared": False}}, []),
        ({"backend": "Identity", "shared": True}, ["node"]),
        ({"a": {"backend": "Unheard", "shared": True}}, ["a"]),
        ({"a": {"shared": "maybe"}, "b": node()}, []),
        ({}, []),
    ],
)
def test_lists_shared_nodes(config: dict[str, Any], expected: list[str]) -> None:
    """A supervisor reads them before importing anything; the workers report errors."""
    assert shared_nodes(config) == expected


def test_files_of_shared_nodes_are_those_that_exist(tmp_path: Path) -> None:
    """Other strings are passed over, even those that no path can have."""
    (tmp_path / "a.onnx").touch()
    named = {"model": str(tmp_path / "a.onnx"), "labels": "a\0b", "other": "a\ud800", "missing": "nowhere"}
    tables = {"one": {"backend": "Identity", "shared": True, **named}, "two": {"model": __file__}}
    assert list(shared_files(tables)) == [named["model"]]

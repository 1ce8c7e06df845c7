"""Random graphs with random maps and filters come to what ``reference.interpret`` says, dict for dict."""

from __future__ import annotations

from typing import Any

from conftest import Register
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from kit.reference import interpret
from kit.waits import outcome

from torchpipe_py import ItemBackend, Param, Status, pipe

Data = dict[str, Any]

STATUSES = ("Run", "Run", "Run", "Skip", "SerialSkip", "SubGraphSkip", "Break")


class Recorder(ItemBackend):
    """``result`` says which node saw what; notes the dict it saw. A node called ``no…`` gives none."""

    mark = Param(str, doc="the node's name")
    seen: dict[tuple[Any, str], Data] = {}  # noqa: RUF012 - shared on purpose

    def forward_item(self, item: Data) -> None:
        compute(self.mark, item, self.seen)


def compute(name: str, item: Data, seen: dict[tuple[Any, str], Data]) -> None:
    """What both sides run at a node."""
    assert (item["request"], name) not in seen, "a node ran twice"
    seen[item["request"], name] = item
    item[f"at_{name}"] = item.get("data")
    if not name.startswith("no"):
        item["result"] = f"{name}({item['data']})"


def swap_or_break(item: Data) -> str:
    """What ``swap`` does, for the reference."""
    if "result" not in item:
        return "Break"
    item["data"] = item.pop("result")
    return "Run"


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Nodes in topological order."""
    count = draw(st.integers(1, 8))
    names = [f"n{index}" for index in range(count)]
    for index in range(count):
        if draw(st.integers(0, 9)) == 9:
            names[index] = f"no{index}"
    nodes: dict[str, dict[str, Any]] = {}
    ancestors: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        earlier = names[:index]
        before = draw(st.lists(st.sampled_from(earlier), min_size=1, max_size=3, unique=True)) if earlier else []
        ancestors[name] = [node for node in earlier if node in before or any(node in ancestors[b] for b in before)]
        nodes[name] = {"next": [], "map": (), "filter": None}
        for node in before:
            nodes[node]["next"].append(name)
        if len(before) > 1 or (before and draw(st.integers(0, 3)) == 0):
            nodes[name]["map"] = draw(maps(ancestors[name]))
        nodes[name]["filter"] = draw(st.sampled_from([None, *STATUSES]))
    return nodes


@st.composite
def maps(draw: st.DrawFn, ancestors: list[str]) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    sources = draw(st.lists(st.sampled_from(["", *ancestors]), min_size=1, max_size=3))
    keys = st.sampled_from(["result", "data", "request", "extra", *(f"at_{name}" for name in ancestors)])
    new = st.sampled_from(["x", "y", "data", "error"])
    reads = [(source, tuple(draw(st.lists(st.tuples(keys, new), min_size=1, max_size=3)))) for source in sources]
    source, pairs = reads[-1]
    last = draw(st.sampled_from(["result", "data"]))
    reads[-1] = (source, (*pairs, ("request", "request"), (last, "data")))
    return tuple(reads)


def as_config(nodes: dict[str, dict[str, Any]], backend: str, filters: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, node in nodes.items():
        config[name] = {"backend": backend, "mark": name, "next": ",".join(node["next"])}
        if node["map"]:
            parts = [f"{source}[{','.join(f'{key}:{new}' for key, new in pairs)}]" for source, pairs in node["map"]]
            config[name]["map"] = ",".join(parts)
        if node["filter"]:
            config[name]["filter"] = filters[node["filter"]]
    return config


def as_reference(nodes: dict[str, dict[str, Any]], seen: dict[tuple[Any, str], Data]) -> dict[str, dict[str, Any]]:
    root = next(iter(nodes))
    plain: dict[str, dict[str, Any]] = {}
    for name, node in nodes.items():
        default = (lambda item: "Run") if name == root or node["map"] else swap_or_break
        constant = (lambda item, status=node["filter"]: status) if node["filter"] else default
        backend = lambda item, name=name: compute(name, item, seen)  # noqa: E731
        plain[name] = {**node, "filter": constant, "backend": backend}
    return plain


def sharing(seen: dict[tuple[Any, str], Data], request: Any) -> dict[str, str]:
    """For each node that ran, the first node that saw the very same dict."""
    mine = {name: item for (which, name), item in seen.items() if which == request}
    order = sorted(mine)
    return {name: next(other for other in order if mine[other] is mine[name]) for name in order}


def comparable(data: Data) -> Data:
    """Errors by whether they are there: their words differ."""
    return {
        key: "some error" if key == "error" or isinstance(value, Exception) else value for key, value in data.items()
    }


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(nodes=graphs(), context=st.booleans())
def test_random_graphs_behave_as_the_reference(
    register: Register, nodes: dict[str, dict[str, Any]], context: bool
) -> None:
    seen: dict[tuple[Any, str], Data] = {}
    backend = register(type("Recorder", (Recorder,), {"seen": seen, "__doc__": Recorder.__doc__}))
    config = as_config(nodes, backend, {status.name: status.name.lower() for status in Status})
    note(config)
    requests = [
        {"data": f"d{index}", "request": index, "extra": index, **({"context": [index]} if context else {})}
        for index in range(4)
    ]
    with pipe(config) as p:
        futures = [p.submit(data) for data in requests[:2]]
        for data in requests[2:]:
            p(data)
        for future in futures:
            outcome(future)
        assert p.stats()["inflight"] == 0
    expected_seen: dict[tuple[Any, str], Data] = {}
    root = next(iter(nodes))
    for index, data in enumerate(requests):
        plain = {"data": f"d{index}", "request": index, "extra": index, **({"context": [index]} if context else {})}
        expected, ends_early = interpret(as_reference(nodes, expected_seen), root, plain)
        assert comparable(data) in [comparable(outcome) for outcome in expected]
        if not ends_early:
            assert sharing(seen, index) == sharing(expected_seen, index)
    if not context:
        return
    for (index, _), item in seen.items():
        assert item.get("context") == [index]

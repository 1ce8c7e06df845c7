"""What a pipe must come to, one node after the other: an interpreter of the graph rules, for tests to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Data = dict[str, Any]
Nodes = Mapping[str, Mapping[str, Any]]
"""Per node, in topological order: next (names), map ((source or "", ((key, new), …)), …), filter, backend."""


class _Over(Exception):
    """A Break: its dict is the outcome."""


def interpret(nodes: Nodes, root: str, data: Data) -> tuple[list[Data], bool]:
    """What the caller's dict may be after the request, and whether it ended early.

    One dict, or one for each Break where branches race for it.
    """
    before = {name: [node for node in nodes if name in nodes[node]["next"]] for name in nodes}
    readers = {
        name: [r for r in nodes for s, _ in nodes[r]["map"] if name in ([s] if s else before[r])] for name in nodes
    }
    inputs: dict[str, Data] = {root: data}
    outputs: dict[str, tuple[str, Data]] = {}  # of every node passed: the node that hides it, or itself, and its dict
    ends: dict[str, Data] = {}

    def takers(members: list[str]) -> list[str]:
        after = dict.fromkeys(to for name in members for to in nodes[name]["next"] if to not in members)
        return [to for to in after if not nodes[to]["map"]]

    def run(name: str) -> None:
        item = inputs[name]
        status = nodes[name]["filter"](item)
        members = [name]
        if status == "Break":
            raise _Over(item)
        if status == "Run":
            item.pop("result", None)
            item.pop("error", None)
            nodes[name]["backend"](item)
            if "result" not in item:
                item.setdefault("error", name)
        elif status == "SerialSkip":
            while len(nodes[members[-1]]["next"]) == 1 and len(before[nodes[members[-1]]["next"][0]]) == 1:
                members.append(nodes[members[-1]]["next"][0])
        elif status == "SubGraphSkip":
            members += [n for n in nodes if n != name and n in _hidden(name, nodes, before)]
        outputs.update(dict.fromkeys(members, (name, item)))
        is_end = any(not nodes[member]["next"] for member in members)
        is_read = any(reader not in members for member in members for reader in readers[member])
        if is_end:
            ends[name] = item
        own_copy = is_read or is_end + len(takers(members)) > 1
        for to in takers(members):
            inputs[to] = dict(item) if own_copy else item

    def mapped(name: str) -> Data:
        new: Data = {}
        error = None
        for source, pairs in nodes[name]["map"]:
            for node in [source] if source else before[name]:
                output = outputs[node][1]
                new.update({"context": output["context"]} if "context" in output else {})
                for key, to in pairs:
                    new.update({to: output[key]} if key in output else {})
                    error = output.get("error", error) if to == "data" and key not in output else error
        if "data" not in new:
            raise _Over({**new, "error": error or new.get("error", name)})
        return new

    breaks: list[Data] = []
    for name in nodes:
        if name in outputs or not (name in inputs or (before[name] and all(node in outputs for node in before[name]))):
            continue
        try:
            if nodes[name]["map"]:
                inputs[name] = mapped(name)
            run(name)
        except _Over as over:
            breaks.append(over.args[0])
    last = [dict(end) for end in breaks] or [{key: value for end in ends.values() for key, value in end.items()}]
    data.pop("result", None)
    data.pop("error", None)
    outcomes = [{**data, **end} for end in last]
    for outcome in outcomes:
        outcome.update({} if "result" in outcome or "error" in outcome else {"error": "none"})
    return outcomes, bool(breaks)


def _hidden(name: str, nodes: Nodes, before: Mapping[str, list[str]]) -> set[str]:
    inside = {name}
    for other in nodes:
        if before[other] and all(node in inside for node in before[other]):
            inside.add(other)
    return inside

"""From specs to what runs: every name resolved and every value checked, before any thread starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchpipe_py import registry
from torchpipe_py.backends.base import REQUIRED, Backend, BackendConfig, Graphs, Param, Shared
from torchpipe_py.backends.basic import PythonClass, Sequential
from torchpipe_py.backends.jump import Jump
from torchpipe_py.backends.ranges import composed
from torchpipe_py.config import GLOBAL, NODE_KEYS, NodeSpec, PipelineSpec, Place, is_composed, split_variants
from torchpipe_py.errors import ConfigError, nearest
from torchpipe_py.expression import Call, parse_expression
from torchpipe_py.filters import Filter, run, swap
from torchpipe_py.graph import Graph, add_jumps, build_graph
from torchpipe_py.values import Value, to_str


@dataclass(frozen=True)
class BackendPlan:
    """A backend that can be built: class, typed parameters, children, and the filters in front of the children."""

    cls: type[Backend]
    label: str
    params: Mapping[str, Any]
    children: tuple[BackendPlan, ...] = ()
    filters: tuple[Filter | None, ...] = ()

    def jumps(self) -> Iterator[str]:
        """Roots of the graphs that it runs."""
        if issubclass(self.cls, Jump):
            yield self.params["jump"]
        for child in self.children:
            yield from child.jumps()

    def create(self, seat: BackendConfig) -> Backend:
        """A new instance, not set up yet; ``seat`` says which instance it is, and on which device."""
        config = replace(
            seat,
            params=self.params,
            children=tuple(child.create(seat) for child in self.children),
            filters=self.filters,
            label=self.label,
        )
        return self.cls(config)


@dataclass(frozen=True)
class NodePlan:
    """A node that can be started; ``backends`` has an entry for each part of an ``&`` composition.

    A logical node has the backends of the node whose instances it shares, and a filter of its own.
    """

    spec: NodeSpec
    backends: tuple[BackendPlan, ...]
    filter: Filter
    reaches_caller: bool = True

    @property
    def label(self) -> str:
        """The backend as it was written."""
        labels = [backend.label for backend in self.backends]
        return labels[0] if len(set(labels)) == 1 else "&".join(labels)

    def creators(self, graphs: Graphs) -> list[Callable[[int], Backend]]:
        """One function for each instance, from its index to its backend."""
        counts = self.spec.instance_num
        shared = [Shared() for _ in self.backends]

        def create(instance: int) -> Backend:
            seat = BackendConfig(
                label=self.label,
                device_id=self.spec.device_id,
                instance=instance,
                instance_num=max(counts),
                reaches_caller=self.reaches_caller,
                graphs=graphs,
            )
            parts = zip(self.backends, counts, shared, strict=True)
            return composed(
                seat, [plan.create(replace(seat, shared=own)) for plan, count, own in parts if instance < count]
            )

        return [create] * max(counts)


def plan_pipeline(spec: PipelineSpec) -> tuple[Graph, dict[str, NodePlan]]:
    """The graph, and a plan for each node; ``ConfigError`` for the first thing that is wrong."""
    graph = build_graph(spec)
    plans: dict[str, NodePlan] = {}
    used_defaults = set(NODE_KEYS)
    for name, node in spec.nodes.items():
        if node.owner == name:
            backends, used = _bind_node(node)
            logical = [one for one in spec.nodes.values() if one.owner == name]
            reaches_caller = any(_reaches_caller(one, spec, graph) for one in logical)
            plans[name] = NodePlan(node, backends, _entry_filter(node, graph), reaches_caller)
            used_defaults |= used
    for name, node in spec.nodes.items():
        if node.owner != name:
            plans[name] = replace(plans[node.owner], spec=node, filter=_entry_filter(node, graph))
    _check_defaults(spec, used_defaults)
    jumps = {name: tuple(dict.fromkeys(one for plan in plans[name].backends for one in plan.jumps())) for name in plans}
    return add_jumps(graph, spec, {name: targets for name, targets in jumps.items() if targets}), plans


def _bind_node(node: NodeSpec) -> tuple[tuple[BackendPlan, ...], set[str]]:
    """Its backends, and the keys they used."""
    backends, unused, used = [], None, set()
    for index, call in enumerate(node.calls):
        binder = _Binder(_variant(node, index))
        backends.append(binder.bind(_expand(call, binder.node), {}))
        left = binder.unused_keys()
        unused = left if unused is None else [key for key in unused if key in left]
        used |= binder.used
        if index == len(node.calls) - 1:
            binder.check_keys(unused)
    return tuple(backends), used


def _variant(node: NodeSpec, index: int) -> NodeSpec:
    """The node as one part of an ``&`` composition sees it."""
    count = len(node.calls)
    params = {
        key: split_variants(value, count)[index] if is_composed(key) else value for key, value in node.params.items()
    }
    return replace(node, params=params)


def _reaches_caller(node: NodeSpec, spec: PipelineSpec, graph: Graph) -> bool:
    always_run = [_always_runs(spec.nodes[name]) for name in node.next]
    return not (always_run and all(always_run)) or len(node.next) > 1 or bool(graph.readers[node.name])


def _expand(call: Call, node: NodeSpec, ancestors: tuple[str, ...] = ()) -> Call:
    """``A`` with a key ``"A::backend" = "B"`` is ``A[B]``; everything else stays as it is."""
    name = registry.canonical(call.name)
    key = next((key for key in _scoped(name, "backend") if key in node.params), None)
    if not call.args and key is not None and name not in ancestors:
        try:
            (inner,) = parse_expression(f"{call.name}[{to_str(node.params[key])}]")
            call = Call(call.name, inner.args, call.filter)
        except ValueError as error:
            raise node.at(key).error(error) from None
    return Call(call.name, tuple(_expand(arg, node, (*ancestors, name)) for arg in call.args), call.filter)


class _Binder:
    """Binds the calls of one node to classes and values, and remembers which keys were used."""

    def __init__(self, node: NodeSpec) -> None:
        self.node = node
        self.used: set[str] = set()
        self.known: set[str] = set()
        self.missing: list[ConfigError] = []

    def bind(self, call: Call, positions: Mapping[int, tuple[int, int]]) -> BackendPlan:
        """``positions`` maps a call's identity to (its position, count) among the calls of its name in the list."""
        position = positions.get(id(call), (0, 1))
        call = self._hoisted(call)
        cls = self._find(call)
        self._check_children(call, cls)
        params = self._params(call, cls, position)
        inner = _positions(call)
        return BackendPlan(
            cls=cls,
            label=str(Call(call.name, call.args)),
            params=params,
            children=tuple(self.bind(arg, inner) for arg in call.args),
            filters=tuple(self._filter(arg, cls) for arg in call.args),
        )

    def _hoisted(self, call: Call) -> Call:
        """``S[A,B,SyncTensor]`` is ``SyncTensor[S[A,B]]``."""
        if registry.canonical(call.name) != "Sequential" or len(call.args) < 2:
            return call
        *before, last = call.args
        if last.args or last.filter or not self._find(last).wraps_sequence:
            return call
        return Call(last.name, (Call(call.name, tuple(before)),), call.filter)

    def _find(self, call: Call) -> type[Backend]:
        found = registry.find_backend(call.name)
        if found is None:
            raise self.node.at("backend").error(
                f"no backend {call.name!r}; {nearest(call.name, registry.backend_names())}"
            )
        return found if issubclass(found, Backend) else PythonClass.of(found)

    def _check_children(self, call: Call, cls: type[Backend]) -> None:
        low, high = cls.children
        count = len(call.args)
        if count < low:
            raise self.node.at("backend").error(f"{call.name} needs a backend in brackets: {call.name}[…]")
        if high is not None and count > high:
            allowed = "no brackets" if high == 0 else f"at most {high} in its brackets"
            raise self.node.at("backend").error(f"{call.name} takes {allowed}, found {count}")

    def _params(self, call: Call, cls: type[Backend], position: tuple[int, int]) -> dict[str, Any]:
        scope = registry.canonical(call.name)
        if cls.any_params:
            return self._all_params(scope)
        params = {}
        self.used.update(_scoped(scope, "backend"))
        for name, param in cls.parameters().items():
            self.known |= {param.key, f"{scope}::{param.key}"}
            params[name] = self._value(scope, param, position)
        return params

    def _value(self, scope: str, param: Param, position: tuple[int, int]) -> Any:
        key = self._key(scope, param.key)
        if key is None:
            if param.default is REQUIRED:
                place = Place(self.node.place.source, self.node.name, param.key)
                self.missing.append(place.error(f"{scope} needs it: {param.doc}"))
            return param.default
        try:
            value = param.read(_at_position(self.node.params[key], position, scope))
            if param.file and value and not os.path.isfile(value):
                raise ValueError(f"no such file: {value} (working directory: {os.getcwd()})")
        except ValueError as error:
            raise self.node.at(key).error(error) from None
        return value

    def _key(self, scope: str, name: str) -> str | None:
        """The key that holds the parameter: the node's table before the top level, the scoped form before the bare."""
        present = [key for key in (*_scoped(scope, name), name) if key in self.node.params]
        self.used.update(present)
        own = [key for key in present if key in self.node.own]
        return next(iter(own or present), None)

    def _all_params(self, scope: str) -> dict[str, Value]:
        """Every bare key, and those of this scope over them without their scope."""
        prefix = f"{scope}::"
        bare = {key: value for key, value in self.node.params.items() if "::" not in key}
        scoped = {key: value for key, value in self.node.params.items() if key.startswith(prefix)}
        self.used |= bare.keys() | scoped.keys()
        return {**bare, **{key[len(prefix) :]: value for key, value in scoped.items()}}

    def _filter(self, call: Call, parent: type[Backend]) -> Filter | None:
        if call.filter is None:
            return None
        if not issubclass(parent, Sequential):
            raise self.node.at("backend").error(f"({call.filter}){call.name}: filters stand only inside Sequential")
        return _find_filter(call.filter, self.node, "backend")

    def unused_keys(self) -> list[str]:
        """Keys of the node's own table that nothing in it takes."""
        return [key for key in self.node.params if key in self.node.own and key not in self.used]

    def check_keys(self, unused: Iterable[str]) -> None:
        """Refuse a key that nothing takes, then a missing one: it may be the same."""
        for key in unused:
            if key in ("min", "max"):
                raise self.node.at(key).error("no backend of this node takes a batch range")
            names = {name for name in self.known if ("::" in name) == ("::" in key)}
            raise self.node.at(key).error(f"unknown key; {nearest(key, names | set(NODE_KEYS))}")
        if self.missing:
            raise self.missing[0]


def _scoped(scope: str, name: str) -> list[str]:
    """The scoped forms of a key, under the backend's own name and its aliases."""
    aliases = [alias for alias, target in registry.ALIASES.items() if target == scope]
    return [f"{one}::{name}" for one in (scope, *aliases)]


def _positions(call: Call) -> dict[int, tuple[int, int]]:
    names = [registry.canonical(arg.name) for arg in call.args]
    return {
        id(arg): (names[:index].count(names[index]), names.count(names[index])) for index, arg in enumerate(call.args)
    }


def _at_position(value: Value, position: tuple[int, int], scope: str) -> Value:
    """One of the values separated by ``|``, where the backend occurs several times in one list."""
    index, count = position
    if count == 1 or not isinstance(value, str) or "|" not in value:
        return value
    parts = [part.strip() for part in value.split("|")]
    if len(parts) != count:
        raise ValueError(f"{value!r} has {len(parts)} values, {scope} occurs {count} times")
    return parts[index]


def _find_filter(name: str, node: NodeSpec, key: str) -> Filter:
    found = registry.find_filter(name)
    if found is None:
        raise node.at(key).error(f"no filter {name!r}; {nearest(name, registry.filter_names())}")
    return found


def _entry_filter(node: NodeSpec, graph: Graph) -> Filter:
    if node.filter is not None:
        return _find_filter(node.filter, node, "filter")
    return run if node.map or not graph.predecessors[node.name] else swap


def _always_runs(node: NodeSpec) -> bool:
    """Whether the node runs on every result that comes to it."""
    return node.filter is None or node.filter.lower() in ("swap", "run")


def _check_defaults(spec: PipelineSpec, used: set[str]) -> None:
    """Refuse a key of the top level that no node takes."""
    for key in spec.defaults:
        if key not in used:
            names = {name for name in used if "::" not in name}
            raise ConfigError(
                f"{spec.place}: {GLOBAL}: key {key!r}: no node takes it; {nearest(key, {*names, 'max_inflight'})}"
            )

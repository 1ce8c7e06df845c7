"""Turns specs into a graph and a plan for the instances of each node, before any thread starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torchpipe_py.backends.base import BatchRange
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import Problems, logger
from torchpipe_py.filters import run, swap
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.binding import BackendPlan, Binder, FilterPlan, expand
from torchpipe_py.plan.config import (
    GLOBAL,
    ISOLATIONS,
    LOGICAL_KEYS,
    NODE_KEYS,
    TABLE_KEYS,
    NodeSpec,
    PipelineSpec,
    is_composed,
    read_config,
    split_variants,
)
from torchpipe_py.plan.fitting import refuse_misfits
from torchpipe_py.plan.folder import Model, models_of
from torchpipe_py.plan.graph import Graph, add_jumps, build_graph
from torchpipe_py.plan.isolation import decodes, isolated
from torchpipe_py.plan.reduction import with_reductions
from torchpipe_py.plan.unknown import instead_of
from torchpipe_py.registry import Registry, default

MOST_BY_CORES = 8
"""Maximum number of instances if it is derived from the number of cores."""


@dataclass(frozen=True)
class NodePlan:
    """A node that can be started; ``backends`` has an entry for each part of an ``&`` composition.

    A logical node has the backends of the node whose instances it shares, but its own filter. ``processes`` is the
    number of processes that run it. ``reloading`` is that of ``BackendConfig``.
    """

    spec: NodeSpec
    backends: tuple[BackendPlan, ...]
    filter: FilterPlan
    reaches_caller: bool = True
    processes: int = 1
    reloading: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def label(self) -> str:
        """The backend expression as it was written."""
        labels = [backend.label for backend in self.backends]
        return labels[0] if len(set(labels)) == 1 else "&".join(labels)

    def parts(self) -> Iterator[BackendPlan]:
        """The backends of an instance and all their descendants."""
        for backend in self.backends:
            yield from backend.parts()

    def batch_range(self) -> BatchRange | None:
        """The batch sizes that an instance accepts, or ``None`` if the configuration does not determine them."""
        limits = [backend.batch_range() for backend in self.backends]
        known = [each for each in limits if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(limits) else None

    def keys_read(self) -> frozenset[str] | None:
        """The keys of a request's dict that it may read, beside ``data`` and ``result``; ``None``: any."""
        of_parts = [keys for backend in self.backends for keys in backend.keys_read()]
        if self.filter.is_custom:
            return None
        mapped = [key for source in self.spec.map for key, _ in source.pairs]
        read = {self.spec.ordered_by, *mapped} - {"", TASK_DATA_KEY, TASK_RESULT_KEY}
        for keys in of_parts:
            if keys is None:
                return None
            read.update(keys)
        return frozenset(read)

    def requires_cuda(self) -> bool:
        """Whether it cannot be set up without a CUDA device."""
        return any(backend.requires_cuda() for backend in self.backends)

    def jumps(self) -> dict[str, list[str]]:
        """Roots of the graphs that it runs, each with the labels that a drawing gives the jumps to it."""
        labels: dict[str, list[str]] = {}
        for backend in self.backends:
            for root, label in backend.jumps():
                labels.setdefault(root, []).append(label)
        return labels


@dataclass(frozen=True)
class Pipeline:
    """Everything known about a pipeline before it runs; ``plans`` has the nodes in file order."""

    spec: PipelineSpec
    graph: Graph
    plans: Mapping[str, NodePlan]

    @property
    def models(self) -> tuple[Model, ...]:
        """Every root that a request may enter, with the name that clients use for it."""
        return models_of(self.spec, self.graph)

    @property
    def roots(self) -> dict[str, str]:
        """Maps each valid ``node_name`` of a request to the root that the request enters."""
        if not self.spec.parts:
            return {root: root for root in self.graph.roots}
        # In a folder, requests do not use node names.
        versions = {f"{model.name}/{model.version}": model.root for model in self.models}
        return versions | {model.name: model.root for model in self.models}

    @property
    def only_root(self) -> str | None:
        """The root that a request enters by default, or ``None`` if it must name one."""
        latest = {model.name: model.root for model in self.models}
        return next(iter(latest.values())) if len(latest) == 1 else None


def plan_pipeline(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline, registry: Registry = default, processes: int = 1
) -> Pipeline:
    """Plan a configuration: a path ending in ``.toml``, a flat dict (one node), a dict of dicts, a result of
    ``parse_folder``, or a plan.

    ``registry`` finds the backends, filters and postprocessors that it names. ``processes`` is the number of processes
    that will run it and share the cores.

    Raises ``ConfigError`` with all problems found; one mistake may hide another.
    """
    if isinstance(config, Pipeline):
        return config
    problems = Problems()
    spec = read_config(config, problems)
    bound = {}
    for name, node in spec.nodes.items():
        with problems.gathered():
            bound[name] = _bind_node(node, spec.nodes.get(node.owner, node), registry, problems)
    if spec.broken:
        # If a node could not be read, edges to it would be reported as wrong, too.
        problems.raise_all()
    with problems.gathered():
        graph = build_graph(spec)
    problems.raise_all()
    reaching = {
        owner: any(_reaches_caller(spec.nodes[name], spec, graph) for name in names)
        for owner, names in spec.logical().items()
    }
    spec = replace(
        spec, nodes={name: _counted(node, bound[node.owner][0], processes) for name, node in spec.nodes.items()}
    )
    plans = {}
    for name, node in spec.nodes.items():
        usual = FilterPlan(run if node.map or not graph.predecessors[name] else swap)
        plans[name] = NodePlan(node, bound[node.owner][0], bound[name][1] or usual, reaching[node.owner], processes)
    for start, part in {f"{key}/": part for key, part in spec.parts.items()}.items() or [("", spec)]:
        own = [binder for name, (_, _, binders) in bound.items() for binder in binders if name.startswith(start)]
        _check_defaults(part, own, problems)
    with problems.gathered():
        graph = with_jumps(graph, spec, plans)
    _check_shared(spec, plans, problems)
    _check_ordered(spec, plans, problems)
    backends = {name: plan.backends for name, plan in plans.items()}
    refuse_misfits(spec, graph, backends, problems)
    reducing = with_reductions(spec, graph, backends, problems)
    problems.raise_all()
    plans = {name: replace(plan, backends=reducing[name]) for name, plan in plans.items()}
    _warn_of_isolation(spec, plans)
    return Pipeline(spec, graph, plans)


def _counted(node: NodeSpec, backends: Sequence[BackendPlan], processes: int) -> NodeSpec:
    """The node with the default number of instances, unless it sets one.

    The default is 1, or the process's share of the cores, rounded up, if the node decodes images on the CPU or checks
    files.
    """
    if node.instance_num:
        return node
    is_work = any(decodes(backend) or any(part.cls.checks for part in backend.parts()) for backend in backends)
    by_cores = is_work and not any(backend.requires_cuda() for backend in backends)
    count = min(MOST_BY_CORES, -(-usable_cores() // processes)) if by_cores else 1
    return replace(node, instance_num=(count,) * len(backends))


def with_jumps(graph: Graph, spec: PipelineSpec, plans: Mapping[str, NodePlan]) -> Graph:
    """The graph of a spec, including the jumps of its backends."""
    jumps = {name: tuple(plan.jumps()) for name, plan in plans.items()}
    return add_jumps(graph, spec, {name: targets for name, targets in jumps.items() if targets})


_Bound = tuple[tuple[BackendPlan, ...], FilterPlan | None, list[Binder]]


def _bind_node(node: NodeSpec, owner: NodeSpec, registry: Registry, problems: Problems) -> _Bound:
    """A node's backends (empty for a logical node), its filter, and the binders that recorded which keys they used."""
    binders = [Binder(_variant(node, index), registry, problems) for index in range(len(node.calls))]
    filter_ = None
    with problems.gathered():
        if node.filter is not None:
            filter_ = binders[-1].filter(node.filter, "filter")
    backends = []
    for call, binder in zip(node.calls, binders, strict=True):
        if node.owner == node.name:
            expanded = expand(call, binder.node)
            binder.check_names(expanded)
            backends.append(isolated(binder.bind(expanded), binder))
            binder.check_combinations()
    used = set().union(*(binder.used for binder in binders))
    unused = [key for key in node.params if key in node.own and key not in used]
    ignored = {key: reason for binder in binders for key, reason in binder.ignored.items()}
    if node.owner == node.name:
        binders[-1].check_keys(unused, ignored)
        if node.device_id and "device_id" in node.own and not any(backend.uses_device() for backend in backends):
            reason = "no backend here works on a CUDA device (a custom Backend declares uses_device = True)"
            problems.warn_once(f"{node.at('device_id')}: nothing uses it: {reason}")
    else:
        binders[-1].check_keys([], {})
        own_keys = {*unused, *node.own.intersection(NODE_KEYS)} - {"backend", *LOGICAL_KEYS}
        for key in sorted(key for key in own_keys if _setting(node, key) != _setting(owner, key)):
            problems.add(node.at(key).error(f"shares the instances of {node.owner!r}, where this key belongs"))
    return tuple(backends), filter_, binders


def _setting(node: NodeSpec, key: str) -> Any:
    return getattr(node, key) if key in NODE_KEYS else node.params.get(key)


def _warn_of_isolation(spec: PipelineSpec, plans: Mapping[str, NodePlan]) -> None:
    """Warn if isolation is requested and nothing is isolated: a custom decoder may not declare that it decodes."""
    is_requested = any(node.decode_isolation != "none" for node in spec.nodes.values())
    if is_requested and not any(decodes(backend) for plan in plans.values() for backend in plan.backends):
        logger.warning(
            '%s: decode_isolation = "process" isolates nothing: no backend declares that it decodes (Isolation.MOVES)',
            spec.place,
        )


def _variant(node: NodeSpec, index: int) -> NodeSpec:
    """The node as one part of an ``&`` composition sees it."""
    count = len(node.calls)
    params = {
        key: split_variants(value, count)[index] if is_composed(key) else value for key, value in node.params.items()
    }
    return replace(node, params=params)


def _reaches_caller(node: NodeSpec, spec: PipelineSpec, graph: Graph) -> bool:
    always_run = [spec.nodes[name].always_runs for name in node.next]
    return not (always_run and all(always_run)) or len(node.next) > 1 or bool(graph.readers[node.name])


def _check_shared(spec: PipelineSpec, plans: Mapping[str, NodePlan], problems: Problems) -> None:
    """Refuse shared nodes that an engine process cannot run for a worker."""
    for name, aliases in spec.logical().items():
        if not spec.nodes[name].shared:
            continue
        place, roots = spec.nodes[name].at("shared"), ", ".join(f"[{root}]" for root in plans[name].jumps())
        others = ", ".join(alias for alias in aliases if alias != name)
        for reason, hint in (
            (
                others and f"its instances run {others} as well",
                f"leave the key out, or write separate nodes for {others}",
            ),
            (roots and "it runs another graph", f"share nodes of that graph instead, from {roots} on"),
        ):
            if reason:
                hint = f"shared = false in [{name}] leaves it out" if place.node == GLOBAL else hint
                problems.add(place.error(f"{name!r} cannot be shared: {reason}; {hint}"))


def _check_ordered(spec: PipelineSpec, plans: Mapping[str, NodePlan], problems: Problems) -> None:
    """Refuse nodes that cannot keep their requests in order, or cannot give them their state."""
    for name, node in spec.nodes.items():
        if node.owner != name:
            continue
        if not node.ordered_by:
            if "state_seconds" in node.own:
                problems.add(node.at("state_seconds").error('needs ordered_by, as in ordered_by = "camera"'))
            continue
        place, plan = node.at("ordered_by"), plans[name]
        if node.decode_isolation != ISOLATIONS[0] and any(map(decodes, plan.backends)):
            hint = "decode in a node before it"
            problems.add(place.error(f"decode_isolation runs its backend in a separate process: {hint}"))
        if plan.processes > 1 and not node.shared:
            hint = f"set shared = true in [{name}], or use --workers 1"
            problems.add(place.error(f"works in one process only, not in {plan.processes}: {hint}"))


def _check_defaults(spec: PipelineSpec, binders: Sequence[Binder], problems: Problems) -> None:
    """Refuse a top-level key that no node uses."""
    used = set(NODE_KEYS).union(*(binder.used for binder in binders))
    known = set().union(*(binder.known for binder in binders))
    ignored = {key: reason for binder in binders for key, reason in binder.ignored.items()}
    bare = {name for name in {*used, *known, "max_inflight"} - TABLE_KEYS if "::" not in name}
    for key in spec.defaults:
        place = replace(spec.place, node=GLOBAL, key=key)
        if key in ignored and key not in used:
            problems.warn_once(f"{place}: {ignored[key]}")
        elif key not in used:
            names = bare | known if "::" in key else bare
            problems.add(place.error(f"no node takes it; {instead_of(key, names)}"))

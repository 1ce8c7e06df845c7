"""What may change in a configuration: its shape and the settings of nodes, but never what it computes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import NodePlan, Pipeline, plan_pipeline
from torchpipe_py.plan.config import GLOBAL, NODE_KEYS, Tables
from torchpipe_py.plan.expression import Call
from torchpipe_py.plan.sharing import engine_part, sections, worker_part
from torchpipe_py.proc.backends import Remote

ROUTING = ("next", "map", "filter", "or")
KNOBS = ("instance_num", "max", "batching_timeout", "threads")
WRITTEN = "as written"

Knobs = tuple[tuple[str, str, float], ...]
"""Node, key and value of each setting that differs from the shape, sorted."""


@dataclass(frozen=True)
class Shape:
    """A configuration with other nodes but the same computation; ``units`` names what each node computes.

    ``twin`` names the shape with the same units, which is profiled in place of this one; perhaps itself.
    ``alternative`` names what changes its results, empty if nothing does.
    """

    name: str
    config: Tables
    pipeline: Pipeline
    units: Mapping[str, str]
    twin: str
    alternative: str = ""
    _planned: dict[int, Pipeline] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, name: str, config: Tables) -> Shape:
        """Check and plan a configuration. Raises ``ConfigError``."""
        pipeline = plan_pipeline(config)
        nodes = {each: plan for each, plan in pipeline.plans.items() if plan.spec.owner == each and not plan.jumps()}
        return cls(name, config, pipeline, {each: _unit(plan) for each, plan in nodes.items()}, name)

    def planned(self, processes: int) -> Pipeline:
        """The plan of each of so many processes, which share the cores. Raises ``ConfigError``."""
        if processes == 1:
            return self.pipeline
        if processes not in self._planned:
            self._planned[processes] = plan_pipeline(self.config, processes=processes)
        return self._planned[processes]

    @property
    def heads(self) -> list[str]:
        """The first node of each section that engine processes run."""
        return [section.head for section in sections(self.pipeline)]

    def is_free(self, node: str) -> bool:
        """Whether a node may be split or joined: no key concerns it as a whole, and no node reads or copies it."""
        plan, spec = self.pipeline.plans[node], self.pipeline.plans[node].spec
        is_whole = spec.shared or spec.ordered_by or plan.jumps() or len(spec.calls) > 1
        is_read = any(source.node == node for each in self.pipeline.plans.values() for source in each.spec.map)
        is_copied = len(self.pipeline.spec.logical()[spec.owner]) > 1
        return not (is_whole or is_read or is_copied or "|" in str(self.config[node]))

    def alone(self, node: str, **settings: Any) -> dict[str, dict[str, Any]]:
        """The configuration of one node, without its neighbours."""
        table = {key: value for key, value in self.config[node].items() if key not in ROUTING}
        # NOTE: a default that no node uses would be refused.
        known = {*NODE_KEYS, *_keys(self.pipeline.plans[node].backends)}
        defaults = self.config.get(GLOBAL, {}).items()
        shared = {key: value for key, value in defaults if key in known or key.partition("::")[2] in known}
        return {GLOBAL: shared, "node": {**table, **settings}}


@dataclass(frozen=True)
class Candidate:
    """Settings to evaluate: a shape, the numbers of workers and of engine processes, and settings of nodes."""

    shape: Shape
    workers: int = 1
    knobs: Knobs = ()
    engines: int = 0

    def with_knob(self, node: str, key: str, value: float) -> Candidate:
        """The candidate with another setting; without one that is the shape's own."""
        others = tuple(each for each in self.knobs if each[:2] != (node, key))
        without = replace(self, knobs=others)
        if without.value(node, key) == value:
            return without
        return replace(self, knobs=tuple(sorted([*others, (node, key, value)])))

    def value(self, node: str, key: str) -> float:
        """The value of a node's setting, from the candidate or else the shape."""
        for name, knob, value in self.knobs:
            if (name, knob) == (node, key):
                return value
        is_shared = self.engines and self.shape.pipeline.plans[node].spec.shared
        spec = self.shape.planned(self.engines if is_shared else self.workers).plans[node].spec
        if key == "instance_num":
            return max(spec.instance_num)
        if key == "batching_timeout":
            return spec.batching_timeout
        if key == "max":
            return (self.shape.pipeline.plans[node].batch_range() or (1, 1))[1]
        return float(spec.params.get(key, 0))  # type: ignore[arg-type]

    def config(self) -> Tables:
        """The configuration with all settings."""
        tables = copied(self.shape.config, self.shape.config.source)
        for node, key, value in self.knobs:
            tables[node][key] = int(value) if value == int(value) else value
        return tables

    def plans(self) -> tuple[list[Pipeline], list[Pipeline]]:
        """The plan of each worker, and of each engine process. Raises ``ConfigError``."""
        plan = plan_pipeline(self.config(), processes=self.workers)
        if not self.engines:
            return [plan] * self.workers, []
        plan = worker_part(plan, lambda section, label: BackendPlan(Remote, label, {}))
        shared = engine_part(plan_pipeline(self.config(), processes=self.engines))
        return [plan] * self.workers, [shared] * self.engines

    @property
    def setting(self) -> tuple[str, int, Knobs, int]:
        """What names it, where the shapes are known."""
        return self.shape.name, self.workers, self.knobs, self.engines

    @property
    def place(self) -> str:
        """What stays while settings of nodes are searched: shape and processes."""
        return f"{self.shape.name}, {self.processes}"

    @property
    def processes(self) -> str:
        """The options of ``torchpipe-serve``."""
        return f"--workers {self.workers}" + (f" --engines {self.engines}" if self.engines else "")

    def __str__(self) -> str:
        settings = [f"{node}.{key} {value:g}" for node, key, value in self.knobs]
        return ", ".join([self.place, *settings])


def _unit(plan: NodePlan) -> str:
    spec = plan.spec
    params = {key: value for key, value in spec.params.items() if key not in KNOBS}
    calls = "&".join(map(str, spec.calls))
    return json.dumps([calls, spec.device_id, spec.decode_isolation, params], sort_keys=True, default=str)


def knobs_of(plan: NodePlan, has_gpu: bool = False) -> tuple[str, ...]:
    """The settings of a node that may change; none of an ``&`` composition, not the batches of an engine."""
    values = [plan.spec.params.get(key) for key in KNOBS]
    if plan.jumps() or len(plan.spec.calls) > 1 or any("|" in str(value) for value in values):
        return ()
    declared = _keys(plan.backends)
    keys = ["instance_num"]
    keys += ["threads"] if "threads" in declared and not has_gpu else []
    if has_batches(plan) and not ("model::cache" in declared and has_gpu):
        keys.append("max")
    high = (plan.batch_range() or (1, 1))[1]
    return (*keys, "batching_timeout") if high > 1 or "max" in keys else tuple(keys)


def has_batches(plan: NodePlan) -> bool:
    """Whether a node has a model or decodes on the GPU."""
    return "max" in _keys(plan.backends)


def _keys(backends: Iterable[BackendPlan]) -> set[str]:
    """The keys of all parameters of the backends and of those inside them."""
    parts = [part for backend in backends for part in backend.parts()]
    return {param.key for part in parts for param in part.cls.parameters().values()}


# --- shapes


def shapes_of(config: Tables) -> list[Shape]:
    """The shapes: as written, with neighbours joined, with decoder and model apart; each with and without sharing."""
    written = Shape.of(WRITTEN, config)
    found = [written]
    for name, change in (("joined", _joined), ("apart", _apart)):
        tables = change(written)
        try:
            shape = Shape.of(name, tables)
        except ConfigError:
            continue
        if len(tables) != len(config) and _computes(shape) == _computes(written):
            found.append(shape)
    return found + [twin for shape in found if (twin := twin_of(shape)) is not None]


def twin_of(shape: Shape) -> Shape | None:
    """The shape with nodes of models and of GPU decoders shared or, if it has shared nodes, without; None if alike."""
    tables, is_shared = copied(shape.config, shape.config.source), bool(shape.heads)
    for name, table in tables.items():
        table.pop("shared", None)
        if name in shape.units and not is_shared and has_batches(shape.pipeline.plans[name]):
            table["shared"] = True
    try:
        twin = Shape.of(f"{shape.name}, {'not ' * is_shared}shared", tables)
    except ConfigError:
        return None
    is_other = bool(twin.heads) != is_shared
    return replace(twin, twin=shape.name, alternative=shape.alternative) if is_other else None


def _computes(shape: Shape) -> list[tuple[type, str]]:
    """The computing backends with their parameters, in the order of the nodes."""
    plans = [shape.pipeline.plans[name] for name in shape.pipeline.graph.order]
    parts = [
        part for plan in plans for backend in plan.backends for part in backend.parts() if not part.cls.is_sequence
    ]
    free = {"max", "threads"}
    return [(part.cls, str({k: v for k, v in part.params.items() if k not in free})) for part in parts]


def _joined(shape: Shape) -> Tables:
    """The tables with each pair of exclusive neighbours as one node."""
    tables, graph = copied(shape.config, shape.config.source), shape.pipeline.graph
    parts = {name: _parts(plan.spec.calls[0]) for name, plan in shape.pipeline.plans.items()}
    for name in reversed(graph.order):
        after = graph.successors[name]
        if len(after) != 1 or len(graph.predecessors[after[0]]) != 1 or not all(map(shape.is_free, (name, after[0]))):
            continue
        one, two = (shape.pipeline.plans[each] for each in (name, after[0]))
        first, second = tables[name], tables[after[0]]
        # NOTE: for one pair that means other values by a key, `_computes` would refuse the whole shape.
        both = (set(first) & set(second) | _keys(one.backends) & _keys(two.backends)) - {*KNOBS, *ROUTING, "backend"}
        is_other = one.spec.device_id != two.spec.device_id or any(first.get(key) != second.get(key) for key in both)
        if two.spec.map or two.spec.filter or is_other:
            continue
        parts[name] = [*parts[name], *parts[after[0]]]
        del tables[name]["next"]
        tables[name] |= {**tables.pop(after[0]), "backend": _listed(parts[name])}
        tables[name].pop("instance_num", None)
    return tables


def _listed(parts: Sequence[object]) -> str:
    return f"S[{','.join(map(str, parts))}]" if len(parts) > 1 else str(parts[0])


def _parts(call: Call) -> Sequence[Call]:
    """The backends that an expression runs one after the other."""
    is_list = call.name in ("S", "Sequential") and not any(arg.filter for arg in call.args)
    return call.args if is_list else [call]


def _apart(shape: Shape) -> Tables:
    """The tables with each node that prepares images and runs a model as two nodes."""
    tables = copied({}, shape.config.source)
    for name, table in shape.config.items():
        tables[name] = dict(table)
        place = _before_batches(shape, name) if name in shape.pipeline.plans else 0
        if not place:
            continue
        plan = shape.pipeline.plans[name]
        args, head = plan.spec.calls[0].args, plan.backends[0].children[:place]
        scopes = {call.name for arg in args[:place] for call in arg.walk()}
        keys, tail = {*_keys(head), "map", "filter", "or", "decode_isolation"}, _keys(plan.backends[0].children[place:])
        first, second = {"backend": _listed(args[:place])}, dict[str, Any]()
        for key, value in table.items():
            scope, _, rest = key.partition("::")
            is_first = (rest if scope in scopes else key) in keys
            if is_first:
                first[key] = value
            if not is_first or key in tail:
                second[key] = value
        first |= {key: table[key] for key in ("device_id",) if key in table} | {"next": f"{name}_model"}
        second.pop("instance_num", None)
        tables[name] = first
        tables[first["next"]] = {**second, "backend": _listed(args[place:])}
    return tables


def _before_batches(shape: Shape, name: str) -> int:
    """The number of calls in a node's list before the first backend that batches; 0 if the node must stay whole."""
    plan = shape.pipeline.plans[name]
    args, backend = plan.spec.calls[0].args, plan.backends[0]
    is_list = backend.cls.is_sequence and len(backend.children) == len(args) and not any(arg.filter for arg in args)
    if not is_list or not shape.is_free(name) or any(part.cls.any_params for part in backend.parts()):
        return 0
    return next((at for at, child in enumerate(backend.children) if "max" in _keys([child])), 0)


def copied(config: Mapping[str, Mapping[str, Any]], source: str) -> Tables:
    """A copy of the tables to change; messages name them ``source``."""
    tables = Tables({name: dict(table) for name, table in config.items()})
    tables.source = source
    return tables

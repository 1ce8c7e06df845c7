"""Changes of a configuration: processes, its shape and settings of nodes, but never what it computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.errors import ConfigError
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.build import MOST_BY_CORES, NodePlan, Pipeline, plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.plan.expression import Call
from torchpipe_py.plan.sharing import sections, usual_engines

ROUTING = ("next", "map", "filter", "or")
KNOBS = ("instance_num", "max", "batching_timeout", "threads")
WRITTEN = "as written"

ENGINES = (1, 2)
"""Numbers of engine processes for all workers."""

BATCHES, TIMEOUTS_MS = (1, 8, 32), (0, 2, 5)

MOST_INSTANCES_ON_GPU = 4
"""Instances of a model on a GPU: each takes its own memory, and more do not compute faster."""

LEAST_BUSY_SHARE = 0.05
"""A node that computes less than this share of the busiest one is left as it is: twice as fast, it would gain less
than what measurements vary by."""


@dataclass(frozen=True)
class Candidate:
    """A configuration, and the numbers of workers and of engine processes that serve it.

    ``shape`` names how its nodes differ from the user's file, ``settings`` are those that differ from the shape by node
    and key. ``alternative`` names what changes its results, empty if nothing does. Plans are made when they are needed,
    and may raise ``ConfigError``.
    """

    shape: str
    config: Tables
    workers: int = 1
    engines: int = 0
    settings: tuple[tuple[str, float], ...] = ()
    alternative: str = ""

    @cached_property
    def pipeline(self) -> Pipeline:
        """The plan of each worker; the workers share the cores."""
        return plan_pipeline(self.config, processes=self.workers)

    @property
    def nodes(self) -> dict[str, NodePlan]:
        """The plans of the nodes that the file names and that compute something themselves."""
        plans = self.pipeline.plans.items()
        return {name: plan for name, plan in plans if plan.spec.owner == name and not plan.jumps()}

    @cached_property
    def heads(self) -> list[str]:
        """The first node of each section that engine processes run."""
        return [section.head for section in sections(self.pipeline)]

    def processes_of(self, node: str) -> int:
        """How many processes run a node: the engine processes if it is shared, else the workers."""
        return self.engines if self.engines and self.pipeline.plans[node].spec.shared else self.workers

    def value(self, node: str, key: str) -> float:
        """The value of a node's setting."""
        plan = self.pipeline.plans[node]
        if key == "instance_num":
            return max(plan.spec.instance_num)
        if key == "max":
            return (plan.batch_range() or (1, 1))[1]
        return plan.spec.batching_timeout if key == "batching_timeout" else float(plan.spec.params.get(key, 0))  # type: ignore[arg-type]

    def changed(self, node: str, key: str, value: float) -> Candidate:
        """The candidate with another setting; itself if it has that value."""
        if self.value(node, key) == value:
            return self
        tables = copied(self.config, self.config.source)
        tables[node][key] = int(value) if value == int(value) else value
        return replace(self, config=tables, settings=tuple({**dict(self.settings), f"{node}.{key}": value}.items()))

    def is_free(self, node: str) -> bool:
        """Whether a node may be split or joined: no key concerns it as a whole, and no node reads or copies it."""
        plan, spec = self.pipeline.plans[node], self.pipeline.plans[node].spec
        is_whole = spec.shared or spec.ordered_by or plan.jumps() or len(spec.calls) > 1
        is_read = any(source.node == node for each in self.pipeline.plans.values() for source in each.spec.map)
        is_copied = len(self.pipeline.spec.logical()[spec.owner]) > 1
        return not (is_whole or is_read or is_copied or "|" in str(self.config[node]))

    @property
    def processes(self) -> str:
        """The options of ``torchpipe-serve``."""
        return f"--workers {self.workers}" + (f" --engines {self.engines}" if self.engines else "")

    def __str__(self) -> str:
        return ", ".join([self.shape, self.processes, *(f"{key} = {value:g}" for key, value in self.settings)])


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


def unkept_engines(pipeline: Pipeline) -> list[str]:
    """The nodes that build an engine at each start, since no file keeps it."""
    return [name for name, plan in pipeline.plans.items() if any(map(_builds_each_time, plan.parts()))]


def _builds_each_time(part: BackendPlan) -> bool:
    """Whether a backend builds an engine at each start."""
    caches = [attribute for attribute, param in part.cls.parameters().items() if param.key == "model::cache"]
    return any(not part.params[each] for each in caches) and ModelFile(part.params["model"]).is_onnx


def has_batches(plan: NodePlan) -> bool:
    """Whether a node has a model or decodes on the GPU."""
    return "max" in _keys(plan.backends)


def _keys(backends: Iterable[BackendPlan]) -> set[str]:
    """The keys of all parameters of the backends and of those inside them."""
    parts = [part for backend in backends for part in backend.parts()]
    return {param.key for part in parts for param in part.cls.parameters().values()}


# --- candidates


def as_served(written: Candidate, cores: int, uses_gpu: bool) -> Candidate:
    """The file as ``torchpipe-serve`` runs it without options for processes."""
    workers = 1 if uses_gpu and not written.heads else min(cores, MOST_BY_CORES)
    engines = usual_engines(written.config) if written.heads and workers > 1 else 0
    return replace(written, workers=workers, engines=min(engines, workers))


def process_candidates(shapes: Sequence[Candidate], cores: int) -> list[Candidate]:
    """Each shape with several numbers of workers and, if it shares nodes, of engine processes; the likely ones first.

    Nodes of several workers get no more instances together than there are cores.
    """
    found = []
    half = -(-cores // 2)
    for workers in sorted({half, -(-cores // 4), cores, 1}, key=lambda each: (abs(math.log(each / half)), each)):
        for shape in shapes:
            # With one worker, ``shared`` changes nothing.
            engines = [count for count in ENGINES if count <= workers] if shape.heads and workers > 1 else [0]
            if engines != [0] or shape.shape == WRITTEN or not shape.heads:
                found += [_within_cores(replace(shape, workers=workers, engines=count), cores) for count in engines]
    return found


def _within_cores(candidate: Candidate, cores: int) -> Candidate:
    with suppress(ConfigError):  # building it reports why
        for node, plan in candidate.pipeline.plans.items() if candidate.workers > 1 else ():
            most = 1 if has_batches(plan) else -(-cores // candidate.workers)
            is_in_worker = not (candidate.engines and plan.spec.shared)
            if is_in_worker and "instance_num" in knobs_of(plan):
                candidate = candidate.changed(node, "instance_num", min(most, candidate.value(node, "instance_num")))
    return candidate


def setting_candidates(best: Candidate, busy: Mapping[str, float], cores: int, uses_gpu: bool) -> list[Candidate]:
    """``best`` with one setting of one node changed, first of those that compute most: ``busy`` is the time of each."""
    found = []
    for node in sorted(best.nodes.keys() & busy.keys(), key=lambda name: -busy[name]):
        if busy[node] < LEAST_BUSY_SHARE * max(busy.values()):
            continue
        plan, instances = best.nodes[node], best.value(node, "instance_num")
        threads = best.value(node, "threads") or max(1, cores // (best.processes_of(node) * int(instances)))
        most = min(cores, MOST_INSTANCES_ON_GPU) if uses_gpu and has_batches(plan) else cores
        choices: dict[str, Sequence[float]] = {
            "max": BATCHES,
            "instance_num": [each for each in (instances // 2, instances * 2) if 1 <= each <= most],
            "threads": [each for each in (1, cores) if each != threads],
            "batching_timeout": TIMEOUTS_MS if best.value(node, "max") > 1 else (),
        }
        is_new = {key: key == "instance_num" or f"{node}.{key}" not in dict(best.settings) for key in choices}
        keys = [key for key in knobs_of(plan, uses_gpu) if is_new[key]]  # others had all values
        changes = [best.changed(node, key, value) for key in keys for value in choices[key]]
        found += [change for change in changes if change is not best]
    return found


# --- shapes


def shapes_of(config: Tables) -> list[Candidate]:
    """The shapes: as written, with neighbours joined, with decoder and model apart; each with and without sharing."""
    written = Candidate(WRITTEN, config)
    found = [written]
    for name, change in (("joined", _joined), ("apart", _apart)):
        shape = Candidate(name, change(written))
        if len(shape.config) != len(config) and is_valid(shape) and _computes(shape) == _computes(written):
            found.append(shape)
    return found + [other for shape in found if (other := with_other_sharing(shape)) is not None]


def with_other_sharing(shape: Candidate) -> Candidate | None:
    """The shape with the nodes of models and of GPU decoders shared or, if it shares nodes, with none shared.

    None if that changes nothing.
    """
    tables, is_shared = copied(shape.config, shape.config.source), bool(shape.heads)
    for name, table in tables.items():
        table.pop("shared", None)
        if not is_shared and name in shape.nodes and has_batches(shape.nodes[name]):
            table["shared"] = True
    other = replace(shape, shape=f"{shape.shape}, {'not ' * is_shared}shared", config=tables)
    return other if is_valid(other) and bool(other.heads) != is_shared else None


def is_valid(shape: Candidate) -> bool:
    """Whether a configuration can be planned."""
    try:
        return bool(shape.pipeline)
    except ConfigError:
        return False


def _computes(shape: Candidate) -> list[tuple[type, str]]:
    """The computing backends with their parameters, in the order of the nodes."""
    plans = [shape.pipeline.plans[name] for name in shape.pipeline.graph.order]
    parts = [part for plan in plans for part in plan.parts() if not part.cls.is_sequence]
    free = {"max", "threads"}
    return [(part.cls, str({k: v for k, v in part.params.items() if k not in free})) for part in parts]


def _joined(shape: Candidate) -> Tables:
    """The tables with each pair of exclusive neighbours as one node."""
    tables, graph = copied(shape.config, shape.config.source), shape.pipeline.graph
    parts = {name: _parts(plan.spec.calls[0]) for name, plan in shape.pipeline.plans.items()}
    for name in reversed(graph.order):
        after = graph.successors[name]
        if len(after) != 1 or len(graph.predecessors[after[0]]) != 1 or not all(map(shape.is_free, (name, after[0]))):
            continue
        one, two = (shape.pipeline.plans[each] for each in (name, after[0]))
        first, second = tables[name], tables[after[0]]
        # For one pair that means other values by a key, `_computes` would refuse the whole shape.
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


def _apart(shape: Candidate) -> Tables:
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


def _before_batches(shape: Candidate, name: str) -> int:
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

"""Checks that each backend accepts the output of the one before it, as far as classes, parameters and model files
declare it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchpipe_py.backends.base import Backend
from torchpipe_py.backends.signature import ENCODED, MAT, TENSOR, ImageSpec
from torchpipe_py.errors import ConfigError, Problems, counted, quoted
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.config import DEFAULT_FILTER, NodeSpec, PipelineSpec, Place
from torchpipe_py.plan.graph import Graph
from torchpipe_py.registry import BUILT_IN_BACKENDS


@dataclass(frozen=True)
class Fact:
    """A known number of an image, the key that sets it, and the beginning of messages about it."""

    value: int
    place: Place
    shown: str


@dataclass(frozen=True)
class Known:
    """Known properties of data between two backends: its kind, and the backend and node that produced it.

    The fields are empty if unknown. ``facts`` describes an image, by field names of ``ImageSpec``. ``unset_order`` is
    the place where the channel order could be set, if it is not set and therefore BGR. ``is_normalised``: an image had
    ``mean`` and ``std`` applied.
    """

    kind: str = ""
    giver: str = ""
    node: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    unset_order: Place | None = None
    is_normalised: bool = False


UNKNOWN = Known()


def refuse_misfits(
    spec: PipelineSpec, graph: Graph, backends: Mapping[str, Sequence[BackendPlan]], problems: Problems
) -> None:
    """Refuse a backend that can never accept its input.

    Output of a map, of a custom backend, or after a filter that may skip is not known and is not checked.
    """
    results: dict[str, Known] = {}
    for name in graph.order:
        node, before = spec.nodes[name], graph.predecessors[name]
        comes_along = len(before) == 1 and not node.map and node.has_filter(DEFAULT_FILTER)
        walk = _Walk(node, spec.nodes[node.owner])
        known = walk.any_of(backends[name], results[before[0]] if comes_along else UNKNOWN)
        for error in walk.errors:
            problems.add(error)
        for place in walk.unset_order:
            problems.warn_once(f"{place}: {_UNSET_ORDER}")
        # NOTE: a node that is skipped, by its own filter or one upstream, passes its input on unchanged.
        is_certain = all(spec.nodes[each].always_runs for each in (name, *graph.upstream[name]))
        results[name] = known if is_certain else UNKNOWN
    for end in graph.order:
        kind = results[end].kind if not graph.successors[end] else ""
        for root in graph.entered if kind in _NAMES else ():
            node, first = spec.nodes[root], _first(backends[root][0])
            is_of_file = node.place.source == spec.nodes[end].place.source
            if is_of_file and root not in graph.reached_from[end] and (first.is_model or first.takes == kind):
                after, last = (quoted(each.place.node) for each in (node, spec.nodes[end]))
                problems.warn_once(
                    f"{node.place}: nothing comes before it, and {last} ends with {kind}; "
                    f"if one should follow the other, {last} needs next = {after}"
                )


def _first(plan: BackendPlan) -> type[Backend]:
    """The backend that receives the input of a node."""
    while plan.children and not plan.cls.takes:
        plan = plan.children[0]
    return plan.cls


_UNSET_ORDER = (
    "DecodeMat outputs BGR, and the model cannot tell; one that was trained on RGB, like nearly all in PyTorch, "
    'needs color = "rgb" here; set color = "bgr" if BGR is right'
)


class _Walk:
    """Follows data through the backends of one node and collects ``errors``.

    ``unset_order`` has the places where the channel order of a model's input could be set but is not.
    """

    def __init__(self, node: NodeSpec, owner: NodeSpec) -> None:
        self._node, self._owner = node, owner
        self.errors: list[ConfigError] = []
        self.unset_order: list[Place] = []

    def any_of(self, plans: Sequence[BackendPlan], known: Known) -> Known:
        """Follow data through any one of the plans; it is refused only if all of them refuse it."""
        before, results, misfits = self.errors, [], []
        for plan in plans:
            self.errors = []
            results.append(self.through(plan, known))
            misfits.append(self.errors)
        self.errors = [*before, *misfits[0]] if all(misfits) else before
        if len({result.kind for result in results}) > 1:
            return UNKNOWN
        first, *others = results
        facts = {
            name: fact
            for name, fact in first.facts.items()
            if all(name in other.facts and other.facts[name].value == fact.value for other in others)
        }
        return replace(
            first,
            facts=facts,
            unset_order=first.unset_order if len({each.unset_order for each in results}) == 1 else None,
        )

    def through(self, plan: BackendPlan, known: Known) -> Known:
        cls = plan.cls
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
            return UNKNOWN  # a custom backend may override the forward that it inherits
        if cls.is_sequence:
            for child, filter_ in zip(plan.children, plan.filters, strict=True):
                known = self.through(child, known if filter_ is None else UNKNOWN)
                known = known if filter_ is None else UNKNOWN
            # NOTE: a filter may end the sequence with the result of any backend before it.
            return UNKNOWN if any(plan.filters) else known
        if plan.children:
            return self.any_of(plan.children, known)
        if cls.takes and known.kind not in ("", cls.takes):
            self._refuse_kind(plan, known)
        elif known.facts or known.kind in _NAMES:
            sizes = {name: fact.value for name, fact in known.facts.items()}
            image = ImageSpec(known.kind, **sizes, is_normalised=known.is_normalised)
            for name, why in cls.image_misfits(plan.params, image).items():
                if name == "kind":
                    giver, place = self._giver(known)
                    self.errors.append(place.error(f"{giver} before {plan.label} gives {known.kind}, {why}"))
                else:
                    fact = known.facts[name]
                    self.errors.append(fact.place.error(f"{fact.shown}, {why}"))
        if cls.is_model and known.unset_order is not None:
            self.unset_order.append(known.unset_order)
        if cls.passes_on:
            return known
        facts, order = self._facts(plan, known), self._unset_order(plan, known)
        is_normalised = cls.normalises or (known.is_normalised and {cls.takes, cls.gives} <= _NAMES.keys())
        return Known(cls.gives, plan.label, self._node.name, facts, order, is_normalised)

    def _unset_order(self, plan: BackendPlan, known: Known) -> Place | None:
        """The place to set the channel order, if the backend outputs BGR only by default."""
        # NOTE: ``color`` of a custom class may have nothing to do with an image.
        if plan.cls.gives in _NAMES and "color" in plan.params:
            return self._place(plan, "color") if plan.params["color"] == "bgr" and "color" not in plan.keys else None
        return known.unset_order if {plan.cls.takes, plan.cls.gives} <= _NAMES.keys() else None

    def _facts(self, plan: BackendPlan, known: Known) -> dict[str, Fact]:
        """Known properties of the image that the backend outputs."""
        cls = plan.cls
        facts = {name: fact for name, fact in known.facts.items() if cls.keeps_sides}
        for side, name in zip(("height", "width"), cls.sides, strict=False):
            facts[side] = Fact(plan.params[name], self._place(plan, name), str(plan.params[name]))
        if cls.gives not in _NAMES:
            return facts
        if "color" in plan.params:
            color = plan.params["color"]
            channels = 1 if color == "gray" else 3
            default = "" if "color" in plan.keys else ", the default,"
            shown = f"{color}{default} is {counted(channels, 'channel')}"
            facts["channels"] = Fact(channels, self._place(plan, "color"), shown)
        elif cls.takes in _NAMES and "channels" in known.facts:
            facts["channels"] = known.facts["channels"]
        return facts

    def _place(self, plan: BackendPlan, param: str) -> Place:
        """The place where the parameter is set, or could be set."""
        if param in plan.keys:
            return self._owner.at(plan.keys[param])
        return replace(self._owner.place, key=plan.cls.parameters()[param].key)

    def _giver(self, known: Known) -> tuple[str, Place]:
        """The backend that produced the data, as worded in messages, and the place of an error about it."""
        is_inside = known.node == self._node.name
        giver = known.giver if is_inside else f"{known.giver} of {known.node!r}"
        return giver, self._owner.at("backend") if is_inside else replace(self._node.place, key="backend")

    def _refuse_kind(self, plan: BackendPlan, known: Known) -> None:
        giver, place = self._giver(known)
        text = f"{plan.label} takes {plan.cls.takes}, and {giver} before it gives {known.kind}"
        self.errors.append(place.error(text + _advice(plan.cls.__name__, plan.cls.takes, known.kind)))


_CONVERTERS = {(MAT, TENSOR): "Mat2Tensor", (TENSOR, MAT): "Tensor2Mat"}
_NAMES = {MAT: "Mat", TENSOR: "Tensor"}


def _advice(name: str, target: str, source: str) -> str:
    if target == ENCODED and source in _NAMES:
        return f"; the image is decoded already: leave {name} out"
    converter = _CONVERTERS.get((source, target))
    if converter is None:
        return ""
    if _CONVERTERS.get((target, source)) == name:
        return f"; leave {name} out"
    twin = name.removesuffix(_NAMES[target]) + _NAMES[source]
    instead = f"{twin} takes {source}, or " if twin in BUILT_IN_BACKENDS else ""
    return f"; {instead}put {converter} before it"

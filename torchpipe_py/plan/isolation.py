"""Selects the backends of a node that run in a separate process if ``decode_isolation`` is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torchpipe_py.backends.base import Isolation
from torchpipe_py.plan.binding import BackendPlan, Binder

_ISOLATED = "Isolated"

Wrap = Callable[[BackendPlan], BackendPlan]


def isolated(plan: BackendPlan, binder: Binder) -> BackendPlan:
    """The plan, with each decoder wrapped in ``Isolated`` if its node requests it.

    In a sequence the backends after a decoder move with it: their output is usually smaller than the decoded image, so
    less is copied between processes.

    Raises ``ConfigError`` for a decoder that cannot run in another process.
    """
    _refuse(plan, binder)
    if not decodes(plan):
        return plan
    # NOTE: bind its parameters for every node that could use it, so that the key alone turns isolation on and off.
    wrapper = binder.wrapper(_ISOLATED)
    if binder.node.decode_isolation == "none":
        return plan

    def wrap(inner: BackendPlan) -> BackendPlan:
        return replace(wrapper, label=f"{_ISOLATED}[{inner.label}]", children=(inner,), filters=(None,))

    return _wrapped(plan, wrap, wrapper.cls)


def decodes(plan: BackendPlan) -> bool:
    """Whether it contains a backend that isolation moves to another process."""
    return any(part.cls.isolation is Isolation.MOVES for part in plan.parts())


def _wrapped(plan: BackendPlan, wrap: Wrap, wrapper: type) -> BackendPlan:
    if plan.cls is wrapper:
        return plan
    if plan.cls.isolation is Isolation.MOVES:
        return wrap(plan)
    if not plan.cls.is_sequence:
        return replace(plan, children=tuple(_wrapped(child, wrap, wrapper) for child in plan.children))
    children, filters = [], []
    for start, end in _groups(plan):
        group = plan.children[start:end]
        if len(group) > 1:
            label = f"{plan.label.partition('[')[0]}[{','.join(part.label for part in group)}]"
            inner = replace(plan, label=label, children=group, filters=(None, *plan.filters[start + 1 : end]))
            children.append(wrap(inner))
        else:
            children.append(_wrapped(group[0], wrap, wrapper))
        filters.append(plan.filters[start])
    return replace(plan, children=tuple(children), filters=tuple(filters))


def _groups(plan: BackendPlan) -> Iterator[tuple[int, int]]:
    """Split the sequence: a decoder with the backends after it, any other backend alone."""
    start = 0
    while start < len(plan.children):
        end = start + 1
        if plan.children[start].cls.isolation is Isolation.MOVES:
            while end < len(plan.children) and _follows(plan, end):
                end += 1
        yield start, end
        start = end


def _follows(plan: BackendPlan, index: int) -> bool:
    part = plan.children[index]
    if part.cls.isolation is not Isolation.FOLLOWS or plan.filters[index] is not None:
        return False
    return not part.params.get("keep_original", False)  # the image before it would stay in the other process


def _refuse(plan: BackendPlan, binder: Binder) -> None:
    refused = [part for part in plan.parts() if part.cls.isolation is Isolation.REFUSED]
    if refused and binder.node.decode_isolation != "none":
        raise binder.node.at("decode_isolation").error(
            f"{refused[0].label} decodes on the GPU, in this process, and cannot be isolated; "
            'DecodeMat can, and decode_isolation = "none" in the table of the node lets it be'
        )

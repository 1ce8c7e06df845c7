"""Finds the model of a configuration to quantise, and makes configurations up to it or with another file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchpipe_py import registry
from torchpipe_py.backends.control.python import declared
from torchpipe_py.backends.model.onnx import OnnxTensor
from torchpipe_py.errors import nearest
from torchpipe_py.plan.binding import BackendPlan, expand
from torchpipe_py.plan.build import NodePlan, Pipeline, plan_pipeline
from torchpipe_py.plan.config import GLOBAL, Tables
from torchpipe_py.plan.expression import Call
from torchpipe_py.registry import canonical
from torchpipe_py.tools.report import ToolError
from torchpipe_py.values import to_strings

TAKES_ONNX = ("OnnxTensor", "TensorrtTensor")
MODELS = (*TAKES_ONNX, "TorchTensor")

_AFTER = ("postprocessor", "post_processor", "labels", "k", "threshold")


@dataclass(frozen=True)
class Target:
    """The model of a node; ``fp32_layers`` are those that the configuration keeps in fp32."""

    pipeline: Pipeline
    tables: Tables
    node: str
    model: str
    fp32_layers: tuple[str, ...]

    @property
    def config(self) -> str:
        return self.tables.source

    def with_model(self, model: Path) -> Tables:
        """The whole configuration with another ONNX file, without an engine cache."""
        tables = self._copy()
        self._set_model(tables, model)
        tables[self.node].pop("model::cache", None)
        tables[GLOBAL].pop("model::cache", None)
        return tables

    def up_to_model(self, model: Path) -> Tables:
        """The configuration up to the node, with ``model`` run by ONNX Runtime on the CPU and plain outputs."""
        spec, kept = self.pipeline.spec, self._up_to_node()
        owners = {spec.nodes[name].owner for name in kept}
        tables = self._copy()
        for name in spec.nodes.keys() - kept - owners:
            del tables[name]
        for name in tables.keys() - {GLOBAL}:
            after = [each for each in spec.nodes[name].next if each in kept and name != self.node]
            tables[name].pop("next", None)
            if after:
                tables[name]["next"] = ",".join(after)
        node = tables[self.node]
        ignored = {*_AFTER, *self._of_postprocessor(), *OnnxTensor.ignored_keys}
        for key in [key for key in node if key in ignored or key.endswith("::backend")]:
            del node[key]
        for key in [key for key in node if key.startswith("TensorrtTensor::")]:
            node[key.replace("Tensorrt", "Onnx", 1)] = node.pop(key)
        (call,) = spec.nodes[self.node].calls
        node |= {"backend": str(_up_to_model(expand(call, spec.nodes[self.node]))), "postprocessor": ""}
        node["providers"] = "CPUExecutionProvider"
        self._set_model(tables, model)
        return tables

    def _of_postprocessor(self) -> list[str]:
        """Keys of the node that only a custom postprocessor takes."""
        name = str(next((value for key in _AFTER[:2] if (value := self.tables[self.node].get(key))), ""))
        cls = registry.default.find_postprocessor(name)
        own = () if cls is None else declared(cls)
        models = {param.key for param in OnnxTensor.parameters().values()}
        return [*(key for key in own if key not in models), *(f"{name}::{key}" for key in own)]

    def _up_to_node(self) -> set[str]:
        """The node, all nodes before it, and the graphs that they run."""
        graph = self.pipeline.graph
        kept, waiting = {self.node}, [self.node]
        while waiting:
            name = waiting.pop()
            roots = set(graph.jumps.get(name, ()))
            needed = {*graph.predecessors[name], *(each for each in graph.order if graph.reached_from[each] & roots)}
            waiting += needed - kept
            kept |= needed
        return kept

    def _copy(self) -> Tables:
        tables = Tables(copy.deepcopy(dict(self.tables)))
        tables.source = self.tables.source
        return tables

    def _set_model(self, tables: Tables, model: Path) -> None:
        for key in [key for key in tables[self.node] if key.endswith("::model")]:
            del tables[self.node][key]
        tables[self.node]["model"] = str(model.absolute())


def find_target(config: str | Tables, node: str | None) -> Target:
    """The ONNX model of ``node``, or of the only node with one. Raises ``ToolError`` if there is none, or several.

    Raises ``ConfigError`` for a bad configuration.
    """
    tables = Tables.of(config)
    pipeline, config = plan_pipeline(tables), tables.source
    found = {name: list(_models(plan)) for name, plan in pipeline.plans.items() if plan.spec.owner == name}
    models = {name: parts for name, parts in found.items() if parts}
    if not models:
        raise ToolError(f"{config}: no node runs a model; expected {' or '.join(TAKES_ONNX)} in one of them")
    if node is None and len(models) > 1:
        raise ToolError(f"{config}: several nodes run a model; choose one with --node: {', '.join(models)}")
    if node is not None and node not in models:
        what = "runs no model" if node in pipeline.plans else "is not in the file"
        raise ToolError(f"--node {node}: it {what}; {nearest(node, models)}")
    name = next(iter(models)) if node is None else node
    plan, graph = pipeline.plans[name], pipeline.graph
    part = next((each for each in models[name] if each.cls.__name__ in TAKES_ONNX), None)
    key = next((key for key in ("key_file", "key_env") if part is not None and part.params[key]), None)
    why = ""
    if part is None:
        why = f"runs {models[name][0].label}, not an ONNX model: torchpipe export writes one, for OnnxTensor"
    elif len(plan.backends) > 1:
        why = "is composed of several by '&'; quantise each in a separate node"
    elif key is not None:
        why = f"has {key}: its model is encrypted; quantise the plain one, and torchpipe encrypt the int8 model"
    elif not graph.reached_from[name] - graph.jumped_to:
        why = "is reached by a jump only; quantise it in a file whose root leads to it"
    if why or part is None:
        raise ToolError(f"{config}: node {name!r} {why}")
    kept = to_strings(plan.spec.params.get("precision::fp32", ()))
    return Target(pipeline, tables, name, str(part.params["model"]), kept)


def _models(plan: NodePlan) -> Iterator[BackendPlan]:
    return (part for part in plan.parts() if part.cls.__name__ in MODELS)


def _up_to_model(call: Call) -> Call:
    """The expression with OnnxTensor as its model, without anything after the model."""
    if canonical(call.name) in TAKES_ONNX:
        return Call("OnnxTensor", (), call.filter)
    for index, arg in enumerate(call.args):
        if any(canonical(each.name) in TAKES_ONNX for each in arg.walk()):
            inner = _up_to_model(arg)
            is_first = canonical(call.name) == "FirstAvailable"
            return inner if is_first else Call(call.name, (*call.args[:index], inner), call.filter)
    return call

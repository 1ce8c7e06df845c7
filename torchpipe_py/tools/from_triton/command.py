"""``torchpipe from-triton``: a TOML file for each model of a repository, with notes on unconverted settings."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.errors import Problems
from torchpipe_py.files import read_bytes, replace_file
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.registry import import_code
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.from_triton.pbtxt import Message
from torchpipe_py.tools.from_triton.repository import FILES, Model, checked, read_repository
from torchpipe_py.tools.report import ToolError, refuse_existing

KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
TYPES = {"TYPE_BOOL": "bool", "TYPE_BF16": "bfloat16", "TYPE_STRING": "bytes"}
TYPES |= {f"TYPE_{kind.upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
TYPES |= {f"TYPE_FP{bits}": f"float{bits}" for bits in (16, 32, 64)}

_BOUNDS = "--deadline-ms of torchpipe-serve bounds a whole request, --max-inflight how many there are"
_PRIORITIES = "a request has priority 0, which is normal, or 1, which is low (and Triton's highest)"
_NOTHING = "nothing here does that"
NOT_CARRIED = {
    "sequence_batching": "no sequences; ordered_by runs requests of one key in order, with a state",
    "model_transaction_policy": "a request has one answer",
    "model_warmup": "made-up items are run when a model is loaded",
    "response_cache": "answers are not kept",
    "optimization": "TensorrtTensor, with precision and model::cache, runs ONNX files by TensorRT",
    "preferred_batch_size": "no size is preferred; a batch closes when it is full or nothing could still join it",
    "preserve_ordering": "ordered_by keeps the order of requests of one key",
    **dict.fromkeys(("priority_levels", "default_priority_level"), _PRIORITIES),
    **dict.fromkeys(("default_queue_policy", "priority_queue_policy", "max_inflight_responses"), _BOUNDS),
    "reshape": "a model gets an item as 1×…, and its results are not reshaped",
    "allow_ragged_batch": "items of different shapes never share a batch",
    "optional": "a request has all inputs",
    "parameters": "they are for Triton's backend; `torchpipe backends NAME` lists those here",
    **dict.fromkeys(("batch_input", "batch_output", "is_shape_tensor", "is_non_linear_format_io"), _NOTHING),
    **dict.fromkeys(("rate_limiter", "passive", "secondary_devices", "profile", "host_policy"), _NOTHING),
    **dict.fromkeys(("metric_tags", "model_metrics", "model_operations", "model_repository_agents"), _NOTHING),
    "cc_model_filenames": "a node has one file for all GPUs",
}

CODE = '''"""What {toml} has beside models: --import {path} registers it."""

from torchpipe_py import ItemBackend, Signature, TensorSpec, register_backend
'''
CLASS = """

@register_backend
class {name}(ItemBackend):
    {doc!r}

    def forward_item(self, item):
        {body}

    def signature(self):
        return Signature({inputs!r}, {outputs!r})
"""

Source = tuple[str, str]
"""A node, and a Python expression for the part of its result; empty for all of it."""


def run_from_triton(args: argparse.Namespace) -> int:
    """0 once everything possible is written. ``ConfigError`` for malformed files or results that `check` refuses."""
    models, files, problems = read_repository(args.repository), list[_File](), Problems()
    texts, writers = dict[str, str](), dict[str, Model]()
    nested, owners, classes = dict[str, str](), dict[str, str](), set[str]()
    for model in models.values():
        steps = model.config.message("ensemble_scheduling").all("step", Message)
        for step in steps:
            if (inner := models.get(step.text("model_name"))) is not None and inner.backend == "ensemble":
                nested[model.name] = f"{step.at('model_name')}: {inner.name!r} is an ensemble; write its steps here"
        if model.name not in nested:
            owners |= {step.text("model_name"): model.name for step in steps}
    for model in models.values():
        is_model = model.name not in nested and (model.name not in owners or model.backend == "ensemble")
        for version in model.versions if is_model else ():
            with problems.gathered():
                file = _File(model, version, models, args.out, classes)
                for path, text in file.texts().items():
                    if (other := writers.setdefault(path, model)) is not model:
                        problem = f"name: {model.name!r} and {other.name!r} would both be {path}; rename one"
                        raise model.config.error(problem, "name")
                    texts[path] = text
                files.append(file)
    problems.raise_all()
    refuse_existing(map(Path, texts), args.force, "--out FOLDER takes another")
    codes, kept = [path for path in texts if path.endswith(".py")], list[str]()
    try:
        for path, text in texts.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # Keep classes that the user has completed.
            if path in codes and os.path.exists(path) and read_bytes(path) != text.encode():
                kept.append(path)
            else:
                replace_file(path, text.encode())
    except OSError as error:
        raise ToolError(f"--out {args.out}: {error.strerror}") from error
    for file in files:
        print("\n  ".join([file.path, *file.notes]))
    for path in kept:
        print(f"{path}: kept, because it was changed; delete it to have it written anew")
    for name, problem in nested.items():
        print(f"{name}: not written\n  {problem}")
    for name in sorted(owners):
        print(f"{name}: a node of {owners[name]}, not a model by itself")
    if not files:
        raise ToolError(f"{args.repository}: no model that can be written by itself")
    for path in codes:
        import_code(path)
    for file in files:
        with problems.gathered():
            plan_pipeline(file.path)
    problems.raise_all()
    imports = ["--import", ",".join(codes)] if codes else []
    print(f"{shlex.join(['torchpipe-serve', args.out, *imports])} serves them")
    return 0


class _File:
    """The TOML file of a model's version, the classes that it needs, and notes on unconverted settings.

    ``classes`` are the class names of other files, because one service imports them all.
    """

    def __init__(self, model: Model, version: str, models: Mapping[str, Model], out: str, classes: set[str]) -> None:
        self.model, self._models, self._classes, name = model, models, classes, _clean(model.name)
        self.path = os.path.join(out, f"{name}.toml" if version == "1" else f"{name}/{version}.toml")
        self._version = f"_v{version}" if len(model.versions) > 1 else ""
        self.code_path = os.path.join(out, f"{name}{self._version}_backends.py")
        self.notes: list[str] = []
        self._code = ""
        self._tables: dict[str, dict[str, Any]] = {}
        self._next: dict[str, list[str]] = {}
        self._owners: dict[tuple[str, str], str] = {}
        if model.backend == "ensemble":
            self._add_ensemble(model.config, model.config.message("ensemble_scheduling"))
        else:
            self._tables[name] = self._node(model, version)

    def texts(self) -> dict[str, str]:
        """The files by their paths."""
        heading = [f"From {self.model.config.file}{'; differences:' * bool(self.notes)}", *self.notes]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in heading)
        code = {self.code_path: CODE.format(toml=self.path, path=self.code_path) + self._code} if self._code else {}
        return {self.path: f"{comments}\n{to_toml(self._tables)}", **code}

    def _note(self, message: Message, field: str, text: str) -> None:
        self.notes.append(f"{message.at(field)}: {text}")

    def _note_all(self, *messages: Message) -> None:
        """Note fields of ``NOT_CARRIED``, unless they are switched off."""
        for message in messages:
            for name, values in message.fields.items():
                if name in NOT_CARRIED and not all(_is_off(value) for _, value in values):
                    self._note(message, name, f"{name}: {NOT_CARRIED[name]}")

    def _node(self, model: Model, version: str) -> dict[str, Any]:
        """The table of a model."""
        config, batching = model.config, model.config.message("dynamic_batching")
        inputs, outputs = config.all("input", Message), config.all("output", Message)
        self._note_all(config, batching, *inputs, *outputs)
        if model.backend not in FILES:
            return {"backend": self._stub(model, version, inputs, outputs), **self._instances(model)}
        beside = os.path.realpath(os.path.dirname(self.path))
        node: dict[str, Any] = {"backend": model.backend, "model": os.path.relpath(model.file(version), beside)}
        types = {_type(tensor) for tensor in inputs}
        if "bytes" in types:
            self._note(config, "input", f"TYPE_STRING: {model.backend} takes numbers")
        if model.backend == "TorchTensor":
            self._note(config, "platform", "trusted = true: loading the file runs the code in it, as Triton does")
            node["trusted"] = True
            if types == {"float16"} or types == {"bfloat16"} or types == {"uint8"}:
                node["input_type"] = min(types)
            elif types != {"float32"}:
                self._note(config, "input", f"input_type: one for all inputs, not {', '.join(sorted(types))}")
        if (most := config.number("max_batch_size", 0)) > 1:
            node["max"] = most
        elif most == 0 and any(tensor.all("dims", int)[:1] != [1] for tensor in inputs):
            self._note(config, "max_batch_size", "max_batch_size 0: clients of /v2 put a 1 before each shape here")
        if delay := batching.number("max_queue_delay_microseconds", 0):
            node["batching_timeout"] = delay / 1000
        for output in outputs:
            if labels := output.text("label_filename"):
                path = os.path.relpath(os.path.join(model.folder, labels), beside)
                if len(outputs) == 1:
                    node |= {"postprocessor": "cpu", "labels": path}
                    continue
                text = f'label_filename: postprocessor = "cpu" with labels = "{path}" names classes of the first output'
                self._note(output, "label_filename", text)
        return {**node, **self._instances(model)}

    def _instances(self, model: Model) -> dict[str, Any]:
        groups, keys, count = model.config.all("instance_group", Message), dict[str, Any](), 0
        gpus = sorted({gpu for group in groups for gpu in group.all("gpus", int)})
        on_cpu = [group.choice("kind", KINDS) for group in groups] == ["KIND_CPU"] and model.backend == "OnnxTensor"
        for group in groups:
            self._note_all(group)
            if not gpus or gpus[0] in group.all("gpus", int):
                count += group.number("count", 0) or 1 + on_cpu
        if count > 1:
            keys["instance_num"] = count
        if on_cpu:
            keys["providers"] = "CPUExecutionProvider"
        if len(gpus) > 1:
            self._note(groups[0], "gpus", f"gpus {gpus}: --devices of torchpipe-serve runs the whole file on each")
        elif gpus not in ([], [0]):
            keys["device_id"] = gpus[0]
        return keys

    def _class(self, name: str, doc: str, body: str, inputs: Sequence[Message], outputs: Sequence[Message]) -> str:
        """Add a backend class; returns its unique name."""
        of = self.model.name + self._version
        name = re.sub(r"\W", "_", f"triton_{of}" if name == self.model.name else f"triton_{of}_{name}", flags=re.ASCII)
        while name in self._classes:
            name += "_"
        self._classes.add(name)
        specs = [tuple([_spec(tensor) for tensor in tensors]) for tensors in (inputs, outputs)]
        self._code += CLASS.format(name=name, doc=doc, body=body, inputs=specs[0], outputs=specs[1])
        return name

    def _stub(self, model: Model, version: str, inputs: Sequence[Message], outputs: Sequence[Message]) -> str:
        """Add a class for the user to complete; returns its name."""
        where = f"version {version} of {model.folder} (backend {model.backend})"
        takes, gives = (", ".join([str(_spec(tensor)) for tensor in tensors]) for tensors in (inputs, outputs))
        doc = f"Does for one request what {where} does. data: {takes}. result: {gives}."
        body = f"raise NotImplementedError({f'set the result to what {where} gives'!r})"
        name = self._class(model.name, doc, body, inputs, outputs)
        self._note(model.config, "backend", f"backend {model.backend}: fill in class {name} in {self.code_path}")
        dims = [tensor.all("dims", int) for tensor in (*inputs, *outputs[:1])]
        if list(map(len, dims)) == [1, 3]:
            is_chw = dims[1][0] in (1, 3)
            height, width = (size if size > 0 else "…" for size in (dims[1][1:] if is_chw else dims[1][:2]))
            node = f'backend = "S[DecodeMat,ResizeMat,cvtColorMat{",Mat2Tensor" * is_chw}]", color = "rgb"'
            text = f"if {model.name} decodes images, this may do: {node}, resize_h = {height}, resize_w = {width}"
            text += ", with mean and std, of pixels 0 to 255, in the next node; clients of /v2 send files as BYTES"
            self._note(model.config, "output", text)
        return name

    def _add_ensemble(self, config: Message, scheduling: Message) -> None:
        """Add a node for each step, and classes between nodes whose results and inputs differ."""
        self._note_all(config, scheduling)
        inputs, outputs = config.all("input", Message), config.all("output", Message)
        names, root = [tensor.text("name") for tensor in inputs], self._new("input")
        sources = {name: (root, f"[{name!r}]" if len(names) > 1 else "") for name in names}
        outputs_of, inputs_of, steps = {root: names}, dict[str, list[str]](), scheduling.all("step", Message)
        placed = [self._place(step, sources, outputs_of) for step in steps]
        for step, (node, model, version) in zip(steps, placed, strict=True):
            inputs_of[node], input_map = model.names(version, "input"), step.pairs("input_map")
            for name, tensor in input_map.items():
                checked(step, "input_map", name, inputs_of[node])
                checked(step, "input_map", tensor, sources)
            if missing := [name for name in inputs_of[node] if name not in input_map] or [""] * (not input_map):
                raise step.error(f"input_map: {model.name!r} takes {missing[0]!r}, which is missing", "input_map")
            by_index = model.backend == "TorchTensor"
            self._join(node, {name: sources[input_map[name]] for name in inputs_of[node]}, by_index)
        results = {
            tensor.text("name"): sources[checked(tensor, "name", tensor.text("name"), sources)] for tensor in outputs
        }
        ends = [node for node in self._tables if node not in self._next]
        if list(results.values()) == _parts(ends[0], outputs_of[ends[0]]) and len(ends) == 1:
            self._note_names(config, "output", list(results), outputs_of[ends[0]])
        else:
            self._join(self._new("output"), results, True, outputs)
        readers = self._next.get(root, [])
        if len(names) == len(readers) == 1 and "map" not in self._tables[readers[0]]:
            del self._tables[root], self._next[root]
            self._note_names(config, "input", names, inputs_of.get(readers[0], []))
        else:
            body = 'item["result"] = item["data"]'
            self._tables[root]["backend"] = self._class(root, "The ensemble's inputs.", body, inputs, ())
        for node, following in self._next.items():
            self._tables[node]["next"] = ",".join(dict.fromkeys(following))

    def _note_names(self, config: Message, kind: str, before: list[str], after: list[str]) -> None:
        if before != after:
            names = ", ".join(after) or "data"
            self._note(config, kind, f"{kind} {', '.join(before)}: clients of /v2 name it {names} here")

    def _place(
        self, step: Message, sources: dict[str, Source], outputs_of: dict[str, list[str]]
    ) -> tuple[str, Model, str]:
        """Add the node of a step, and its outputs to ``sources``; returns node, model and version."""
        model = self._models[checked(step, "model_name", step.text("model_name"), self._models)]
        version = str(step.one("model_version", int, -1))
        version = model.versions[-1] if version == "-1" else checked(step, "model_version", version, model.versions)
        owner = self._owners.get((model.name, version))
        node = self._new(_clean(model.name) if owner is None else f"{owner}.again")  # of the same instances
        if owner is None:
            self._owners[model.name, version] = node
            self._tables[node] = self._node(model, version)
        outputs_of[node] = model.names(version, "output")
        parts = dict(zip(outputs_of[node], _parts(node, outputs_of[node]), strict=True))
        for name, tensor in step.pairs("output_map").items():
            checked(step, "output_map", name, parts)
            if tensor in sources:
                raise step.error(f"output_map: {tensor!r} is an output of another step, or an input", "output_map")
            sources[tensor] = parts[name]
        return node, model, version

    def _new(self, name: str) -> str:
        """Add an empty table of this name, or a similar one; returns the name."""
        while name in self._tables:
            name += "_"
        self._tables[name] = {}
        return name

    def _join(self, node: str, tensors: Mapping[str, Source], is_list: bool, outputs: Sequence[Message] = ()) -> None:
        """Pass tensors to a node: directly if they are all outputs of one node, else through a class.

        The class gathers them as a list or by name; with ``outputs`` the node itself is that class.
        """
        nodes = list(dict.fromkeys([source for source, _ in tensors.values()]))
        keys = {source: f"from_{source}" if index else "data" for index, source in enumerate(nodes)}
        if outputs or [part for _, part in tensors.values()] != [""]:
            values = [(name, f"item[{keys[source]!r}]{part}") for name, (source, part) in tensors.items()]
            listed = ", ".join([value if is_list else f"{name!r}: {value}" for name, value in values])
            gathered = values[0][1] if len(values) == 1 else f"[{listed}]" if is_list else f"{{{listed}}}"
            entry = node if outputs else self._new(f"{node.replace('.', '_')}_inputs")
            doc = f"Gathers {', '.join(tensors)}."
            self._tables[entry]["backend"] = self._class(entry, doc, f'item["result"] = {gathered}', (), outputs)
            if entry != node:
                self._next[entry] = [node]
            node = entry
        if len(nodes) > 1:
            self._tables[node]["map"] = ",".join([f"{source}[result:{key}]" for source, key in keys.items()])
        for source in nodes:
            self._next.setdefault(source, []).append(node)


def _parts(node: str, outputs: Sequence[str]) -> list[Source]:
    """The sources of a node's outputs."""
    return [(node, f"[{index}]" if len(outputs) > 1 else "") for index in range(len(outputs))]


def _is_off(value: Any) -> bool:
    """Whether a value is ``false``, or a message with only such values."""
    if isinstance(value, Message):
        return bool(value.fields) and all(_is_off(each) for values in value.fields.values() for _, each in values)
    return value is False


def _type(tensor: Message) -> str:
    return TYPES[tensor.choice("data_type", TYPES)]


def _spec(tensor: Message) -> TensorSpec:
    dims = [None if size < 0 else size for size in tensor.all("dims", int)]
    return TensorSpec(tensor.text("name"), (None, *dims), _type(tensor))


def _clean(name: str) -> str:
    """A valid name for a node and a file."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)

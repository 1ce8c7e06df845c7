"""Where requests enter a pipe: its inputs and outputs by name, the same for every protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torchpipe_py.backends.model.inputs import misfit
from torchpipe_py.backends.signature import Signature, shown_dims
from torchpipe_py.errors import ConfigError, InvalidRequest, UnknownNode, counted, nearest
from torchpipe_py.keys import (
    TASK_CONTEXT_KEY,
    TASK_DATA_KEY,
    TASK_NODE_NAME_KEY,
    TASK_PARAMETERS_KEY,
    TASK_PRIORITY_KEY,
    TASK_RESULT_KEY,
)
from torchpipe_py.plan.folder import FIRST_VERSION
from torchpipe_py.results import Detections
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire import detections
from torchpipe_py.wire.parameters import check_near, check_usual, give
from torchpipe_py.wire.values import MOST_VALUES, are_arrays, is_ranking, output_of

_ALWAYS = (TASK_CONTEXT_KEY, TASK_NODE_NAME_KEY, TASK_PRIORITY_KEY)
"""Keys that a request to any pipe may have."""


class Root:
    """A root of a pipe: the names of its model's inputs, unless that is ``data`` alone, and its outputs.

    ``reads`` are the other keys that a request may have; ``None``: any. ``images`` are the inputs that are encoded
    images, ``parameters`` the names of a request's parameters that backends declare to read. ``model`` is
    ``NAME/VERSION``.
    """

    def __init__(self, signature: Signature, reads: Collection[str] | None = None, model: str = "") -> None:
        names = [spec.name for spec in signature.inputs]
        self.names = [] if names == [TASK_DATA_KEY] else names
        self._required = sum(not spec.is_optional for spec in signature.inputs)
        self.outputs = signature.outputs
        self.images = frozenset(spec.name for spec in signature.inputs if spec.is_image)
        self.parameters = signature.parameters
        self._mixed = [spec for spec in signature.inputs if spec.rows_mix]
        self._of_output = {spec.name: index for index, spec in enumerate(signature.outputs)}
        self._reads, self.model = reads, model

    def item(
        self, given: dict[str, Any], wanted: Collection[str] = (), node_name: str | None = None,
        priority: int | None = None, parameters: Mapping[str, Any] = {}, whole: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """The dict for the pipe of a request with these inputs: the model's own become ``data``, others are keys.

        A name of the model's comes before ours. ``data`` alone is the whole of it, as in Python. ``whole``, for errors,
        says what became ``data``, if the client did not name it. ``parameters`` are for backends. Raises
        ``InvalidRequest`` for an input that nothing reads, unless it is ``wanted`` back, and what ``check_parameters``
        refuses.
        """
        if self._reads is not None:  # a custom backend may take others than it declares
            self._check_images(given)
        item = self._inputs_of(given, wanted, whole)
        if node_name is not None:
            item[TASK_NODE_NAME_KEY] = node_name
        if priority is not None:
            item[TASK_PRIORITY_KEY] = priority
        if parameters:
            self.check_parameters(parameters)
            give(item, parameters)
        return item

    def check_parameters(self, given: Collection[str]) -> None:
        """``InvalidRequest`` for a parameter whose name is nearly one that backends read, or one that detectors usually
        have, unless a custom backend may read it."""
        check_near(given, self.parameters)
        if self._reads is not None and (self.parameters or TASK_PARAMETERS_KEY not in self._reads):
            check_usual(given, self.parameters)

    def _check_images(self, given: Mapping[str, Any]) -> None:
        for name in self.images:
            value: Any = given.get(name)
            if hasattr(value, "detach"):
                got = f"got a tensor of {shown_dims(value.shape)}"
                raise InvalidRequest(f"input {name[:40]!r} takes an encoded image, {got}; send the bytes of a file")

    def _inputs_of(self, given: dict[str, Any], wanted: Collection[str], whole: str) -> dict[str, Any]:
        own = [name for name in self.names if name in given]
        if own in ([], [TASK_DATA_KEY]):
            if TASK_DATA_KEY not in given:
                if not given:
                    raise InvalidRequest(f"the request has no inputs; {nearest('', self._own())}")
                raise self._unknown(next(iter(given)), self._own())
            if whole and not own and self._required > 1:
                count = counted(self._required, "input")
                raise InvalidRequest(f"the model has {count}, {', '.join(self.names)}; {whole}")
            if len(given) > 1:
                self._check(given, {TASK_DATA_KEY, *wanted})
            return given
        if len(given) > len(own):
            self._check(given, {*own, *wanted}, whole)
            if TASK_DATA_KEY in given and TASK_DATA_KEY not in self.names:
                both = f"both {TASK_DATA_KEY!r}, which is the whole input, and its part {own[0][:40]!r}"
                raise InvalidRequest(f"{both}; {whole}" if whole else both)
        inputs = {name: given[name] for name in own}
        item = {name: value for name, value in given.items() if name not in inputs}
        item[TASK_DATA_KEY] = inputs if len(self.names) > 1 else inputs[own[0]]
        return item

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``InvalidRequest`` for several rows of a request, if the model's rows depend on each other."""
        if not self._mixed or len(rows) == 1:
            return
        spec = self._mixed[0]
        value = rows[0].get(spec.name, rows[0].get(TASK_DATA_KEY))
        shape = getattr(value, "shape", (1,) * len(spec.dims))  # of texts, a row may be a single one
        raise InvalidRequest(misfit(spec.name, spec.dims[1:], (len(rows), *shape[1:]), spec.rows_mix))

    def _check(self, given: Mapping[str, Any], known: Collection[str], whole: str = "") -> None:
        if self._reads is None:
            return
        for name in given:
            if name not in known and name not in self._reads and name not in _ALWAYS:
                raise self._unknown(name, self._known(), whole if name == TASK_DATA_KEY else "")

    def _unknown(self, name: str, known: Sequence[str], whole: str = "") -> InvalidRequest:
        """The error of an input, which may have been meant for a parameter."""
        near = get_close_matches(name[:40].lower().replace("-", "_"), self.parameters, 1, 0.8)
        if name in self.parameters:
            hint = "it is a parameter, which goes into 'parameters'"
        else:
            hint = f"did you mean the parameter {near[0]!r}?" if near else nearest(name[:40], known)
        return InvalidRequest(f"unknown input {name[:40]!r}; {hint}{whole and '; '}{whole}")

    def _own(self) -> Sequence[str]:
        return self.names or [TASK_DATA_KEY]

    def _known(self) -> list[str]:
        return [*self._own(), *sorted(self._reads or ())]

    def output(self, data: Mapping[str, Any], key: str) -> Any:
        """The value of an output: one of the model's own by its name, or else what is under this key of the dict.

        ``Detections`` have those that ``fields_of`` names. Without a result, raises the error that explains why.
        """
        index, count = self._of_output.get(key), len(self._of_output)
        if key in detections.FIELDS and (index is not None or key not in data):
            result = data.get(TASK_RESULT_KEY)
            if isinstance(result, Detections) and key in detections.fields_of([result]):
                return detections.tensor_of(TASK_RESULT_KEY, [result], key)
        if index is None:
            part = None if self.outputs or key in data else _part(data.get(TASK_RESULT_KEY), key)
            return output_of(data, key, self._of_output) if part is None else part
        result = output_of(data, TASK_RESULT_KEY)
        if count == 1:
            return result
        if is_ranking(result):
            return [pair[index] for pair in result]
        is_each = isinstance(result, (list, tuple)) and len(result) == count
        return result[index] if is_each else output_of(data, key)


def _part(result: Any, key: str) -> Any:
    """The array ``result_N`` of a list of arrays, whose parts backends do not name; ``None`` for another key."""
    names = [f"{TASK_RESULT_KEY}_{index}" for index in range(len(result))] if are_arrays(result) else []
    return result[names.index(key)] if key in names else None


class Roots:
    """The roots of a pipe by the names that requests use, for any thread. It follows a ``Pipes``.

    ``stem``: see ``model_keys``.
    """

    def __init__(self, run: pipe, stem: str) -> None:
        self._pipe, self._stem = run, stem
        self._roots: dict[str | None, Root] = {}
        run.follow_models(self._forget)

    def _forget(self) -> None:
        # NOTE: a new dict, since another thread may be about to add a root of before to the old one.
        self._roots = {}

    def find(self, node_name: str | None) -> Root:
        """The root. Raises ``UnknownNode`` for an unknown one, or several and none is named."""
        node_name, roots = self._renamed(node_name), self._roots
        root = roots.get(node_name)
        if root is None:
            root = roots[node_name] = root_of(self._pipe, node_name, self._stem)
        return root

    def model_of(self, node_name: str | None) -> str:
        """``NAME/VERSION`` of the model that a request with this ``node_name`` enters; empty if there is none."""
        node_name = self._renamed(node_name)
        known = self._pipe.only_root if node_name is None else self._pipe.roots.get(node_name)
        # NOTE: `find` would look for a name like an unknown one, which takes long.
        return "" if known is None else self.find(node_name).model

    def item(
        self, given: dict[str, Any], node_name: str | None, priority: int | None, wanted: Collection[str],
        parameters: Mapping[str, Any] = {}, whole: str = "",
    ) -> tuple[Root, dict[str, Any]]:  # fmt: skip
        """The root that a request enters, and the dict for the pipe; raises what ``Root.item`` raises.

        If the pipe has several roots, an input ``node_name`` names one.
        """
        node_name = self._named(given, node_name)
        root = self.find(node_name)
        return root, root.item(given, wanted, node_name, priority, parameters, whole)

    def images(self, given: Mapping[str, Any], node_name: str | None) -> Collection[str]:
        """The inputs that are encoded images, at the root that a request enters; none if there is no such root."""
        try:
            return self.find(self._named(given, node_name)).images
        except UnknownNode:
            return ()

    def parameters(self, node_name: str | None) -> Collection[str]:
        """The parameters that backends declare to read, at the root of this name; none if there is no such root."""
        try:
            return self.find(node_name).parameters
        except UnknownNode:
            return ()

    def _named(self, given: Mapping[str, Any], node_name: str | None) -> str | None:
        if node_name is None and self._pipe.only_root is None:
            named = given.get(TASK_NODE_NAME_KEY)
            return named if isinstance(named, str) else None
        return self._renamed(node_name)

    def _renamed(self, node_name: str | None) -> str | None:
        """``None``, which is the only root, for the name that a file's only model has; other names as they are."""
        if node_name is None or node_name in self._pipe.roots:
            return node_name
        is_stem = node_name in (self._stem, f"{self._stem}/{FIRST_VERSION}")
        return None if is_stem and self._pipe.only_root is not None and is_file(self._pipe) else node_name


def root_of(run: pipe, node_name: str | None, stem: str) -> Root:
    """The root of this name. Raises ``UnknownNode``."""
    signature, reads = run.signature(node_name), run.keys_read(node_name)
    root = run.only_root if node_name is None else run.roots.get(node_name)
    return Root(signature, reads, model_keys(run, stem).get(root or "", ""))


def model_keys(run: pipe, stem: str) -> dict[str, str]:
    """``NAME/VERSION`` of each model by its root; the only root of a file is the model ``stem``, the file's name."""
    models = run.models
    if is_file(run) and len(models) == 1:
        return {models[0].root: f"{stem}/{FIRST_VERSION}"}
    return {model.root: f"{model.name}/{model.version}" for model in models}


def check_count(run: pipe) -> None:
    """Raise ``ConfigError`` for a model with more inputs or outputs than a request can have."""
    for model in run.models:
        signature = run.signature(model.node_name)
        for what, specs in (("inputs", signature.inputs), ("outputs", signature.outputs)):
            if len(specs) > MOST_VALUES:
                raise ConfigError(f"model {model.name!r} has {len(specs)} {what}; a request can have {MOST_VALUES}")


def is_file(run: pipe) -> bool:
    """Whether the models are the roots of one file, not of a folder."""
    return bool(run.models) and all(model.root == model.name for model in run.models)

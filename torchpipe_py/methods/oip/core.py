"""The protocol's methods, for any transport: HTTP and gRPC only read requests and write answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import DeadlineExceeded, ModelUnavailable, Overloaded, TorchpipeError, UnknownNode, nearest
from torchpipe_py.methods.many import FairAdmission
from torchpipe_py.methods.oip import metadata
from torchpipe_py.methods.oip.requests import InferRequest, explained
from torchpipe_py.methods.oip.results import SMALLER, kept, outputs_of
from torchpipe_py.methods.oip.tensors import Output
from torchpipe_py.methods.roots import Root, is_file, root_of
from torchpipe_py.methods.routes import Cancellable, Done
from torchpipe_py.runtime.admission import Deadlines
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, describe_error, log_defect, restated
from torchpipe_py.wire.parameters import NO_SHARED_MEMORY

VERSION = "1"  # a model of a file has only this version
UNKNOWN_MODEL = "Request for unknown model"  # Triton's words, which its clients look for


class NotServedError(TorchpipeError):
    """A method of the protocol that this service does not have."""

    code = "not_served"


class RepositoryError(TorchpipeError):
    """Models that were not loaded, unloaded or listed; ``said`` is the JSON with the reason and its code."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said["error"])
        self.code = said["code"]
        self.retry_after_ms = said.get("retry_after_ms")


def shared_memory(region: object) -> None:
    """Refuse a request about a region of shared memory. One about all regions passes: there are none.

    Triton's perf_analyzer begins by unregistering all.
    """
    if region:
        raise NotServedError(NO_SHARED_MEMORY)


Control = Callable[[str, str, Callable[[int, dict[str, Any]], object]], object]
"""Runs ``load`` or ``unload`` for a model by its name, and passes on an HTTP status and its JSON.

``index`` gives ``{"models": […]}``: all of the folder that the models come from.
"""


Listed = Callable[["list[dict[str, Any]] | RepositoryError"], object]
"""Takes models, or why they cannot be listed."""

Totals = Callable[[Callable[[Mapping[str, Any]], object]], object]
"""Passes on the figures of all processes of the service, ``models`` as ``Models.figures`` and ``nodes``; or nothing."""


class Model:
    """A root of the pipe under a name and a version, and the figures of its requests.

    ``node_name`` is what the pipe calls the root; without it requests may name one.
    """

    def __init__(
        self,
        name: str,
        version: str,
        run: pipe,
        deadlines: Deadlines,
        admission: FairAdmission,
        node_name: str | None = None,
    ) -> None:
        self.name, self.version, self.pipe, self.deadlines, self.admission = name, version, run, deadlines, admission
        self.node_name, self.figures = node_name, metadata.Figures()
        self.key = f"{name}/{version}"
        self._roots: dict[str | None, Root] = {}

    def is_ready(self, stats: Mapping[str, Any]) -> bool:
        """Whether every node has an instance that serves; ``stats`` are the pipe's."""
        return all(node["alive"] for node in self.stats(stats)["nodes"].values())

    def stats(self, stats: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of the pipe's statistics that is about the model's nodes."""
        if self.node_name is None:
            return stats
        own = self.pipe.nodes_of(self.node_name)
        nodes = {name: node for name, node in stats["nodes"].items() if name in own}
        # NOTE: the root is the first one.
        return {**stats, "nodes": nodes, "admitted": nodes[own[0]]["requests"]}

    def node_names(self) -> list[str]:
        """The nodes of the model, as the pipe's statistics call them."""
        return list(self.pipe.stats()["nodes"]) if self.node_name is None else self.pipe.nodes_of(self.node_name)

    def entered(self, node_name: str | None) -> str | None:
        """The root that a request enters that names ``node_name``. Raises ``UnknownNode`` if it is not the model's."""
        if self.node_name is None or node_name in (None, self.node_name):
            return self.node_name or node_name
        raise UnknownNode(f"model {self.name!r} is the root {self.node_name!r}, not {node_name[:80]!r}")

    def root(self, node_name: str | None) -> Root:
        """The root that a request names. Raises ``UnknownNode`` for an unknown one, or several and none is named."""
        root = self._roots.get(node_name)
        if root is None:
            root = self._roots[node_name] = root_of(self.pipe, node_name, self.name)
        return root

    def images(self, node_name: str | None) -> Collection[str]:
        """The inputs that are encoded images, at the root that a request names; none if there is no such root."""
        try:
            return self.root(self.entered(node_name)).images
        except UnknownNode:
            return ()

    def signature(self, node_name: str | None) -> Signature | None:
        """The signature of the root of this name; ``None`` without a name, if there are several roots."""
        name = self.entered(node_name)
        try:
            return self.pipe.signature(name)
        except UnknownNode:
            if name is not None:
                raise
            return None


class Models:
    """The models of a pipe: its roots, by name and version; the last version of a name is its latest.

    The only root of a file also goes by the file's name, ``stem``; other names are found as well, and listed nowhere.
    It follows a ``Pipes`` whose models change; for one thread.
    """

    def __init__(self, run: pipe, stem: str, deadlines: Deadlines, admission: FairAdmission) -> None:
        self._pipe, self._stem, self._deadlines, self._admission = run, stem, deadlines, admission
        self._figures: dict[tuple[str, str], metadata.Figures] = {}
        self._listed: Sequence[Model] = ()
        self._models: dict[tuple[str, str], Model] = {}
        self._latest: dict[str, Model] = {}
        self._list()
        run.follow_models(self._list)

    def _list(self) -> None:
        roots = self._pipe.models
        listed = [self._model(each.name, each.version, each.node_name) for each in roots]
        others: list[Model] = []
        if is_file(self._pipe):
            file = [self._model(self._stem, VERSION, None)]
            listed, others = (listed, file) if len(listed) > 1 else (file, listed)
        self._listed = listed
        self._models = {(model.name, model.version): model for model in (*others, *listed)}
        self._latest = {model.name: model for model in (*others, *listed)}

    def _model(self, name: str, version: str, node_name: str | None) -> Model:
        model = Model(name, version, self._pipe, self._deadlines, self._admission, node_name)
        model.figures = self._figures.setdefault((name, version), model.figures)
        return model

    def all(self) -> Sequence[Model]:
        """All models, each version."""
        return self._listed

    def stats(self) -> dict[str, Any]:
        """Those of the pipe, which all models share."""
        return self._pipe.stats()

    def figures(self) -> dict[str, dict[str, int]]:
        """Totals of this process's requests, by ``NAME/VERSION``; see ``metadata.Figures.counts``.

        They are of all listed models, and of others that were asked.
        """
        stats = self.stats()
        models = self.all()
        others = {"/".join(key): figures.counts() for key, figures in self._figures.items()}
        return {
            **{key: {**counts, "admitted": 0} for key, counts in others.items() if counts["last_ms"]},
            **{model.key: {**model.figures.counts(), "admitted": model.stats(stats)["admitted"]} for model in models},
        }

    def versions(self, name: str) -> list[str]:
        """The versions of a model, in ascending order."""
        return [version for model, version in self._models if model == name]

    def find(self, name: str, version: str = "") -> Model:
        """The model; an empty version is the latest. Raises ``UnknownNode`` for an unknown model or version, and
        ``ModelUnavailable`` for one that is not loaded.
        """
        model = self._models.get((name, version)) if version else self._latest.get(name)
        if model is not None:
            return model
        self._pipe.check_loaded(f"{name}/{version}" if version else name)
        if name not in self._latest:
            valid = nearest(name[:80], {model.name for model in self._listed})
            raise self._unknown(f"{name[:80]!r} is not found; {valid}")
        valid = nearest("", self.versions(name))
        raise self._unknown(f"{name[:80]!r} version {version[:40]!r} is not found; {valid}")

    def _unknown(self, text: str) -> UnknownNode:
        return UnknownNode(f"{UNKNOWN_MODEL}: {text}{self._pipe.hint_if_unknown}")


class Codec(Protocol):
    """Writes answers of inference in the form that its clients read; called on any thread."""

    def answer(self, model: Model, asked: InferRequest, outputs: Sequence[tuple[Output, bool]]) -> Any:
        """The answer with these tensors, each of which is wanted as binary or not."""


class OpenInference:
    """The protocol's methods. Those that raise, raise ``TorchpipeError`` with a code for the client.

    ``items`` bounds the batch of a request, ``reply`` an answer. ``control`` is that of a folder of models; clients may
    load and unload them only if ``may_load``.
    """

    def __init__(
        self, models: Models, items: int, reply: Bound, control: Control | None = None, may_load: bool = False,
        totals: Totals | None = None,
    ) -> None:  # fmt: skip
        self.models, self.items, self.reply = models, items, reply
        self.control, self._folder = control if may_load else None, control
        self._indexing: list[Listed] = []
        self._totals: Totals = totals or (lambda done: done({}))
        self._counting: list[Callable[[Mapping[str, Any]], object]] = []

    def is_ready(self, name: str = "", version: str = "") -> bool:
        """Whether the model is, or without a name whether all are that are served."""
        try:
            models = self._named(name, version)
        except ModelUnavailable:
            return False
        stats = self.models.stats()  # NOTE: once, which is not cheap
        return all(model.is_ready(stats) for model in models)

    def metadata(self, name: str, version: str = "", node_name: str | None = None) -> dict[str, Any]:
        """Inputs and outputs of the model, or of the root ``node_name``."""
        model = self.models.find(name, version)
        return metadata.model(model.name, self.models.versions(name), model.signature(node_name))

    def config(self, name: str, version: str = "", node_name: str | None = None) -> dict[str, Any]:
        """The model's configuration in Triton's form."""
        model = self.models.find(name, version)
        return metadata.config(model.name, model.signature(node_name), self.items)

    def statistics(self, name: str, version: str, done: Callable[[dict[str, Any]], object]) -> None:
        """Pass the statistics of the model to ``done``, or without a name of all models: totals of the service."""
        models = self._named(name, version)

        def answer(totals: Mapping[str, Any]) -> None:
            stats = totals if totals else {"models": self.models.figures(), **self.models.stats()}
            counts, nodes = stats["models"], stats["nodes"]
            done({"model_stats": [self._statistics_of(model, counts, nodes) for model in models]})

        self._counting.append(answer)
        if len(self._counting) == 1:  # NOTE: one at a time: all processes are asked
            self._totals(self._counted)

    def _counted(self, totals: Mapping[str, Any]) -> None:
        counting, self._counting = self._counting, []
        for answer in counting:
            answer(totals)

    def _statistics_of(self, model: Model, counts: Mapping[str, Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
        names, own = model.node_names(), counts.get(model.key) or {**model.figures.counts(), "admitted": 0}
        if model.node_name is not None and names[0] in nodes:
            own = {**own, "admitted": nodes[names[0]]["requests"]}  # also those of before the model was loaded again
        return metadata.statistics(model.name, model.version, own, [nodes[name] for name in names if name in nodes])

    def index(self, is_ready: bool, done: Listed) -> None:
        """Report served models to ``done``; with ``is_ready`` false also unloaded ones, or why there is no list."""
        if is_ready or self._folder is None:
            done(self._served())
            return
        self._indexing.append(done)
        if len(self._indexing) == 1:  # NOTE: one at a time: the folder is read for it
            self._folder("index", "", self._indexed)

    def _indexed(self, status: int, body: Mapping[str, Any]) -> None:
        waiting, self._indexing = self._indexing, []
        models: list[dict[str, Any]] | RepositoryError
        if "models" in body:  # none of the folder, if the supervisor is gone
            models = [*self._served(), *(each for each in body["models"] if each["state"] != "READY")]
        else:
            models = RepositoryError(body)
        for done in waiting:
            done(models)

    def _served(self) -> list[dict[str, Any]]:
        return [
            {"name": model.name, "version": model.version, "state": "READY", "reason": ""}
            for model in self.models.all()
        ]

    def _named(self, name: str, version: str) -> Sequence[Model]:
        return [self.models.find(name, version)] if name else self.models.all()

    # -- inference ----------------------------------------------------------------------------------------------

    def infer(self, model: Model, asked: InferRequest, codec: Codec, began: float, done: Done) -> Cancellable:
        """Run the items of a request side by side; where one fails, the request does.

        ``began``: when the request was there, in seconds of ``perf_counter``.
        """
        if model.node_name is not None:
            asked.node_name = model.entered(asked.node_name)
        root = model.root(asked.node_name)
        items = asked.items(root)
        count = len(items)

        def finish(outcomes: list[Any]) -> None:
            try:
                result = self._answer(model, asked, root, codec, outcomes)
            except BaseException as failure:
                result = explained(failure, asked.timeout)
            model.figures.add(count, began, not isinstance(result, BaseException))
            done(result)

        def finish_one(data: dict[str, Any], error: BaseException | None) -> None:
            finish([_outcome(asked, root, data, error)])

        seconds = self.admit(model, began, asked.deadline_ms, asked.priority, asked.node_name, asked.timeout)
        try:
            if count == 1:
                return model.pipe.dispatch(items[0], finish_one, seconds)
            return model.admission.gather(items, seconds, partial(_outcome, asked, root), finish)
        except BaseException as error:  # it was not let in
            model.figures.add(count, began, False)
            raise explained(error, asked.timeout) from None

    def admit(
        self, model: Model, began: float, deadline_ms: float | None, priority: int, node_name: str | None,
        timeout: int = 0,
    ) -> float | None:  # fmt: skip
        """The time limit of a request in seconds; raises, and counts a failure, if it cannot be met.

        ``timeout``: see ``InferRequest``.
        """
        try:
            return model.deadlines.admit(deadline_ms, priority, model.entered(node_name), began)
        except (Overloaded, DeadlineExceeded) as error:
            model.figures.add(0, began, False)
            raise explained(error, timeout) from None

    def _answer(self, model: Model, asked: InferRequest, root: Root, codec: Codec, outcomes: list[Any]) -> Any:
        failed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        for index in failed[1:]:
            log_defect(outcomes[index])  # the answer reports only the first
        if failed:
            raise _of_item(outcomes[failed[0]], failed[0], len(outcomes))
        outputs = outputs_of(outcomes, asked, root.outputs)
        size = sum(output.size(is_binary) for output, is_binary in outputs)
        if size > self.reply.bytes:
            raise ReplyTooLargeError(size, self.reply, "" if all(is_binary for _, is_binary in outputs) else SMALLER)
        return codec.answer(model, asked, outputs)


def _outcome(asked: InferRequest, root: Root, data: dict[str, Any], error: BaseException | None) -> Any:
    """The outputs of an item, or its error, which are kept until the other items are finished."""
    if error is not None:
        return error
    try:
        return kept(data, asked, root.outputs)
    except BaseException as failure:
        return failure


def _of_item(error: BaseException, index: int, count: int) -> BaseException:
    """The error of an item; among several items it names its index."""
    if count == 1 or not isinstance(error, TorchpipeError):
        return error
    return restated(error, f"item [{index}] of {count}: {describe_error(error)}")

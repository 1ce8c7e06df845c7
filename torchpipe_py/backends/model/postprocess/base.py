"""Base of postprocessors, and their names in a configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.control.python import configured, declared
from torchpipe_py.backends.image.geometry import Size
from torchpipe_py.backends.image.original import WayBack, way_back
from torchpipe_py.backends.params import REQUIRED, Param, Postprocessors
from torchpipe_py.backends.signature import TensorSpec, shown_dims
from torchpipe_py.errors import BackendError, ConfigError, nearest
from torchpipe_py.registry import register_hint


class Postprocessor:
    """``init(config)`` once; then ``forward(outputs)`` for each batch, on the instance's thread.

    ``outputs`` are the model's output tensors, each N×…, and with ``max = 1`` those of one item, of any shape;
    ``forward`` returns N results. Any class with these two methods can be registered with ``register_postprocessor``;
    ``init`` may be missing. Its annotations (``iou: float = 0.5``) are its parameters, as those of a custom
    backend: keys of the node, checked, and attributes before ``init``.

    On a GPU, a postprocessor with ``on_device`` and ``on_host`` is split: ``on_device(outputs)`` enqueues GPU work
    only and returns tensors N×…, with ``max = 1`` of any shape, and becomes part of the model's CUDA graph; these are
    copied to pinned memory at once, and ``on_host(tensors)`` returns N results from them. It must not keep the tensors:
    the next batch overwrites them.

    With ``takes_items``, ``forward`` and ``on_host`` get the dicts of the N items as a second argument. An exception in
    place of a result becomes the ``error`` of its item.
    """

    takes_items: ClassVar[bool] = False
    uses: ClassVar[Collection[str]] = ()
    """Of a built-in one: which of ``labels``, ``k`` and ``threshold`` it uses."""
    request_parameters: ClassVar[Collection[str]] = ()
    """The parameters of a request that it reads."""

    def init(self, config: Mapping[str, Any]) -> None:
        """``config`` holds ``labels``, the path of the label file or an empty string, ``k``, ``threshold``, ``max``
        (the most items of a batch), ``model`` (the ``ModelFile``), ``node`` (the name of the node), and the values of
        the class's annotations."""

    def fit(self, outputs: Sequence[TensorSpec]) -> None:
        """Adapt to a model that declares these outputs; called after ``init``. ``ConfigError`` if they do not fit."""

    def forward(self, outputs: list[Any]) -> list[Any]:
        raise NotImplementedError(type(self).__name__)

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """The tensors in a result, for a model with these outputs; empty if unknown."""
        return ()


@dataclass(frozen=True)
class Origin:
    """The output that a postprocessor reads: of which node and model, for errors. Without a name it has an index."""

    node: str = ""
    model: str = "model"
    output: str = "0"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Origin:
        """From the ``config`` that a postprocessor gets."""
        file = config.get("model")
        return cls(config.get("node", ""), "model" if file is None else file.path)

    def not_finite(self, what: str) -> BackendError:
        """The error of an item that has NaN or infinity among ``what`` of the output."""
        return BackendError(f"{self._place}output {self.output!r} has {what} that are not finite numbers")

    def misfit(self, reads: str, shapes: Sequence[Sequence[int]]) -> BackendError:
        """The error of a batch whose outputs have other ``shapes`` than those that a postprocessor ``reads``."""
        given = ", ".join(map(shown_dims, shapes)) or "no output"
        return BackendError(f"{self._place}{reads}, and the model gave {given}")

    def way_back(self, item: Data, size: Size) -> WayBack:
        """The way from the image of ``size`` that the model got to the original; ``BackendError`` if it is unknown."""
        try:
            return way_back(item, *size)
        except BackendError as error:
            raise BackendError(f"{self._place}{error}") from None

    @property
    def _place(self) -> str:
        return (f"node {self.node!r}: " if self.node else "") + f"model {self.model}: "


class Written(dict[str, Any]):
    """A result of a postprocessor that writes more keys of its item than ``result``."""


class PostprocessorParam(Param):
    """A parameter that names a registered postprocessor; its value is the class, or an empty string."""

    def read(self, value: Any, registry: Postprocessors) -> Any:
        if value == "":
            return ""
        cls = registry.find_postprocessor(str(value))
        if cls is None:
            near = nearest(str(value), registry.postprocessor_names())
            raise ValueError(f"no postprocessor {value!r}; {near} {register_hint('postprocessor')}")
        declared(cls)  # refuse annotations here, where the place is known
        return cls

    def inner(self, typed: Any) -> Mapping[str, Param]:
        return declared(typed) if typed else {}


def make_postprocessor(cls: type, config: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> Postprocessor:
    """Create ``cls`` with the values of its declared parameters; by default those of the declaration."""
    own = {name: param.default for name, param in declared(cls).items() if param.default is not REQUIRED}
    own.update(params or {})
    postprocessor: Postprocessor = configured(cls, own, {**config, **own})
    return postprocessor


def read_labels(path: str) -> list[str]:
    """The lines of a label file, without blank ones at its end; ``ConfigError`` if it is not UTF-8."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            labels = [line.rstrip("\n") for line in file]
    except UnicodeDecodeError as error:
        raise ConfigError(f"labels: {path} is not UTF-8 text: {error}") from error
    while labels and not labels[-1].strip():
        labels.pop()
    return labels

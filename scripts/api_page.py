"""``python scripts/api_page.py``: write ``docs/api.md``, the public names with their signatures, from docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"

GUIDE = (
    "# API reference\n\n"
    "The public names of the packages, from their docstrings; `help(torchpipe_py.pipe)` shows the same in Python. "
    "Parameters of the built-in backends are in [Backends](backends.md), keys of the TOML in "
    "[Configuration](configuration.md#nodes), flags of the service in [The service](service.md#flags).\n"
)

SECTIONS: dict[str, tuple[str, str, str]] = {
    "Calling a pipe": (
        "torchpipe_py",
        "pipe Ticket parse_toml parse_folder Detections Status",
        "[Python](python.md) shows how they are used.",
    ),
    "Writing backends": (
        "torchpipe_py",
        "Backend ItemBackend Param Signature TensorSpec Isolation Jump MapReduce register_backend register_filter"
        " register_postprocessor import_code Registry",
        "[Your own backend](own-backends.md), [testing it](testing-backends.md).",
    ),
    "Metrics of backends": ("torchpipe_py.metrics", "Counter Gauge Histogram", "[Metrics](own-backends.md#metrics)."),
    "Errors": (
        "torchpipe_py",
        "TorchpipeError ConfigError BackendUnavailable SetupError BackendError NoResult DecodeError InvalidRequest"
        " UnknownNode ModelUnavailable Overloaded DeadlineExceeded WorkerDied EngineUnavailable PipeClosed",
        "[What happens when](python.md).",
    ),
    "The client": (
        "torchpipe_client",
        "Client AsyncClient Result Detections",
        "[The client](client.md); [its errors](client.md#errors).",
    ),
    "Handlers of the service": (
        "torchpipe_server",
        "Handler HttpAnswer",
        "[Over Thrift](service.md#a-custom-handler), [over HTTP](protocols.md#a-handler-with-routes).",
    ),
    "Streams": ("torchpipe_py.streams", "Streams Frame", "[Video](video.md)."),
    "Training": (
        "torchpipe_py.training",
        "wrap_dataloader_torchpipe LoaderOptions TorchpipeLoader Batch TensorToTensor ImageFiles ImageFolder LmdbImages"
        " pack_folder RandomResizedCrop ColorTwist CutOut GridMask Compose CudaPrefetcher BatchFeeder"
        " DistributedEvalSampler TrainingError BadSample UnreadableFile PeerFailed",
        "[Training](training.md).",
    ),
}
PUBLIC = {name for _, names, _ in SECTIONS.values() for name in names.split()}
UNTOLD = {"Exception", "BaseException"}

SHOWN = {
    "pipe": "__call__ submit map acall dispatch signature stats trace instrument max min close",
    "Backend": "setup forward close max min any_thread signature batch_key is_large setup_choices requires_cuda"
    " keys_read remarks",
    "Status": "",
    "AsyncClient": "close",
}
"""Methods that are shown of a class, where there are others that a reader does not need."""


def page() -> str:
    """The text of the page."""
    return "\n".join([GUIDE, *(line for title in SECTIONS for line in section(title))])


def section(title: str) -> Iterator[str]:
    """The lines of a section: a heading and text for each name, and for each method of a class."""
    package, names, guide = SECTIONS[title]
    module = importlib.import_module(package)
    yield from (f"## {title}", "", f"`from {package} import …`. {guide}", "")
    for name in names.split():
        thing = getattr(module, name)
        yield from (f"### {name}", "", *described(name, thing))
        shown = SHOWN.get(name)
        for member, method in members(thing) if inspect.isclass(thing) else ():
            if shown is not None and member not in shown.split():
                continue
            if isinstance(method, property):
                yield from (f"`.{member}`: {summary(method)}", "")
            else:
                yield from described(f".{member}", method)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Documented methods and properties of a class, and of its bases that have no entry of their own."""
    if issubclass(cls, BaseException):
        return
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("torchpipe_") or base.__name__ in PUBLIC - {cls.__name__}:
            continue
        for name, value in vars(base).items():
            member = value if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
            function = member.fget if isinstance(member, property) else member
            is_member = inspect.isfunction(function) and function.__module__.startswith("torchpipe_")
            if is_member and member.__doc__ and (name == "__call__" or name[0] != "_") and name not in seen:
                seen.add(name)
                yield name, member


def described(name: str, thing: Any) -> Iterator[str]:
    """A signature and a docstring, as Markdown."""
    if not (inspect.isclass(thing) and issubclass(thing, (Enum, BaseException))):
        yield from ("```text", signature(name, thing, is_method=name.startswith(".")), "```", "")
    yield from (inspect.cleandoc(thing.__doc__ or "").replace("``", "`").replace("::\n", ":\n"), "")
    if inspect.isclass(thing):
        kinds = [base.__name__ for base in thing.__mro__[1:] if base.__name__ not in ("object", "Generic", "ABC")]
        shown = [kind for kind in kinds if kind not in UNTOLD and (kind in PUBLIC or issubclass(thing, BaseException))]
        if shown:
            yield from (f"A kind of {', '.join(f'`{kind}`' for kind in shown)}.", "")
    if inspect.isclass(thing) and issubclass(thing, Enum):
        yield from (", ".join(f"`{name}.{value}`" for value in thing.__members__), "")


def summary(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("``", "`")


def signature(name: str, thing: Any, is_method: bool) -> str:
    """A call, with annotations and defaults as they are written."""
    parts = []
    parameters = list(inspect.signature(thing).parameters.values())[is_method and not inspect.isclass(thing) :]
    star = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        text = getattr(each.annotation, "__forward_arg__", each.annotation)
        annotation = "" if text is each.empty else f": {text}"
        default = "" if each.default is each.empty else f"{' = ' if annotation else '='}{written(each.default)}"
        parts.append(f"{prefix}{each.name}{annotation}{default}")
    returned = inspect.signature(thing).return_annotation
    end = "" if returned in (inspect.Signature.empty, None, "None") else f" -> {returned}"
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){end}"


def written(default: Any) -> str:
    """A default value as in the source; one that has no such form is an ellipsis."""
    text = repr(default)
    return "…" if text.startswith("<") else text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)

"""Turns an expression into backends that can be built: resolves every name and checks every value."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchpipe_py.backends.base import Backend, BackendConfig, BatchRange, FilterMaker
from torchpipe_py.backends.params import REQUIRED, Param
from torchpipe_py.errors import MOST_PROBLEMS, ConfigError, Problems, nearest, quoted
from torchpipe_py.filters import BUILT_IN, Filter
from torchpipe_py.plan.config import NODE_KEYS, NodeSpec
from torchpipe_py.plan.expression import Call, parse_expression
from torchpipe_py.plan.unknown import backend_instead_of, elsewhere, instead_of, is_service_flag
from torchpipe_py.registry import ALIASES, Registry, canonical, register_hint
from torchpipe_py.values import Value, to_str

_MOST_NAMED = 16  # keys in one message


@dataclass(frozen=True)
class FilterPlan:
    """A filter to be created where it will run: a function as it is, or a class to instantiate with ``params``."""

    source: Any
    params: Mapping[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        """Whether it is none of the built-in filters, and so may read any key."""
        return self.source not in BUILT_IN.values()

    def create(self) -> Filter:
        """The function, or a new instance."""
        function: Filter = self.source if self.params is None else self.source.create(self.params)
        return function


@dataclass(frozen=True)
class BackendPlan:
    """A backend that can be built: class, typed parameters, children, and the filters before the children.

    ``keys`` maps a parameter to the key it was read from, if there is one; of a ``named`` one, each bare key.
    """

    cls: type[Backend]
    label: str
    params: Mapping[str, Any]
    children: tuple[BackendPlan, ...] = ()
    filters: tuple[FilterMaker | None, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, backend: Backend) -> BackendPlan:
        """The plan that creates another instance of ``backend``."""
        config = backend.config
        children = tuple(map(cls.of, config.children))
        return cls(type(backend), config.label, dict(config.params), children, config.filters)

    def parts(self) -> Iterator[BackendPlan]:
        """This plan and all its descendants."""
        yield self
        for child in self.children:
            yield from child.parts()

    def jumps(self) -> Iterator[tuple[str, str]]:
        """Roots of the graphs that it runs, each with the label that a drawing gives the jump."""
        for part in self.parts():
            yield from part.cls.jumps(part.params).items()

    def on_cpu(self) -> BackendPlan:
        """The plan with Tensors on the CPU where the configuration leaves their device open."""
        is_open = self.params.get("device_type") == ""
        params = {**self.params, "device_type": "cpu"} if is_open else self.params
        return replace(self, params=params, children=tuple(child.on_cpu() for child in self.children))

    def keys_read(self) -> Iterator[Collection[str] | None]:
        """Keys of a request's dict that its parts may read; see ``Backend.keys_read``."""
        for part in self.parts():
            yield part.cls.keys_read(part.params)
            if any(isinstance(each, FilterPlan) and each.is_custom for each in part.filters):
                yield None

    def batch_range(self) -> BatchRange | None:
        """The batch sizes that it accepts, or ``None`` if the configuration does not determine them."""
        return self.cls.batch_range(self.params, [child.batch_range() for child in self.children])

    def requires_cuda(self) -> bool:
        """Whether it cannot be set up without a CUDA device."""
        return self.cls.requires_cuda(self.params, [child.requires_cuda() for child in self.children])

    def uses_device(self) -> bool:
        """Whether any of its backends declares that it uses a CUDA device when one is available."""
        return self.requires_cuda() or any(part.cls.uses_device for part in self.parts())

    def create(self, config: BackendConfig) -> Backend:
        """A new instance, not set up yet; ``config`` holds its index and its device."""
        children = tuple(child.create(config) for child in self.children)
        return self.cls(replace(config, params=self.params, children=children, filters=self.filters, label=self.label))


_Position = tuple[tuple[str, ...], int]
"""The position of a call: the names of all calls in its list, and its index among them."""

_ALONE: _Position = (("",), 0)


def expand(call: Call, node: NodeSpec, ancestors: tuple[str, ...] = ()) -> Call:
    """``A`` with a key ``"A::backend" = "B"`` is ``A[B]``; everything else stays as it is."""
    name = canonical(call.name)
    key = next((key for key in _scoped(name, "backend") if key in node.params), None)
    if not call.args and key is not None and name not in ancestors:
        try:
            (inner,) = parse_expression(f"{call.name}[{to_str(node.params[key])}]")
            call = Call(call.name, inner.args, call.filter)
        except ValueError as error:
            raise node.at(key).error(error) from None
    return Call(call.name, tuple(expand(arg, node, (*ancestors, name)) for arg in call.args), call.filter)


class Binder:
    """Binds the calls of one node to classes and values, and remembers which keys were used.

    Errors in single values are added to ``problems``; an error that leaves no backend to bind is raised.
    """

    def __init__(self, node: NodeSpec, registry: Registry, problems: Problems) -> None:
        self.node = node
        self.registry = registry
        self.problems = problems
        self.used: set[str] = set()
        self.known: set[str] = set()
        self.ignored: dict[str, str] = {}
        self.missing: list[ConfigError] = []
        self._sources: dict[str, Any] = {}
        self._valid: list[tuple[type[Backend], Mapping[str, Any], Mapping[str, str]]] = []
        source = node.place.source
        self._folder = os.path.dirname(source) if source.endswith(".toml") else None
        self._reads_beside = False

    def bind(self, call: Call, position: _Position = _ALONE) -> BackendPlan:
        """The plan of a call, which is at ``position`` in its list."""
        call = self._hoisted(call)
        cls = self._find(call)
        self._check_children(call, cls)
        params, keys = self._params(canonical(call.name), cls, position)
        names = tuple(canonical(arg.name) for arg in call.args)
        return BackendPlan(
            cls=cls,
            label=str(Call(call.name, call.args)),
            params=params,
            children=tuple(self.bind(arg, (names, place)) for place, arg in enumerate(call.args)),
            filters=tuple(self._filter(arg, cls) for arg in call.args),
            keys=keys,
        )

    def check_names(self, call: Call) -> None:
        """Report every unknown backend name in an expression; ``bind`` stops at the first one."""
        for each in call.walk():
            with self.problems.gathered():
                self._find(each)

    def wrapper(self, name: str) -> BackendPlan:
        """The plan of a backend that will wrap another one, although the node does not name it."""
        call = Call(name)
        cls = self._find(call)
        return BackendPlan(cls, name, self._params(name, cls, _ALONE)[0])

    def filter(self, name: str, key: str) -> FilterPlan:
        """The filter that ``key`` of the node names, with the parameters of its class."""
        try:
            source = self.registry.find_filter(name)
        except Exception as error:
            raise self.node.at(key).error(f"filter {quoted(name)}: {error}") from error
        if source is None:
            near = nearest(name, self.registry.filter_names())
            raise self.node.at(key).error(f"no filter {quoted(name)}; {near} {register_hint('filter')}")
        if not hasattr(source, "create"):
            return FilterPlan(source)
        scope = name.removeprefix("Python[").removesuffix("]").strip()
        return FilterPlan(source, self._values(scope, source, _ALONE)[0])

    def _hoisted(self, call: Call) -> Call:
        """Rewrite ``S[A,B,SyncTensor]`` as ``SyncTensor[S[A,B]]``."""
        if len(call.args) < 2 or not self._find(call).is_sequence:
            return call
        *before, last = call.args
        if last.args or last.filter or not self._find(last).wraps_sequence:
            return call
        return Call(last.name, (Call(call.name, tuple(before)),), call.filter)

    def _find(self, call: Call) -> type[Backend]:
        try:
            cls = self.registry.find_backend(call.name)
        except ConfigError as error:
            raise self.node.at("backend").error(error) from None
        if cls is None:
            meant = backend_instead_of(call.name, self.registry.backend_names())
            raise self.node.at("backend").error(f"no backend {quoted(call.name)}; {meant} {register_hint('backend')}")
        return cls

    def _check_children(self, call: Call, cls: type[Backend]) -> None:
        low, high = cls.children
        count = len(call.args)
        if count < low:
            raise self.node.at("backend").error(f"{call.name} needs a backend in brackets: {call.name}[…]")
        if high is not None and count > high:
            allowed = "no brackets" if high == 0 else f"at most {high} in its brackets"
            raise self.node.at("backend").error(f"{call.name} takes {allowed}, found {count}")

    def _params(self, scope: str, cls: type[Backend], position: _Position) -> tuple[dict[str, Any], dict[str, str]]:
        """The parameters of a backend, and the keys they were read from."""
        self.used.update(_scoped(scope, "backend"))
        for key, reason in cls.ignored_keys.items():
            self.ignored.update(dict.fromkeys((key, *_scoped(scope, key)), f"ignored: {reason}"))
        before = self.problems.count
        params, keys = self._values(scope, cls, position)
        if self.problems.count == before and not self.missing and not cls.any_params:
            self._valid.append((cls, params, keys))
        return params, keys

    def _values(self, scope: str, source: Any, position: _Position) -> tuple[dict[str, Any], dict[str, str]]:
        """Parameter values of a backend or a ``PythonFilter``, and the key that each was read from."""
        self._sources[scope] = source
        if source.any_params:
            return self._all_params(scope), {}
        return self._typed(scope, source.parameters(), position)

    def _typed(
        self, scope: str, declared: Mapping[str, Param], position: _Position
    ) -> tuple[dict[str, Any], dict[str, str]]:
        params: dict[str, Any] = {}
        keys: dict[str, str] = {}
        # Handle files to be written last: they go to the folder where the files to be read were found.
        for name, param in sorted(declared.items(), key=lambda item: item[1].kept):
            self.known |= {param.key, f"{scope}::{param.key}"}
            if param.named:
                found = self._named(scope, param)
                values = {each: self._value(key, scope, param, position) for each, key in found.items()}
                params[name] = tuple(sorted(values.items()))
                prefix = param.key.rpartition("::")[0]
                keys |= {f"{prefix}::{each}": key for each, key in found.items()}
                continue
            key = self._key(scope, param)
            params[name] = self._value(key, scope, param, position)
            if key is None:
                continue
            keys[name] = key
            if inner := param.inner(params[name]):
                written = str(_at_position(self.node.params[key], position, scope))
                params[f"{name}_params"] = self._typed(written, inner, _ALONE)[0]
        return params, keys

    def check_combinations(self) -> None:
        """Report invalid combinations of valid parameters, once every backend is bound."""
        declaring = [source for source in self._sources.values() if not source.any_params]
        takers = Counter(param.key for source in declaring for param in source.parameters().values())
        for cls, params, read in self._valid:
            self._remark(cls, params, read, takers)

    def _remark(
        self, cls: type[Backend], params: Mapping[str, Any], read: Mapping[str, str], takers: Mapping[str, int]
    ) -> None:
        keys = {param.key: read.get(name, param.key) for name, param in cls.parameters().items()}
        own = [name for name, key in keys.items() if key in self.node.own]
        for remark in cls.remarks(params, own):
            key = keys.get(remark.key) or read.get(remark.key, remark.key)
            if remark.is_unused and takers[key] > 1:
                continue  # another backend of the node takes it
            place = self.node.at(key) if key in self.node.params else replace(self.node.place, key=key)
            if remark.is_warning:
                self.problems.warn_once(f"{place}: {remark.text}")
            else:
                self.problems.add(place.error(remark.text))

    def _value(self, key: str | None, scope: str, param: Param, position: _Position) -> Any:
        if key is None:
            if param.default is REQUIRED:
                place = replace(self.node.place, key=param.key)
                self.missing.append(place.error(f"{scope} needs it{': ' * bool(param.doc)}{param.doc}"))
            return param.default
        with self.problems.gathered():
            return self._read(key, scope, param, position)
        return param.default

    def _read(self, key: str, scope: str, param: Param, position: _Position) -> Any:
        value = self.node.params[key]
        is_text = isinstance(value, str)
        try:
            value = param.read(_at_position(value, position, scope), self.registry)
            if value and (param.file or param.kept):
                value = self._located(value, param)
        except ValueError as error:
            meaning = f" ({param.doc})" if param.doc and is_text and str(error).startswith("expected a") else ""
            raise self.node.at(key).error(f"{error}{meaning}") from None
        return value

    def _located(self, path: str, param: Param) -> str:
        """The path of a file in the working directory, or else beside the TOML file.

        A file to be written goes beside the TOML file if this node's other files were found there.
        Raises ``ValueError`` if a file to be read is missing.
        """
        beside = path if self._folder is None else os.path.join(self._folder, path)
        if not os.path.isfile(path) and os.path.isfile(beside):
            self._reads_beside = True
            return beside
        if beside != path and os.path.isfile(path) and os.path.isfile(beside) and not os.path.samefile(path, beside):
            both = f"{path} is in the working directory and beside the TOML file; the former is taken"
            self.problems.warn_once(f"{self.node.place.source}: {both}")
        if param.file and not os.path.isfile(path):
            folders = f"working directory: {os.getcwd()}"
            if beside != path:
                folders += f"; folder of the TOML file: {os.path.abspath(self._folder or '')}"
            raise ValueError(f"no such file: {path} ({folders})")
        return beside if param.kept and self._reads_beside and not os.path.isfile(path) else path

    def _key(self, scope: str, param: Param) -> str | None:
        """The key that sets the parameter: the node's table wins over the top level, a scoped key over a bare one."""
        present = [
            (name, key)
            for name in (param.key, *param.also)
            for key in (*_scoped(scope, name), name)
            if key in self.node.params
        ]
        self.used.update(key for _, key in present)
        names = [(name, key) for name, key in present if key in self.node.own] or present
        for name, key in names:
            if name != names[0][0]:
                self.problems.add(self.node.at(key).error(f"another name of {names[0][0]!r}, which is set, too"))
        return names[0][1] if names else None

    def _named(self, scope: str, param: Param) -> dict[str, str]:
        """The keys of the node that set a parameter for one name each, as ``mean::left``, by these names."""
        prefix = param.key.rpartition("::")[0]
        starts = [f"{start}::" for start in (prefix, *reversed(_scoped(scope, prefix)))]
        # A later key wins: the node's over the top level's, a scoped one over a bare one.
        present = [
            (key[len(start) :], key)
            for is_own in (False, True)
            for start in starts
            for key in self.node.params
            if key.startswith(start) and key != start and (key in self.node.own) is is_own
        ]
        self.used.update(key for _, key in present)
        return dict(present)

    def _all_params(self, scope: str) -> dict[str, Value]:
        """All bare keys, overridden by the keys of this scope, whose prefix is removed."""
        prefix = f"{scope}::"
        bare = {key: value for key, value in self.node.params.items() if "::" not in key}
        scoped = {key: value for key, value in self.node.params.items() if key.startswith(prefix)}
        self.used |= bare.keys() | scoped.keys()
        return {**bare, **{key[len(prefix) :]: value for key, value in scoped.items()}}

    def _filter(self, call: Call, parent: type[Backend]) -> FilterPlan | None:
        if call.filter is None:
            return None
        if not parent.is_sequence:
            raise self.node.at("backend").error(f"({call.filter}){call.name}: filters stand only inside Sequential")
        return self.filter(call.filter, "backend")

    def check_keys(self, unused: Iterable[str], ignored: Mapping[str, str]) -> None:
        """Report unknown and missing keys; ``ignored`` holds known keys that have no effect here."""
        unknown = []
        for key in unused:
            if key in ignored:
                self.problems.warn_once(f"{self.node.at(key)}: {ignored[key]}")
            else:
                unknown.append(key)
        for key in unknown if self.node.has_backend else self._without_backend(unknown):
            self.problems.add(self.node.at(key).error(self._why_unknown(key)))
        for error in self.missing:
            self.problems.add(error)

    def _without_backend(self, unused: Sequence[str]) -> list[str]:
        """If no backend is named, report that once instead of every parameter; returns the keys still to report."""
        unused = unused[:MOST_PROBLEMS]
        others = [key for key in unused if elsewhere(key) or _is_nearly(key, [*NODE_KEYS, *self.known])]
        params = [quoted(key) for key in unused if key not in others]
        if params:
            place = replace(self.node.place, key="backend")
            named = ", ".join(params[:_MOST_NAMED]) + (", …" if len(params) > _MOST_NAMED else "")
            self.problems.add(place.error(f"missing; without it the node is Identity, which does not take {named}"))
        return others

    def _why_unknown(self, key: str) -> str:
        scope, _, name = key.rpartition("::")
        sources = [source for own, source in self._sources.items() if scope in ("", own)]
        undeclared = "; ".join(filter(None, (source.undeclared(name, self.node.params[key]) for source in sources)))
        if key in ("min", "max"):
            return "; ".join(filter(None, ("no backend of this node takes a batch range", undeclared)))
        if scope and name in NODE_KEYS:
            return f"unknown key; {name!r} belongs to the node, not to a backend: write it without {scope}::"
        names = {known for known in self.known if ("::" in known) == ("::" in key)} | set(NODE_KEYS)
        is_other = is_service_flag(name) or _is_nearly(name, [known.rpartition("::")[2] for known in names])
        if undeclared and not is_other:
            return "; ".join(filter(None, ("unknown key", elsewhere(key), undeclared)))
        takers = [] if is_other or elsewhere(key) else self.registry.backends_with(name)
        if takers:
            return f"unknown key; it belongs to {' or '.join(takers)}, which this node does not name"
        readers = [] if is_other or elsewhere(key) else self.registry.postprocessors_with(name)
        if readers:
            return f"unknown key; postprocessors read it that this node does not have: {', '.join(readers)}"
        return f"unknown key; {instead_of(key, names)}"


def _is_nearly(key: str, valid: Iterable[str]) -> bool:
    """Whether an unknown key is similar to a valid one."""
    return bool(difflib.get_close_matches(key, list(valid), 1, 0.75))


def _scoped(scope: str, name: str) -> list[str]:
    """The scoped forms of a key: one for the backend's name and one for each alias."""
    aliases = [alias for alias, target in ALIASES.items() if target == scope]
    return [f"{prefix}::{name}" for prefix in (scope, *aliases)]


def _at_position(value: Value, position: _Position, scope: str) -> Value:
    """Select one of the values separated by ``|``, if the backend occurs several times in one list.

    There must be one value for each occurrence, or one for each backend of the list; the others are then ignored.
    """
    names, place = position
    count = names.count(names[place])
    if count == 1 or not isinstance(value, str) or "|" not in value:
        return value
    parts = [part.strip() for part in value.split("|")]
    if len(parts) == count:
        return parts[names[:place].count(names[place])]
    if len(parts) == len(names):
        return parts[place]
    raise ValueError(f"{quoted(value)} has {len(parts)} values, {scope} occurs {count} times")

"""Turns TOML text or dicts into frozen, checked node specs; knows no backends and starts no threads."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar

from torchpipe_py.errors import ConfigError, Problems, logger, nearest, quoted
from torchpipe_py.files import iter_matches, missing, nearest_path
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ORIGINAL_COLOR_KEY, TASK_ORIGINAL_KEY
from torchpipe_py.plan.expression import Call, parse_expression
from torchpipe_py.plan.syntax import explain
from torchpipe_py.plan.unknown import ELSEWHERE
from torchpipe_py.values import Value, to_bool, to_float, to_int, to_key, to_str, to_strings

GLOBAL = "global"
DEFAULT_NODE = "node"
DEFAULT_MAX_INFLIGHT = 10_000
DEFAULT_STATE_SECONDS = 60.0
MAX_INSTANCES = 1024  # per node; each is a thread, and no machine has so many cores

NODE_KEYS = (
    "backend",
    "next",
    "map",
    "filter",
    "instance_num",
    "batching_timeout",
    "device_id",
    "decode_isolation",
    "shared",
    "ordered_by",
    "state_seconds",
)
ISOLATIONS = ("none", "process")
MOST_CHARACTERS = 2**20
"""Maximum length of a configuration file, in characters."""

MOST_NODES = 2000
"""Maximum number of nodes in a configuration file."""

TABLE_KEYS = frozenset(("next", "map", "filter", "or"))
LOGICAL_KEYS = ("next", "map", "filter")
PIPELINE_KEYS = ("max_inflight",)
DEFAULT_FILTER = "swap"  # for a node that has a predecessor and no map
RUNS = (DEFAULT_FILTER, "run", "continue")
"""Filters that never return ``Skip``."""

# Schedulers of the C++ library; this package always behaves like the default ones.
_SCHEDULER_SCOPES = ("Interpreter", "PipelineV3")
_SCHEDULER_DEFAULTS = ("PipelineV3", "BaselineSchedule")

_MODELS = (".onnx", ".pt", ".pth", ".pt2", ".ts", ".engine", ".plan", ".trt", ".enc")
_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_\-]+)?")
_MAP_SOURCE = re.compile(r"\s*(?P<node>[A-Za-z0-9_.\-]*)\s*\[(?P<pairs>[^\[\]]*)\]\s*(?:,|$)")

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A place in the configuration; every error message begins with it."""

    kind: ClassVar[str] = "node"

    source: str
    node: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        parts = [self.source]
        if self.node is not None:
            parts.append("global" if self.node == GLOBAL else f"{self.kind} {quoted(self.node)}")
        if self.key is not None:
            parts.append(f"key {quoted(self.key)}")
        return ": ".join(parts)

    def error(self, problem: object) -> ConfigError:
        return ConfigError(f"{self}: {problem}")


@dataclass(frozen=True)
class MapSource:
    """One source of a ``map``: ``node`` (if empty, every predecessor) and its ``(key, new key)`` pairs."""

    node: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NodeSpec:
    """One table of the configuration, with the defaults of the top level filled in.

    ``calls`` and ``instance_num`` have one entry for each part of an ``&`` composition; if the configuration does not
    set ``instance_num``, it is empty until the node is planned.
    ``params`` holds every key that is not a node key, bare or as ``"Backend::param"``, still as written;
    ``own`` names those from the node's own table. ``has_backend``: the node or the top level names a backend.
    """

    place: Place
    name: str
    calls: tuple[Call, ...]
    next: tuple[str, ...] = ()
    map: tuple[MapSource, ...] = ()
    filter: str | None = None
    instance_num: tuple[int, ...] = ()
    batching_timeout: float = 0.0
    device_id: int = 0
    decode_isolation: str = ISOLATIONS[0]
    shared: bool = False
    ordered_by: str = ""
    state_seconds: float = DEFAULT_STATE_SECONDS
    params: Mapping[str, Value] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    has_backend: bool = True

    @property
    def owner(self) -> str:
        """The node whose instances run it: itself, or for a logical node ``name.alias`` the node ``name``."""
        folder, slash, name = self.name.rpartition("/")  # of a folder's file, whose name may have dots
        return f"{folder}{slash}{name.partition('.')[0]}"

    @property
    def always_runs(self) -> bool:
        """Whether the node runs on every result that it receives."""
        return self.has_filter(*RUNS)

    def has_filter(self, *names: str) -> bool:
        """Whether its filter, named or default, is one of these."""
        return (self.filter or DEFAULT_FILTER).lower() in names

    def at(self, key: str) -> Place:
        """The place of ``key``: the node's table, or the top level if it is set there."""
        return Place(self.place.source, self.place.node if key in self.own else GLOBAL, key)


@dataclass(frozen=True)
class PipelineSpec:
    """The whole configuration; ``nodes`` are in file order, without the ``broken`` ones, which could not be read.

    For a folder, ``parts`` maps the prefix of a file's node names to the spec of that file.
    """

    place: Place
    nodes: Mapping[str, NodeSpec]
    defaults: Mapping[str, Value]
    max_inflight: int = DEFAULT_MAX_INFLIGHT
    broken: tuple[str, ...] = ()
    parts: Mapping[str, PipelineSpec] = field(default_factory=dict)

    def logical(self) -> dict[str, list[str]]:
        """Maps each node with instances to the names of all nodes that run on them, in file order."""
        names: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            names.setdefault(node.owner, []).append(name)
        return names


class Tables(dict[str, Any]):
    """The tables of one file or several; error messages name it as ``source``."""

    source = "config"

    @classmethod
    def of(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> Tables:
        """The tables of a file, a flat dict or a dict of dicts, with ``"global"`` first. Raises ``ConfigError``."""
        if not isinstance(config, Mapping):
            return parse_toml(config)
        tables = cls(_with_global(dict(config), Place(cls.source)))
        tables.source = getattr(config, "source", cls.source)
        return tables

    def spec(self, problems: Problems) -> PipelineSpec:
        """The checked spec; errors in single nodes go to ``problems``, an error that leaves no node is raised."""
        place = Place(self.source)
        return _pipeline(_with_global(dict(self), place), place, problems)


def parse_toml(path: str | os.PathLike[str]) -> Tables:
    """Read a file as a dict of dicts, ``"global"`` first, which you may edit and pass to ``pipe``.

    Raises ``ConfigError`` if the file is missing (naming it and the working directory) or is not valid TOML.
    """
    import tomli  # here, so that `torchpipe load` works where only the client is installed

    name = os.fspath(path)
    try:
        # NOTE: a service reloads it while it serves: reading a pipe would block, and /dev/zero never ends.
        kind = os.stat(name).st_mode
        if stat.S_ISDIR(kind):
            raise ConfigError(f"{name}: a folder; {_one_of(name)}")
        if not stat.S_ISREG(kind):
            raise ConfigError(f"{name}: not a regular file")
        with open(name, encoding="utf-8-sig") as file:  # editors on Windows write a mark at the start
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise ConfigError(f"{name}: more than {MOST_CHARACTERS} characters")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file{missing(name, '.toml')}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        _check_name(name)
        line, byte = error.object.count(b"\n", 0, error.start) + 1, f"0x{error.object[error.start]:02x}"
        raise ConfigError(f"{name}: not UTF-8, as TOML is: byte {byte} in line {line}; save it as UTF-8") from None
    except ConfigError:
        raise
    except ValueError as error:  # a null character in the path, say
        raise ConfigError(f"{name!r}: cannot be read: {error}") from None
    try:
        tables = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, endless nesting
        raise ConfigError(f"{name}: not valid TOML: {explain(error, text)}") from None
    parsed = Tables(_with_global(tables, Place(name)))
    parsed.source = name
    return parsed


def _check_name(name: str) -> None:
    """Raise ``ConfigError`` unless the path ends in ``.toml``; a model's file gets a hint."""
    if name.endswith(".toml"):
        return
    if name.lower().endswith(_MODELS):
        export = f"; torchpipe export {name} writes one" if name.lower().endswith(".onnx") else ""
        raise ConfigError(f"{name}: a model; expected the TOML file that names it, as model = {quoted(name)}{export}")
    if os.path.isdir(name):
        raise ConfigError(f"{name}: a folder; {_one_of(name)}")
    expected = "expected a path ending in .toml"
    if not os.path.exists(name):
        meant = nearest_path(name, ".toml")
        expected = f"no such file or folder; {f'did you mean {meant!r}?' if meant else expected}"
    raise ConfigError(f"{name}: {expected}")


def _one_of(folder: str) -> str:
    """How to name one configuration of a folder."""
    found = islice(chain(iter_matches(f"{folder}/*.toml"), iter_matches(f"{folder}/*/*.toml")), 4)
    files = [os.path.normpath(path) for path in found]
    more = ", …" if len(files) > 3 else ""
    return f"name one file of it: {', '.join(files[:3])}{more}" if files else "expected a path ending in .toml"


def load_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> PipelineSpec:
    """Checked specs from a path ending in ``.toml``, a flat dict (one node) or a dict of dicts."""
    problems = Problems()
    spec = read_config(config, problems)
    problems.raise_all()
    return spec


def read_config(config: str | os.PathLike[str] | Mapping[str, Any], problems: Problems) -> PipelineSpec:
    """``load_config``, but errors go to ``problems``; raises only if it is not a configuration at all."""
    if isinstance(config, Mapping):
        return (config if isinstance(config, Tables) else Tables(config)).spec(problems)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config: expected a path or a dict, got {type(config).__name__}")
    name = os.fspath(config)
    _check_name(name)
    return _pipeline(parse_toml(name), Place(name), problems)


def used_backends(config: Mapping[str, Any]) -> set[str]:
    """Names of the backends in a configuration, as far as it can be read."""
    nodes = read_config(config, Problems()).nodes.values()
    return {part.name for node in nodes for call in node.calls for part in call.walk()}


def _with_global(tables: dict[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Scalars beside tables become ``"global"``; scalars alone are one node."""
    scalars = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    nodes: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if isinstance(table, Mapping):
            nodes.update(_with_aliases(name, table))
    if not nodes:
        if not scalars:
            raise place.error("no table or key in it; expected a table for each node, as [decode]")
        pipeline = {key: scalars.pop(key) for key in PIPELINE_KEYS if key in scalars}
        return {GLOBAL: pipeline, DEFAULT_NODE: scalars}
    return {GLOBAL: {**scalars, **nodes.pop(GLOBAL, {})}, **nodes}


def _with_aliases(name: Any, table: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """The node and its logical nodes: TOML reads an unquoted ``[name.alias]`` as a table inside a table."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    own = {key: value for key, value in table.items() if key not in inner}
    aliases = {f"{name}.{alias}": dict(value) for alias, value in inner.items()}
    return {name: own, **aliases} if own or not aliases else aliases


def _pipeline(tables: dict[str, dict[str, Any]], place: Place, problems: Problems) -> PipelineSpec:
    nodes = dict(tables)
    top = Place(place.source, GLOBAL)
    defaults = _cleaned(nodes.pop(GLOBAL), top, problems)
    if not nodes:
        raise place.error("no node in it")
    for key in TABLE_KEYS:
        if defaults.pop(key, None) is not None:
            problems.add(Place(place.source, GLOBAL, key).error("belongs into a node's table"))
    max_inflight = DEFAULT_MAX_INFLIGHT
    with problems.gathered():
        max_inflight = _read(defaults, "max_inflight", _positive, DEFAULT_MAX_INFLIGHT, top)
    defaults.pop("max_inflight", None)
    if len(nodes) > MOST_NODES:
        raise place.error(f"{len(nodes)} nodes; the limit is {MOST_NODES}")
    specs = {}
    for name, table in nodes.items():
        with problems.gathered():
            specs[name] = _node(name, table, defaults, place, problems)
    for spec in specs.values():
        with problems.gathered():
            _check_alias(spec, specs, nodes.keys(), problems)
    # NOTE: a logical node has no instances: it runs where its owner runs.
    specs = {name: replace(spec, shared=specs.get(spec.owner, spec).shared) for name, spec in specs.items()}
    return PipelineSpec(place, specs, defaults, max_inflight, tuple(name for name in nodes if name not in specs))


def _check_alias(node: NodeSpec, nodes: Mapping[str, NodeSpec], names: Set[str], problems: Problems) -> None:
    """Check that a logical node has an owner, and warn if it names another backend."""
    if node.owner == node.name:
        return
    owner = nodes.get(node.owner)
    if owner is None:
        if node.owner in names:
            return  # its errors have already been reported
        physical = {name for name, other in nodes.items() if other.owner == name}
        hint = nearest(node.owner, physical)
        raise node.place.error(
            f"a logical node (name.alias) of {node.owner!r}, which is missing, or is a table without a key; {hint}"
        )
    if "backend" in node.own and node.calls != owner.calls:
        named, runs = ("&".join(map(str, spec.calls)) for spec in (node, owner))
        place = node.at("backend")
        problems.warn_once(f"{place}: ignored: the node runs on the instances of {owner.name!r}, {runs}, not {named}")


def _node(
    name: str, table: dict[str, Any], defaults: Mapping[str, Value], pipeline: Place, problems: Problems
) -> NodeSpec:
    place = Place(pipeline.source, name)
    if not (isinstance(name, str) and _NODE_NAME.fullmatch(name)):
        raise place.error("a node's name is letters from a to z, digits, '_' and '-', with one '.' before an alias")
    own = _cleaned(table, place, problems)
    for key in PIPELINE_KEYS:
        if own.pop(key, None) is not None:
            problems.add(Place(place.source, name, key).error("belongs to the top level, not into a node"))
    with problems.gathered():
        _spell_out_or(own, place)
    keys = {**defaults, **own}

    failed: dict[str, ConfigError] = {}

    def read(key: str, convert: Callable[[Any], Any], default: Any) -> Any:
        try:
            return _read(keys, key, convert, default, Place(place.source, name if key in own else GLOBAL))
        except ConfigError as error:
            problems.add(error)
            failed[key] = error
            return default

    calls = read("backend", parse_expression_value, None) or (Call("Identity"),)
    variants = max([len(calls), *(_variants(keys[key]) for key in keys if is_composed(key))])
    if len(calls) == 1:
        calls *= variants
    elif len(calls) != variants:
        key = next(key for key in keys if is_composed(key) and _variants(keys[key]) == variants)
        raise Place(place.source, name, key).error(
            f"{quoted(keys[key])} has {variants} parts, backend has {len(calls)}"
        )
    for key in filter(is_composed, keys):
        where = Place(place.source, name if key in own else GLOBAL)
        _read(keys, key, lambda value: split_variants(value, variants), None, where)
    spec = NodeSpec(
        place=place,
        name=name,
        calls=calls,
        next=read("next", _names, ()),
        map=read("map", _map, ()),
        filter=read("filter", to_str, None),
        instance_num=read("instance_num", lambda value: _instance_num(value, variants), ()),
        batching_timeout=read("batching_timeout", _at_least(0, _to_ms), 0.0),
        device_id=read("device_id", _at_least(0, to_int), 0),
        decode_isolation=read("decode_isolation", _isolation, ISOLATIONS[0]),
        shared=read("shared", to_bool, False),
        ordered_by=read("ordered_by", lambda value: to_key(to_str(value)), ""),
        state_seconds=read("state_seconds", _at_least(0, to_float), DEFAULT_STATE_SECONDS),
        params={key: value for key, value in keys.items() if key not in NODE_KEYS},
        own=frozenset(own),
        has_backend="backend" in keys,
    )
    for key in ("backend", "next", "map"):
        if key in failed:
            raise failed[key]  # without these keys, further errors would be misleading
    return spec


def _spell_out_or(own: dict[str, Value], place: Place) -> None:
    """Replace ``or = true``, the C++ library's form of ``filter = "or"``."""
    if "or" not in own:
        return
    is_or = _read({"or": own.pop("or")}, "or", to_bool, False, place)
    if is_or and own.setdefault("filter", "or") != "or":
        raise Place(place.source, place.node, "or").error(f"the node has filter = {quoted(own['filter'])} as well")


def _cleaned(table: Mapping[str, Any], place: Place, problems: Problems) -> dict[str, Value]:
    """The table without scheduler choices that equal the default; refuses values of unsupported types."""
    cleaned: dict[str, Value] = {}
    for key, value in table.items():
        here = Place(place.source, place.node, key)
        with problems.gathered():
            if not isinstance(key, str):
                raise here.error("a key is a string")
            if isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value):
                if key in ELSEWHERE:
                    raise here.error(f"unknown key; {ELSEWHERE[key]}")
                raise here.error(f"expected one table, [{key}], got a list of tables, [[{key}]]")
            if isinstance(value, Mapping) or not isinstance(value, (str, int, float, list, tuple)):
                raise here.error(f"expected a string, number, bool or list, got {type(value).__name__}")
            if key.split("::")[0] not in _SCHEDULER_SCOPES:
                cleaned[key] = _copied(value)
            elif value in _SCHEDULER_DEFAULTS:
                logger.info("%s: ignored, this is how every pipe is scheduled", here)
            else:
                hint = nearest(str(value), _SCHEDULER_DEFAULTS)
                raise here.error(f"the scheduler is not exchangeable (a node's backend is set by 'backend'); {hint}")
    return cleaned


def _copied(value: Value) -> Value:
    """The value; a list is copied, so that later edits to it do not change a pipe."""
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _read(keys: Mapping[str, Value], key: str, convert: Callable[[Any], T], default: Any, place: Place) -> Any:
    if key not in keys:
        return default
    try:
        return convert(keys[key])
    except ValueError as error:
        raise Place(place.source, place.node, key).error(error) from None


def parse_expression_value(value: Value) -> tuple[Call, ...]:
    """Call ``parse_expression`` on a value that must be a string."""
    if not isinstance(value, str):
        several = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
        example = f"S[{','.join(value)}]" if several else "DecodeMat"  # type: ignore[arg-type]
        raise ValueError(f'expected a backend expression in quotes, as "{example}", got {quoted(value)}')
    return parse_expression(value)


def is_composed(key: str) -> bool:
    """Whether a key may have a separate value for each part of an ``&`` composition."""
    return key == "instance_num" or key == "model::cache" or key.rpartition("::")[2] in ("model", "min", "max")


def _variants(value: Value) -> int:
    return value.count("&") + 1 if isinstance(value, str) else 1


def split_variants(value: Value, count: int) -> list[Value]:
    """One value for each of ``count`` parts of an ``&`` composition: a shared value, or ``"a&b"`` with one for each."""
    if not isinstance(value, str) or "&" not in value:
        return [value] * count
    parts: list[Value] = [part.strip() for part in value.split("&")]
    if len(parts) != count:
        raise ValueError(f"{quoted(value)} has {len(parts)} parts, others have {count}")
    return parts


def _at_least(low: int, convert: Callable[[Value], float]) -> Callable[[Value], Any]:
    def read(value: Value) -> float:
        number = convert(value)
        if number < low:
            raise ValueError(f"expected at least {low}, got {quoted(number)}")
        return number

    return read


def _to_ms(value: Value) -> float:
    try:
        return to_float(value)
    except ValueError as error:
        raise ValueError(f"{error} (milliseconds)") from None


_positive = _at_least(1, to_int)


def _instance_num(value: Value, variants: int) -> tuple[int, ...]:
    numbers = tuple(_positive(part) for part in split_variants(value, variants))
    if max(numbers) > MAX_INSTANCES:
        raise ValueError(
            f"expected at most {MAX_INSTANCES}, got {quoted(max(numbers))}: each instance is a thread with a backend "
            "of its own ('max' is the size of a batch)"
        )
    return numbers


def _isolation(value: Value) -> str:
    name = to_str(value).lower()
    if name not in ISOLATIONS:
        raise ValueError(f"expected one of {', '.join(ISOLATIONS)}, got {quoted(value)}")
    return name


def _names(value: Value) -> tuple[str, ...]:
    names = to_strings(value)
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"names {quoted(name)} twice")
    return names


def _map(value: Value) -> tuple[MapSource, ...]:
    """Parse ``"src[key:newkey,key:newkey],src2[…]"``."""
    text, position, sources = to_str(value).strip(), 0, []
    while position < len(text):
        match = _MAP_SOURCE.match(text, position)
        if match is None:
            place = f"at column {position + 1} of {quoted(text)}"
            raise ValueError(f"expected source[key:newkey,…] {place}; for example decode[result:data]")
        sources.append(MapSource(match.group("node"), _pairs(match.group("pairs"), text)))
        position = match.end()
    if not sources:
        raise ValueError("is empty; expected source[key:newkey,…]")
    return tuple(sources)


def _pairs(text: str, whole: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in text.split(","):
        names = [name.strip() for name in part.split(":")]
        if len(names) != 2 or not all(names):
            raise ValueError(f"expected key:newkey, found {quoted(part.strip())} in {quoted(whole)}")
        pairs.append((to_key(names[0]), to_key(names[1])))
    if (TASK_ORIGINAL_KEY, TASK_DATA_KEY) in pairs and all(new != TASK_COLOR_KEY for _, new in pairs):
        pairs.append((TASK_ORIGINAL_COLOR_KEY, TASK_COLOR_KEY))  # the order of its channels
    return tuple(pairs)

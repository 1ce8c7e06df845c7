"""The arguments of ``app``: names, types, defaults and meaning, each declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torchpipe_py.backends.params import Param
from torchpipe_py.errors import ConfigError, nearest
from torchpipe_py.plan.config import GLOBAL, Tables
from torchpipe_py.values import to_float, to_int, to_str

MEBIBYTE = 2**20

Overrides = Mapping[tuple[str, str], Any]
"""Values for keys of nodes, by ``(node, key)``."""


def _argument(default: Any, doc: str, low: float | None = None, choices: Sequence[str] = (), key: str = "") -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "choices": choices, "key": key})


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``app``. ``overrides`` are those with a dot; ``None``: derived from the plan."""

    config: str = _argument("", "the TOML file")
    import_code: str = _argument("", "modules or .py files with custom backends, separated by commas", key="import")
    replicas: int = _argument(1, "replicas; with max_replicas the fewest", 1)
    max_replicas: int | None = _argument(None, "the most replicas: Serve scales between the two", 1)
    scale_on: str = _argument("ongoing", "quantity to scale on", choices=("ongoing", "queue_time"))
    target: float | None = _argument(
        None, "ongoing requests of a replica (as many as fill two rounds of batches), or ms of queue time (50)", 0.001
    )
    num_cpus: float | None = _argument(None, "CPUs of a replica", 0)
    num_gpus: float | None = _argument(None, "GPUs of a replica", 0)
    max_ongoing_requests: int | None = _argument(None, "requests of a replica (max_inflight + 10,000)", 1)
    max_queued_requests: int | None = _argument(
        None, "requests that may wait for a replica, in each proxy or handle", 1
    )
    deadline_ms: float = _argument(0.0, "longest deadline of a request; 0 is none", 0)
    queue_target_ms: float = _argument(-1.0, "ms that a request without a deadline may wait; as of torchpipe-serve", -1)
    hang_seconds: float = _argument(30.0, "seconds for a batch; then the replica is unhealthy; 0: no limit", 0)
    drain_seconds: float = _argument(25.0, "seconds for accepted requests when a replica or a pipe ends", 0)
    max_message_bytes: int = _argument(16 * MEBIBYTE, "bytes of a body", 64)
    max_text_bytes: int = _argument(MEBIBYTE, "bytes of all text in a body of JSON, without base64 and numbers", 64)
    max_reply_bytes: int = _argument(64 * MEBIBYTE, "bytes of an answer", 4096)
    max_held_bytes: int = _argument(1024 * MEBIBYTE, "bytes of unanswered requests and their answers in a replica", 64)
    max_batch: int = _argument(256, "items of a request", 1)
    forward_headers: str = _argument("", "headers that backends get as parameters; as of torchpipe-serve")
    overrides: Overrides = field(default_factory=dict)


_CONVERT: dict[str, Callable[[Any], Any]] = {"str": to_str, "int": to_int, "float": to_float}
SETTINGS: dict[str, tuple[str, Any]] = {
    each.metadata["key"] or each.name: (each.name, Param(_CONVERT[each.type.split()[0]], each.default, **each.metadata))
    for each in fields(Arguments)
    if each.metadata
}
"""Attributes and their ``Param`` by argument name."""


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Typed and checked, from words (``serve run … name=value``) or YAML's values.

    Raises ``ConfigError`` that names the argument and the nearest valid one.
    """
    named, overrides = _split(given)
    values: dict[str, Any] = {}
    for name, value in named.items():
        if name not in SETTINGS:
            hint = nearest(name, SETTINGS)
            raise ConfigError(f"app: no argument {name!r}; {hint} (a key of the configuration is node.key=value)")
        if value is not None:
            attribute, param = SETTINGS[name]
            try:
                values[attribute] = param.read(value, None)
            except ValueError as error:
                raise ConfigError(f"app: argument {name!r}: {error}") from None
    if not values.get("config"):
        raise ConfigError("app: the argument 'config' is missing, as in config=configs/demo.toml")
    arguments = Arguments(**values, overrides=overrides)
    if arguments.max_replicas is None:
        for name in ("scale_on", "target"):
            if name in values:
                raise ConfigError(f"app: argument {name!r} is for scaling, which max_replicas turns on")
    elif arguments.max_replicas < arguments.replicas:
        raise ConfigError(f"app: argument 'max_replicas' = {arguments.max_replicas} is less than replicas")
    return arguments


def read_user_config(given: object, before: Arguments) -> tuple[str, Overrides]:
    """The file and overrides that ``user_config`` sets; others stay as in ``before``.

    With another file, the overrides of ``before`` do not apply. Raises ``ConfigError``.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"user_config: expected config and node.key, each with a value, got a {type(given).__name__}")
    named, overrides = _split(given)
    for name in named.keys() - {"config"}:
        hint = "of app's arguments only config can change" if name in SETTINGS else nearest(name, ["config"])
        raise ConfigError(f"user_config: no {name!r}; {hint} (a key of the configuration is node.key)")
    if "config" in named:
        return str(named["config"]), overrides
    return before.config, {**before.overrides, **overrides}


def overridden(tables: Tables, overrides: Overrides) -> Tables:
    """The tables with other values for keys of their nodes; ``global`` is the top level. Changed in place."""
    for (node, key), value in overrides.items():
        if node not in tables:
            hint = nearest(node, [*tables, GLOBAL])
            raise ConfigError(f"argument {f'{node}.{key}'!r}: {tables.source} has no node {node!r}; {hint}")
        tables[node][key] = value
    return tables


def found_folder(path: str, folder: str) -> str:
    """The folder in which a relative ``path`` is found on this node: the working directory, or else ``folder``.

    ``folder`` is where the application was built. Raises ``ConfigError`` that names both.
    """
    for place in (os.getcwd(), folder):
        if os.path.exists(os.path.join(place, path)):
            return place
    raise ConfigError(
        f"{path}: not on node {os.uname().nodename}, neither in {os.getcwd()} nor in {folder}: the file and all that "
        "it names must lie in the working_dir of the runtime environment, or at the same place on every node"
    )


def _split(given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """Arguments by name, and overrides by node and key, whose names have a dot: ``node.key``."""
    named: dict[str, Any] = {}
    overrides: dict[tuple[str, str], Any] = {}
    for name, value in given.items():
        node, dot, key = str(name).rpartition(".")
        if dot:
            overrides[node, key] = value
        else:
            named[key] = value
    return named, overrides

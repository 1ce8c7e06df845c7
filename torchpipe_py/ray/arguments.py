"""The arguments of ``app``: names, types, defaults and meaning, each declared once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from torchpipe_py.errors import ConfigError, nearest
from torchpipe_py.plan.config import GLOBAL, Tables, parse_toml
from torchpipe_py.values import to_float, to_int, to_str

MEBIBYTE = 2**20


def _argument(
    default: Any,
    convert: Callable[[Any], Any],
    doc: str,
    low: float = 0,
    choices: Sequence[str] = (),
    key: str = "",
) -> Any:
    return field(default=default, metadata={"convert": convert, "doc": doc, "low": low, "choices": choices, "key": key})


@dataclass(frozen=True)
class Arguments:
    """What ``app`` is told. ``overrides`` are the arguments with a dot, by ``(node, key)``; ``None``: from the plan."""

    config: str = _argument("", to_str, "the TOML file")
    import_code: str = _argument("", to_str, "modules or .py files with backends of your own, by commas", key="import")
    replicas: int = _argument(1, to_int, "replicas; with max_replicas the fewest", 1)
    max_replicas: int | None = _argument(None, to_int, "the most replicas: Serve scales between the two", 1)
    scale_on: str = _argument("ongoing", to_str, "what it scales on", choices=("ongoing", "queue_time"))
    target: float | None = _argument(
        None,
        to_float,
        "of a replica: ongoing requests (those that fill two rounds of batches), or ms of queue time (50)",
        0.001,
    )
    num_cpus: float | None = _argument(None, to_float, "CPUs of a replica")
    num_gpus: float | None = _argument(None, to_float, "GPUs of a replica")
    max_ongoing_requests: int | None = _argument(None, to_int, "requests of a replica (max_inflight + 10,000)", 1)
    max_queued_requests: int | None = _argument(None, to_int, "requests that wait for one, of each proxy or handle", 1)
    deadline_ms: float = _argument(0.0, to_float, "longest deadline of a request; 0 is none")
    hang_seconds: float = _argument(30.0, to_float, "seconds for a batch; then the replica is unhealthy; 0: no limit")
    drain_seconds: float = _argument(25.0, to_float, "seconds for accepted requests when a replica or a pipe ends")
    max_message_bytes: int = _argument(16 * MEBIBYTE, to_int, "bytes of a body", 64)
    max_text_bytes: int = _argument(MEBIBYTE, to_int, "bytes of a body of JSON", 64)
    max_reply_bytes: int = _argument(64 * MEBIBYTE, to_int, "bytes of an answer over HTTP", 4096)
    overrides: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    def tables(self) -> Tables:
        """The configuration, with the overrides in it."""
        return overridden(parse_toml(self.config), self.overrides)


SETTINGS: dict[str, Field] = {each.metadata["key"] or each.name: each for each in fields(Arguments) if each.metadata}
"""By name."""


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Typed and checked, from words (``serve run … name=value``) or YAML's values.

    Raises ``ConfigError`` that names the argument and the nearest valid one.
    """
    values: dict[str, Any] = {}
    overrides: dict[tuple[str, str], Any] = {}
    for name, value in given.items():
        if "." in str(name):
            overrides[_node_and_key(name)] = value
        elif name not in SETTINGS:
            hint = nearest(str(name), SETTINGS)
            raise ConfigError(f"app: no argument {name!r}; {hint} (a key of the configuration is node.key=value)")
        elif value is not None:
            values[SETTINGS[name].name] = _read(name, value)
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


def read_user_config(given: object, before: Arguments) -> tuple[str, Mapping[tuple[str, str], Any]]:
    """The file and the overrides that ``user_config`` asks for: what it does not name stays as ``before`` has it.

    A file of its own starts without the others' overrides. Raises ``ConfigError``.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"user_config: expected config and node.key, each with a value, got a {type(given).__name__}")
    overrides: dict[tuple[str, str], Any] = {} if "config" in given else dict(before.overrides)
    for name, value in given.items():
        if "." in str(name):
            overrides[_node_and_key(name)] = value
        elif name != "config":
            hint = "of app's arguments only config can change" if name in SETTINGS else nearest(str(name), ["config"])
            raise ConfigError(f"user_config: no {name!r}; {hint} (a key of the configuration is node.key)")
    return str(given.get("config", before.config)), overrides


def overridden(tables: Tables, overrides: Mapping[tuple[str, str], Any]) -> Tables:
    """The tables with other values for keys of their nodes; ``global`` is the top level. Changed in place."""
    for (node, key), value in overrides.items():
        if node not in tables:
            hint = nearest(node, [*tables, GLOBAL])
            raise ConfigError(f"argument {f'{node}.{key}'!r}: {tables.source} has no node {node!r}; {hint}")
        tables[node][key] = value
    return tables


def found_folder(path: str, folder: str) -> str:
    """The folder that a relative ``path`` leads from on this node: the working directory, or else ``folder``.

    ``folder`` is where the application was built. Raises ``ConfigError`` that names both.
    """
    for place in (os.getcwd(), folder):
        if os.path.exists(os.path.join(place, path)):
            return place
    raise ConfigError(
        f"{path}: not on node {os.uname().nodename}, neither in {os.getcwd()} nor in {folder}: the file and all that "
        "it names must lie in the working_dir of the runtime environment, or at the same place on every node"
    )


def _node_and_key(name: str) -> tuple[str, str]:
    node, _, key = name.rpartition(".")
    return node, key


def _read(name: str, value: Any) -> Any:
    about = SETTINGS[name].metadata
    try:
        read = about["convert"](value)
    except ValueError as error:
        raise ConfigError(f"app: argument {name!r}: {error}") from None
    if about["choices"] and read not in about["choices"]:
        raise ConfigError(f"app: argument {name!r}: no {read!r}; {nearest(read, about['choices'])}")
    if isinstance(read, (int, float)) and not about["low"] <= read < math.inf:
        raise ConfigError(f"app: argument {name!r}: expected {about['low']} or more, got {read}")
    return read

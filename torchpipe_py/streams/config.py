"""A stream's table: the source of its frames, and which of them to keep."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from torchpipe_py.backends.params import REQUIRED, Param
from torchpipe_py.errors import ConfigError, Problems, nearest, quoted
from torchpipe_py.files import is_pattern, iter_matches
from torchpipe_py.plan.config import DEFAULT_NODE, GLOBAL, Place, parse_toml
from torchpipe_py.registry import default as registry
from torchpipe_py.values import Value, to_bool, to_float, to_int, to_str

LATEST, ALL = "latest", "all"

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_SECRET = re.compile(r"(?<=://)[^\s'\"]*@|\?[^\s'\"]*")
"""The secret parts of a URL: everything before the last @, since a password may have any character, and the query."""


def to_keep(value: Value) -> str | int:
    """``latest``, ``all``, or a number of the newest frames."""
    if value in (LATEST, ALL):
        return str(value)
    try:
        count = to_int(value)
    except ValueError:
        count = 0
    if not 1 <= count <= 1000:
        raise ValueError(f"expected 'latest', 'all' or a number of frames from 1 to 1000, got {quoted(value)}")
    return count


class StreamOptions:
    """The configuration of one stream; each attribute is a key of its table, or of the top level for every stream."""

    source = Param(
        to_str,
        doc="a file, a folder of images, a pattern as `shots/*.jpg`, `rtsp://…`, `http://…` or `/dev/video0`; "
        "`${NAME}` is read from the environment",
    )
    keep = Param(to_keep, LATEST, doc="frames that wait: `latest`, `all`, or a number of the newest; of images all")
    fps = Param(to_float, 0.0, low=0.0, high=1000.0, doc="take no more frames than that in a second; 0: all of them")
    live = Param(to_bool, None, doc="play a file as fast as its clock goes; default: unless all frames are kept")
    repeat = Param(to_bool, False, doc="play a file again when it ends")
    in_flight = Param(
        to_int, 0, low=0, high=1000, doc="frames in the pipe at once; 0: one, or as many as fit with `all`"
    )
    stale_ms = Param(to_float, 0.0, low=0.0, high=1e6, doc="drop a frame that waited longer; 0: never")
    weight = Param(to_float, 1.0, low=0.01, high=100.0, doc="share of the pipe beside other streams")
    reconnect = Param(to_bool, True, doc="open a network stream or device again when it ends or fails")
    timeout = Param(
        to_float,
        10.0,
        low=0.1,
        high=3600.0,
        doc="seconds to open it, and without a frame, after which it is opened again",
    )
    decoder = Param(
        to_str,
        "auto",
        choices=("auto", "pyav", "opencv", "pynvvideocodec"),
        doc="`auto` is PyAV, or OpenCV without it; `pynvvideocodec` decodes on a GPU, and frames are Tensors there",
    )
    device_id = Param(to_int, 0, low=0, doc="the GPU of `pynvvideocodec`")
    hwaccel = Param(to_str, "", doc="PyAV's device for decoding, as `cuda` or `vaapi`; empty: the CPU")
    node_name = Param(to_str, "", doc="the root that its frames enter, where the configuration has several")

    def __init__(self, name: str, values: Mapping[str, Any], source: str, secrets: Sequence[str] = ()) -> None:
        """``values`` are typed; ``source`` has its variables replaced by their values, the ``secrets``."""
        self.name = name
        self.shown = values["source"]
        vars(self).update(values)
        self.source = source
        self.is_file = _is_local(source)
        self.is_images = self.is_file and not _is_file(source)
        """Whether it is a folder or a pattern: its frames are images, without a clock."""
        if self.live is None:
            self.live = self.keep != ALL
        self._secrets = secrets

    def masked(self, text: str) -> str:
        """``text`` without passwords, tokens and values of environment variables."""
        text = text.replace(self.source, self.shown)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _SECRET.sub(lambda match: "***@" if match[0].endswith("@") else "?***", text)


def _secrets(source: str, where: Place) -> list[str]:
    """The secret parts of a URL; ``ConfigError`` if it cannot be parsed."""
    if "://" not in source:
        return []
    try:
        parts = urlsplit(source)
        _ = parts.port  # NOTE: no number where a / or ? in a password ends the host
        secrets = [parts.netloc.rpartition("@")[0], parts.query, parts.password or "", unquote(parts.password or "")]
    except ValueError:  # whose text may hold the password
        raise where.error("not a URL; within a password write %40 for @, %2F for /, %3F for ?, %5B for [") from None
    return [secret for secret in secrets if secret]


PARAMS: dict[str, Param] = {name: param for name, param in vars(StreamOptions).items() if isinstance(param, Param)}


class Entered(Protocol):
    """A pipe, or its plan: the roots that requests may enter."""

    @property
    def roots(self) -> Mapping[str, str]: ...

    @property
    def only_root(self) -> str | None: ...


def read_streams(
    config: str | os.PathLike[str] | Mapping[str, Any], entered: Entered | None = None
) -> list[StreamOptions]:
    """The streams of a TOML file or a dict of dicts; ``ConfigError`` that names every mistake with its place.

    Their frames have to find a root of ``entered``, where that is given.
    """
    if isinstance(config, Mapping):
        tables, place = dict(config), Place(getattr(config, "source", None) or "streams")
    else:
        tables, place = dict(parse_toml(config)), Place(os.fspath(config))
    defaults = tables.pop(GLOBAL, {})
    if [*tables, *defaults] == [DEFAULT_NODE] and "source" not in _table(tables[DEFAULT_NODE], place, DEFAULT_NODE):
        tables = {}  # keys without a table
    problems = Problems()
    streams = []
    for name, table in tables.items():
        with problems.gathered():
            streams.append(read_stream(str(name), {**defaults, **_table(table, place, name)}, place, entered))
    problems.raise_all()
    if not streams:
        raise place.error("no stream in it: each is a table with a source")
    return streams


def _table(table: Any, place: Place, name: Any) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise _StreamPlace(place.source, str(name)).error(f"expected a table, got {quoted(table)}")
    return table


def read_stream(name: str, table: Mapping[str, Any], place: Place, entered: Entered | None = None) -> StreamOptions:
    """One stream; ``ConfigError`` with the first mistake."""
    for key in table:
        if key not in PARAMS:
            raise _StreamPlace(place.source, name, key).error(f"unknown; {nearest(str(key), PARAMS)}")
    values = {}
    for key, param in PARAMS.items():
        if key not in table:
            if param.default is REQUIRED:
                raise _StreamPlace(place.source, name).error(f"needs the key {key!r}: {param.doc}")
            values[key] = param.default
            continue
        try:
            values[key] = param.read(table[key], registry)
        except (ValueError, ConfigError) as error:
            raise _StreamPlace(place.source, name, key).error(error) from None
    root = values["node_name"]
    if entered is not None and root not in entered.roots and (root or entered.only_root is None):
        problem = f"{quoted(root)} is not a root" if root else "has to name one of several roots"
        raise _StreamPlace(place.source, name, "node_name").error(f"{problem}; {nearest(root, entered.roots)}")
    where = _StreamPlace(place.source, name, "source")
    filled: list[str] = []
    source = _VARIABLE.sub(lambda match: _variable(match[1], where, filled), values["source"])
    secrets = {secret for secret in (*filled, *_secrets(source, where)) if len(secret) > 1}
    if _is_local(source):
        beside = str(Path(place.source).parent / source)
        found = next((path for path in (source, beside) if source and _exists(path)), None)
        if found is None:
            raise where.error(f"no such file: {quoted(values['source'])}, here or beside the configuration")
        source = found
        if not _is_file(source) and "keep" not in table:
            values["keep"] = ALL
    return StreamOptions(name, values, source, sorted(secrets, key=len, reverse=True))


def _is_local(source: str) -> bool:
    """Whether a source is a file, a folder or a pattern."""
    return "://" not in source and not source.startswith("/dev/")


def _exists(path: str) -> bool:
    """Whether there is a file or folder, or one that a pattern matches."""
    return _is_file(path) or os.path.isdir(path) or (is_pattern(path) and any(iter_matches(path)))


def _is_file(path: str) -> bool:
    """Whether ``path`` exists and is not a directory."""
    try:
        return os.path.exists(path) and not os.path.isdir(path)
    except (OSError, ValueError):
        return False


def _variable(name: str, where: Place, filled: list[str]) -> str:
    if name not in os.environ:
        raise where.error(f"the environment has no variable {name}")
    filled.append(os.environ[name])
    return filled[-1]


class _StreamPlace(Place):
    """The place of a stream's table."""

    kind = "stream"

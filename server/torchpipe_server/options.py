"""Every setting of the service, declared once: flags, defaults and documentation come from here."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any

import torchpipe_py
from torchpipe_py.serving import ArgumentParser, to_strings

MEBIBYTE = 2**20
_UNBOUNDED = 2**62
_UNITS = {"_ms": "milliseconds", "_seconds": "seconds", "_bytes": "bytes"}
_SIZE = re.compile(r"([0-9]{1,9})([KMGkmg])(?:i?B|b)?")
_SLOW = re.compile(r"slow:([0-9]{1,7}(?:\.[0-9]{1,3})?)")
_ORIGIN = re.compile(r"[\w*+.-]+://[^/\s]+/?")
MONITORING_PATHS = ("/", "/graph.svg", "/live", "/ready", "/metrics", "/stats", "/streams")
"""The paths of ``--http-port``."""


class Group(Enum):
    """A part of the list of all flags, by its title."""

    LISTENING = "where it listens, and to whom"
    PROCESSES = "processes and devices"
    CODE = "code, certificate and cameras"
    WAITING = "deadlines and overload"
    LIMITS = "limits of connections and messages"
    ENDINGS = "replacing and stopping processes"
    MODELS = "a folder of models"
    PAGES = "pages and headers"
    LOGS = "logs and traces"


def _option(
    group: Group,
    default: Any,
    doc: str,
    low: float = 0,
    high: float = _UNBOUNDED,
    choices: Sequence[str] = (),
    flag: str = "",
    brief: str = "",
) -> Any:
    """A flag; with ``brief``, a meaning of one line, it is among the few that ``--help`` shows."""
    about = {"group": group, "doc": doc, "low": low, "high": high, "choices": choices, "flag": flag, "brief": brief}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Options:
    """The settings of ``torchpipe-serve``; ``config``, a file or a folder, is the one positional argument."""

    config: str
    host: str = _option(
        Group.LISTENING,
        "127.0.0.1",
        "address to listen on; 0.0.0.0 or :: is every interface",
        brief="address (default: %(default)s); 0.0.0.0 is any",
    )
    port: int = _option(
        Group.LISTENING,
        8888,
        "port to listen on; 0 lets the system choose, the start line shows it",
        0,
        65535,
        brief="port for HTTP and Thrift (default: %(default)s)",
    )
    http_port: int = _option(
        Group.LISTENING,
        -1,
        f"port for monitoring: {', '.join(MONITORING_PATHS)}; 0: any free one; -1: none",
        -1,
        65535,
        brief="port for monitoring (default: none)",
    )
    http_host: str = _option(Group.LISTENING, "127.0.0.1", "monitoring: address that --http-port is opened on")
    allowed_hosts: str = _option(
        Group.LISTENING,
        "",
        "names that HTTP requests may be addressed to, separated by commas, * for any part; IP addresses, names "
        "without a dot and *.localhost are always allowed. Without this flag, a port that is not on loopback answers "
        "under any name, but loads and unloads models only under allowed ones",
    )
    cors_origin: str = _option(
        Group.LISTENING,
        "",
        "origins whose pages may call --port and --http-port and read the answers, as https://app.example, separated "
        "by commas, * for any part without /, ? and #; never with credentials, and not to load or unload models",
    )
    grpc_port: int = _option(
        Group.LISTENING,
        -1,
        "port of the Open Inference Protocol over gRPC, at --host; 0: any free one; -1: none",
        -1,
        65535,
        brief="port for gRPC (default: none)",
    )
    workers: int = _option(
        Group.PROCESSES,
        0,
        "processes, each with the whole pipeline and a share of the connections; 0: one per core, at most 8; 1 with "
        "--handler, or on a machine with an NVIDIA GPU if no node is shared",
        0,
        1024,
        brief="processes (default: one per core, at most 8)",
    )
    devices: str = _option(
        Group.PROCESSES,
        "",
        "CUDA devices for the workers in turn, as 0,1; default: all are visible to each",
        brief="CUDA devices for the workers in turn, as 0,1",
    )
    engines: int = _option(
        Group.PROCESSES,
        0,
        "engine processes for each device, where nodes are shared; 0: 2 if they decode on the GPU, else 1",
        0,
        64,
    )
    handler: str = _option(
        Group.CODE, "", "package.module:Class or file.py:Class with your own Thrift service, or routes over HTTP"
    )
    import_code: str = _option(
        Group.CODE,
        "",
        "modules or .py files with custom backends, separated by commas",
        flag="--import",
        brief="modules or .py files with custom backends",
    )
    require_certificate: str = _option(
        Group.CODE,
        "",
        "certificate of torchpipe compile; no worker starts if the TOML file, its models, code, libraries or what "
        "backends chose are not what it certifies",
    )
    streams: str = _option(
        Group.CODE, "", "TOML file of cameras, video files and network streams that the workers read as well"
    )
    max_connections: int = _option(
        Group.LIMITS, 1024, "connections at a time; a new one replaces an idle one, or gets 'overloaded'", 1
    )
    max_connections_per_address: int = _option(
        Group.LIMITS,
        0,
        "the same for one IPv4 address or IPv6 /64; 0: half of --max-connections, without limit for this machine",
    )
    max_calls_per_connection: int = _option(
        Group.LIMITS,
        64,
        "calls of one gRPC connection in work, and requests of its streams; its client holds further ones back",
        1,
    )
    max_message_bytes: int = _option(Group.LIMITS, 16 * MEBIBYTE, "bytes of one message, and of each string in it", 64)
    max_text_bytes: int = _option(
        Group.LIMITS,
        MEBIBYTE,
        "bytes of all text in one message; over HTTP that of JSON, but not of base64 and numbers",
        64,
    )
    max_reply_bytes: int = _option(
        Group.LIMITS, 64 * MEBIBYTE, "bytes of one reply as it is sent; beyond them 'too_large'", 4096
    )
    max_held_bytes: int = _option(
        Group.LIMITS,
        1024 * MEBIBYTE,
        "bytes of unanswered messages and unread replies in a worker; then the largest are dropped",
        64,
    )
    max_items: int = _option(
        Group.LIMITS, 2**12, "fields, list elements and map entries of one message, all together", 16
    )
    max_batch: int = _option(Group.LIMITS, 256, "images or inputs of one call, as of infer_many or /infer", 1)
    max_depth: int = _option(Group.LIMITS, 64, "nested structs and containers of one message", 2, 128)
    message_seconds: float = _option(
        Group.LIMITS, 30.0, "seconds for a whole message to arrive, and for a reply to be read", 0.01
    )
    idle_seconds: float = _option(Group.LIMITS, 300.0, "seconds after which a silent connection is closed; 0 keeps it")
    max_inflight: int = _option(
        Group.WAITING, 0, "requests in flight in a worker, beyond them 'overloaded'; 0 leaves it to the configuration"
    )
    deadline_ms: float = _option(
        Group.WAITING,
        0.0,
        "longest deadline of a request, milliseconds; 0 is none",
        brief="longest deadline of a request (default: none)",
    )
    decode_isolation: str = _option(
        Group.PROCESSES,
        "config",
        "where decoders run; process is safest, for untrusted clients; config means as the TOML says:",
        choices=("config", "none", "process"),
        brief="process: confine decoders (untrusted clients)",
    )
    queue_target_ms: float = _option(
        Group.WAITING,
        -1.0,
        "milliseconds that a request without a deadline may wait; beyond them it gets 'overloaded'; 0: no limit; -1: "
        "100, or four times the compute time of its path",
        -1,
    )
    drain_seconds: float = _option(
        Group.ENDINGS, 25.0, "seconds for accepted requests to finish after SIGTERM or SIGHUP"
    )
    hang_seconds: float = _option(
        Group.ENDINGS,
        30.0,
        "seconds for a batch, and between a worker's heartbeats; then it is replaced; 0: no limit",
        0,
    )
    start_seconds: float = _option(
        Group.ENDINGS,
        3600.0,
        "seconds for a process to load its models and become ready, and for a model to be loaded; then it is killed, "
        "or the model not served; 0: no limit",
        0,
    )
    trace_ratio: float = _option(
        Group.LOGS,
        -1.0,
        "share of requests with OpenTelemetry spans, besides those whose caller asks for them; -1: none",
        -1,
        1,
    )
    repository_control: bool = _option(
        Group.MODELS, False, "load and unload a folder's models on --port as well, not on --http-port alone"
    )
    exit_on_error: bool = _option(
        Group.MODELS, False, "with a folder of models: start only if every file can be served"
    )
    forward_headers: str = _option(
        Group.PAGES,
        "",
        "names of request headers, and of gRPC metadata, that backends get as parameters, separated by commas; * is "
        "any text, as in x-user-*; at most 32 headers of 4,096 bytes each",
    )
    no_page: bool = _option(Group.PAGES, False, "no page to try the pipeline, at / of --port, nor /docs")
    log_level: str = _option(
        Group.LOGS, "info", "least serious messages that are logged:", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _option(Group.LOGS, "text", "form of a log line:", choices=("text", "json"))
    log_requests: str = _option(
        Group.LOGS,
        "none",
        "requests to log, with the client's uuid; slow:100: above 100 ms, with times in each node:",
        choices=("none", "failed", "all", "slow:MS"),
        brief="none (the default), failed, all or slow:MS",
    )
    server_timing: str = _option(
        Group.PAGES,
        "asked",
        "which answers have Server-Timing, the times in each node; asked: if the request has ?timing=1 or X-Timing:",
        choices=("asked", "all"),
    )

    @property
    def device_numbers(self) -> list[str]:
        """``devices`` as a list; empty if each worker sees all."""
        return [part.strip() for part in self.devices.split(",") if part.strip()]

    @property
    def monitoring(self) -> str:
        """A hint for ``MONITORING_PATHS`` on the other port. NOTE: port 0 is not chosen yet."""
        port = self.http_port
        return f"monitoring is on --http-port {port}" if port > 0 else "--http-port opens a port for monitoring"

    @property
    def elsewhere(self) -> dict[str, str]:
        """Hints for paths that --port does not serve; ``*`` stands for anything."""
        models = "models are loaded and unloaded on --http-port, or here with --repository-control"
        return {**dict.fromkeys(MONITORING_PATHS, self.monitoring), "/v2/repository/models/*": models}

    @property
    def slow_seconds(self) -> float | None:
        """The seconds beyond which a request is logged, with ``slow:MS``."""
        found = _SLOW.fullmatch(self.log_requests)
        return None if found is None else float(found[1]) / 1000

    def device_of(self, index: int) -> str:
        """The device of a worker or engine process; empty if each sees all."""
        numbers = self.device_numbers
        return numbers[index % len(numbers)] if numbers else ""


_SETTINGS = [option for option in fields(Options) if option.default is not MISSING]


_ELSEWHERE = {
    "--config": "the TOML file is given without a flag",
    "--gpus": "CUDA devices are --devices here, their numbers",
    "--http": "--port takes HTTP and Thrift, --http-port is for monitoring",
}
"""Flags of other servers, and their equivalents."""

_HELP = "these flags; --help all: all flags"


class _Join(argparse.Action):
    """Joins the values of a repeated flag."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{earlier},{value}" if earlier else value)


class _Help(argparse.Action):
    """Prints the flags that most services need, or with ``all`` every flag."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        (parser if value == "all" else _parser(is_brief=True)).print_help()
        parser.exit()


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; wrong ones end the process with status 2 and a message."""
    parser = _parser(is_brief=False)
    options = Options(**vars(parser.parse_args(argv)))
    if not all(part.strip().isdigit() for part in options.devices.split(",") if options.devices):
        parser.error(f"--devices: expected numbers separated by commas, as 0,1, got {options.devices!r}")
    for origin in to_strings(options.cors_origin):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            parser.error(f"--cors-origin: expected origins as https://app.example, or *, got {origin!r}")
    return options


def _parser(is_brief: bool) -> ArgumentParser:
    """The parser of the command line; ``is_brief`` leaves out the flags without a ``brief``."""
    parser = ArgumentParser(
        prog="torchpipe-serve",
        usage="torchpipe-serve CONFIG [FLAGS]",
        description="Serve a pipeline over HTTP, Thrift and gRPC.",
        elsewhere=_ELSEWHERE,
        superfluous="one CONFIG is served; for several, give a folder of TOML files",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=28),
        add_help=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of a pipeline, or folder of such files")
    add = parser.add_argument_group("flags").add_argument
    to_nothing = argparse.SUPPRESS  # neither a value nor a default of it is in the result
    add("-h", "--help", action=_Help, dest=to_nothing, default=to_nothing, nargs="?", metavar="all", help=_HELP)
    add("--version", action="version", version=f"torchpipe_py {torchpipe_py.__version__}", help="the version")
    if is_brief:
        for option in _SETTINGS:
            if brief := option.metadata["brief"]:
                _add_flag(add, option, brief)
        return parser
    groups = {group: parser.add_argument_group(group.value) for group in Group}
    for option in _SETTINGS:
        _add_flag(groups[option.metadata["group"]].add_argument, option, _help(option))
    # NOTE: the former name of --import, which scripts still give.
    parser.add_argument("--import-code", dest="import_code", action=_Join, default="", help=argparse.SUPPRESS)
    return parser


def _add_flag(add: Callable[..., Any], option: Any, meaning: str) -> None:
    default = option.default
    how: dict[str, Any] = {"default": default, "type": _reader(option)}
    how["metavar"] = "TEXT" if isinstance(default, str) else "N"
    if isinstance(default, bool):
        how = {"action": "store_true"}
    elif option.name == "import_code":
        how["action"] = _Join
    add(_flag(option), dest=option.name, help=meaning, **how)


def markdown_table() -> list[str]:
    """The rows of the table in ``docs/service.md``: flag, default, meaning."""
    rows = []
    for option in _SETTINGS:
        default = "" if option.default == "" or option.default is False else f"`{option.default}`"
        rows.append(f"| `{_flag(option)}` | {default} | {_meaning(option.metadata)} |")
    return rows


def _meaning(metadata: Any) -> str:
    return " ".join(part for part in (metadata["doc"], ", ".join(metadata["choices"])) if part)


def _help(option: Any) -> str:
    meaning = _meaning(option.metadata).replace("%", "%%")
    return meaning if option.default == "" or option.default is False else f"{meaning} (default: {option.default})"


def _flag(option: Any) -> str:
    return str(option.metadata["flag"]) or "--" + option.name.replace("_", "-")


def _reader(option: Any) -> Callable[[str], Any]:
    """The type of a flag's value; its errors say what is expected."""
    kind, about, low, high = type(option.default), option.metadata, option.metadata["low"], option.metadata["high"]

    def read(text: str) -> Any:
        choices = about["choices"]
        if choices:
            is_slow = "slow:MS" in choices and _SLOW.fullmatch(text)
            if not is_slow and (text not in choices or text == "slow:MS"):
                raise argparse.ArgumentTypeError(f"expected {', '.join(choices[:-1])} or {choices[-1]}, got {text!r}")
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if kind is not str and not low <= value <= high:
            unit = next((f" of {name}" for end, name in _UNITS.items() if option.name.endswith(end)), "")
            bounds = f"at least {low:.15g}" if high == _UNBOUNDED else f"from {low:.15g} to {high:.15g}"
            number = f"a whole number{unit}" if kind is int else f"a number{unit}"
            raise argparse.ArgumentTypeError(f"expected {number}, {bounds}, got {text!r}{_in_bytes(option, text)}")
        return value

    return read


def _in_bytes(option: Any, text: str) -> str:
    """A hint for a size as ``16M``: its number of bytes."""
    size = _SIZE.fullmatch(text)
    if size is None or not option.name.endswith("_bytes"):
        return ""
    return f"; {text} is {int(size[1]) * 1024 ** (1 + 'KMG'.index(size[2].upper()))}"

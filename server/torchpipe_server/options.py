"""Every setting of the service, declared once: flags, defaults and documentation come from here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torchpipe_py
from torchpipe_py.serving import ArgumentParser, to_strings

MEBIBYTE = 2**20
_SLOW = re.compile(r"slow:([0-9]{1,7}(?:\.[0-9]{1,3})?)")
_ORIGIN = re.compile(r"[\w*+.-]+://[^/\s]+/?")
MONITORING_PATHS = ("/", "/graph.svg", "/live", "/ready", "/metrics", "/stats", "/streams")
"""The paths of ``--http-port``."""


def _option(
    default: Any, doc: str, low: float = 0, high: float = 2**62, choices: Sequence[str] = (), flag: str = ""
) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices, "flag": flag})


@dataclass(frozen=True)
class Options:
    """The settings of ``torchpipe-serve``; ``config``, a file or a folder, is the one positional argument."""

    config: str
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 or :: is every interface")
    port: int = _option(8888, "port to listen on; 0 lets the system choose, the start line shows it", 0, 65535)
    http_port: int = _option(
        -1, f"port for monitoring: {', '.join(MONITORING_PATHS)}; 0: any free one; -1: none", -1, 65535
    )
    http_host: str = _option("127.0.0.1", "monitoring: address that --http-port is opened on")
    allowed_hosts: str = _option(
        "",
        "names that HTTP requests may be addressed to, separated by commas, * for any part; besides IP addresses, "
        "names without a dot and *.localhost. Without names, any host will do where a port is not on loopback, but "
        "not for loading and unloading models",
    )
    cors_origin: str = _option(
        "",
        "origins whose pages may call --port and --http-port and read the answers, as https://app.example, separated "
        "by commas, * for any part without /, ? and #; never with credentials, and not to load or unload models",
    )
    grpc_port: int = _option(
        -1, "port of the Open Inference Protocol over gRPC, at --host; 0: any free one; -1: none", -1, 65535
    )
    workers: int = _option(
        0,
        "processes, each with the whole pipeline and a share of the connections; 0: one per core, at most 8; 1 with "
        "--handler, or on a machine with an NVIDIA GPU if no node is shared",
        0,
        1024,
    )
    devices: str = _option("", "CUDA devices for the workers in turn, as 0,1; default: all are visible to each")
    engines: int = _option(
        0, "engine processes for each device, where nodes are shared; 0: 2 if they decode on the GPU, else 1", 0, 64
    )
    handler: str = _option(
        "", "package.module:Class or file.py:Class with your own Thrift service, or routes over HTTP"
    )
    import_code: str = _option("", "modules or .py files with custom backends, separated by commas", flag="--import")
    streams: str = _option("", "TOML file of cameras, video files and network streams that the workers read as well")
    max_connections: int = _option(
        1024, "connections at a time; a new one replaces an idle one, or gets 'overloaded'", 1
    )
    max_connections_per_address: int = _option(
        0, "the same for one IPv4 address or IPv6 /64; 0: half of --max-connections, without limit for this machine"
    )
    max_calls_per_connection: int = _option(
        64, "calls of one gRPC connection in work, and requests of its streams; its client holds further ones back", 1
    )
    max_message_bytes: int = _option(16 * MEBIBYTE, "bytes of one message, and of each string in it", 64)
    max_text_bytes: int = _option(
        MEBIBYTE, "bytes of all text in one message; over HTTP that of JSON, but not of base64 and numbers", 64
    )
    max_reply_bytes: int = _option(64 * MEBIBYTE, "bytes of one reply as it is sent; beyond them 'too_large'", 4096)
    max_held_bytes: int = _option(
        1024 * MEBIBYTE, "bytes of unanswered messages and unread replies in a worker; then the largest are dropped", 64
    )
    max_items: int = _option(2**12, "fields, list elements and map entries of one message, all together", 16)
    max_batch: int = _option(256, "images or inputs of one call, as of infer_many or /infer", 1)
    max_depth: int = _option(64, "nested structs and containers of one message", 2, 128)
    message_seconds: float = _option(30.0, "seconds for a whole message to arrive, and for a reply to be read", 0.01)
    idle_seconds: float = _option(300.0, "seconds after which a silent connection is closed; 0 keeps it")
    max_inflight: int = _option(
        0, "requests in flight in a worker, beyond them 'overloaded'; 0 leaves it to the configuration"
    )
    deadline_ms: float = _option(0.0, "longest deadline of a request, milliseconds; 0 is none")
    decode_isolation: str = _option(
        "config",
        "where decoders run: process is safest, for untrusted clients; config is what the configuration says:",
        choices=("config", "none", "process"),
    )
    queue_target_ms: float = _option(
        -1.0,
        "milliseconds that a request without a deadline may wait; beyond them it gets 'overloaded'; 0: no limit; -1: "
        "100, or four times the compute time of its path",
        -1,
    )
    drain_seconds: float = _option(25.0, "seconds for accepted requests to finish after SIGTERM or SIGHUP")
    hang_seconds: float = _option(
        30.0, "seconds for a batch, and between a worker's heartbeats; then it is replaced; 0: no limit", 0
    )
    trace_ratio: float = _option(
        -1.0, "share of requests with OpenTelemetry spans, besides those whose caller asks for them; -1: none", -1, 1
    )
    repository_control: bool = _option(
        False, "load and unload a folder's models on --port as well, not on --http-port alone"
    )
    exit_on_error: bool = _option(
        False, "a folder: start only if every file can be served, instead of with those that can"
    )
    forward_headers: str = _option(
        "",
        "request headers, and metadata of gRPC, that backends get as parameters: names separated by commas, * is "
        "anything, as x-user-*; at most 32, of 4,096 bytes",
    )
    no_page: bool = _option(False, "no page to try the pipeline, at / of --port, nor /docs")
    log_level: str = _option("info", "", choices=("debug", "info", "warning", "error"))
    log_format: str = _option("text", "", choices=("text", "json"))
    log_requests: str = _option(
        "none",
        "requests to log, with the client's uuid; slow:100: above 100 ms, with times in each node:",
        choices=("none", "failed", "all", "slow:MS"),
    )
    server_timing: str = _option(
        "asked",
        "answers with Server-Timing, the times in each node; asked: those to ?timing=1 or X-Timing:",
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


class _Join(argparse.Action):
    """Joins the values of a repeated flag."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{earlier},{value}" if earlier else value)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; wrong ones end the process with status 2 and a message."""
    description = "Serve a pipeline over Thrift and HTTP."
    parser = ArgumentParser(prog="torchpipe-serve", description=description, elsewhere=_ELSEWHERE)
    parser.add_argument("--version", action="version", version=f"torchpipe_py {torchpipe_py.__version__}")
    parser.add_argument("config", help="TOML file of the pipeline, or a folder of them: NAME.toml, NAME/2.toml")
    for option in _SETTINGS:
        how: dict[str, Any] = {"default": option.default, "metavar": "X", "type": type(option.default)}
        if isinstance(option.default, bool):
            how = {"action": "store_true"}
        elif option.name == "import_code":
            how["action"] = _Join
        parser.add_argument(_flag(option), dest=option.name, help=_help(option), **how)
    # NOTE: the former name of --import, which scripts still give.
    parser.add_argument("--import-code", dest="import_code", action=_Join, default="", help=argparse.SUPPRESS)
    options = Options(**vars(parser.parse_args(argv)))
    for option in _SETTINGS:
        problem = _problem(option.metadata, getattr(options, option.name))
        if problem:
            parser.error(f"{_flag(option)}: {problem}")
    if not all(part.strip().isdigit() for part in options.devices.split(",") if options.devices):
        parser.error(f"--devices: expected numbers separated by commas, as 0,1, got {options.devices!r}")
    for origin in to_strings(options.cors_origin):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            parser.error(f"--cors-origin: expected origins as https://app.example, or *, got {origin!r}")
    return options


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
    meaning = _meaning(option.metadata)
    return meaning if option.default == "" or option.default is False else f"{meaning} (default: {option.default})"


def _flag(option: Any) -> str:
    return str(option.metadata["flag"]) or "--" + option.name.replace("_", "-")


def _problem(metadata: Any, value: Any) -> str:
    """What is wrong with the value; empty if nothing is."""
    low, high, choices = metadata["low"], metadata["high"], metadata["choices"]
    is_slow = "slow:MS" in choices and _SLOW.fullmatch(str(value))
    if choices and not is_slow and (value not in choices or value == "slow:MS"):
        return f"expected {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}"
    if isinstance(value, (int, float)) and not low <= value <= high:
        return f"expected {low:.15g} to {high:.15g}, got {value}"
    return ""

"""Every setting of the service, declared once: the flag, the default and the documentation come from here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

MEBIBYTE = 2**20


def _option(default: Any, doc: str, low: float = 0, high: float = 2**62) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclass(frozen=True)
class Options:
    """What ``torchpipe-serve`` was told; ``config`` is the one positional argument."""

    config: str
    host: str = _option("0.0.0.0", "address to listen on")
    port: int = _option(8888, "port to listen on; 0 lets the system choose, the start line tells which", 0, 65535)
    max_connections: int = _option(1024, "connections at a time; further ones are answered 'overloaded' and closed", 1)
    max_message_bytes: int = _option(16 * MEBIBYTE, "bytes of one message, of each string in it too", 64)
    max_items: int = _option(2**16, "fields, list elements and map entries of one message, all together", 16)
    max_depth: int = _option(64, "nested structs and containers of one message", 2)
    message_seconds: float = _option(30.0, "seconds for a whole message to arrive, and for a reply to be taken", 0.01)
    idle_seconds: float = _option(0.0, "seconds after which a silent connection is closed; 0 keeps it")
    max_inflight: int = _option(0, "requests in flight, beyond them 'overloaded'; 0 leaves it to the configuration")
    drain_seconds: float = _option(25.0, "seconds for accepted requests to finish after SIGTERM")
    import_code: str = _option("", "modules or .py files with backends of your own, separated by commas")
    log_level: str = _option("info", "debug, info, warning or error")


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; wrong ones end the process with status 2 and a line that says why."""
    parser = argparse.ArgumentParser(prog="torchpipe-serve", description="Serve a pipeline over Thrift.")
    parser.add_argument("config", help="TOML file of the pipeline")
    for option in fields(Options):
        if option.default is not MISSING:
            kind = type(option.default)
            flag = "--" + option.name.replace("_", "-")
            text = f"{option.metadata['doc']} (default: {option.default})"
            # Underscores work as well: the load tester's flags have them.
            parser.add_argument(flag, f"--{option.name}", type=kind, default=option.default, help=text, metavar="X")
    options = Options(**vars(parser.parse_args(argv)))
    for option in fields(Options):
        value = getattr(options, option.name)
        if isinstance(value, (int, float)):
            low, high = option.metadata["low"], option.metadata["high"]
            if not low <= value <= high:
                parser.error(f"--{option.name.replace('_', '-')}: expected {low:g} to {high:g}, got {value}")
    if options.log_level not in ("debug", "info", "warning", "error"):
        parser.error(f"--log-level: expected debug, info, warning or error, got {options.log_level!r}")
    return options

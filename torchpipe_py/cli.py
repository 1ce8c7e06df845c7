"""``torchpipe``: look at backends, check, draw, compare and load configurations; export, quantise, encrypt models."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torchpipe_py
from torchpipe_py import registry
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.base import Backend
from torchpipe_py.backends.params import REQUIRED, Param
from torchpipe_py.errors import ConfigError, Problems, TorchpipeError, counted
from torchpipe_py.files import leave_deleted_folder
from torchpipe_py.idl import idl_path, proto_path
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.folder import NO_MODEL, find_models, parse_folder
from torchpipe_py.plan.unknown import backend_instead_of
from torchpipe_py.tools import options
from torchpipe_py.tools.doctor import DEPENDENCIES
from torchpipe_py.tools.report import write_text


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 for an error in a configuration or file, 2 for wrong arguments; for ``bench`` see ``run_bench``."""
    _open_standard_streams()
    parser = ArgumentParser(prog="torchpipe", description="Tools for torchpipe_py configurations.")
    parser.add_argument("--version", action="version", version=f"torchpipe_py {torchpipe_py.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="check a configuration without loading a model")
    text = "TOML files, or folders of them, as for torchpipe-serve"
    check.add_argument("configs", nargs="+", metavar="config", help=text)
    _add_imports(check)
    check.add_argument("--streams", metavar="FILE", help="check this file of streams as well")
    check.set_defaults(run=lambda args: _check(args.configs, args.streams))
    graph = commands.add_parser("graph", help="draw the graph of a configuration, without loading a model")
    _add_config(graph)
    kinds = "a page (.html), a picture (.svg) or Mermaid text (.mmd); default: print"
    graph.add_argument("--out", type=options.output_file, metavar="FILE", help=kinds)
    graph.set_defaults(run=lambda args: _graph(graph, args.config, args.out))
    backends = commands.add_parser("backends", help="list backends and their parameters")
    backends.add_argument("name", nargs="?", help="only this one, with its documentation")
    _add_imports(backends)
    backends.add_argument("--markdown", action="store_true", help="as the table in docs/backends.md")
    backends.set_defaults(run=lambda args: _backends(args.name, args.markdown))
    for name, folder, text in (
        ("export", "tools.export", "write a PyTorch model as ONNX, with the TOML that serves it"),
        ("encrypt", "encryption", "encrypt a model, or make a key"),
        ("from-triton", "tools.from_triton", "write the TOML files of a model repository of Triton"),
        ("parity", "tools.parity", "compare two configurations, or one and a PyTorch function, on images"),
        ("quantize", "tools.quantize", "write an int8 copy of a configuration's model, if it is as good"),
        ("tune", "tools.tune", "choose workers, batches and threads of a configuration by measurements"),
        ("compile", "tools.compile", "choose cheaper pixels and precision within a tolerance, with a certificate"),
    ):
        command = commands.add_parser(name, help=text)
        own = name.replace("-", "_")
        getattr(options, f"add_{own}_options")(command)
        if name not in ("encrypt", "from-triton"):
            _add_imports(command)
        command.set_defaults(run=_tool(f"{folder}.command", f"run_{own}"))
    run_statuses = "exit status: 0 every file has a result, 1 some have errors, 2 it could not run, 130 interrupted"
    run = commands.add_parser(
        "run", help="run files through a configuration, with a line for each", epilog=run_statuses
    )
    _add_config(run)
    options.add_run_options(run)
    run.set_defaults(run=_tool("tools.run.command", "run_run"), error_status=2)
    bench = commands.add_parser("bench", help="load a configuration in this process and report throughput and latency")
    _add_config(bench)
    options.add_load_options(bench, clients="client threads")
    bench.set_defaults(run=_tool("tools.load.run", "run_bench"), error_status=2)
    watch = commands.add_parser("watch", help="run the frames of video files and cameras through a configuration")
    _add_config(watch)
    options.add_watch_options(watch)
    watch.set_defaults(run=_tool("tools.watch", "run_watch"))
    doctor = commands.add_parser("doctor", help="report installed libraries, and missing ones by feature")
    doctor.add_argument("--json", type=options.output_file, metavar="FILE", help="write the report")
    text = "compare what the libraries make of made pictures with what they should"
    doctor.add_argument("--pixels", action="store_true", help=text)
    doctor.set_defaults(run=_tool("tools.doctor", "run_doctor"))
    load = commands.add_parser("load", help="load a server and report throughput and latency; compare two such reports")
    commands.add_parser("serve", help="serve a configuration: the same as torchpipe-serve", add_help=False)
    idl = commands.add_parser("idl", help="print a contract of the service, for clients in any language")
    idl.add_argument("--grpc", action="store_true", help="the Open Inference Protocol's, oip.proto; default: Thrift's")
    idl.set_defaults(run=lambda args: _print_contract(args.grpc))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: a path may not be valid UTF-8
    arguments = sys.argv[1:] if argv is None else argv
    if text := leave_deleted_folder():
        print(f"torchpipe: {text}", file=sys.stderr)
    if arguments[:1] == ["serve"]:  # it parses its own options, and is a process that has imported little
        os.execv(sys.executable, [sys.executable, "-m", "torchpipe_server", *arguments[1:]])
    load.set_defaults(run=lambda _: _tool("tools.load.run", "main")(arguments[1:]))
    # It parses its own options, which scripts/client_qps.py shares.
    args = parser.parse_args(["load"] if arguments[:1] == ["load"] else arguments)
    try:
        with _sigterm_as_ctrl_c(), _named_warnings():
            registry.import_all(",".join(getattr(args, "imports", None) or ()))
            status = args.run(args) or 0
            print(end="", flush=True)  # raises OSError if stdout is closed
            return int(status)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # The reader has ended, as with head, or the disk is full; without this Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print(f"torchpipe: {error.strerror}", file=sys.stderr)
        return 1
    except TorchpipeError as error:
        for line in str(error).split("\n"):
            print(f"torchpipe: {line}", file=sys.stderr)
    except KeyboardInterrupt:
        print("torchpipe: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in DEPENDENCIES:
            raise
        print(f"torchpipe: {error.name} is not installed (pip install torchpipe_py without --no-deps)", file=sys.stderr)
    return int(getattr(args, "error_status", 1))


class _Named(logging.Formatter):
    """Lines that begin as those of errors do, with the word ``warning``."""

    def format(self, record: logging.LogRecord) -> str:
        return f"torchpipe: {record.levelname.lower()}: {super().format(record)}"


@contextmanager
def _named_warnings() -> Iterator[None]:
    """A context in which logged warnings are told from errors, unless logging is set up, as by imported code."""
    handler = logging.lastResort  # what logs if nothing is set up
    if handler is None:
        yield
        return
    before = handler.formatter
    handler.setFormatter(_Named())
    try:
        yield
    finally:
        handler.setFormatter(before)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A context that SIGTERM ends as Ctrl-C does: what is known is reported, and temporary files are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _open_standard_streams() -> None:
    """Open on ``/dev/null`` those that are closed: Python has ``None`` for them, and files would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _add_config(parser: argparse.ArgumentParser, text: str = "TOML file") -> None:
    parser.add_argument("config", help=text)
    _add_imports(parser)


def _add_imports(parser: argparse.ArgumentParser) -> None:
    text = "modules or .py files with custom backends and filters, separated by commas; may be repeated"
    parser.add_argument("--import", dest="imports", metavar="CODE", action="append", help=text)


def _check(configs: Sequence[str], streams: str | None) -> None:
    problems = Problems()
    for config in configs:
        with problems.gathered():
            models = find_models(config) if os.path.isdir(config) else {"": {"": config}}
            if not models:
                raise ConfigError(f"{config}: {NO_MODEL}")
            for file in [file for versions in models.values() for file in versions.values()]:
                with problems.gathered():
                    _check_file(file)
    problems.raise_all()
    if streams is not None:
        from torchpipe_py.streams.config import read_streams

        if len(configs) > 1:
            raise ConfigError("--streams: give only one configuration with it")
        pipeline = plan_pipeline(parse_folder(config) if os.path.isdir(config) else config)
        print(f"{streams}: ok, {counted(len(read_streams(streams, pipeline)), 'stream')}")


def _check_file(config: str) -> None:
    pipeline = plan_pipeline(config)
    graph = pipeline.graph
    for name, plan in pipeline.plans.items():
        after = f" -> {', '.join(graph.successors[name])}" if graph.successors[name] else ""
        jumps = f", runs {', '.join(graph.jumps[name])}" if name in graph.jumps else ""
        shared = ", shared" if plan.spec.shared else ""
        print(f"{name}: {plan.label} x{max(plan.spec.instance_num)}{after}{jumps}{shared}")
    print(f"{config}: ok, {counted(len(graph.order), 'node')}")


# Each command imports in its function what it alone needs, so that the others start fast.


def _graph(parser: argparse.ArgumentParser, config: str, out: Path | None) -> None:
    from torchpipe_py.tools.draw.picture import depict
    from torchpipe_py.tools.draw.render import mermaid, page, svg

    kinds = {".html": page, ".svg": svg, ".mmd": mermaid}
    kind = mermaid if out is None else kinds.get(out.suffix.lower())
    if kind is None:
        parser.error(f"--out {out}: expected a name that ends in {', '.join(kinds)}")
    text = kind(depict(plan_pipeline(config)))
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    write_text(out, text)
    print(out)


def _print_contract(is_grpc: bool) -> None:
    path = proto_path() if is_grpc else idl_path()
    print(path.read_text(encoding="utf-8"), end="")


def _tool(module: str, function: str) -> Callable[[Any], int]:
    """A command that imports its module when it runs."""
    return lambda args: int(getattr(importlib.import_module(f"torchpipe_py.{module}"), function)(args))


def _backends(name: str | None, markdown: bool) -> None:
    if markdown:
        print("\n".join(markdown_table()))
    elif name is None:
        width = max(map(len, registry.BUILT_IN_BACKENDS))
        for backend in sorted(registry.BUILT_IN_BACKENDS):
            print(f"{backend:{width}} {_summary(_backend(backend))}")
    else:
        cls = _backend(name)
        print("\n".join([name, "", cls.__doc__ or "", *_parameter_lines(cls)]))


def markdown_table() -> Iterator[str]:
    """The table of built-in backends, a line at a time."""
    yield "| backend | parameters | what it does |"
    yield "|---|---|---|"
    for name in sorted(registry.BUILT_IN_BACKENDS, key=str.lower):
        cls = _backend(name)
        aliases = [alias for alias, target in registry.ALIASES.items() if target == name]
        names = ", ".join(f"`{spelling}`" for spelling in (name, *aliases))
        params = ", ".join(f"`{signature(param)}`" for param in cls.parameters().values())
        yield f"| {names} | {params} | {_summary(cls)} |"


def _backend(name: str) -> type[Backend]:
    cls = registry.default.find_backend(name)
    if cls is None:
        raise ConfigError(f"no backend {name!r}; {backend_instead_of(name, registry.default.backend_names())}")
    return cls


def _parameter_lines(cls: type[Backend]) -> Iterator[str]:
    for param in cls.parameters().values():
        choices = f": {', '.join(filter(None, param.choices))}" if param.choices else ""
        yield f"  {signature(param):28} {param.doc}{choices}"


def signature(param: Param) -> str:
    """A parameter with its default, as the documentation has it."""
    if param.default is REQUIRED:
        return param.key
    default = ", ".join(map(str, param.default)) if isinstance(param.default, tuple) else param.default
    return f'{param.key}="{default}"' if isinstance(default, str) else f"{param.key}={default}"


def _summary(cls: type[Backend]) -> str:
    """The first sentence or paragraph of the docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())

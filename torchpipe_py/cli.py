"""``torchpipe``: look at backends, check configurations and compare them from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from torchpipe_py import registry
from torchpipe_py.backends.base import REQUIRED, Backend, Param
from torchpipe_py.build import plan_pipeline
from torchpipe_py.config import load_config
from torchpipe_py.errors import ConfigError, TorchpipeError, nearest
from torchpipe_py.parity.options import add_options, check_options


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is well, 1 for an error in what was asked about; wrong arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="torchpipe", description="Tools for torchpipe_py configurations.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="check a configuration without loading a model")
    check.add_argument("config", help="TOML file")
    check.set_defaults(run=lambda args: _check(args.config))
    backends = commands.add_parser("backends", help="list backends and their parameters")
    backends.add_argument("name", nargs="?", help="only this one, with its documentation")
    backends.add_argument("--markdown", action="store_true", help="as the table in README.md")
    backends.set_defaults(run=lambda args: _backends(args.name, args.markdown))
    parity = commands.add_parser("parity", help="compare two preprocessing configurations on a directory of images")
    add_options(parity)
    parity.set_defaults(run=lambda args: _parity(parity, args))
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except TorchpipeError as error:
        print(f"torchpipe: {error}", file=sys.stderr)
        return 1


def _check(config: str) -> None:
    spec = load_config(config)
    graph, plans = plan_pipeline(spec)
    for name in graph.order:
        after = f" -> {', '.join(graph.successors[name])}" if graph.successors[name] else ""
        print(f"{name}: {plans[name].label} x{max(spec.nodes[name].instance_num)}{after}")
    print(f"{config}: ok, {len(graph.order)} nodes")


def _parity(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    check_options(parser, args)
    # Here, so that the other commands stay light.
    from torchpipe_py.parity.command import run_parity

    return run_parity(args)


def _backends(name: str | None, markdown: bool) -> None:
    if markdown:
        print("\n".join(markdown_table()))
    elif name is None:
        for one in sorted(registry.BUILT_IN_BACKENDS):
            print(f"{one:16} {_summary(_backend(one))}")
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
        names = ", ".join(f"`{one}`" for one in (name, *aliases))
        params = ", ".join(f"`{_signature(param)}`" for param in cls.parameters().values())
        yield f"| {names} | {params} | {_summary(cls)} |"


def _backend(name: str) -> type[Backend]:
    cls = registry.find_backend(name)
    if cls is None or not issubclass(cls, Backend):
        raise ConfigError(f"no backend {name!r}; {nearest(name, registry.backend_names())}")
    return cls


def _parameter_lines(cls: type[Backend]) -> Iterator[str]:
    for param in cls.parameters().values():
        yield f"  {_signature(param):28} {param.doc}"


def _signature(param: Param) -> str:
    if param.default is REQUIRED:
        return param.key
    default = ", ".join(map(str, param.default)) if isinstance(param.default, tuple) else param.default
    return f'{param.key}="{default}"' if isinstance(default, str) else f"{param.key}={default}"


def _summary(cls: type[Backend]) -> str:
    """The first sentence or paragraph of the docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())

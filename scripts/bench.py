"""``python scripts/bench.py NAME|all``: limit, baselines and the pipe in one run, on a CPU.

Exit status: 0 every target is met, 1 one is missed, 3 one is undecided.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks import common, in_process
from benchmarks.comparison import add_folder_options, against_baseline
from benchmarks.detector import SIDE, WIDTH, detector
from benchmarks.goodput import SERVICES, goodput
from benchmarks.offline import offline
from benchmarks.on_ray import on_ray
from benchmarks.over_http import over_http
from benchmarks.priorities import priorities
from benchmarks.sharing import shared
from benchmarks.streams import streams
from benchmarks.tuning import tuning

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.options import at_least

BENCHMARKS = {
    "schedule": in_process.schedule,
    "batching": in_process.batching,
    "decode": in_process.decode,
    "over_http": over_http,
    "offline": offline,
    "on_ray": on_ray,
    "baseline": against_baseline,
    "shared": shared,
    "goodput": goodput,
    "priorities": priorities,
    "tune": tuning,
    "streams": streams,
    "detector": detector,
}


def make_parser() -> ArgumentParser:
    """All options."""
    parser = ArgumentParser(description="Limit, baselines and the pipe in one run.")
    common.add_options(parser, list(BENCHMARKS))
    group = parser.add_argument_group("over_http, offline, baseline")
    model = "demo, or the .onnx of torchpipe export resnet18 --weights random (default: %(default)s)"
    group.add_argument("--model", default="demo", help=model)
    group = parser.add_argument_group("over_http")
    group.add_argument("--workers", type=int, default=2, help="of each service (default: %(default)s)")
    group = parser.add_argument_group("offline")
    group.add_argument("--files", type=at_least(100), default=10_000, help="in the folder (default: %(default)s)")
    group.add_argument(
        "--image",
        type=partial(common.numbers, separator="x"),
        default=(500, 375),
        metavar="WxH",
        help="pixels (default: 500x375)",
    )
    add_folder_options(parser.add_argument_group("baseline"))
    group = parser.add_argument_group("tune")
    group.add_argument("--budget", type=float, default=120.0, help="seconds for each file (default: %(default)g)")
    group.add_argument("--most-seconds", type=float, default=3600.0, metavar="S", help="then end; --json goes on")
    case = "demo, demo_nodes, detector, branch, or a file, as of torchpipe export (default: all of them)"
    group.add_argument("--case", action="append", metavar="NAME", help=case)
    group = parser.add_argument_group("goodput")
    group.add_argument("--services", default=",".join(SERVICES[:4]), help="to measure (default: %(default)s)")
    group.add_argument(
        "--triton", type=int, metavar="PORT", help="of a Triton that serves benchmarks/triton; detector too"
    )
    for side in ("service", "tester"):
        group.add_argument(f"--{side}-cores", default="", metavar="0,1", help="to run it on, of priorities too")
    group = parser.add_argument_group("detector")
    group.add_argument("--side", type=int, default=SIDE, help="of the model's input (default: %(default)s)")
    group.add_argument("--width", type=float, default=WIDTH, help="of its layers (default: YOLOv8n's, %(default)g)")
    group.add_argument("--detector-model", metavar="FILE", help="the model, written there if it is missing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = make_parser().parse_args(argv)
    return common.run({name: partial(benchmark, args) for name, benchmark in BENCHMARKS.items()}, args)


if __name__ == "__main__":
    sys.exit(main())

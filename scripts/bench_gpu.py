"""``python scripts/bench_gpu.py NAME|all``: limit, baseline and the pipe on a GPU, in one run.

``in_process``: client threads and JPEGs; ``engine``: the model alone; ``shared``: services over Thrift,
with a model in each worker and with engine processes for all; ``mosec``: these against mosec; ``baseline``: a service
with a locked engine against the pipe's, CPU decode against GPU decode, and the accuracy of all. Needs a CUDA device,
TensorRT and torchvision. Engines are built at the first run (minutes) and kept in ``--work``; those of
``--version-compatible`` also run on TensorRT's lean runtime.
Exit status: 0 every target is met, 1 one is missed, 2 it cannot run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks import common
from benchmarks.common import numbers
from benchmarks.gpu import comparison, in_process
from benchmarks.gpu.baseline import LIBRARIES, choose_library
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.mosec import against_mosec
from benchmarks.gpu.sharing import CHECKED, FEW, MANY, shared

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.model.engine.api import is_lean, load_tensorrt
from torchpipe_py.cores import limit_threads
from torchpipe_py.errors import BackendUnavailable

BENCHMARKS = {
    "in_process": in_process.in_process,
    "engine": in_process.engine,
    "shared": shared,
    "mosec": against_mosec,
    "baseline": comparison.against_baseline,
}


def make_parser() -> ArgumentParser:
    """All options."""
    parser = ArgumentParser(description="Limit, baseline and the pipe on a GPU, in one run.")
    common.add_options(parser, list(BENCHMARKS))
    option = parser.add_argument
    option("--work", default="build/bench_gpu", help="folder for model and engines")
    option("--cores", type=int, help="use only so many cores")
    lean = "with engines that the lean runtime takes too; it builds none, so run once under TensorRT before"
    option("--version-compatible", action="store_true", help=lean)
    option("--model-max", type=int, default=8, help="images in a batch of the model (default: 8)")
    cuda = "what copies for the locked engine; auto: PyCUDA if it can be imported, else PyTorch (default: auto)"
    option("--cuda", choices=["auto", *LIBRARIES], default="auto", help=cuda)
    comparison.add_options(parser.add_argument_group("baseline"))
    option = parser.add_argument_group("shared, mosec, baseline").add_argument
    option("--most-seconds", type=float, default=3600.0, metavar="S", help="start nothing after so many")
    option = parser.add_argument_group("in_process, shared, baseline").add_argument
    size = partial(numbers, separator="x")
    option("--image", type=size, default=(500, 375), metavar="WxH", help="pixels (default: 500x375)")
    option = parser.add_argument_group("shared, mosec").add_argument
    option("--only", default="", metavar="REGEX", help="of shared: services whose name has it")
    checks = "where GPU decode checks JPEGs: node, inside, none (default: node)"
    option("--checks", nargs="+", choices=CHECKED, default=["node"], metavar="WHERE", help=checks)
    clients = "client processes (default: %(default)s)"
    option("--clients", type=numbers, default=f"{FEW},{MANY}", metavar="N,N", help=clients)
    option("--instances", type=int, default=2, help="instances of a shared node (default: 2)")
    engines = "engine processes with shared nodes (default: %(default)s)"
    option("--engines", type=numbers, default="1,2", metavar="N,N", help=engines)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every target is met, 1 when one is missed, 2 where it cannot run."""
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services are ended
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before any thread is started
    import torch

    try:
        if not torch.cuda.is_available():
            raise BackendUnavailable("no CUDA device")
        tensorrt = load_tensorrt()
        choose_library(args.cuda)
    except BackendUnavailable as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 2
    limit_threads()
    engines = Engines(args.work, args.version_compatible)
    runtime = f"{'the lean runtime of ' if is_lean(tensorrt) else ''}TensorRT {tensorrt.__version__}"
    where = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {runtime}, "
    return common.run({name: partial(run, engines, args) for name, run in BENCHMARKS.items()}, args, where)


if __name__ == "__main__":
    sys.exit(main())

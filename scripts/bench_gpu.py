"""``python scripts/bench_gpu.py limits|g1g2|g5|g6|g3g4|all``: limit, baseline and the pipe on a GPU, in one run.

``g1g2``: one client and many, 500×375 JPEGs; ``g5``: 1080×1080 JPEGs on three cores; ``g6``: the engine alone;
``g3g4``: the service over Thrift, with 1 to 8 workers. Needs a CUDA device, TensorRT, torchvision, and pycuda for the
baseline. Engines are built at the first run (minutes) and kept in ``--work``. Exit status 0 when every target is met,
1 when one is missed, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from benchmarks.common import Report, machine, show, write_json
from benchmarks.gpu import BENCHMARKS, Engines, run_all
from torchpipe_server.worker.worker import limit_threads

NEEDED = ("torch", "torchvision", "tensorrt", "pycuda", "cv2")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements whose median is shown (default: 5)")
    parser.add_argument("--work", default="build/bench_gpu", help="folder for model and engines")
    parser.add_argument("--cores", type=int, help="use only so many cores")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    args = parser.parse_args(argv)
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before any thread is started
    reason = _missing()
    if reason:
        print(f"bench_gpu.py: {reason}", file=sys.stderr)
        return 2
    limit_threads()
    print(f"{_describe()}; medians of {args.rounds} x {args.seconds:g} s", flush=True)
    reports: list[Report] = []
    names = list(BENCHMARKS) if args.name == "all" else [args.name]
    for report in run_all(names, Engines(args.work), args.seconds, args.rounds):
        show(report)
        sys.stdout.flush()
        reports.append(report)
    if args.json:
        write_json(args.json, reports)
    return 0 if all(met for report in reports for *_, met in report.targets) else 1


def _missing() -> str:
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)}: not installed" if missing else ""


def _describe() -> str:
    import tensorrt
    import torch

    here = machine()
    return (
        f"{torch.cuda.get_device_name()}, {here['cores']} cores {here['cpu']}, Python {here['python']}, "
        f"PyTorch {torch.__version__}, TensorRT {tensorrt.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())

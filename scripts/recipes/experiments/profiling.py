"""Where the time of a training goes: waiting for data, the GPU's work, copies, operators.

    python scripts/profile_training.py --data DIR --toml configs/preprocess_gpu.toml --arch resnet50 --precision bf16

Trains as scripts/train.py does, for some steps, under torch.profiler, and writes no checkpoint. The GPU is waited for
after each step, so that a step's work does not end up in the wait for the next batch; this and the profiler itself make
steps slower than they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as profiled

from recipes.data import Loaders
from recipes.experiments.timeline import STEP, WAIT, GpuUse, gpu_use
from recipes.options import guarded, make_parser, whole
from recipes.place import Place
from recipes.session import PRECISIONS, Session
from torchpipe_py.training import Batch, TorchpipeLoader, TrainingError

OPERATORS = 10


@dataclass(frozen=True)
class Operator:
    """Its own time, without that of the operators it calls, on the GPU where there is one; of all steps."""

    name: str
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """Of ``steps`` steps with ``images`` images: seconds inside ``next`` and in all, and what the profiler saw.

    ``stall_share`` is the wait's share by the loader's own ``stats()``; ``gpu`` is ``None`` on the CPU.
    """

    steps: int
    images: int
    waited: float
    wall: float
    stall_share: float
    gpu: GpuUse | None
    operators: Sequence[Operator]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when profiled, 2 with one line on stderr otherwise."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.trace is not None and args.trace.suffix != ".json":
        parser.error(f"--trace {args.trace}: expected a name that ends in .json")
    return guarded("profile_training", lambda: print("\n".join(described(profile(args)))))


def profile(args: argparse.Namespace) -> Profile:
    """Train for ``--warmup`` steps and ``--steps`` more, and look at these; raises ``TorchpipeError``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = Place("single", devices=args.device)
        loaders = stack.enter_context(Loaders(args, place))
        session = Session(args, place, loaders, args.precision)
        stack.callback(session.scalars.close)
        session.model.train()
        on_gpu = session.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # NOTE: the profiler runs from the first step on, and keeps those after the warm-up: starting it takes seconds
        plan = schedule(wait=0, warmup=args.warmup, active=args.steps, repeat=1)
        with profiled(activities=kinds, schedule=plan) as profiler:
            for _ in range(args.warmup):
                _step(session, loaders.train)
                profiler.step()
            before, images, waited, began = loaders.train.stats(), 0, 0.0, perf_counter()
            for left in reversed(range(args.steps)):
                seconds, batch = _step(session, loaders.train)
                waited += seconds
                images += int(batch.mask.sum())
                if left:
                    profiler.step()
            wall, after = perf_counter() - began, loaders.train.stats()
        trace = args.trace or folder / "trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        gpu = gpu_use(events) if on_gpu else None
        if on_gpu and gpu is None:
            raise TrainingError(
                "the profiler saw no kernel: this process may lack the right to look at the GPU (CUPTI)"
            )
        return Profile(
            steps=args.steps,
            images=images,
            waited=waited,
            wall=wall,
            stall_share=_share(before, after),
            gpu=gpu,
            operators=_operators(profiler, on_gpu),
        )


def _step(session: Session, loader: TorchpipeLoader) -> tuple[float, Batch]:
    """The seconds inside ``next``, and the batch. The GPU has nothing to do for the model before it and after it."""
    began = perf_counter()
    with record_function(WAIT):
        batch = _next(loader)
    waited = perf_counter() - began
    with record_function(STEP):
        session.step(batch)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
    return waited, batch


def _next(loader: TorchpipeLoader) -> Batch:
    """After the last batch of an epoch the next one begins: a loop that trains waits for its first batch too."""
    batch = next(loader, None)
    if batch is None:
        loader.reset()
        batch = next(loader)
    return batch


def _share(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    waited, worked = (after[key] - before[key] for key in ("wait_s", "busy_s"))
    return float(waited / (waited + worked)) if waited + worked else 0.0


def _operators(profiler: Any, on_gpu: bool) -> list[Operator]:
    """All but annotations and what runs on the GPU itself, which is its operator's time already; longest first."""
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    operators = [
        Operator(operator.key, operator.count, getattr(operator, field) / 1e3)
        for operator in profiler.key_averages()
        if operator.device_type == torch.autograd.DeviceType.CPU and not operator.is_user_annotation
    ]
    return sorted(operators, key=lambda operator: operator.milliseconds, reverse=True)


def described(profile: Profile) -> list[str]:
    """Lines to print; the last is the verdict."""
    steps, waited = profile.steps, profile.waited / profile.wall
    lines = [
        f"{steps} steps, {1e3 * profile.wall / steps:.1f} ms each, {profile.images / profile.wall:.1f} images/s",
        f"waiting for data: {1e3 * profile.waited / steps:.1f} ms a step, {waited:.1%} of the time; "
        f"{profile.stall_share:.1%} by the loader's own count",
    ]
    where = "GPU" if profile.gpu is not None else "CPU"
    if profile.gpu is not None:
        lines += _gpu_lines(profile.gpu, steps)
    total = sum(operator.milliseconds for operator in profile.operators)
    lines.append(f"operators by their own time on the {where}, {total / steps:.2f} ms a step in all:")
    for operator in profile.operators[:OPERATORS]:
        share = operator.milliseconds / total if total else 0.0
        each = f"{operator.milliseconds / steps:9.3f} ms a step  {share:6.1%}  {operator.calls / steps:7.1f} calls"
        lines.append(f"  {each}  {operator.name}")
    if profile.gpu is None:
        return [*lines, f"there is no GPU in this training: the CPU's loop waited for data {waited:.1%} of the time"]
    return [*lines, f"the GPU waited for data {profile.gpu.starved:.1%} of the time"]


def _gpu_lines(gpu: GpuUse, steps: int) -> list[str]:
    lines = [
        f"GPU busy: {gpu.busy:.1%} of the time; kernels on the model's stream {gpu.model:.1%}, "
        f"on the loader's streams {gpu.loader:.1%}"
    ]
    for kind, copies in gpu.copies.items():
        lines.append(
            f"copies to the GPU, {kind.lower()} memory: {copies.count / steps:.1f} a step, "
            f"{copies.bytes / steps / 1e6:.3f} MB, {copies.milliseconds / steps:.3f} ms"
        )
    return lines if gpu.copies else [*lines, "copies to the GPU: none"]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--steps", type=whole(1), default=30, help="that are looked at (default: %(default)s)")
    parser.add_argument("--warmup", type=whole(1), default=10, help="steps before these (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="keep the trace, for ui.perfetto.dev")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="(default: %(default)s)")
    return parser

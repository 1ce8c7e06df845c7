"""The time of a training by stage: waiting for data, decoding, copies, forward, backward, optimiser.

    python scripts/run.py profile --data DIR --toml configs/preprocess_cpu.toml --steps 30 --trace trace.json

Trains as scripts/train.py does, and writes no checkpoint. The first steps are only warm-up. The next ``--steps`` are
timed: on a GPU each part of a step is waited for, so that its work does not count for the next part; this slows
steps down. As many again run under PyTorch's profiler, which sees operators, and on a GPU kernels and copies.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profiled

from recipes.data import Loaders
from recipes.experiments.timeline import STEP, WAIT, GpuUse, gpu_use
from recipes.options import Place, check_options, guarded, make_parser
from recipes.session import Session
from torchpipe_py.tools.options import at_least, output_file
from torchpipe_py.training import Batch, TorchpipeLoader

WARMUP, STEPS = 10, 30
OPERATORS = 10
COMPUTE = ("forward", "backward", "optimiser")
SMALL_WAIT = 0.1
"""Below this share of waiting, more data would not make the training much faster."""
WHERE = {
    "read": "background thread: waiting for the workers",
    "decode": "background thread",
    "transform": "training loop, inside the wait",
    "transfer": "copy engine of the GPU",
    "waiting for data": "training loop",
    "forward": "training loop",
    "backward": "training loop",
    "optimiser": "training loop",
}
_NETWORK = {
    "the CPU": "a smaller network (--arch), smaller images (the TOML), a GPU",
    "a GPU": "mixed precision (--amp), --cudnn-benchmark, a smaller network (--arch), several GPUs (--ddp)",
}
_DECODERS = "more decoders: instance_num of the TOML, workers that decode (--workers-decode)"
_UPDATES = "a larger --batch-size: fewer updates"
HELP = {
    "read": dict.fromkeys(_NETWORK, "more --workers, --in-memory, or one file for all (scripts/run.py lmdb)"),
    "decode": {
        "the CPU": f"{_DECODERS} on free cores, smaller files",
        "a GPU": f"{_DECODERS}, or decode on the GPU (configs/preprocess_gpu.toml)",
    },
    "transform": {"the CPU": "fewer augmentations (--augment), a GPU", "a GPU": "fewer augmentations (--augment)"},
    "transfer": {"a GPU": "smaller images (the TOML), or decode on the GPU (configs/preprocess_gpu.toml)"},
    "forward": _NETWORK,
    "backward": _NETWORK,
    "optimiser": dict.fromkeys(_NETWORK, _UPDATES),
}
"""Hints for the longest stage, by the device of the model."""


@dataclass(frozen=True)
class Operator:
    """An operator's own time over all steps in milliseconds, without operators it calls; on the GPU if there is one."""

    name: str
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """The profile of ``steps`` steps with ``images`` images in ``wall`` seconds.

    ``stages``: seconds of each, by the names of ``WHERE``; "transfer" is ``None`` without a GPU. Work on other
    threads overlaps with the loop. ``gpu`` is ``None`` on the CPU, and where the profiler sees no kernel. ``workers``:
    number of decoding processes, whose seconds are added up; 0: this process decodes, on a separate thread with
    ``prefetch``.
    """

    steps: int
    images: int
    wall: float
    stages: Mapping[str, float | None]
    gpu: GpuUse | None
    operators: Sequence[Operator]
    device: str
    workers: int = 0
    prefetch: int = 2

    @property
    def runs_on(self) -> str:
        """``the CPU`` or ``a GPU``."""
        return "the CPU" if self.device == "the CPU" else "a GPU"

    @property
    def waited(self) -> float:
        """The share of the time in which the loop waited for data."""
        return (self.stages["waiting for data"] or 0.0) / self.wall


def profile(args: argparse.Namespace) -> Profile:
    """Train for ``args.warmup`` steps, then look at ``args.steps`` twice; raises ``TorchpipeError``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaders = stack.enter_context(Loaders(args, Place.of(args)))
        session = Session(args, Place.of(args), loaders)
        session.model.train()
        on_gpu = session.device.type == "cuda"
        for _ in range(args.warmup):
            session.step(next_batch(loaders.train))
        images, wall, stages = timed(session, loaders.train, args.steps)
        profiler = traced(session, loaders.train, args.steps)
        trace = args.trace or folder / "trace.json"
        profiler.export_chrome_trace(str(trace))
        gpu = gpu_use(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]) if on_gpu else None
        if gpu is not None:
            stages["transfer"] = sum(copies.milliseconds for copies in gpu.copies.values()) / 1e3
        name = torch.cuda.get_device_name(session.device) if on_gpu else "the CPU"
        workers = args.workers if args.workers_decode else 0
        operators = _operators(profiler, on_gpu)
        return Profile(args.steps, images, wall, stages, gpu, operators, name, workers, args.prefetch)


def timed(session: Session, loader: TorchpipeLoader, steps: int) -> tuple[int, float, dict[str, float | None]]:
    """Images, seconds in all, and the seconds of each stage; the GPU is waited for after each part."""
    seconds = dict.fromkeys(("waiting for data", *COMPUTE), 0.0)

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        _synchronise(session)
        seconds[name] += perf_counter() - began

    _synchronise(session)
    before, images, began = loader.stats()["stages_s"], 0, perf_counter()
    for _ in range(steps):
        with part("waiting for data"):
            batch = next_batch(loader)
        with part("forward"):
            loss = session.forward(batch)
        with part("backward"):
            session.backward(loss)
        with part("optimiser"):
            session.update()
        images += int(batch.mask.sum())
    wall, after = perf_counter() - began, loader.stats()["stages_s"]
    stages: dict[str, float | None] = {name: after[name] - before[name] for name in ("read", "decode", "transform")}
    return images, wall, {**stages, "transfer": None, **seconds}


def traced(session: Session, loader: TorchpipeLoader, steps: int) -> Any:
    """The profiler, after so many steps; the GPU is waited for after each step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no reports on stderr that it starts and stops
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.device.type == "cuda" else [])]
    with profiled(activities=kinds) as profiler:
        for _ in range(steps):
            with record_function(WAIT):
                batch = next_batch(loader)
            with record_function(STEP):
                session.step(batch)
                _synchronise(session)
    return profiler


def next_batch(loader: Any) -> Batch:
    """The next batch; after the last one of an epoch the next epoch begins, and a training waits for that too."""
    batch: Batch | None = next(loader, None)
    if batch is None:
        loader.reset()
        batch = next(loader)
    return batch


def _synchronise(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)


def _operators(profiler: Any, on_gpu: bool) -> list[Operator]:
    """Operators, longest first; without annotations and GPU kernels, whose time counts for their operators."""
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    operators = [
        Operator(operator.key, operator.count, getattr(operator, field) / 1e3)
        for operator in profiler.key_averages()
        if operator.device_type == torch.autograd.DeviceType.CPU and not operator.is_user_annotation
    ]
    return sorted(operators, key=lambda operator: operator.milliseconds, reverse=True)


# -- output ----------------------------------------------------------------------------------------------


def described(profile: Profile) -> list[str]:
    """Lines to print; the last is the verdict."""
    steps, wall = profile.steps, profile.wall
    speed = f"{1e3 * wall / steps:.1f} ms each, {profile.images / wall:.0f} images/s"
    lines = [f"{steps} steps on {profile.device}, {speed}"]
    width = max(map(len, WHERE))
    lines.append(f"{'':{width}}  ms a step   share")
    for name in WHERE:
        seconds = profile.stages[name]
        figures = f"{'-':>9}  {'-':>6}" if seconds is None else f"{1e3 * seconds / steps:9.2f}  {seconds / wall:6.1%}"
        lines.append(f"{name:{width}}  {figures}  {_where(profile, name)}")
    if profile.prefetch or profile.workers:
        lines.append("work beside the training loop costs only the time that the loop waits for it")
    lines += _gpu_lines(profile.gpu, steps) if profile.gpu is not None else []
    total = sum(operator.milliseconds for operator in profile.operators)
    lines.append(f"operators by their own time on {profile.runs_on}, {total / steps:.2f} ms a step in all:")
    for operator in profile.operators[:OPERATORS]:
        share = operator.milliseconds / total if total else 0.0
        figures = f"{operator.milliseconds / steps:9.3f} ms a step  {share:6.1%}  {operator.calls / steps:7.1f} calls"
        lines.append(f"  {figures}  {operator.name}")
    return [*lines, verdict(profile)]


def verdict(profile: Profile) -> str:
    """The share of time spent waiting, the longest stage, and the options that help."""
    waited = f"the training loop waited for data {profile.waited:.0%} of the time"
    if profile.waited < SMALL_WAIT:
        largest = _longest(profile, COMPUTE)
        return f"{waited}: data is fast enough, {largest} takes longest; what helps: {HELP[largest][profile.runs_on]}"
    # The transforms of a batch are part of the wait; reading and decoding run beside the loop, and overlap.
    inside = 0.0 if profile.workers else profile.stages["transform"] or 0.0
    is_inside = inside > 0.5 * profile.waited * profile.wall
    largest = "transform" if is_inside else _longest(profile, ("read", "decode", "transfer"))
    return f"{waited}, mostly for {largest}; what helps: {HELP[largest][profile.runs_on]}"


def _longest(profile: Profile, names: Sequence[str]) -> str:
    return max(names, key=lambda name: profile.stages[name] or 0.0)


def _where(profile: Profile, name: str) -> str:
    if name == "transfer" and profile.stages[name] is None:
        no_kernel = "the profiler saw no kernel: this process may lack the right to look at the GPU (CUPTI)"
        return "there is no GPU" if profile.runs_on == "the CPU" else no_kernel
    if name not in ("read", "decode", "transform"):
        return WHERE[name]
    if profile.workers:
        return f"summed over {profile.workers} workers" + (", with reading" if name == "decode" else "")
    return WHERE[name] if profile.prefetch else WHERE["transform"]


def _gpu_lines(gpu: GpuUse, steps: int) -> list[str]:
    lines = [
        f"under the profiler: GPU busy {gpu.busy:.1%} of the time, idle and waiting for data {gpu.starved:.1%}; "
        f"kernels on the model's stream {gpu.model:.1%}, on the loader's streams {gpu.loader:.1%}"
    ]
    for kind, copies in gpu.copies.items():
        lines.append(
            f"copies to the GPU, {kind.lower()} memory: {copies.count / steps:.1f} a step, "
            f"{copies.bytes / steps / 1e6:.3f} MB, {copies.milliseconds / steps:.3f} ms"
        )
    return lines if gpu.copies else [*lines, "copies to the GPU: none"]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when profiled, 2 with one line on stderr otherwise."""
    parser = make_parser()
    parser.description = "Show where the time of a training goes, on one device; it takes the options of train.py."
    option = parser.add_argument_group("profile").add_argument
    option("--steps", type=at_least(1), default=STEPS, help="steps to measure (default: %(default)s)")
    option("--warmup", type=at_least(1), default=WARMUP, help="steps before these (default: %(default)s)")
    option("--trace", type=output_file, metavar="FILE.json", help="write PyTorch's trace there, for ui.perfetto.dev")
    option("--json", type=output_file, metavar="FILE", help="write all figures there as well")
    args = parser.parse_args(argv)
    if args.trace is not None and args.trace.suffix != ".json":
        parser.error(f"--trace {args.trace}: expected a name that ends in .json")
    if args.ddp or args.dp:
        parser.error("a profile is of one device: leave --ddp and --dp out")
    if args.dali:
        parser.error("DALI's stages cannot be measured separately: leave --dali out")
    check_options(parser, args)

    def work() -> None:
        seen = profile(args)
        print("\n".join(described(seen)))
        if args.json is not None:
            content = {**asdict(seen), "waited": seen.waited, "verdict": verdict(seen)}
            args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    return guarded("profile", work)

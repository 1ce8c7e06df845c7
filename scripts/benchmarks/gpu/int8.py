"""What int8 gains over fp16 on this GPU: ResNet-50 by TensorRT in batches of 32, and where the time of a batch goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks.common import Call, Report, interleave, run_threads, scaled
from benchmarks.gpu.engines import SIDE, BareEngine, Engines, engine_of
from benchmarks.gpu.in_process import WARM_UP
from torchpipe_py.backends.models.engine.precision import Layer

BATCH = 32
CLIENTS = 4
PROFILED = 20  # batches
LONGEST = 3  # layers that are named


def int8(engines: Engines, seconds: float, rounds: int) -> Report:
    """The file that ``torchpipe quantize`` writes against the model in fp16; tensors on the GPU in.

    The target is one of the engines alone: through a pipe, Python may be slower than either.
    """
    import torch

    from torchpipe_py import pipe

    tensor = torch.rand(1, 3, SIDE, SIDE, device="cuda") * 255
    torch.cuda.synchronize()
    nodes = {"fp16": engines.node, "int8": engines.int8_node}
    paths = {kind: engine_of(node(BATCH)) for kind, node in nodes.items()}
    subjects = {
        f"{what}: {kind}, bare loop, {threads} contexts": partial(
            BareEngine(paths[kind], BATCH, threads, True).load, seconds
        )
        for kind, what in (("int8", "limit"), ("fp16", "baseline"))
        for threads in (1, 2)
    }
    with ExitStack() as stack:

        def by_pipe(kind: str) -> Call:
            run = stack.enter_context(pipe(nodes[kind](BATCH, instance_num=2, batching_timeout=2)))
            return lambda: run([{"data": tensor} for _ in range(BATCH)])

        for kind in nodes:
            call = by_pipe(kind)
            run_threads(call, CLIENTS, WARM_UP)
            subjects[f"torchpipe_py: {kind}, {CLIENTS} clients, {BATCH} per call"] = partial(
                scaled, call, CLIENTS, BATCH, seconds
            )
        loads = interleave(subjects, rounds)
    report = Report(f"int8: ResNet-50 in batches of {BATCH}, images per second; latencies of a batch")
    report.add(loads)

    def best(start: str) -> float:
        return max(load.qps for name, load in loads.items() if name.startswith(start))

    report.require("int8 against fp16, the engines alone", best("limit") / best("baseline"), low=1.2)
    gain = best("torchpipe_py: int8") / best("torchpipe_py: fp16")
    report.remarks.append(f"int8 against fp16 through a pipe: {gain:.2f}")
    for kind, path in paths.items():
        bare = BareEngine(path, BATCH, 1, False)
        report.remarks += [f"{kind} {line}" for line in where(bare.layer_times(PROFILED), bare.layers())]
    return report


def where(times: Mapping[str, float], layers: Iterable[Layer]) -> list[str]:
    """Lines that say what the milliseconds of each layer add up to, by what it computes in, and which are longest."""
    precisions = {layer.name: layer.precision for layer in layers}
    groups: dict[str, list[float]] = {}
    for name, taken in times.items():
        kind = "copies" if "Reformatting CopyNode" in name else precisions.get(name, "other layers")
        groups.setdefault(kind, []).append(taken)
    ordered = sorted(groups.items(), key=lambda group: -sum(group[1]))
    parts = ", ".join(f"{len(taken)} {kind} {sum(taken):.3f}" for kind, taken in ordered)
    longest = sorted(times.items(), key=lambda layer: -layer[1])[:LONGEST]
    return [
        f"layers: {sum(times.values()):.3f} ms: {parts}",
        f"longest: {', '.join(f'{name} {taken:.3f}' for name, taken in longest)}",
    ]

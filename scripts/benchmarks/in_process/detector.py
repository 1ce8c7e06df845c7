"""The detector example against the same steps as plain code in a pool of threads."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.common import REPOSITORY, Call, Report, interleave, run_threads

EXAMPLES = REPOSITORY / "configs" / "examples"
CLIENTS = 16


def detector(seconds: float, rounds: int) -> Report:
    """Scenes per second of ``configs/detector.toml``, against plain code at its best number of threads."""
    import cv2

    from torchpipe_py import import_code, pipe

    import_code(str(EXAMPLES / "backends.py"))
    sys.path.insert(0, str(EXAMPLES))
    import straight

    cv2.setNumThreads(1)
    scenes = [path.read_bytes() for path in sorted((EXAMPLES / "scenes").glob("*.jpg"))]
    scene = itertools.cycle(scenes)
    plain = {
        "each crop by itself": straight.Detector(one_by_one=True),
        "crops of a scene at once": straight.Detector(),
        "the same, ONNX Runtime with one thread": straight.Detector(threads=1),
    }

    def on_a_scene(run: Callable[[bytes], object]) -> Call:
        return lambda: run(next(scene))

    subjects = {
        f"plain code, {name}, {threads} threads": partial(run_threads, on_a_scene(run), threads, seconds)
        for name, run in plain.items()
        for threads in (2, 8)
    }
    with pipe(str(REPOSITORY / "configs" / "detector.toml")) as run:
        ours = f"torchpipe_py, {CLIENTS} clients"
        subjects[ours] = partial(run_threads, lambda: run({"data": next(scene)}), CLIENTS, seconds)
        loads = interleave(subjects, rounds)
        batches = run.stats()["nodes"]["digit"]
    report = Report("detector: scenes of 1 to 6 digits; boxes by one model, labels by another")
    report.add(loads)
    best = {name: max(load.qps for key, load in loads.items() if f", {name}, " in key) for name in plain}
    report.require("against plain code, each crop by itself", loads[ours].qps / best["each crop by itself"], low=1.5)
    report.require(
        "against plain code, crops of a scene at once", loads[ours].qps / best["crops of a scene at once"], low=1.5
    )
    mean = sum(size * count for size, count in batches["batch_sizes"].items()) / batches["batches"]
    report.remarks.append(f"crops in a batch of the classifier: {mean:.1f}; in a scene: 3.9")
    return report

"""Broken JPEGs after a picture that can be recognised.

    python tests/gpu/leaks.py --decoder nvimgcodec --files 100000

Each batch of broken files follows a batch of magenta pictures of the same sizes on the same decoder. A result that has
pixels of that color, or is unlike OpenCV's (more than 48 levels in more than 1 % of the values), is a suspect: the file
is decoded again after magenta and after green pictures, and if those two results differ, pixels belong to another
image. Exit status 1 if there are any; ``--unchecked`` shows that the search finds them. A line for each kind has the
files, those with a result, those unlike OpenCV's, the suspects, the leaks, and the largest share of a picture.

A service is searched with its address in place of the decoder; it serves tests/gpu/leaks.toml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "server"), str(HERE.parent)]

BATCH = 32
FIGURES = "files", "results", "unlike", "suspects", "leaks"


Decode = Callable[[list[bytes]], list[Any]]
"""A batch of files to an array H×W×3, ``uint8``, RGB, for each, or ``None`` where there is no result."""


@contextmanager
def in_process(decoder: str, unchecked: bool) -> Iterator[Decode]:
    """``DecodeTensor`` alone."""
    from kit.gpu import backend_of, forward

    def decode(files: list[bytes]) -> list[Any]:
        results = [item.get("result") for item in forward(backend, list(files))]
        return [None if one is None else one[0].permute(1, 2, 0).cpu().numpy() for one in results]

    with backend_of({"backend": "DecodeTensor", "decoder": decoder, "unchecked": unchecked, "max": BATCH}) as backend:
        yield decode


@contextmanager
def in_service(address: str) -> Iterator[Decode]:
    """A service that gives images as Tensors 1×3×H×W, asked by as many threads as a batch has files."""
    from torchpipe_client import Client, InferenceError

    def ask(data: bytes) -> Any:
        try:
            return client.infer({"data": data}, timeout=60)["result"][0].transpose(1, 2, 0)
        except InferenceError:
            return None

    with Client(address) as client, ThreadPoolExecutor(BATCH) as threads:
        yield lambda files: list(threads.map(ask, files))


def search(
    decoder: str, unchecked: bool, kinds: list[str], files: int, seconds: float, seed: int, save: str
) -> dict[str, Any]:
    """What ``files`` of each kind show; figures by kind."""
    import cv2
    import numpy as np
    from fuzz.broken_jpegs import GREEN, MAGENTA, broken, is_magenta, plain

    def share_of_others(data: bytes, origin: tuple[int, int, int]) -> float:
        """How much of a picture depends on what was decoded before it."""
        seen = []
        for color in (MAGENTA, GREEN):
            decode([plain(color, *origin)] * BATCH)
            seen.append(decode([data] * BATCH))
        pairs = [(one, other) for one, other in zip(*seen, strict=True) if one is not None and other is not None]
        return max(((cv2.absdiff(one, other) > 48).any(2).mean() for one, other in pairs), default=0.0)

    found: dict[str, Any] = {}
    with in_service(decoder) if ":" in decoder else in_process(decoder, unchecked) as decode:
        for kind in kinds:
            rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
            counts: Counter[str] = Counter()
            worst, end = 0.0, monotonic() + seconds / len(kinds)
            while counts["files"] < files and monotonic() < end:
                mutants, origins = zip(*(broken(kind, rng) for _ in range(BATCH)), strict=True)
                decode([plain(MAGENTA, *origin) for origin in origins])
                results = decode(list(mutants))
                for data, origin, result in zip(mutants, origins, results, strict=True):
                    counts["files"] += 1
                    if result is None:
                        continue
                    counts["results"] += 1
                    own = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
                    if own is None or own.shape != result.shape:
                        own = np.zeros_like(result)
                    is_unlike = bool((cv2.absdiff(own, result) > 48).mean() > 0.01)
                    counts["unlike"] += is_unlike
                    if not is_unlike and not (is_magenta(result) & ~is_magenta(own)).any():
                        continue
                    counts["suspects"] += 1
                    share = float(share_of_others(data, origin))
                    worst = max(worst, share)
                    if share > 0.0:
                        counts["leaks"] += 1
                        if save:
                            Path(save, f"{kind}-{seed}-{counts['leaks']}.jpg").write_bytes(data)
            found[kind] = {**counts, "worst": worst}
    return found


def main() -> int:
    """Search in several processes, which share the GPU, and print what they have found together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", default="nvimgcodec", help="of DecodeTensor, or HOST:PORT of a service")
    parser.add_argument("--unchecked", action="store_true", help="without the check of compressed data")
    parser.add_argument("--kinds", default="", help="separated by commas; default: all of them")
    parser.add_argument("--files", type=int, default=100_000, help="of each kind (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="at the most, for all kinds (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="", metavar="DIR", help="keep the files that show another image here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    from fuzz.broken_jpegs import KINDS

    kinds = args.kinds.split(",") if args.kinds else list(KINDS)
    if args.child:
        print(json.dumps(search(args.decoder, args.unchecked, kinds, args.files, args.seconds, args.seed, args.save)))
        return 0
    options = ["--decoder", args.decoder, "--kinds", ",".join(kinds), "--seconds", str(args.seconds), "--child"]
    options += ["--save", args.save]
    options += ["--files", str(-(-args.files // args.processes)), *["--unchecked"] * args.unchecked]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *options, "--seed", str(args.seed + number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(args.processes)
    ]
    found = [json.loads(child.communicate()[0] or "{}") for child in children]
    leaks = 0
    for kind in kinds:
        of_kind = [one[kind] for one in found if kind in one]
        sums = [sum(one.get(what, 0) for one in of_kind) for what in FIGURES]
        leaks += sums[-1]
        worst = max((one["worst"] for one in of_kind), default=0.0)
        shown = [f"{count:7} {what}" for what, count in zip(FIGURES, sums, strict=True)]
        print(f"{kind:14}", *shown, f"worst {worst:.4f}", flush=True)
    failed = sum(child.returncode != 0 for child in children)
    print(
        f"{args.decoder}{' unchecked' * args.unchecked}: {leaks} leaks; {failed} of {args.processes} processes failed"
    )
    return 1 if leaks or failed else 0


if __name__ == "__main__":
    sys.exit(main())

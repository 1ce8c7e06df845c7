"""What a configuration takes of a GPU's memory, step by step, in one process with one pipe:

    python scripts/gpu_memory.py CONFIG --img_dir DIR [--import FILE] [--requests 200]

MiB that are taken on the device beyond what was taken before: nothing else may start or end on it meanwhile. The first
row, the CUDA context, is paid by each process, the others by each copy of the models.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
from pathlib import Path

from torchpipe_py import import_code, pipe

MIB = 2**20


def main() -> int:
    """Print the table; 1 without a CUDA device."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config")
    parser.add_argument("--img_dir", type=Path, required=True)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("gpu_memory: PyTorch finds no CUDA device")
        return 1
    for name in args.imports:
        import_code(name)
    images = [path.read_bytes() for path in sorted(args.img_dir.rglob("*.jp*g"))]
    if not images:
        print(f"gpu_memory: no JPEG files in {args.img_dir}")
        return 1

    def taken() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    before = used_on_device()
    rows = [("CUDA context", taken() - before)]  # the first call makes it
    with pipe(args.config) as run:
        rows.append(("models loaded, batch sizes run once", taken() - before))
        for name, count in (("one request", 1), (f"{args.requests} requests at once", args.requests)):
            run([{"data": images[number % len(images)]} for number in range(count)])
            rows.append((name, taken() - before))
        rows.append(("of it, PyTorch's tensors", torch.cuda.memory_allocated()))
        rows.append(("of it, kept by PyTorch for later", torch.cuda.memory_reserved() - torch.cuda.memory_allocated()))
    del run
    gc.collect()
    rows.append(("pipe closed", taken() - before))
    torch.cuda.empty_cache()
    rows.append(("and PyTorch's cache emptied", taken() - before))
    for name, size in rows:
        print(f"{name:40} {size / MIB:8.0f} MiB")
    return 0


def used_on_device() -> int:
    """Bytes in use on the device, by nvidia-smi, which makes no context of its own."""
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = ["nvidia-smi", "-i", number, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout) * MIB


if __name__ == "__main__":
    raise SystemExit(main())

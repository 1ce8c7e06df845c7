"""``torchpipe run`` on a folder, against its backends in bare loops and against the service, all on the same cores."""

from __future__ import annotations

import argparse
import itertools
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.bare import Processes, nodes
from benchmarks.common import REPOSITORY, Load, Report, cores, image_folder, labelled, picture, python
from benchmarks.over_http import configuration
from benchmarks.services import run_clients, serving
from torchpipe_py.tools.export.config import to_toml

CLIENTS = 10
FEW = 16  # files of a run that shows what the start takes
SERVICE = "torchpipe-serve, HTTP"
RUN, WITHOUT_START = "torchpipe run, {} workers", "torchpipe run, {} workers, without its start"


def offline(args: argparse.Namespace) -> Report:
    """Images per second of a run of ``--files`` different JPEGs, with and without what its start takes."""
    width, height = args.image
    count = cores()
    report = Report(f"offline: {args.model} model, {args.files} JPEGs of {width}x{height}, {count} cores", "images/s")
    config, _, _ = configuration(args.model)
    batch = int(config["classifier"]["max"])
    bare = Processes(count, nodes, config, batch, (width, height))
    try:
        limit = f"limit: the backends in {{}} bare loops, a process each, batches of {batch}"
        with (
            files(args.files, width, height) as folder,
            files(FEW, width, height) as few,
            TemporaryDirectory() as out,
            serving(config) as port,
            image_folder(picture(width, height)) as images,
        ):
            toml = Path(out, "run.toml")
            toml.write_text(to_toml(config), encoding="utf-8")
            load = partial(run_clients, port, images, options=["--transport", "http"])
            for _ in range(args.rounds):  # in turns, so that a drift of the machine hits all
                report.add(limit, count, bare.load(1, args.seconds))
                start = seconds_of(toml, few, Path(out, "few.jsonl"))
                took = seconds_of(toml, folder, Path(out, "all.jsonl"))
                report.add(RUN, count, Load(args.files / took, note=f"{took:.1f} s, {start:.1f} of {FEW} files"))
                report.add(WITHOUT_START, count, Load((args.files - FEW) / (took - start)))
                report.add(SERVICE, CLIENTS, load(CLIENTS, args.seconds))
    finally:
        bare.close()
    for other, low in (((SERVICE, CLIENTS), 0.95), ((limit, count), 0.9)):
        ratio = report.ratio((WITHOUT_START, count), other)
        report.require(f"a run without its start against {labelled(*other)}", ratio, low=low)
    return report


def seconds_of(toml: Path, folder: Path, out: Path) -> float:
    """Seconds of a run from its start to its end."""
    began = perf_counter()
    main = "import sys; from torchpipe_py.cli import main; sys.exit(main())"
    command = ["-c", main, "run", str(toml), str(folder), "--out", str(out), "--no-progress", "--restart"]
    process = python(*command, cwd=REPOSITORY, stderr=subprocess.PIPE)
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"torchpipe run: {said.strip()}")
    return perf_counter() - began


@contextmanager
def files(count: int, width: int, height: int) -> Iterator[Path]:
    """A folder with so many JPEGs, no two of which are equal: each has a comment of its own."""
    drawn = [picture(width, height, seed=seed) for seed in range(min(count, 32))]
    with TemporaryDirectory() as name:
        for number, jpeg in zip(range(count), itertools.cycle(drawn)):
            comment = b"\xff\xfe" + struct.pack(">H", 10) + b"%08d" % number
            Path(name, f"{number:06}.jpg").write_bytes(jpeg[:2] + comment + jpeg[2:])
        yield Path(name)

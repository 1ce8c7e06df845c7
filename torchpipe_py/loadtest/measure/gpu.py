"""What the GPUs of this machine did during a run, as `nvidia-smi` says once a second."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_QUERY = "index,name,utilization.gpu,memory.used,memory.total"
_END_S = 2.0


class GpuMeter:
    """Owns one long-running `nvidia-smi`, which writes to a temporary file; does nothing where there is none.

    A sample's utilisation is the share of the last sampling period in which any kernel ran.
    """

    def __init__(self, wanted: bool) -> None:
        self._program = shutil.which("nvidia-smi") if wanted else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._program is None:
            return
        self._samples = tempfile.TemporaryFile()  # noqa: SIM115
        command = [self._program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-l", "1"]
        try:
            self._process = subprocess.Popen(command, stdout=self._samples, stderr=subprocess.DEVNULL)
        except OSError:
            self._samples.close()

    def stop(self) -> list[dict[str, Any]] | None:
        """Means and maxima for each GPU; None where nothing is known. May be called again."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with self._samples as samples:
            samples.seek(0)
            return summarize_gpus(samples.read().decode(errors="replace").splitlines()) or None


def summarize_gpus(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Pure: samples as lines of `nvidia-smi` → one entry for each GPU; memory in MiB, utilisation in percent.

    What a GPU does not tell (`[N/A]`) is null; a line that was cut off is left out.
    """
    samples: defaultdict[str, list[list[str]]] = defaultdict(list)
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) == len(_QUERY.split(",")) and row[0].isdigit() and row[-1]:
            samples[row[0]].append(row)
    return [_summary(int(index), rows) for index, rows in sorted(samples.items(), key=lambda item: int(item[0]))]


def _summary(index: int, rows: list[list[str]]) -> dict[str, Any]:
    use, memory, total = ([float(row[at]) for row in rows if _is_number(row[at])] for at in (2, 3, 4))
    return {
        "index": index,
        "name": rows[0][1],
        "samples": len(rows),
        "utilization_mean": sum(use) / len(use) if use else None,
        "utilization_max": max(use, default=None),
        "memory_used_max_mib": max(memory, default=None),
        "memory_total_mib": max(total, default=None),
    }


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdigit()

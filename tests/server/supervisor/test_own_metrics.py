"""Metrics of a custom backend: sums over workers, which outlive a worker, a reload and a load of the model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from kit.clients import fetch
from kit.monitored import Monitored
from kit.services import LIGHT
from kit.waits import eventually
from prometheus_client.parser import text_string_to_metric_families

CODE = """
from torchpipe_py import register_backend
from torchpipe_py.metrics import Counter, Gauge, Histogram

@register_backend
class Counting:
    def init(self, config):
        self.found = Counter("faces_found", "Faces found", ["camera"])
        self.level = Gauge("level", "Fill level")
        self.sizes = Histogram("face_pixels", "Size of a face", buckets=[10, 100])
        self.level.set(2)

    def forward(self, items):
        for item in items:
            self.found.labels("door").inc()
            self.sizes.observe(len(item["data"]))
            item["result"] = 1
"""
TABLE = '[node]\nbackend = "Counting"\n'


def values(service: Monitored) -> dict[str, float]:
    """The metrics of the backend, by name and labels but for buckets."""
    found = {}
    for family in text_string_to_metric_families(service.get("metrics")[1]):
        if not family.name.startswith("torchpipe_"):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


def expect(service: Monitored, count: int) -> None:
    """So many requests were counted, and two workers run."""
    wanted = {
        "faces_found_total door": count,
        "level": 4.0,
        "face_pixels_count": count,
        "face_pixels_sum": 3 * count,
    }
    eventually(lambda: values(service) == wanted)


def write(folder: Path, name: str) -> tuple[str, str]:
    (folder / "counting.py").write_text(CODE)
    (folder / name).write_text(TABLE)
    return "--import", str(folder / "counting.py")


def ask(service: Monitored, count: int, path: str = "/infer") -> None:
    for _ in range(count):
        assert fetch(service.port, path, "POST", b"abc").status == 200


def test_counts_outlive_a_worker_and_a_reload(tmp_path: Path) -> None:
    more = write(tmp_path, "model.toml")
    config, env = str(tmp_path / "model.toml"), {"PYTHONPATH": LIGHT}
    with Monitored("--workers", "2", *more, config=config, env=env) as service:
        service.wait_started()
        ask(service, 10)
        expect(service, 10)
        service.signal(signal.SIGHUP)
        eventually(lambda: service.stats["reloads"]["ok"] == 1)
        ask(service, 10)
        expect(service, 20)
        killed = service.pids()[0]
        eventually(lambda: all(worker["inflight"] == 0 for worker in service.stats["workers"]))
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(service.pids()) == 2 and killed not in service.pids())
        expect(service, 20)
        found: Any = json.loads(service.get("stats")[1])["metrics"]["faces_found"]
        assert found["samples"] == [{"labels": {"camera": "door"}, "value": 20.0}]


def test_counts_outlive_a_load_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    more = write(tmp_path, "models/a.toml")
    env = {"PYTHONPATH": LIGHT}
    with Monitored("--workers", "2", *more, config=str(tmp_path / "models"), env=env) as service:
        service.wait_started()
        ask(service, 5)
        expect(service, 5)
        assert fetch(service.http_port, "/v2/repository/models/a/load", "POST", b"").status == 200
        ask(service, 5)
        expect(service, 10)

"""The live page's figures, as Node.js computes them, and that it shows what a service says as text only."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torchpipe_server
from kit.waits import WAIT

PAGE = Path(torchpipe_server.__file__).parent / "supervisor" / "monitoring" / "page"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine")


def computed(*expressions: str) -> list[Any]:
    """What the expressions are, with the page's functions at hand."""
    script = "document = {getElementById: () => null};\n" + (PAGE / "page.js").read_text(encoding="utf-8")
    script += f"\nconsole.log(JSON.stringify([{', '.join(expressions)}]));"
    done = subprocess.run([str(NODE), "-"], input=script, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


BOUNDS = [4.0, 8.0, 16.0]
ZEROS = {key: [0, 0, 0, 0] for key in ("queue", "batch_wait", "compute")}
OLD: dict[str, Any] = {
    "pid": 123, "time": 10.0, "bounds_ms": BOUNDS, "engines": [],
    "workers": [{"index": 0, "pid": 7, "responding": True}],
    "requests": {
        "by_method": {"infer": {"ok": 100, "overloaded": 3}}, "histograms": {"latency": [0, 0, 0, 0]},
        "by_model": {"": {"http": {"outcomes": {"not_found": 1}}}, "seg/2": {
            "infer": {"outcomes": {"ok": 90, "overloaded": 3}, "latency_ms": 90.0, "latency": [90, 3, 0, 0]},
            "GET /v2/models/{model}": {"outcomes": {"ok": 9}},
        }},
    },
    "models": {"idle/1": {}, "seg/2": {}}, "metrics": {},
    "nodes": {"decode": {
        "instances": 2, "queued": 4, "busy": 1, "requests": 100, "batches": 50, "failed": 2, "expired": 0, "shed": 0,
        "batch_sizes": {"2": 50}, "queue_ms": 500.0, "batch_wait_ms": 0.0, "compute_ms": 0.0,
        "instance_compute_ms": [0.0, 0.0], "histograms": ZEROS,
    }},
}  # fmt: skip


def later() -> dict[str, Any]:
    """Two seconds after ``OLD``."""
    new = copy.deepcopy(OLD)
    new["time"] = 12.0
    new["requests"] = {
        "by_method": {"infer": {"ok": 290, "overloaded": 8}, "ping": {"ok": 2}, "gRPC Check": {"ok": 50}},
        "histograms": {"latency": [0, 100, 92, 0]}, "by_model": new["requests"]["by_model"],
    }  # fmt: skip
    new["requests"]["by_model"]["seg/2"] |= {
        "infer": {"outcomes": {"ok": 180, "overloaded": 8}, "latency_ms": 900.0, "latency": [90, 103, 0, 0]},
        "POST /infer": {"outcomes": {"ok": 10}, "latency_ms": 10.0, "latency": [0, 0, 10, 0]},
    }  # fmt: skip
    new["nodes"]["decode"] |= {
        "requests": 300, "batches": 150, "failed": 5, "batch_sizes": {"2": 150}, "queue_ms": 900.0,
        "compute_ms": 2400.0, "instance_compute_ms": [1900.0, 500.0],
        "histograms": {**ZEROS, "compute": [0, 0, 100, 0]},
    }  # fmt: skip
    return new


def figures(old: Any, new: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the requests, and of the node."""
    made = f"figures({json.dumps(old)}, {json.dumps(new)})"
    of_requests, of_node = computed(f"{made}.requests", f"{made}.nodes.get('decode')")
    return of_requests, of_node


def test_rates_are_computed_between_two_snapshots() -> None:
    of_requests, of_node = figures(OLD, later())
    assert (of_requests["answers"], of_requests["qps"]) == (290, 95), "a ping is no answer"
    assert of_requests["methods"] == [["infer", 95]]
    assert of_requests["errors"] == [{"code": "overloaded", "total": 8, "rate": 2.5}]
    assert (of_requests["p50"], of_requests["p99"]) == (pytest.approx(7.84), pytest.approx(15.83, abs=0.01))
    assert (of_node["rate"], of_node["queued"], of_node["shares"], of_node["share"]) == (100, 4, [0.95, 0.25], 0.6)
    assert of_node["queue"] == {"mean": 2, "p99": None}
    assert of_node["compute"] == {"mean": 24, "p99": pytest.approx(15.92)}
    assert of_node["batches"] == [{"label": "2", "count": 100}]
    none = {"total": 0, "rate": 0}
    assert (of_node["failed"], of_node["expired"], of_node["shed"]) == ({"total": 5, "rate": 1.5}, none, none)


@pytest.mark.parametrize("what", ["counters fell", "another worker", "another service"])
def test_snapshots_of_other_processes_give_no_rates(what: str) -> None:
    new = later()
    if what == "counters fell":
        new["nodes"]["decode"]["requests"] = 20
    elif what == "another worker":
        new["workers"][0]["pid"] = 8
    else:
        new["pid"] = 124
    of_requests, of_node = figures(OLD, new)
    assert (of_requests["qps"], of_requests["p99"], of_node["rate"], of_node["share"]) == (None,) * 4
    assert (of_requests["answers"], of_node["batches"]) == (290, [{"label": "2", "count": None}])


def test_models_have_rates_latencies_and_errors() -> None:
    made = f"figures({json.dumps(OLD)}, {json.dumps(later())})"
    idle, seg = computed(f"{made}.models")[0]
    assert idle == {"name": "idle/1", "answers": 0, "rate": 0, "errors": [], "p50": None, "p99": None}
    assert (seg["name"], seg["answers"], seg["rate"]) == ("seg/2", 190, 50)
    assert seg["errors"] == [{"code": "overloaded", "total": 8, "rate": 2.5}]
    assert (seg["p50"], seg["p99"]) == (pytest.approx(6.2), pytest.approx(15.12))
    rows, first = computed(f"modelRows({made})", f"modelFigures({json.dumps(OLD)}, null)")
    assert rows[1][:2] + rows[1][4:] == ["seg/2", "50", "190", "overloaded 8 (2.5 /s)"]
    assert [(model["name"], model["rate"]) for model in first] == [("idle/1", None), ("seg/2", None)]


def test_metrics_of_backends_have_a_row_for_each_label_set() -> None:
    def sample(value: float, **labels: str) -> dict[str, Any]:
        return {"labels": labels, "value": value}

    faces = [sample(2, camera="door"), sample(0.125, camera="yard")]
    metrics = {
        "seconds": {"kind": "histogram", "help": "Time", "samples": [{"labels": {}, "counts": [1, 3], "sum": 2.0}]},
        "faces": {"kind": "counter", "help": "Faces", "samples": faces},
        "unused": {"kind": "histogram", "help": "None", "samples": [{"labels": {}, "counts": [0, 0], "sum": 0.0}]},
    }
    made = f"{{metrics: metricFigures({json.dumps({'metrics': metrics})})}}"
    rows, note = computed(f"metricRows({made})", f"metricNote({made})")
    assert rows == [
        ["faces", "Faces", "camera=door", "counter", "2"], ["faces", "Faces", "camera=yard", "counter", "0.125"],
        ["seconds", "Time", "–", "histogram", "mean 0.5 of 4"], ["unused", "None", "–", "histogram", "mean – of 0"],
    ]  # fmt: skip
    assert note == "Sums over all instances."
    many = {"metrics": {"faces": {**metrics["faces"], "samples": faces * 200}}}
    made = f"{{metrics: metricFigures({json.dumps(many)})}}"
    rows, note = computed(f"metricRows({made}).length", f"metricNote({made})")
    assert (rows, note) == (200, "Sums over all instances; 200 more are in /metrics.")


def test_names_from_the_service_are_escaped() -> None:
    script = (PAGE / "page.js").read_text(encoding="utf-8")
    markup = r"(inner|outer)HTML\s*\+?=[^=]|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert not re.search(markup, script)
    assert re.findall(r"<script[^>]*>", (PAGE / "index.html").read_text()) == ['<script src="page.js" defer>']


EXPRESSIONS: dict[str, Any] = {
    "percentile([0, 0, 0], [1, 2], 0.5)": None,
    "percentile([10, 0, 0], [1, 2], 0.5)": 0.5,
    "percentile([50, 50, 0], [1, 2], 0.5)": 1,
    "percentile([0, 100, 0], [1, 2], 0.99)": 1.99,
    "percentile([1, 1, 8], [1, 2], 0.99) === Infinity": True,
    "hasFallen({a: [2, 2]}, {a: [2, 3]})": True,
    "hasFallen({}, {a: {b: 1}})": True,
    "batchBars({}, {})": [],
    "batchBars({10: 7, 2: 3}, {2: 1})": [{"label": "2", "count": 1}, {"label": "10", "count": 0}],
    "batchBars({10: 7}, undefined)": [{"label": "10", "count": None}],
    "batchBars(Object.fromEntries([1,2,3,4,5,6,7,8,9,17].map((n) => [n, n])), {3: 1, 4: 1, 9: 5})": [
        {"label": "1", "count": 0},
        {"label": "2", "count": 0},
        {"label": "3–4", "count": 2},
        {"label": "5–8", "count": 0},
        {"label": "9–16", "count": 5},
        {"label": "17–32", "count": 0},
    ],
    "withPoint([{time: 1}, {time: 100}, {time: 300}], {time: 250})": [{"time": 100}, {"time": 250}],
    "linePath([[0, 0], [1, 10], [2, null], [3, 5], [50, 20]], 0, 100, 10)": (
        "M0.0 58.0 L0.0 58.0 L6.0 2.0 M18.0 30.0 L18.0 30.0 M300.0 2.0 L300.0 2.0"
    ),
    "[0, 1, 3, 10, 11, 700, 0.03].map(roundUp)": [1, 1, 5, 10, 20, 1000, 0.05],
    "[null, 0, 0.01, 0.25, 3, 9.96, 1234.4, 86543, 2.5e6].map(rateText)": [
        *("–", "0", "<0.1", "0.3", "3", "10", "1,234", "86.5k", "2.5M")
    ],
    "[null, 0, 0.001, 1.234, 12.34, 123.4, 67000, Infinity].map((one) => msText(one, 67109))": [
        *("–", "0.00", "<0.01", "1.23", "12.3", "123", "67.0 s", ">67.1 s")
    ],
    "[null, 5, 20000].map((one) => msUnitText(one, 1))": ["–", "5.00 ms", "20.0 s"],
    "[null, 5 * 2 ** 20, 3 * 2 ** 30].map(bytesText)": ["–", "5 MiB", "3.0 GiB"],
    "[3.9, 65, 3700, 90000].map(durationText)": ["3 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"],
}


def test_functions_of_the_page_in_node() -> None:
    assert dict(zip(EXPRESSIONS, computed(*EXPRESSIONS), strict=True)) == EXPRESSIONS

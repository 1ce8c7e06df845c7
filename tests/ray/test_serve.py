"""The options for Ray Serve, without a cluster."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.waits import run

from torchpipe_py.errors import ConfigError
from torchpipe_py.ray.arguments import read_arguments
from torchpipe_py.ray.resources import Resources

pytest.importorskip("ray.serve")  # not "ray", which might be the folder of these tests
yaml = pytest.importorskip("yaml")
serve = importlib.import_module("torchpipe_py.ray.serve")

ROOT = Path(__file__).parents[2]
NEEDED = Resources(num_cpus=2.0, num_gpus=1.0, max_ongoing_requests=200, max_queued_requests=100, busy_requests=20)


def options(**given: Any) -> dict[str, Any]:
    found: dict[str, Any] = serve.deployment_options(read_arguments({"config": "a.toml", **given}), NEEDED)
    return found


def test_plan_sets_options_that_arguments_omit() -> None:
    found = options()
    assert found["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 1.0}
    assert (found["max_ongoing_requests"], found["max_queued_requests"], found["num_replicas"]) == (200, 100, 1)
    assert found["backpressure_config"].status_code == 429
    found = options(num_gpus=0, max_ongoing_requests=7, replicas=3)
    assert found["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.0}
    assert (found["max_ongoing_requests"], found["num_replicas"]) == (7, 3)


def test_serve_scales_between_two_numbers() -> None:
    scale = options(replicas=2, max_replicas=5)["autoscaling_config"]
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (2, 5, 20)
    scale = options(max_replicas=5, scale_on="queue_time", target="80")["autoscaling_config"]
    assert scale.policy.policy_kwargs == {"target_ms": 80.0}
    policy = scale.policy.get_policy()(**scale.policy.policy_kwargs)
    assert type(policy).__name__ == "QueueTime"


def test_refuses_wrong_configuration_when_app_is_built() -> None:
    with pytest.raises(ConfigError, match="key 'instance_num'"):
        serve.app({"config": str(ROOT / "configs/demo.toml"), "classifier.instance_num": "many"})


def test_config_file_equals_output_of_serve_build(tmp_path: Path) -> None:
    code = 'from torchpipe_py.ray import app\n\ndemo = app({"config": "configs/demo.toml"})\n'
    (tmp_path / "built.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "build", "built:demo"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    arguments = ["--app-dir", str(tmp_path), "-o", str(tmp_path / "built.yaml")]
    done = run(*command, *arguments, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    built = yaml.safe_load((tmp_path / "built.yaml").read_text(encoding="utf-8"))
    (application,) = built["applications"]
    # An application with arguments is named by its function and them, which `serve build` does not take.
    application["import_path"], application["args"] = "torchpipe_py.ray:app", {"config": "configs/demo.toml"}
    application["name"], built["http_options"]["host"] = "demo", "127.0.0.1"
    assert yaml.safe_load((ROOT / "configs/ray/demo.yaml").read_text(encoding="utf-8")) == built

"""Detectors on a GPU: the part of a postprocessor that a CUDA graph holds gives what the host gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.detectors import constant_model, yolo_output
from kit.gpu import needs_tensorrt

from torchpipe_py import pipe

pytestmark = [needs_tensorrt, pytest.mark.timeout(400)]


def outputs_of(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    output = yolo_output(rng, 3, (64, 64), 60)[:, :, :500]
    if name == "Yolo5Boxes":
        rows = np.concatenate([output[:, :4], np.ones_like(output[:, :1]), output[:, 4:]], 1)
        return {"output": np.ascontiguousarray(np.tile(rows.swapaxes(1, 2), (1, 3, 1)))}
    if name == "YoloSegments":
        coefficients = rng.normal(size=(1, 4, 500)).astype(np.float32)
        prototypes = rng.normal(size=(1, 4, 16, 16)).astype(np.float32)
        return {"output": np.concatenate([output, coefficients], 1), "prototypes": prototypes}
    return {"output": output}


@pytest.mark.parametrize("name", ["YoloBoxes", "Yolo5Boxes", "YoloSegments"])
def test_detections_on_the_gpu_equal_those_on_the_host(name: str, tmp_path: Path) -> None:
    path = constant_model(tmp_path / "detector.onnx", outputs_of(name))
    found: dict[str, list[Any]] = {}
    for backend, more in (("OnnxTensor", {}), ("SyncTensor[TensorrtTensor]", {"precision": "fp32"})):
        config = {"backend": backend, "model": path, "max": 4, "postprocessor": name, **more}
        config |= {"masks": "rle"} if name == "YoloSegments" else {}
        with pipe(config) as run:
            for count in (1, 3, 4):  # padded, and each its own graph
                items: list[dict[str, Any]] = [{"data": torch.zeros(1, 3, 64, 64)} for _ in range(count)]
                run(items)
                found.setdefault(backend, []).extend(item["result"] for item in items)
    host, device = found.values()
    for wanted, result in zip(host, device, strict=True):
        assert len(wanted) > 3
        assert result.classes.tolist() == wanted.classes.tolist()
        assert np.abs(result.boxes - wanted.boxes).max() <= 0.02
        assert np.abs(result.scores - wanted.scores).max() <= 1e-4
        assert result.masks == wanted.masks

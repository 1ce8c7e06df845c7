"""The benchmark of a detector: its network, and that the work of its peers finds what the pipe finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from benchmarks.common import picture
from benchmarks.detector import boxes_of, compared, one_node, pictures, two_nodes, write_model
from benchmarks.opencv_detector import OpenCvDetector
from kit.detectors import yolo_output
from kit.model_kinds import FLOAT, Graph

from torchpipe_py import pipe


def test_peers_find_what_the_pipe_finds(tmp_path: Path) -> None:
    graph, output = Graph(), yolo_output(np.random.default_rng(0), 80, (64, 64), 200)
    graph.rows("images", output, "output0")
    images, rows = {"images": (FLOAT, [1, 3, 64, 64])}, {"output0": (FLOAT, [1, 84, output.shape[2]])}
    files = [picture(96, 64, seed=1), picture(60, 100, seed=2)]
    model = str(graph.save(tmp_path / "detector.onnx", images, rows))
    for tables in (one_node(model, 64), two_nodes(model, 64)):
        with pipe(tables) as run:

            def ask(content: bytes, run: Any = run) -> np.ndarray:
                run(data := {"data": content, "node_name": "detector"})
                return boxes_of(data["result"])

            assert "all found the same boxes" in compared(OpenCvDetector(model, 1), {"ours": ask}, files)
            with pytest.raises(RuntimeError, match=r"^half: picture 0: [0-9]+ boxes"):
                compared(OpenCvDetector(model, 1), {"half": lambda content: ask(content)[::2]}, files)


@pytest.mark.slow
def test_network_has_the_outputs_of_yolov8_and_finds_something(tmp_path: Path) -> None:
    write_model(path := str(tmp_path / "detector.onnx"), 64, 0.05)
    (output,) = onnxruntime.InferenceSession(path).get_outputs()
    assert output.shape == [1, 84, 84]
    counts = [len(OpenCvDetector(path, 1)(content)) for content in pictures()[:8]]
    assert len(set(counts)) > 1

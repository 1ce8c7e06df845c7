"""One channel from the encoded image to the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import encode, picture, save_model
from onnx import helper

from torchpipe_py import pipe


@pytest.fixture
def model(tmp_path: Path) -> str:
    """It gives back what it takes, one channel of 8×10 pixels."""
    dims = ["N", 1, 8, 10]
    return save_model(tmp_path / "gray.onnx", [helper.make_node("Identity", ["x"], ["y"])], {"x": dims}, {"y": dims})


@pytest.mark.parametrize("extension", [".jpg", ".png"])
@pytest.mark.parametrize("color", [True, False])
def test_a_model_of_one_channel(model: str, extension: str, color: bool) -> None:
    """``mean`` and ``std`` have one number then."""
    image = encode(picture(16, 20) if color else picture(16, 20)[:, :, 0].copy(), extension)
    config: dict[str, Any] = {
        "pixels": {
            "backend": "S[DecodeMat,ResizeMat,Mat2Tensor]",
            "color": "gray",
            "resize_h": 8,
            "resize_w": 10,
            "device": "cpu",
            "next": "model",
        },
        "model": {"backend": "OnnxTensor", "model": model, "mean": "127.5", "std": 51, "max": 4},
    }
    with pipe(config) as p:
        p(items := [{"data": image} for _ in range(3)])
    decoded = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_GRAYSCALE)
    wanted = (cv2.resize(decoded, (10, 8)).astype(np.float32) - 127.5) / 51
    for item in items:
        assert item["result"].shape == (1, 1, 8, 10)
        assert np.allclose(item["result"].numpy()[0, 0], wanted, atol=1e-5)
        assert item["color"] == "gray"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_gray_from_an_isolated_decoder() -> None:
    image = encode(picture(16, 20), ".png")
    config = {"color": "gray", "size": 9, "crop_h": 8, "crop_w": 8}
    backend = "S[DecodeMat,ResizeShorterMat,CenterCropMat]"
    results = []
    for isolation in ("none", "process"):
        with pipe({"backend": backend, "decode_isolation": isolation, **config}) as p:
            p(item := {"data": image})
        assert item["color"] == "gray"
        results.append(item["result"])
    assert results[1].shape == (8, 8, 1)
    assert np.array_equal(*results)

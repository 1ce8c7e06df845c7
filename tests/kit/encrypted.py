"""Encrypted models for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from conftest import save_model
from onnx import helper

from torchpipe_py.encryption.cipher import Cipher

KEY = bytes(range(100, 132))
NAME = "secretlayer"
"""Part of the names of layers, weights and tensors."""


def encrypt(path: str | Path, key: bytes = KEY, folder: Path | None = None) -> dict[str, str]:
    """Encrypt a model, beside itself unless ``folder`` says where; the keys of the node that serves it."""
    source = Path(path)
    folder = folder or source.parent
    out, key_file = folder / f"{source.name}.enc", folder / f"{source.name}.key"
    out.write_bytes(Cipher(key, "").encrypt(source.read_bytes()))
    key_file.write_text(key.hex())
    key_file.chmod(0o600)
    return {"model": str(out), "key_file": str(key_file)}


def classifier(path: Path, seed: int = 0) -> str:
    """An ONNX file from N×3×H×W to N×5, a few hundred kilobytes, with ``NAME`` all over it."""
    rng = np.random.default_rng(seed)
    names = {name: f"{NAME}_{name}" for name in ("conv", "kernel", "pool", "flat", "weight")}
    nodes = [
        helper.make_node("Conv", ["x", names["kernel"]], [names["conv"]], name=names["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", [names["conv"]], [names["pool"]], name=names["pool"]),
        helper.make_node("Flatten", [names["pool"]], [names["flat"]], name=names["flat"]),
        helper.make_node("MatMul", [names["flat"], names["weight"]], ["y"], name=f"{NAME}_last"),
    ]
    weights = {
        names["kernel"]: rng.normal(0, 0.05, (2000, 3, 3, 3)).astype(np.float32),
        names["weight"]: rng.normal(0, 0.02, (2000, 5)).astype(np.float32),
    }
    return save_model(path, nodes, {"x": ["N", 3, "H", "W"]}, {"y": ["N", 5]}, weights)


def breaks_when_run(path: Path) -> str:
    """An ONNX file from N×4 to N×9, which takes no input at all when it runs; ONNX Runtime names the layer."""
    nodes = [helper.make_node("Reshape", ["x", f"{NAME}_shape"], ["y"], name=f"{NAME}_reshape")]
    return save_model(path, nodes, {"x": ["N", 4]}, {"y": ["N", 9]}, {f"{NAME}_shape": np.array([-1, 9], np.int64)})


def with_weights_beside(path: str, target: Path) -> str:
    """A copy of an ONNX file that keeps its weights in a second file."""
    model = onnx.load(path)
    location = f"{target.stem}.weights"
    onnx.save(model, str(target), save_as_external_data=True, location=location, size_threshold=0)
    return str(target)

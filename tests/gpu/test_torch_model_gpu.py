"""TorchTensor on a GPU: the three kinds of files, graphs, batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.gpu import NORMALISE, backend_of, forward, needs_gpu, normalised, photo
from kit.torch_files import Small, save_small

pytestmark = [needs_gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def try_package(path: Path) -> None:
    """Compile a package and load it, in a process of its own: PyTorch 2.11 was seen to crash loading one."""
    code = f"""
from pathlib import Path
from torch._inductor import aoti_load_package
from kit.torch_files import save_small
aoti_load_package(save_small("aoti", Path({str(path)!r}), "cuda"))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        pytest.skip(f"PyTorch alone cannot compile or load an AOTInductor package here: {words[:100]}")


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("kind", ["script", "export", "aoti"])
def test_model_file_equals_its_module(tmp_path: Path, kind: str, cuda_graph: bool) -> None:
    path = tmp_path / "model"
    if kind == "aoti":
        try_package(path)
    model = str(path.with_suffix(".pt2")) if kind == "aoti" else save_small(kind, path)
    mats = [photo(32, 32, seed) for seed in range(8)]
    with torch.inference_mode():
        expected = Small()(torch.cat([torch.from_numpy(normalised(mat)) for mat in mats]))
    config = {
        "backend": "SyncTensor[TorchTensor]",
        "model": model,
        "trusted": True,
        "max": 8,
        "cuda_graph": cuda_graph,
        **NORMALISE,
    }
    with backend_of(config) as backend:
        for count in (1, 3, 8, 8, 1):
            results = torch.cat([item["result"] for item in forward(backend, mats[:count])])
            torch.testing.assert_close(results.cpu(), expected[:count], rtol=2e-3, atol=2e-3)
        other = forward(backend, [photo(16, 48, 0)]) if kind == "script" else []
        assert all(item["result"].shape == (1, 4) for item in other)

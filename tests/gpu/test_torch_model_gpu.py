"""TorchTensor on a GPU: the three kinds of files, graphs, batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device import MEAN, STD, backend_of, forward, needs_gpu, normalised, photo

pytestmark = [needs_gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


class Small(torch.nn.Module):
    """Conv 3×3, ReLU, global mean: N×3×H×W to N×4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).relu().mean((2, 3))


def save_model(kind: str, path: Path) -> str:
    model, example = Small().eval(), torch.zeros(2, 3, 32, 32)
    if kind == "script":
        torch.jit.script(model).save(str(path))
        return str(path)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    if kind == "export":
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=shapes), str(path))
        return str(path)
    program = torch.export.export(model.cuda(), (example.cuda(),), dynamic_shapes=shapes)
    return str(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def try_package(path: Path) -> None:
    """Compile and load the package in a process of its own: PyTorch 2.11 was seen to crash loading one."""
    code = f"""
from pathlib import Path
from test_torch_model_gpu import save_model
from torch._inductor import aoti_load_package
aoti_load_package(save_model("aoti", Path({str(path)!r})))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        pytest.skip(f"PyTorch alone cannot compile or load an AOTInductor package here: {words[:100]}")


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("kind", ["script", "export", "aoti"])
def test_a_model_file_gives_what_the_module_gives(tmp_path: Path, kind: str, cuda_graph: bool) -> None:
    path = tmp_path / ("model.pt" if kind == "script" else "model.pt2")
    if kind == "aoti":
        try_package(path)
    model = str(path) if kind == "aoti" else save_model(kind, path)
    mats = [photo(32, 32, seed) for seed in range(8)]
    with torch.inference_mode():
        expected = Small()(torch.cat([torch.from_numpy(normalised(mat)) for mat in mats]))
    config = {
        "backend": "SyncTensor[TorchTensor]",
        "model": model,
        "max": 8,
        "mean": ", ".join(map(str, MEAN)),
        "std": ", ".join(map(str, STD)),
        "cuda_graph": cuda_graph,
    }
    with backend_of(config) as backend:
        for count in (1, 3, 8, 8, 1):
            results = torch.cat([item["result"] for item in forward(backend, mats[:count])])
            torch.testing.assert_close(results.cpu(), expected[:count], rtol=2e-3, atol=2e-3)
        other = forward(backend, [photo(16, 48, 0)]) if kind == "script" else []
        assert all(item["result"].shape == (1, 4) for item in other)

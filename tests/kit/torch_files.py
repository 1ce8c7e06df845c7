"""A small PyTorch model, and the three kinds of files of it that TorchTensor takes."""

from __future__ import annotations

from pathlib import Path

import torch


class Small(torch.nn.Module):
    """Conv 3×3, ReLU, global mean: N×3×H×W to N×4."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images).relu().mean((2, 3))


def save_small(kind: str, path: Path, device: str = "cpu") -> str:
    """A file of ``Small`` for any height and width ("script") or for 32×32 ("export", "aoti"); its path.

    An AOTInductor package is compiled for ``device``.
    """
    model, path = Small().eval(), path.with_suffix(".pt" if kind == "script" else ".pt2")
    if kind == "script":
        torch.jit.script(model).save(str(path))
        return str(path)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(model.to(device), (torch.zeros(2, 3, 32, 32, device=device),), dynamic_shapes=shapes)
    if kind == "export":
        torch.export.save(program, str(path))
        return str(path)
    from torch._inductor import config

    # Else the compiler first tries out which instructions it knows, half of the time that all takes.
    with config.patch({"cpp.vec_isa_ok": True}):
        return str(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))

"""torchvision itself: builds that do not go with PyTorch, and the real one where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchpipe_py.tools.export.models import torchvision_models
from torchpipe_py.tools.report import ToolError

OPERATORS = """
import torch

@torch.library.register_fake("torchvision::an_operator_that_could_not_be_loaded")
def described(boxes): ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called torchvision, which comes before an installed one."""
    before = _torchvision()
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "models.py").write_text("ours = True", encoding="utf-8")
    yield folder
    for name in _torchvision():
        del sys.modules[name]
    sys.modules.update(before)


def _torchvision() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}


def test_a_build_for_cuda_goes_with_a_pytorch_for_the_cpu(package: Path) -> None:
    (package / "__init__.py").write_text(OPERATORS, encoding="utf-8")
    register = torch.library.register_fake
    with pytest.raises(RuntimeError, match="operator torchvision::an_operator"):
        register("torchvision::an_operator_that_could_not_be_loaded")(print)
    assert torchvision_models().ours
    assert torch.library.register_fake is register


def test_a_broken_one_is_told_with_what_to_install(package: Path) -> None:
    (package / "__init__.py").write_text("raise OSError('libcudart.so.99:\\n  no such file')", encoding="utf-8")
    with pytest.raises(ToolError) as caught:
        torchvision_models()
    version = torch.__version__.partition("+")[0]
    assert str(caught.value) == (
        "torchvision cannot be imported (OSError: libcudart.so.99: no such file): "
        f"pip install torchvision 'torch=={version}'; a model of yours is file.py:function"
    )

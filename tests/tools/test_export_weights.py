"""Files of weights: what is found in them, what is refused, and what is said of those that do not fit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from small_zoo import saved, tiny
from torch import nn

from torchpipe_py.tools.export.models import count_classes, load_into, read_weights
from torchpipe_py.tools.report import ToolError

HINT = "name a function"


def prefixed(prefix: str, model: nn.Module) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("key", ["", "state_dict", "model", "model_state", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_a_state_dict_is_found_wherever_trainings_put_it(tmp_path: Path, key: str, prefix: str) -> None:
    model, other = tiny(5, seed=1), tiny(5, seed=2)
    state: dict[str, Any] = prefixed(prefix, model)
    weights = read_weights(saved(tmp_path / "a.pt", {"epoch": 3, key: state} if key else state))
    assert weights.under == key
    assert count_classes(weights, {name: tensor.shape for name, tensor in tiny().state_dict().items()}, 1000) == 5
    load_into(other, weights, "tiny", HINT)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_prefix_that_the_model_has_itself_stays(tmp_path: Path) -> None:
    wrapped = nn.Sequential()
    wrapped.add_module("model", tiny(5, seed=1))
    other = nn.Sequential()
    other.add_module("model", tiny(5, seed=2))
    load_into(other, read_weights(saved(tmp_path / "a.pt", wrapped.state_dict())), "tiny", HINT)
    assert torch.equal(other.model.fc.weight, wrapped.model.fc.weight)


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = tiny(5)
    state: dict[str, Any] = {**model.state_dict(), "conv1.weight": torch.zeros(8, 1, 5, 5)}
    del state["fc.weight"], state["fc.bias"]
    state |= {f"fc.{index}.weight": torch.zeros(1) for index in range(5)}
    path = saved(tmp_path / "a.pt", {"model": state})
    with pytest.raises(ToolError) as caught:
        load_into(model, read_weights(path), "tiny", HINT)
    assert str(caught.value).splitlines() == [
        f"{path}['model']: does not fit tiny: missing in the file: fc.weight, fc.bias; "
        "unexpected in it: fc.0.weight, fc.1.weight, fc.2.weight and 2 more; "
        "conv1.weight is 8x1x5x5 in the file and 8x3x5x5 in the model",
        HINT,
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_nothing_is_run_and_every_other_file_is_refused(tmp_path: Path) -> None:
    model = tiny(5)
    whole, script = saved(tmp_path / "whole.pt", model), tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(model, torch.zeros(1, 3, 32, 32)), script)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:1000])
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"checker\ncircle\n")  # which is a pickle that asks for a class
    alone = "torch.save(model.state_dict(), 'whole.pt')"
    for path, problem in (
        (tmp_path / "none.pt", "no such file"),
        (whole, f"holds more than Tensors: torch.nn.modules.container.Sequential, and to load it could run any code; "
         f"save the weights alone: {alone}"),
        (saved(tmp_path / "args.pt", {"args": argparse.Namespace()}), "more than Tensors: argparse.Namespace"),
        (script, "TorchScript or a .pt2 file; the backend TorchTensor serves it as it is"),
        (cut, "no file of torch.save"),
        (junk, "no file of torch.save"),
        (saved(tmp_path / "list.pt", [1]), "holds a list; expected a state dict"),
        (saved(tmp_path / "other.pt", {"epoch": 1, "best": 0.5}), "no state dict; it holds epoch, best; expected"),
    ):  # fmt: skip
        with pytest.raises(ToolError) as caught:
            read_weights(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert problem in str(caught.value)

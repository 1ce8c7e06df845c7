"""TorchTensor on the CPU, and what the GPU models share."""

from __future__ import annotations

import contextlib
import gc
import io
import shutil
import threading
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from kit.encrypted import encrypt
from kit.models import Data, answer, batched, refused, torch_model
from kit.torch_files import Small, save_small

from torchpipe_py import BackendError, ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.model import torch_model as torch_models
from torchpipe_py.backends.model.inputs import InputSpec
from torchpipe_py.backends.model.torch_model import load_module
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.plan.build import plan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TRUSTED = {"backend": "TorchTensor", "trusted": True}


@pytest.fixture(scope="module", params=["script", "export"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small(request.param, tmp_path_factory.mktemp("torch") / "model")


def test_results_equal_those_of_the_module(model: str, tmp_path: Path) -> None:
    mats = [picture(32, 32, seed) for seed in range(5)]
    planes = [torch.from_numpy(mat).permute(2, 0, 1)[None].float() for mat in mats]
    with torch.inference_mode():
        expected = Small()((torch.cat(planes) - 10) / torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1))
    config = {**TRUSTED, "max": 8, "mean": 10, "std": "1, 2, 4", "batching_timeout": 20}
    for keys in ({"model": model}, encrypt(model, folder=tmp_path)):
        with pipe({**config, **keys}) as run:
            for values in (mats, planes, [plane[0] for plane in planes], [plane.numpy() for plane in planes]):
                items: list[Data] = [{"data": value} for value in values]
                run(items)
                torch.testing.assert_close(
                    torch.cat([item["result"] for item in items]), expected, rtol=1e-4, atol=1e-4
                )


def test_nodes_with_exported_programs_load_them_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.export.load`` fails where another thread is in it."""
    load, both = torch.export.load, threading.Barrier(2)

    def met(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        return load(*args, **options)

    monkeypatch.setattr(torch.export, "load", met)
    nodes = {name: {**TRUSTED, "model": save_small("export", tmp_path / name)} for name in "ab"}
    with pipe(nodes):
        assert both.broken


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.timeout(600)  # the compiler takes 12 s of a core, however busy that is
def test_serves_aotinductor_package(tmp_path: Path) -> None:
    from torch._inductor import config  # which takes a second

    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 4),), dynamic_shapes=batched())
    with config.patch({"cpp.vec_isa_ok": True}):
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    item = answer({**TRUSTED, "model": path, "max": 4}, torch.arange(-2.0, 2.0))
    assert item["result"].tolist() == [[0, 0, 0, 1]]


class Anchored(torch.nn.Module):
    """Gives its own memory as the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = torch.ones(1, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, self.anchors.expand(x.shape[0], -1)


def test_close_frees_the_model_without_a_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its memory would stay in use, and a collection during a capture would end it."""
    model = save_small("script", tmp_path / "model")  # modules of torch.export are cycles of their own
    loaded: list[weakref.ref[Any]] = []

    def load(*args: Any) -> Any:
        made = load_module(*args)
        loaded.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(torch_models, "load_module", load)
    gc.disable()
    try:
        with pipe({**TRUSTED, "model": model}) as p:
            p({"data": torch.zeros(1, 3, 32, 32)})
            assert [each() is not None for each in loaded] == [True]
        assert [each() for each in loaded] == [None]
    finally:
        gc.enable()


def test_a_result_may_be_changed_in_place(tmp_path: Path) -> None:
    torch.jit.trace(Anchored(), torch.ones(2, 2)).save(str(tmp_path / "model"))  # type: ignore[no-untyped-call]
    with pipe({**TRUSTED, "model": str(tmp_path / "model"), "max": 2, "batching_timeout": 1000}) as run:
        items: list[Data] = [{"data": torch.ones(2)} for _ in range(2)]
        run(items)
        items[0]["result"][1].zero_()
        assert items[1]["result"][1].tolist() == [[1.0, 1.0]]
        assert run({"data": torch.ones(2)})["result"][1].tolist() == [[1.0, 1.0]]


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return x, [x]


def test_refuses_outputs_that_are_not_tensors(tmp_path: Path) -> None:
    config = torch_model(tmp_path / "model.pt2", Nested(), torch.zeros(2, 3), shapes=batched())
    problem = pytest.raises(BackendError, match="has an output of type list; expected tensors, or a list or dict of")
    with pipe(config) as run, problem:
        run({"data": torch.zeros(3)})


MEAN = {"mean": "10, 20, 30"}


@pytest.mark.parametrize(
    ("more", "value", "told"),
    [
        ({}, "text", "takes a Mat or a tensor, got str"),
        ({}, torch.zeros(2, 3, 8, 8), "takes one item, 1x…, got 2x3x8x8"),
        ({}, np.zeros((5, 6, 3), np.float32), "got 5x6x3 of float32, which may be a Mat; convert it with Mat2Tensor"),
        # It is the model that says what it does with an image without a pixel; the request is no defect.
        ({}, np.zeros((0, 5, 3), np.uint8), (1, 3, 0, 5)),
        # Broadcast over the three numbers, one channel would become three, and a vector an image.
        (MEAN, torch.zeros(1, 1, 4, 4), "mean: 3 numbers, and input 'input' has 1 channel"),
        (MEAN, torch.zeros(1, 3), "mean: mean needs an input NxCxHxW or NxHxWxC, and input 1x3 is not"),
        (MEAN, torch.zeros(1, 2, 5, 5), "mean: 3 numbers, and input 'input' has 2 channels"),
        (MEAN, torch.zeros(1, 3, 1, 1), (1, 3, 1, 1)),
    ],
)
def test_inputs_of_model_without_declarations(tmp_path: Path, more: Data, value: Any, told: Any) -> None:
    item = answer(torch_model(tmp_path / "model", torch.nn.ReLU()) | more, value)
    if isinstance(told, tuple):
        assert item["result"].shape == told
    else:
        assert isinstance(item["error"], InvalidRequest)
        assert told in str(item["error"])


# -- files ------------------------------------------------------------------------------------------------------------


def test_refuses_files_and_settings_that_do_not_fit(model: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"junk")
    refused({**TRUSTED, "model": str(path)}, r"neither TorchScript nor \.pt2: ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nothing", "here")
    refused({**TRUSTED, "model": str(path)}, r"PyTorch .* cannot load it")
    torch.save({"weight": torch.zeros(2)}, path)
    said = f"neither TorchScript nor .pt2: it is a PyTorch checkpoint: torchpipe export MODEL --weights {path} makes an"
    refused({"backend": "TorchTensor", "model": str(path)}, said)
    refused(
        {**TRUSTED, "model": model, "mean": "1", "input_type": "uint8"},
        "input_type is uint8; mean and std need a floating input",
    )


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_refuses_untrusted_model_before_start(model: str, tmp_path: Path, is_encrypted: bool) -> None:
    config = {"backend": "TorchTensor", **(encrypt(model, folder=tmp_path) if is_encrypted else {"model": model})}
    with pytest.raises(ConfigError, match=r"node 'node': key 'trusted': model .*: loading it .*; set trusted = true "):
        plan_pipeline(config)
    plan_pipeline({**config, "trusted": True})
    with pytest.raises(ConfigError, match="set trusted = true"):  # whoever asks for it
        load_module(ModelFile(model), torch.device("cpu"), is_trusted=False)


class Hostile(torch.nn.Module):
    """Its ``__setstate__`` writes into another file."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self.weight = torch.zeros(1)
        self.victim = victim

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, str, bool]:
        return self.weight, self.victim, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]) -> None:
        self.training = state[2]
        self.victim = state[1]
        self.weight = torch.from_file(state[1], True, 4, dtype=torch.uint8).fill_(88)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def hostile_script(folder: Path, victim: Path) -> Path:
    path = folder / "hostile.pt"
    torch.jit.script(Hostile(str(victim))).save(str(path))
    return path


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def hostile_export(folder: Path, made: Path) -> Path:
    """A .pt2 whose sample inputs are such a pickle."""
    good, path = Path(save_small("export", folder / "good")), folder / "hostile.pt2"
    pickled = io.BytesIO()
    torch.save(Touch(made), pickled)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, pickled.getvalue() if "sample_inputs" in name else source.read(name))
    return path


def test_no_code_of_a_file_runs_without_trusted(tmp_path: Path) -> None:
    victim, made = tmp_path / "victim", tmp_path / "made"
    script, export, package = hostile_script(tmp_path, victim), hostile_export(tmp_path, made), tmp_path / "aoti.pt2"
    victim.write_bytes(b"kept")
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/data/aotinductor/model/model.wrapper.so", b"never loaded")
    for path, does in ((script, "runs its __setstate__"), (export, "unpickles"), (package, "native code")):
        refused({"backend": "TorchTensor", "model": str(path)}, f"{does}.*set trusted = true")
    assert victim.read_bytes() == b"kept"
    assert not made.exists()


@pytest.mark.parametrize("kind", ["script", "export"])
def test_loading_trusted_files_runs_their_code(tmp_path: Path, kind: str) -> None:
    """Should PyTorch load these without running them one day, the flag can go."""
    victim = tmp_path / "victim"
    hostile = hostile_script(tmp_path, victim) if kind == "script" else hostile_export(tmp_path, victim)
    if kind == "script":
        victim.write_bytes(b"kept")
    with contextlib.suppress(ConfigError):
        load_module(ModelFile(str(hostile)), torch.device("cpu"), is_trusted=True)
    assert victim.read_bytes() == (b"XXXX" if kind == "script" else b"")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.tensor([1.5, 2.0]), "input 'x' takes uint8, got float32"),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "input 'x' takes uint8, got bfloat16"),
        (torch.tensor([1, 300]), "input 'x' takes uint8, got int64 of 0..300"),
        (np.array([1, -1]), "input 'x' takes uint8, got int64 of -1..1"),
    ],
)
def test_refuses_numbers_that_dtype_cannot_hold(value: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InputSpec("x", torch.uint8, (2,)).row_shape(value)
    assert str(caught.value) == problem
    InputSpec("x", torch.uint8, (2,)).row_shape(torch.tensor([1, 255]))

"""TorchTensor on the CPU, and what the GPU models share."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from encrypted import encrypt
from torch_files import Small, save_small

from torchpipe_py import BackendError, ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.model.cuda_model import batch_sizes
from torchpipe_py.backends.model.inputs import InputSpec
from torchpipe_py.backends.model.torch_model import load_module
from torchpipe_py.encryption.model_file import ModelFile
from torchpipe_py.plan.build import plan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class TwoWays(torch.nn.Module):
    """Sum and difference of two inputs."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


@pytest.fixture(scope="module", params=["script", "export"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small(request.param, tmp_path_factory.mktemp("torch") / "model")


@pytest.fixture(scope="module")
def two_ways(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("torch") / "two.pt"
    torch.jit.script(TwoWays()).save(str(path))
    return str(path)


def test_mats_and_tensors_give_what_the_module_gives(model: str) -> None:
    mats = [picture(32, 32, seed) for seed in range(5)]
    planes = [torch.from_numpy(mat).permute(2, 0, 1)[None].float() for mat in mats]
    with torch.inference_mode():
        expected = Small()((torch.cat(planes) - 10) / torch.tensor([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1))
    config = {
        "backend": "TorchTensor",
        "trusted": True,
        "model": model,
        "max": 8,
        "mean": 10,
        "std": "1, 2, 4",
        "batching_timeout": 20,
    }
    with pipe(config) as run:
        for values in (mats, planes, [plane[0] for plane in planes], [plane.numpy() for plane in planes]):
            items: list[dict[str, Any]] = [{"data": value} for value in values]
            run(items)
            torch.testing.assert_close(torch.cat([item["result"] for item in items]), expected, rtol=1e-4, atol=1e-4)


def test_an_encrypted_model_gives_what_the_plain_one_gives(model: str, tmp_path: Path) -> None:
    keys = encrypt(model, folder=tmp_path)
    results = []
    for given in ({"model": model}, keys):
        with pipe({"backend": "TorchTensor", "trusted": True, **given}) as run:
            run(item := {"data": picture(32, 32)})
        results.append(item["result"])
    assert torch.equal(*results)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_model_that_is_not_trusted_is_told_before_anything_starts(
    model: str, tmp_path: Path, is_encrypted: bool
) -> None:
    config = {"backend": "TorchTensor", **(encrypt(model, folder=tmp_path) if is_encrypted else {"model": model})}
    with pytest.raises(ConfigError, match=r"node 'node': key 'trusted': model .*: loading it .*; set trusted = true "):
        plan_pipeline(config)
    plan_pipeline({**config, "trusted": True})
    with pytest.raises(ConfigError, match="set trusted = true"):  # whoever asks for it
        load_module(ModelFile(model), torch.device("cpu"), is_trusted=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.timeout(600)  # the compiler takes 20 s of a core, however busy that is
def test_a_package_of_aotinductor(tmp_path: Path) -> None:
    path = save_small("aoti", tmp_path / "model")
    mats = [picture(32, 32, seed) for seed in range(3)]
    with torch.inference_mode():
        expected = Small()(torch.cat([torch.from_numpy(mat).permute(2, 0, 1)[None].float() for mat in mats]))
    with pipe({"backend": "TorchTensor", "trusted": True, "model": path, "max": 4, "batching_timeout": 20}) as run:
        items = [{"data": mat} for mat in mats]
        run(items)
    torch.testing.assert_close(torch.cat([item["result"] for item in items]), expected, rtol=1e-4, atol=1e-4)


def test_several_inputs_and_outputs_are_lists(two_ways: str) -> None:
    with pipe({"backend": "TorchTensor", "trusted": True, "model": two_ways}) as run:
        item = {"data": [torch.tensor([[3.0]]), torch.tensor([[1.0]])]}
        run(item)
        assert [part.tolist() for part in item["result"]] == [[[4.0]], [[2.0]]]


def test_sizes_before_the_image_are_not_normalised(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def forward(self, sizes: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return sizes * 1, image * 1

    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Both(), (torch.zeros(1, 2), torch.zeros(1, 3, 2, 2))), path)
    config = {"backend": "TorchTensor", "trusted": True, "model": str(path), "mean": "1, 2, 3", "std": 2}
    with pipe(config) as run:
        run(item := {"data": [torch.tensor([480.0, 640.0]), torch.ones(3, 2, 2)]})
    sizes, image = item["result"]
    assert sizes.tolist() == [[480, 640]]
    assert image[0, :, 0, 0].tolist() == [0, -0.5, -1]


def test_a_postprocessor_and_labels_work_as_elsewhere(model: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\nd\n")
    with pipe(
        {
            "backend": "TorchTensor",
            "trusted": True,
            "model": model,
            "postprocessor": "SoftmaxMax",
            "labels": str(labels),
        }
    ) as run:
        item = {"data": picture(32, 32)}
        run(item)
        label, score = item["result"]
        assert label in "abcd"
        assert 0.25 <= score <= 1


@pytest.mark.parametrize(
    ("value", "message"),
    [("text", "takes a Mat or a tensor, got str"), (torch.zeros(2, 3, 8, 8), "takes one item, 1x…, got 2x3x8x8")],
)
def test_what_is_no_input(model: str, value: Any, message: str) -> None:
    with pipe({"backend": "TorchTensor", "trusted": True, "model": model}) as run:
        run(item := {"data": value})
    assert isinstance(item["error"], InvalidRequest)
    assert message in str(item["error"])


class Anchored(torch.nn.Module):
    """Gives its own memory as the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = torch.ones(1, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, self.anchors.expand(x.shape[0], -1)


def test_a_result_may_be_changed_in_place(tmp_path: Path) -> None:
    torch.jit.trace(Anchored(), torch.ones(2, 2)).save(str(tmp_path / "model"))  # type: ignore[no-untyped-call]
    config = {"backend": "TorchTensor", "model": str(tmp_path / "model"), "trusted": True, "max": 2}
    with pipe({**config, "batching_timeout": 1000}) as run:
        items: list[dict[str, Any]] = [{"data": torch.ones(2)} for _ in range(2)]
        run(items)
        items[0]["result"][1].zero_()
        assert items[1]["result"][1].tolist() == [[1.0, 1.0]]
        assert run({"data": torch.ones(2)})["result"][1].tolist() == [[1.0, 1.0]]


class Looked(torch.nn.Module):
    """Looks words up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 3)

    def forward(self, scale: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return scale * self.table(words).sum(1)


def test_inputs_have_the_types_that_the_program_says(tmp_path: Path) -> None:
    module, batch = Looked().eval(), torch.export.Dim("batch", min=1, max=8)
    example = torch.zeros(2, 1), torch.zeros(2, 4, dtype=torch.int64)
    torch.export.save(
        torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch})), tmp_path / "model.pt2"
    )
    with pipe({"backend": "TorchTensor", "model": str(tmp_path / "model.pt2"), "trusted": True, "max": 2}) as run:
        run(item := {"data": [[2.0], [1, 2, 3, 4]]})
        run(refused := {"data": [[2.0], [1.5, 2.0, 3.0, 4.0]]})
    torch.testing.assert_close(item["result"], module(torch.tensor([[2.0]]), torch.tensor([[1, 2, 3, 4]])).detach())
    assert str(refused["error"]) == "input 'words' takes int64, got float64"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.tensor([1.5, 2.0]), "input 'x' takes uint8, got float32"),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "input 'x' takes uint8, got bfloat16"),
        (torch.tensor([1, 300]), "input 'x' takes uint8, got int64 of 0..300"),
        (np.array([1, -1]), "input 'x' takes uint8, got int64 of -1..1"),
    ],
)
def test_numbers_that_the_input_cannot_hold(value: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        InputSpec("x", torch.uint8, (2,)).row_shape(value)
    assert str(caught.value) == problem
    InputSpec("x", torch.uint8, (2,)).row_shape(torch.tensor([1, 255]))


@pytest.mark.parametrize("kind", ["script", "export"])
def test_a_mat_of_floats_is_a_mat(tmp_path: Path, kind: str) -> None:
    """Laid out where the program says the channels, refused where nobody does."""
    mat = picture(5, 6).astype(np.float32)
    if kind == "script":
        torch.jit.script(torch.nn.ReLU()).save(str(tmp_path / "model"))
    else:
        batch = torch.export.Dim("batch", min=1, max=8)
        program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 3, 5, 6),), dynamic_shapes=({0: batch},))
        torch.export.save(program, tmp_path / "model")
    with pipe({"backend": "TorchTensor", "model": str(tmp_path / "model"), "trusted": True}) as run:
        run(item := {"data": mat})
    if kind == "export":
        np.testing.assert_array_equal(item["result"][0].numpy(), mat.transpose(2, 0, 1))
    else:
        assert "got 5x6x3 of float32, which may be a Mat; Mat2Tensor makes a Tensor of it" in str(item["error"])


def test_a_mat_without_a_pixel_is_an_empty_tensor(tmp_path: Path) -> None:
    """It is the model that says what it does with one; the request is no defect."""
    torch.jit.script(torch.nn.ReLU()).save(str(tmp_path / "model"))
    with pipe({"backend": "TorchTensor", "model": str(tmp_path / "model"), "trusted": True}) as run:
        run(item := {"data": np.zeros((0, 5, 3), np.uint8)})
    assert item["result"].shape == (1, 3, 0, 5)


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return x, [x]


def test_an_output_that_is_no_tensor(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(Nested(), (torch.zeros(2, 3),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    problem = pytest.raises(BackendError, match="has an output of type list; expected tensors, or a list or dict of")
    with pipe({"backend": "TorchTensor", "model": str(tmp_path / "model.pt2"), "trusted": True}) as run, problem:
        run({"data": torch.zeros(3)})


@pytest.mark.parametrize(("shape", "shown"), [((1, 1, 4, 4), "1x4x4"), ((1, 3), "3"), ((1, 2, 4, 4), "2x4x4")])
def test_mean_makes_no_channels(tmp_path: Path, shape: tuple[int, ...], shown: str) -> None:
    """Broadcast over the three numbers, one channel would become three, and a vector an image."""
    torch.jit.script(torch.nn.ReLU()).save(str(tmp_path / "model"))
    config = {"backend": "TorchTensor", "model": str(tmp_path / "model"), "trusted": True, "mean": "10, 20, 30"}
    with pipe(config) as run:
        run(item := {"data": torch.zeros(shape)})
        assert run({"data": torch.full((1, 3, 1, 1), 40.0)})["result"].flatten().tolist() == [30.0, 20.0, 10.0]
    assert str(item["error"]) == f"mean and std are for CxHxW, 3 numbers here; got {shown}"


def test_files_that_are_no_models(tmp_path: Path) -> None:
    junk, empty = tmp_path / "junk.pt", tmp_path / "empty.pt2"
    junk.write_bytes(b"junk")
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("nothing", "here")
    with pytest.raises(ConfigError, match=r"neither TorchScript nor \.pt2"):
        pipe({"backend": "TorchTensor", "trusted": True, "model": str(junk)})
    with pytest.raises(ConfigError, match=r"PyTorch .* cannot load it"):
        pipe({"backend": "TorchTensor", "trusted": True, "model": str(empty)})


def test_a_checkpoint_is_told_before_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    said = f"it is a PyTorch checkpoint: torchpipe export MODEL --weights {path} makes an ONNX file of it"
    with pytest.raises(ConfigError, match=rf"neither TorchScript nor \.pt2: {said}"):
        pipe({"backend": "TorchTensor", "model": str(path)})
    path.write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="git lfs pull"):
        pipe({"backend": "TorchTensor", "model": str(path)})


def hostile_script(folder: Path, victim: Path) -> Path:
    """A TorchScript file whose ``__setstate__`` writes into another file."""
    source = folder / "hostile_script.py"
    source.write_text(f"""
import torch
from typing import Tuple

class Hostile(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> Tuple[torch.Tensor, bool]:
        return (self.weight, self.training)

    @torch.jit.export
    def __setstate__(self, state: Tuple[torch.Tensor, bool]):
        self.training = state[1]
        other = torch.from_file({str(victim)!r}, True, 4, dtype=torch.uint8)
        self.weight = other.fill_(88)

    def forward(self, x):
        return x
""")
    spec = importlib.util.spec_from_file_location("hostile_script", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = folder / "hostile.pt"
    torch.jit.script(module.Hostile()).save(str(path))
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
        with pytest.raises(ConfigError, match=f"{does}.*set trusted = true"):
            pipe({"backend": "TorchTensor", "model": str(path)})
    assert victim.read_bytes() == b"kept"
    assert not made.exists()


@pytest.mark.parametrize("kind", ["script", "export"])
def test_why_trusted_is_asked_for(tmp_path: Path, kind: str) -> None:
    """Should PyTorch load these without running them one day, the flag can go."""
    victim = tmp_path / "victim"
    hostile = hostile_script(tmp_path, victim) if kind == "script" else hostile_export(tmp_path, victim)
    if kind == "script":
        victim.write_bytes(b"kept")
    with contextlib.suppress(ConfigError):
        load_module(ModelFile(str(hostile)), torch.device("cpu"), is_trusted=True)
    assert victim.read_bytes() == (b"XXXX" if kind == "script" else b"")


def test_settings_that_do_not_fit(model: str) -> None:
    with pytest.raises(ConfigError, match="key 'std': expected numbers above 0"):
        pipe({"backend": "TorchTensor", "trusted": True, "model": model, "std": "1, 0, 1"})
    with pytest.raises(ConfigError, match="floating input_type"):
        pipe({"backend": "TorchTensor", "trusted": True, "model": model, "mean": "1", "input_type": "uint8"})


# -- shapes and sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (1, 1, [1]),
        (1, 4, [1, 2, 3, 4]),
        (2, 9, [2, 3, 4, 5, 6, 7, 8, 9]),
        (8, 8, [8]),
        (1, 20, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]),
        (30, 64, [32, 40, 48, 56, 64]),
    ],
)
def test_batch_sizes_that_get_a_graph(least: int, most: int, expected: list[int]) -> None:
    assert batch_sizes(least, most) == expected


@pytest.mark.parametrize("most", range(1, 300, 7))
def test_padding_to_the_next_size_adds_a_quarter_at_most(most: int) -> None:
    sizes = batch_sizes(1, most)
    assert sizes == sorted(set(sizes))
    for count in range(1, most + 1):
        assert min(size for size in sizes if size >= count) <= 1.25 * count


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros((4, 5, 3), np.uint8), (3, 4, 5)),
        (np.zeros((4, 5), np.uint8), (1, 4, 5)),
        (torch.zeros(3, 4, 5), (3, 4, 5)),
        (torch.zeros(1, 3, 4, 5), (3, 4, 5)),
        (np.zeros((1, 3, 4, 5), np.float32), (3, 4, 5)),
    ],
)
def test_the_shape_a_value_has_for_the_model(value: Any, expected: tuple[int, ...]) -> None:
    for dims in (None, (None, None, None), expected):
        assert InputSpec("x", torch.float32, dims).row_shape(value) == expected
    with pytest.raises(InvalidRequest, match="input 'x' takes 1x9x9x9"):
        InputSpec("x", torch.float32, (9, 9, 9)).row_shape(value)

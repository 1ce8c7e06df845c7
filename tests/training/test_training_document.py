"""torchpipe's document "training", followed step by step, with ``torchpipe_py`` in the place of ``torchpipe``.

The document's ``from wrap_loader_torchpipe import …``, in its code ``torchpipe.tool.gpu_train_tools``, is
``from torchpipe_py.training import …`` here; its class ``DataLoader`` (``Dataloader``) is the function
``wrap_dataloader_torchpipe``, by whose name its step 6 calls it. The rest is its text. Without a GPU the TOMLs lose
``jpg_decoder``, and ``cpu_decoder`` takes its place; ONNX Runtime takes TensorRT's where that is missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.distributed as dist
from examples.textures import QUALITY, class_name, draw
from kit.training_document import DECODE, DECODE_AND_MODEL
from kit.training_torchvision import HAS_TORCHVISION, datasets, transforms
from recipes.models import make_model
from torch.utils.data import DataLoader, DistributedSampler

import torchpipe_py as torchpipe
from torchpipe_py import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.tools.export.onnx_file import export_checked
from torchpipe_py.training import (
    DistributedEvalSampler,
    TensorToTensor,
    TorchpipeLoader,
    TrainingError,
    cv2_loader,
    cv2Resize,
    wrap_dataloader_torchpipe,
)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


ON_GPU = torch.cuda.is_available() and (HAS_TORCHVISION or _is_there("nvidia.nvimgcodec"))
HAS_TENSORRT = ON_GPU and _is_there("tensorrt")
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

KINDS = (0, 3, 4, 7)  # of the generated textures
TRAIN, VAL, BATCH, EPOCHS, LR = 40, 10, 16, 7, 3e-3  # images of each class
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def here(toml: str) -> str:
    """The document's TOML for this machine."""
    if not HAS_TENSORRT:
        toml = toml.replace("[TensorrtTensor]", "[OnnxTensor]")
    if ON_GPU:
        return toml
    first, second = toml.index("[jpg_decoder]"), toml.index("[cpu_decoder]")
    toml = toml[:first] + toml[second:].replace("[cpu_decoder]", "[jpg_decoder]")
    return toml.replace('filter = "or" \n', "")


@dataclass
class Outcome:
    """The outcome of steps 1 to 8: ``named`` has the last validation's class for each image of ``dataset``."""

    folder: Path
    dataset: Any
    model: torch.nn.Module
    named: dict[int, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    train: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""

    def accuracy(self) -> float:
        return sum(self.named[index] == label for index, (_, label) in enumerate(self.dataset.samples)) / len(
            self.dataset
        )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of generated textures: ``train``, ``val``."""
    folder = tmp_path_factory.mktemp("document")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for kind in KINDS:
            place = folder / split / class_name(kind)
            place.mkdir(parents=True)
            for number in range(count):
                picture = draw(split, kind, number)
                cv2.imwrite(str(place / f"{number}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: its threads would wait for each other beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The ``local_rank`` of a training by DDP of one process."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield 0
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(data: Path, process_group: int, one_thread: None) -> Outcome:
    """Steps 1 to 8, and the loop around them."""
    local_rank, args = process_group, SimpleNamespace(image_size=224)
    traindir, valdir = str(data / "train"), str(data / "val")

    # step 1
    (data / "gpu_decode_train.toml").write_text(here(DECODE.replace("224", "232")), encoding="utf-8")
    (data / "gpu_decode_val.toml").write_text(here(DECODE), encoding="utf-8")

    # step 2: see the imports

    # step 3
    train_dataset = datasets.ImageFolder(traindir, loader=cv2_loader)
    train_sampler: Any = DistributedSampler(train_dataset)
    train_loader: Any = DataLoader(train_dataset, batch_size=BATCH, sampler=train_sampler)

    # step 4
    train_transform_gpu = transforms.Compose(
        [
            transforms.RandomCrop(224),
            transforms.RandomHorizontalFlip(0.05),
            transforms.RandomGrayscale(0.02),
            transforms.RandomRotation(10),
            transforms.ColorJitter(0.05, 0.05, 0.05),
            TensorToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )

    # step 5
    train_transform_cpu = transforms.Compose(
        [
            cv2Resize((args.image_size, args.image_size)),
            transforms.ToPILImage(),
            transforms.RandomHorizontalFlip(0.05),
            transforms.RandomGrayscale(0.02),
            transforms.RandomRotation(5),
            transforms.ColorJitter(0.05, 0.05, 0.05, 0.05),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )

    # step 6
    wrap_train_loader = wrap_dataloader_torchpipe(
        parallel_type="ddp",
        dataloader=train_loader,
        toml_path=str(data / "gpu_decode_train.toml"),
        local_rank=local_rank,
        transforms_gpu=train_transform_gpu,
        transforms_cpu=train_transform_cpu,
        cpu_percentage=0.3,
    )

    # step 7
    val_dataset = datasets.ImageFolder(valdir, loader=cv2_loader)
    val_transform_gpu = transforms.Compose([TensorToTensor(), transforms.Normalize(MEAN, STD)])

    def wrap_val(val_loader: Any) -> TorchpipeLoader:
        return wrap_dataloader_torchpipe(
            parallel_type="ddp",
            dataloader=val_loader,
            local_rank=local_rank,
            toml_path=str(data / "gpu_decode_val.toml"),
            transforms_gpu=val_transform_gpu,
            transforms_cpu=None,
            cpu_percentage=0,
        )

    # torchpipe's own example validates every image on every rank: the one thing that is refused.
    with pytest.raises(TrainingError) as refusal:
        wrap_val(DataLoader(val_dataset, batch_size=BATCH, shuffle=False, pin_memory=True))
    wrap_val_loader = wrap_val(DataLoader(val_dataset, BATCH, sampler=DistributedEvalSampler(val_dataset)))

    model = make_model("small", len(KINDS), seed=0).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * LR, total_steps=EPOCHS * len(wrap_train_loader))
    criterion = torch.nn.CrossEntropyLoss()
    outcome = Outcome(data, val_dataset, model, refusal=str(refusal.value))
    for _epoch in range(EPOCHS):
        # step 8, where torchpipe's example has it
        wrap_train_loader.reset()
        wrap_val_loader.reset()

        model.train()
        for input, target in wrap_train_loader:
            outcome.shapes.add(tuple(input.shape[1:]))
            loss = criterion(model(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            outcome.losses.append(loss.item())

        model.eval()
        with torch.no_grad():
            for batch in wrap_val_loader:
                classes = model(batch.images).argmax(dim=1)
                outcome.named.update(zip(batch.indices.tolist(), classes.tolist(), strict=True))
    outcome.train = wrap_train_loader.stats()
    wrap_train_loader.close()
    wrap_val_loader.close()
    return outcome


@pytest.mark.slow
def test_the_eight_steps_train_a_network_above_chance(trained: Outcome) -> None:
    assert trained.shapes == {(3, 224, 224)}
    assert trained.train["samples"] == EPOCHS * TRAIN * len(KINDS)
    assert trained.train["bad"]["count"] == 0
    first, last = (np.mean(part) for part in (trained.losses[:5], trained.losses[-5:]))
    assert last < 0.7 * first
    assert trained.accuracy() >= 0.6  # chance: 0.25


def test_cpu_percentage_of_the_batches_go_through_transforms_cpu(trained: Outcome) -> None:
    batches = EPOCHS * TRAIN * len(KINDS) // BATCH
    assert trained.train["batches"] == batches
    assert 0.15 * batches < trained.train["cpu_batches"] < 0.45 * batches  # 0.3, of 70 drawn with a fixed seed


def test_a_sampler_that_gives_each_rank_all_images_is_refused_with_the_one_to_take(trained: Outcome) -> None:
    assert "in 'ddp' use DistributedSampler, or DistributedEvalSampler to validate" in trained.refusal


# -- how to perform local testing with a trained model --------------------------------------------------------------


class ModelWithPreprocessing(torch.nn.Module):
    """Solution 1, step 1: "subtract mean and divide by variance" in the model itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Any) -> Any:
        return self.model((images - self.mean) / self.std)


class Solution:
    """The common part of both solutions: ``init_decodeNode``."""

    def __init__(self, toml_path: str, model: torch.nn.Module | None = None) -> None:
        self.toml_path, self.model = toml_path, model
        self.decode_node = self.init_decodeNode()

    def init_decodeNode(self) -> torchpipe.pipe:  # noqa: N802
        config = torchpipe.parse_toml(self.toml_path)
        for key in config:
            if key != "global":
                # If no GPU is specified in the TOML file, it is necessary to specify the GPU here.
                config[key]["device_id"] = 0
        print(config)
        decode_node = torchpipe.pipe(config)
        return decode_node


class Solution1(Solution):
    def predict(self, img_path: str) -> Any:
        try:
            img = Path(img_path).read_bytes()
            if img is None or img == b"":
                print(f"open error:{img_path}")
                return None

            pipe_input = {TASK_DATA_KEY: img, "node_name": "jpg_decoder"}
            self.decode_node(pipe_input)
            result: Any = pipe_input[TASK_RESULT_KEY]
            return torch.nn.functional.softmax(result).cpu().numpy()

        except Exception as e:
            print(f"error:{e}")
            return None


class Solution2(Solution):
    def predict(self, img_path: str) -> Any:
        assert self.model is not None
        mean, std = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
        try:
            img = Path(img_path).read_bytes()
            if img is None or img == b"":
                print(f"open error:{img_path}")
                return None

            pipe_input = {TASK_DATA_KEY: img, "node_name": "jpg_decoder"}
            self.decode_node(pipe_input)
            img_data: Any = pipe_input[TASK_RESULT_KEY]
            if not ON_GPU:
                img_data = img_data.float()  # ResizeTensor gives float32, Mat2Tensor the Mat's uint8
            mean_tensor = torch.tensor(mean).unsqueeze(0).unsqueeze(2).unsqueeze(3).repeat(1, 1, 224, 224).to(DEVICE)
            std_tensor = torch.tensor(std).unsqueeze(0).unsqueeze(2).unsqueeze(3).repeat(1, 1, 224, 224).to(DEVICE)
            img_data -= mean_tensor
            img_data /= std_tensor

            with torch.no_grad():
                probs = self.model(img_data)
                return torch.nn.functional.softmax(probs).cpu().numpy()

        except Exception as e:
            print(f"error:{e}")
            return None


Predict = Callable[[str], Any]


@pytest.fixture(scope="module")
def solution_1(trained: Outcome) -> Iterator[Predict]:
    onnx = trained.folder / "checkpoint_resnet50.onnx"
    export_checked(ModelWithPreprocessing(trained.model.cpu()).eval(), onnx, size=224)
    trained.model.to(DEVICE)
    toml = here(DECODE_AND_MODEL).replace("/app/pth/dog-cat/checkpoint_resnet50.onnx", str(onnx))
    if HAS_TENSORRT:  # its default is fp16, as torchpipe's
        toml = f'precision = "fp32"\n{toml}'
    path = trained.folder / "gpu_decode_test.toml"
    path.write_text(toml, encoding="utf-8")
    solution = Solution1(str(path))
    yield solution.predict
    solution.decode_node.close()


@pytest.fixture(scope="module")
def solution_2(trained: Outcome) -> Iterator[Predict]:
    solution = Solution2(str(trained.folder / "gpu_decode_val.toml"), trained.model)
    yield solution.predict
    solution.decode_node.close()


NO_DIM = pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax:UserWarning")
"""The document's ``softmax`` names no dimension."""


@NO_DIM
def test_both_solutions_and_the_validation_name_the_same_class_for_every_image(
    trained: Outcome, solution_1: Predict, solution_2: Predict
) -> None:
    for index, (path, _) in enumerate(trained.dataset.samples):
        first, second = solution_1(path), solution_2(path)
        assert first.shape == second.shape == (1, len(KINDS))
        assert first.dtype == second.dtype == np.float32
        assert first.sum() == pytest.approx(1.0, abs=1e-4)
        assert np.abs(first - second).max() < (1e-2 if ON_GPU else 1e-4)  # TF32
        assert int(first.argmax()) == int(second.argmax()) == trained.named[index], path


@NO_DIM
def test_example_prints_error_of_invalid_image(
    solution_1: Predict, solution_2: Predict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, empty = tmp_path / "broken.jpg", tmp_path / "empty.jpg"
    broken.write_bytes(b"no image")
    empty.touch()
    for predict in (solution_1, solution_2):
        assert predict(str(broken)) is None
        assert "error:'result'" in capsys.readouterr().out  # the dict has none: its error says why
        assert predict(str(empty)) is None
        assert f"open error:{empty}" in capsys.readouterr().out

"""The training loader on a GPU: its streams, its generators, its agreement with the pipe; two GPUs where there are."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from kit.gpu import decoders, jpeg, needs_gpu, needs_torchvision, photo, two_devices
from kit.training_data import RandomOffset, same, taken, write_classes, write_images
from kit.training_document import DECODE
from torch.utils.data import DataLoader

from torchpipe_py import parse_toml, pipe
from torchpipe_py.training import (
    BadSample,
    ColorTwist,
    Compose,
    CudaPrefetcher,
    CutOut,
    GridMask,
    ImageFiles,
    RandomResizedCrop,
    TensorToTensor,
    TorchpipeLoader,
    cv2Resize,
    wrap_dataloader_torchpipe,
)

pytestmark = [
    needs_gpu,
    needs_torchvision,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*more than the suggested max number of workers.*:UserWarning"),
]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
H, W = 48, 40
COUNT = 23


def config(instances: int = 1, decoder: str = "torchvision") -> dict[str, Any]:
    backend = "S[DecodeTensor,ResizeTensor,SyncTensor]"
    sizes = {"resize_h": H, "resize_w": W, "max": 8}
    return {"preprocess": {"backend": backend, "decoder": decoder, **sizes, "instance_num": instances}}


@pytest.fixture
def dataset(tmp_path: Path) -> ImageFiles:
    """JPEGs of several sizes, three classes."""
    files = write_images(tmp_path, COUNT)
    for number, (path, _) in enumerate(files.samples):
        Path(path).write_bytes(jpeg(photo(90 + number % 4, 120 - number % 5, number)))
    return files


def wrapped(
    dataset: Any,
    *,
    workers: int = 0,
    shuffle: bool = False,
    instances: int = 1,
    decoder: str = "torchvision",
    **more: Any,
) -> TorchpipeLoader:
    loader = DataLoader(dataset, batch_size=4, shuffle=shuffle, num_workers=workers)
    return wrap_dataloader_torchpipe(more.pop("kind", "single"), loader, config(instances, decoder), **more)


class Noise:
    """Draws from every generator there is, that of the GPU too; lasts a while on the GPU."""

    def __call__(self, image: Any) -> Any:
        image = RandomOffset()(image)
        return image + torch.rand(image.shape, device=image.device)


class BatchNoise:
    def __call__(self, images: Any) -> Any:
        return images + torch.rand(images.shape, device=images.device)


class OnTheCpu:
    def __call__(self, picture: Any) -> Any:
        return TensorToTensor()(cv2Resize(H, W)(picture)) + torch.rand(1)


@decoders
def test_batch_equals_results_of_the_pipe(dataset: ImageFiles, decoder: str) -> None:
    with wrapped(dataset, decoder=decoder) as loader, pipe(config(decoder=decoder)) as run:
        seen = 0
        for images, labels in loader:
            assert images.is_cuda
            assert labels.is_cuda
            assert images.shape[1:] == (3, H, W)
            for image in images:
                run(item := {"data": dataset[seen][0]})
                assert torch.equal(image, item["result"][0])
                seen += 1
        assert seen == COUNT


@decoders
def test_batches_are_the_same_for_any_number_of_workers_and_instances(dataset: ImageFiles, decoder: str) -> None:
    more: dict[str, Any] = {
        "decoder": decoder,
        "transforms_gpu": Noise(),
        "transforms_batch": BatchNoise(),
        "transforms_cpu": OnTheCpu(),
        "cpu_percentage": 0.4,
        "shuffle": True,
    }
    epochs: list[list[Any]] = []
    for workers, prefetch, instances, decode in ((0, 0, 1, False), (2, 3, 3, False), (2, 3, 1, True), (1, 0, 1, True)):
        torch.cuda.manual_seed(workers)  # of no consequence
        with wrapped(
            dataset, workers=workers, prefetch=prefetch, instances=instances, workers_decode=decode, **more
        ) as loader:
            epochs.append([])
            for _ in range(3):
                epochs[-1] += taken(loader)
                loader.reset()
            assert 0 < loader.stats()["cpu_batches"] < loader.stats()["batches"]
    assert all(same(epochs[0], other) for other in epochs[1:])


AUGMENTATIONS: dict[str, Any] = {
    "cutout": CutOut(2, 0.4),
    "gridmask": GridMask(0.25, (0.2, 0.6), (-1.0, 1.0), fill=7),
    "crop": RandomResizedCrop((40, 56), degrees=20, flip=0.5),
    "color": ColorTwist(0.5, 0.5, 0.5, 0.3),
}
CHAIN = Compose([AUGMENTATIONS["crop"], AUGMENTATIONS["color"], AUGMENTATIONS["cutout"]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_on_the_gpu_equal_those_on_the_cpu(name: str, dtype: Any) -> None:
    images = torch.stack([torch.from_numpy(photo(50, 60, seed)).permute(2, 0, 1) for seed in range(16)]).to(dtype)
    seeds = torch.arange(16)
    expected = AUGMENTATIONS[name](images, seeds=seeds)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # of no consequence
    try:
        result = AUGMENTATIONS[name](images.cuda(), seeds=seeds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (result.is_cuda, result.dtype, result.shape) == (True, expected.dtype, expected.shape)
    if name in ("cutout", "gridmask"):
        assert torch.equal(result.cpu(), expected)
    else:
        assert float((result.cpu() - expected).abs().max()) < 0.01  # of 255


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_do_not_wait_for_the_gpu(name: str) -> None:
    images, seeds = torch.ones(8, 3, 50, 60, device="cuda"), torch.arange(8)
    AUGMENTATIONS[name](images, seeds=seeds)  # so that memory is allocated
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        AUGMENTATIONS[name](images, seeds=seeds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_augmented_batches_are_the_same_by_workers_on_the_gpu(dataset: ImageFiles) -> None:
    Path(dataset.samples[5][0]).write_bytes(b"no image")
    more: dict[str, Any] = {"transforms_batch": CHAIN, "bad_samples": "mask", "shuffle": True}
    epochs = []
    for workers, decode in ((0, False), (2, False), (2, True)):
        with wrapped(dataset, workers=workers, workers_decode=decode, **more) as loader:
            epochs.append(taken(loader))
    assert all(batch[0].shape[1:] == (3, 40, 56) for batch in epochs[0])
    assert all(same(epochs[0], other) for other in epochs[1:])


def test_the_programs_generators_are_left_alone(dataset: ImageFiles) -> None:
    with wrapped(dataset, transforms_gpu=Noise()) as loader:
        torch.cuda.manual_seed(5)
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        list(loader)
        assert all(map(torch.equal, before, (torch.cuda.get_rng_state(), torch.get_rng_state())))


@pytest.mark.parametrize("transforms", [TensorToTensor(), None])
@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (3, 0), (3, 2)])
def test_memory_of_a_batch_lasts_until_the_model_has_read_it(
    dataset: ImageFiles, prefetch: int, workers: int, transforms: Any
) -> None:
    """The model's stream is far behind, and nobody holds the batch: its memory must not become the next one's."""
    with wrapped(
        dataset, transforms_gpu=transforms, prefetch=prefetch, workers=workers, workers_decode=bool(workers)
    ) as loader:
        expected = [images.double().sum(dim=(1, 2, 3)).tolist() for images, _ in loader]
        for _ in range(3):
            loader.reset()
            sums = []
            for images, _labels in loader:
                torch.cuda._sleep(30_000_000)
                sums.append(images.double().sum(dim=(1, 2, 3)))
                del images
            assert [one.tolist() for one in sums] == expected


def test_bad_samples(dataset: ImageFiles, tmp_path: Path) -> None:
    Path(dataset.samples[5][0]).write_bytes(b"no image")
    Path(dataset.samples[9][0]).write_bytes(jpeg(photo(60, 60, 1))[:900])
    with wrapped(dataset, bad_samples="mask") as loader:
        batches = taken(loader)
        masked = [
            index for _, _, indices, mask, _ in batches for index, good in zip(indices, mask, strict=True) if not good
        ]
        assert masked == [5, 9]
        assert all(float(images.sum()) == 0.0 for images in (batches[1][0][1], batches[2][0][1]))
        assert loader.stats()["bad"]["kinds"] == {"corrupt": 2}
    with wrapped(dataset, bad_samples="skip") as loader:
        assert sum(len(one[1]) for one in taken(loader)) == COUNT - 2
    with wrapped(dataset) as loader, pytest.raises(BadSample, match=re.escape(dataset.samples[5][0])):
        list(loader)


def test_resuming_in_mid_epoch(dataset: ImageFiles) -> None:
    more: dict[str, Any] = {"transforms_gpu": Noise(), "shuffle": True, "workers": 1}
    with wrapped(dataset, **more) as loader:
        whole = taken(loader)
    with wrapped(dataset, **more) as loader:
        for _ in range(2):
            next(loader)
        state = loader.state_dict()
    with wrapped(dataset, **more) as loader:
        loader.load_state_dict(state)
        assert same(taken(loader), whole[2:])


def test_the_prefetcher_gives_every_batch_unharmed() -> None:
    batches = [(torch.full((4, 1000), float(number)), [torch.tensor([number])]) for number in range(12)]
    loader = DataLoader(batches, batch_size=None, pin_memory=True)  # type: ignore[arg-type]
    sums = []
    for values, (number,) in CudaPrefetcher(loader):
        assert values.is_cuda
        torch.cuda._sleep(10_000_000)
        sums.append((values.sum(), number))
        del values
    assert [(float(total), int(number)) for total, number in sums] == [(4000.0 * n, n) for n in range(12)]


# -- the scripts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_classes(tmp_path / "data", 32, 9)
    return tmp_path / "data"


def started(folder: Path, *command: object) -> list[tuple[float, int]]:
    """Accuracy and number of images of each epoch that the script prints."""
    toml = folder / "pipe.toml"
    backend = "S[DecodeTensor,ResizeTensor,SyncTensor]"
    toml.write_text(f'[preprocess]\nbackend = "{backend}"\nresize_h = 64\nresize_w = 64\nmax = 8\n', encoding="utf-8")
    options = ["--data", folder, "--toml", toml, "--batch-size", 4, "--workers", 1, "--lr", 0.003]
    done = subprocess.run(
        [*map(str, command), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [(float(share), int(seen)) for share, seen in re.findall(r"accuracy ([\d.]+) of (\d+) images", done.stdout)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(folder: Path, precision: str) -> None:
    script = [sys.executable, SCRIPTS / "train.py", "--amp", precision]
    assert started(folder, *script, "--epochs", 6)[-1] == (1.0, 9)


def test_a_training_goes_on(folder: Path, tmp_path: Path) -> None:
    script = [sys.executable, SCRIPTS / "train.py", "--epochs", 6, "--checkpoint", tmp_path / "last.pt"]
    first = started(folder, *script, "--max-steps", 11)  # of eight in an epoch
    assert len(first) == 1
    assert len(first + started(folder, *script)) == 6


@two_devices
def test_two_devices_in_one_process(dataset: ImageFiles) -> None:
    with wrapped(dataset, transforms_gpu=TensorToTensor()) as loader:
        single = taken(loader)
    for workers in (0, 2):
        with wrapped(
            dataset, kind="dp", transforms_gpu=TensorToTensor(), workers=workers, workers_decode=bool(workers)
        ) as loader:
            assert same(taken(loader), single)
    with wrapped(dataset) as whole, wrapped(dataset, kind="dp", gather=False) as apart:
        for batch, (images, labels) in zip(whole, apart, strict=True):
            assert [one.device.index for one in images] == [one.device.index for one in labels] == [0, 1][: len(images)]
            assert torch.equal(torch.cat([one.cpu() for one in images]), batch.images.cpu())
    for workers in (0, 2):
        more: dict[str, Any] = {"transforms_batch": CHAIN, "workers": workers, "workers_decode": bool(workers)}
        with (
            wrapped(dataset, transforms_batch=CHAIN) as whole,
            wrapped(dataset, kind="dp", gather=False, **more) as apart,
        ):
            for batch, (images, _) in zip(whole, apart, strict=True):
                assert torch.equal(torch.cat([one.cpu() for one in images]), batch.images.cpu())


@two_devices
@pytest.mark.parametrize("options", [[], ["--workers-decode"]])
def test_two_processes_over_nccl(folder: Path, options: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    figures = started(folder, *torchrun, SCRIPTS / "train.py", "--ddp", "--epochs", 6, *options)
    assert figures[-1] == (1.0, 9)


class Contexts(ImageFiles):
    """Labels say whether the process that reads has a context on device 0."""

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        encoded, _ = super().__getitem__(index)
        return encoded, int(torch._C._cuda_hasPrimaryContext(0))


ON_THE_OTHER_DEVICE = """
import pickle, sys, torch
from torch.utils.data import DataLoader
from torchpipe_py.training import ImageFiles, wrap_dataloader_torchpipe
samples, config = pickle.loads(sys.stdin.buffer.read())
torch.cuda.set_device(1)
with wrap_dataloader_torchpipe("single", DataLoader(ImageFiles(samples), 4), config, devices=1) as loader:
    assert all(batch.images.device.index == 1 for batch in loader)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@two_devices
@decoders
def test_a_context_takes_memory_of_one_device_alone(dataset: ImageFiles, decoder: str) -> None:
    """A process of a training on several GPUs must not keep half a GiB of the first one."""
    with wrapped(Contexts(dataset.samples), devices=1, workers=1, workers_decode=True, decoder=decoder) as loader:
        assert [label for _, labels in loader for label in labels.tolist()] == [0] * COUNT
    given = pickle.dumps((dataset.samples, config(decoder=decoder)))
    subprocess.run([sys.executable, "-c", ON_THE_OTHER_DEVICE], input=given, timeout=60, check=True)


# -- the document of the training integration; all its steps: tests/training/test_training_document.py ---------------


@pytest.mark.parametrize("decoder", ["", 'decoder = "torchvision"', 'decoder = "nvimgcodec"'])
def test_the_documents_toml_decodes_jpegs_on_the_gpu_and_the_rest_on_the_cpu(tmp_path: Path, decoder: str) -> None:
    if "nvimgcodec" in decoder:
        pytest.importorskip("nvidia.nvimgcodec")
    path = tmp_path / "gpu_decode_val.toml"
    path.write_text(DECODE.replace("[cpu_decoder]", f"{decoder}\n\n[cpu_decoder]"), encoding="utf-8")
    given = parse_toml(str(path))
    for key in given:
        if key != "global":
            given[key]["device_id"] = 0
    mat = photo(300, 400, 1)
    png = cv2.imencode(".png", mat[:, :, ::-1])[1].tobytes()
    with pipe(given) as run:
        run(by_gpu := {"data": jpeg(mat), "node_name": "jpg_decoder"})
        run(by_cpu := {"data": png, "node_name": "jpg_decoder"})
    floats, integers = by_gpu["result"], by_cpu["result"]
    assert floats.device == integers.device == torch.device("cuda", 0)
    assert floats.shape == integers.shape == (1, 3, 224, 224)
    assert (floats.dtype, integers.dtype) == (torch.float32, torch.uint8)
    assert float((floats - integers.float()).abs().mean()) < 5


def test_the_documents_transforms_keep_the_brightness_of_gpu_images(dataset: ImageFiles) -> None:
    """``ColorJitter`` takes floats for values of 0..1: those of ``ResizeTensor`` would all be clipped to 1."""
    from torchvision import transforms

    jitter = transforms.ColorJitter(0.05, 0.05, 0.05)
    steps = [transforms.RandomGrayscale(0.02), transforms.RandomRotation(0), jitter, TensorToTensor()]
    with (
        wrapped(dataset, transforms_gpu=TensorToTensor()) as plain,
        wrapped(dataset, transforms_gpu=transforms.Compose(steps)) as loader,
    ):
        for (expected, _), (images, _) in zip(plain, loader, strict=True):
            assert images.is_cuda
            assert images.dtype == torch.float32
            assert float((images.mean((1, 2, 3)) - expected.mean((1, 2, 3))).abs().max()) < 0.1
            assert float(images.std()) > float(expected.std()) / 2

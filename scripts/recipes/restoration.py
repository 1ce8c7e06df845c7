"""Train a small network that restores images, on pairs of an input and its target that DALI crops and flips alike.

    python scripts/run.py restoration --data_source DIR --make     # first writes a small set of pairs there
    python scripts/run.py restoration --data_source DIR --crop 96 --epochs 20 --checkpoint last.pt

``DIR/train/blurry`` and ``DIR/train/sharp`` have images of the same names, in folders or not; ``DIR/val``, or
``DIR/test``, has pairs to validate with. Each epoch prints the L1 loss, and the PSNR of the network's outputs for the
middle of the validation pairs, beside that of the inputs. Started again with its checkpoint, it continues with the
next epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import torch
from torch import nn

from recipes.dali import PairLoader, PairOptions
from recipes.dali.pairs import Pairs, find_pairs
from recipes.models import check_complete, save_checkpoint
from recipes.options import (
    MOST_SIDE,
    batch_size,
    checkpoint_file,
    epochs,
    guarded,
    learning_rate,
    to_device,
    whole_seed,
    workers,
)
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.image.files import find_images
from torchpipe_py.tools.options import at_least
from torchpipe_py.training import TrainingError
from torchpipe_py.training.options import choose_devices

PICTURES = ("configs/demo/images", "configs/examples/scenes")
"""Folders of the pictures that ``--make`` blurs."""
BLUR = 1.6
"""Standard deviation of the blur, in pixels."""
HELD_OUT = 7
"""``--make`` uses every so many-th picture for validation."""


class Residual(nn.Module):  # type: ignore[misc]
    """Maps N×3×H×W of -1 to 1 to the same; it learns the difference to the target, and adds it."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.tail = nn.Conv2d(width, 3, 3, padding=1)
        nn.init.zeros_(self.tail.weight)  # the first output is the input
        nn.init.zeros_(self.tail.bias)

    def forward(self, images: Any) -> Any:
        features = self.head(images)
        for block in self.body:
            features = features + block(features)
        return images + self.tail(features)


def psnr(images: Any, targets: Any) -> Any:
    """Peak signal-to-noise ratio of each image in dB, N, for N×3×H×W of -1 to 1, whose range is 2."""
    error = (images.clamp(-1, 1) - targets).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(4 / error.clamp(min=1e-10))


def make_pairs(folder: Path) -> str:
    """Write pairs of this repository's pictures as PNGs; return a line that describes them."""
    if (folder / "train").exists():
        raise TrainingError(f"--make: {folder / 'train'} is there already; leave --make out to train on it")
    root = Path(__file__).resolve().parents[2]
    counts = {"train": 0, "val": 0}
    for place in PICTURES:
        for number, path in enumerate(find_images(root / place)):
            sharp = cv2.imread(str(path))
            part = "train" if number % HELD_OUT else "val"
            for name, image in (("sharp", sharp), ("blurry", cv2.GaussianBlur(sharp, (0, 0), BLUR))):
                target = folder / part / name / Path(place).name / f"{path.stem}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                if not cv2.imwrite(str(target), image):
                    raise TrainingError(f"{target}: cannot be written")
            counts[part] += 1
    return f"{folder}: {counts['train']} pairs to train on, {counts['val']} to validate with"


def train(args: argparse.Namespace) -> None:
    """Train. Prints a line for each epoch."""
    if args.make:
        print(make_pairs(args.data_source), flush=True)
    (device,) = choose_devices("single", None, args.device)
    pairs = find_pairs(args.data_source / "train", args.img, args.gt)
    torch.manual_seed(args.seed)
    model = Residual().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with ExitStack() as stack:
        training = stack.enter_context(_loader(args, pairs, device, is_training=True))
        validation = stack.enter_context(_loader(args, _held_out(args) or pairs, device, is_training=False))
        parts = {"model": model, "optimiser": optimiser, "loader": training}
        first = _resume(args, parts)
        for epoch in range(first, args.epochs):
            began = perf_counter()
            loss = _epoch(model, optimiser, training)
            speed = len(pairs) / (perf_counter() - began)
            of_outputs, of_inputs = validate(model, validation)
            shown = f"PSNR {of_outputs:.2f} dB of {len(validation.pairs)} pairs, of the inputs {of_inputs:.2f} dB"
            print(f"epoch {epoch}: loss {loss:.4f}, {shown}, {speed:.0f} images/s", flush=True)
            _save(args, parts, epoch + 1)


def _epoch(model: nn.Module, optimiser: torch.optim.Optimizer, loader: PairLoader) -> float:
    """The mean L1 loss."""
    model.train()
    total, count = 0.0, 0
    for inputs, targets in loader:
        loss = nn.functional.l1_loss(model(inputs), targets)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        total, count = total + float(loss.detach()) * len(inputs), count + len(inputs)
    return total / count


@torch.no_grad()  # type: ignore[untyped-decorator]
def validate(model: nn.Module, loader: PairLoader) -> tuple[float, float]:
    """The mean PSNR in dB of the outputs of ``model``, and of the inputs."""
    model.eval()
    of_outputs, of_inputs = [], []
    for inputs, targets in loader:
        of_outputs.append(psnr(model(inputs), targets))
        of_inputs.append(psnr(inputs, targets))
    return float(torch.cat(of_outputs).mean()), float(torch.cat(of_inputs).mean())


def _loader(args: argparse.Namespace, pairs: Pairs, device: torch.device, is_training: bool) -> PairLoader:
    options = PairOptions(
        crop=args.crop,
        batch_size=args.batch_size,
        is_training=is_training,
        resize=args.resize,
        decode=args.decode,
        threads=args.workers,
        seed=args.seed,
    )
    return PairLoader(pairs, device, options)


def _held_out(args: argparse.Namespace) -> Pairs:
    """The validation pairs, of ``val`` or otherwise ``test``; empty without both."""
    folders = [folder for folder in (args.data_source / "val", args.data_source / "test") if folder.is_dir()]
    return find_pairs(folders[0], args.img, args.gt) if folders else []


def _save(args: argparse.Namespace, parts: dict[str, Any], epoch: int) -> None:
    if args.checkpoint is None:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    save_checkpoint(args.checkpoint, {"restoration": epoch, **state})


def _resume(args: argparse.Namespace, parts: dict[str, Any]) -> int:
    """Load the checkpoint, if there is one; return the first epoch to train."""
    path = args.checkpoint
    if path is None or not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise TrainingError(f"{path}: cannot be read as a checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or "restoration" not in state:
        raise TrainingError(f"{path}: not a checkpoint of scripts/run.py restoration")
    check_complete(path, state, parts)
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except TrainingError as error:
        raise TrainingError(f"{path}: {error}; go on with the options it was made with") from error
    epoch = int(state["restoration"])
    has_all = epoch >= args.epochs
    print(f"{path}: {f'has all {epoch} epochs' if has_all else f'goes on with epoch {epoch}'}", flush=True)
    return epoch


def main(argv: Sequence[str] | None = None) -> int:
    """0 when trained, 2 with one line on stderr otherwise."""
    parser = ArgumentParser(description="Train a network that restores images, on pairs that NVIDIA DALI loads.")
    option = parser.add_argument
    option("--data_source", type=Path, required=True, help="a folder with train/, and val/ or test/, of pairs")
    option("--make", action="store_true", help="first write a small set there: pictures of this repository, blurred")
    option("--img", default="blurry", help="the folder of inputs in each of these (default: %(default)s)")
    option("--gt", default="sharp", help="the folder of targets (default: %(default)s)")
    option(
        "--resize", type=at_least(1, MOST_SIDE), help="height of the images before they are cropped (default: as it is)"
    )
    option("--crop", type=at_least(1, MOST_SIDE), default=64, help="both sides in pixels (default: %(default)s)")
    option("--decode", choices=("cpu", "gpu"), default="cpu", help="what decodes and crops (default: %(default)s)")
    option("--batch-size", type=batch_size, default=4, help="(default: %(default)s)")
    option("--epochs", type=epochs, default=10, help="(default: %(default)s)")
    option("--workers", type=workers(1), default=2, help="threads of DALI (default: %(default)s)")
    option("--lr", type=learning_rate, default=2e-3, help="(default: %(default)s)")
    option("--seed", type=whole_seed, default=0, help="of weights, order, crops and flips (default: %(default)s)")
    option("--device", type=to_device, help="'cpu', or a CUDA device (default: a GPU where there is one)")
    option("--checkpoint", type=checkpoint_file, help="written after each epoch, and read where it is there")
    args = parser.parse_args(argv)
    return guarded("restoration", lambda: train(args))

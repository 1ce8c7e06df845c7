"""Draw a small labelled JPEG set, train a small network on it, and write the files of the demo pipeline.

    python scripts/run.py demo --out configs/demo

writes ``model.onnx``, ``labels.txt`` (one label per line, in class order) and ``images/<label>_<nn>.jpg``, pictures the
network was never trained on. Everything is drawn from ``--seed``; no data set is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import torch
from recipes.data import Normalise
from torch import nn

from examples.shapes import HELD_OUT, LABELS, TRAIN, draw_jpeg
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.export.onnx_file import export_checked, open_session

SIDE = 64  # pixels; the network's input is SIDE×SIDE
HELD_OUT_PER_CLASS, KEPT_PER_CLASS = 100, 6  # drawn, and of these written to disk
BATCH, LEARNING_RATE = 32, 6e-3
NORMALISE = Normalise()  # a pipeline writes it into the graph, so the export is without it
ENOUGH = 0.97  # held-out accuracy below which the exit status is 1


def draw_set(seed: int, part: int, per_class: int) -> tuple[list[bytes], torch.Tensor]:
    """JPEGs, the classes taking turns, and the class of each."""
    keys = [(index, number) for number in range(per_class) for index in range(len(LABELS))]
    return [draw_jpeg(seed, part, *key) for key in keys], torch.tensor([index for index, _ in keys])


# -- network ------------------------------------------------------------------------------------------------------


def preprocess(jpeg: bytes) -> np.ndarray:
    """A JPEG as ``DecodeMat``, ``ResizeMat``, ``cvtColorMat`` and ``Mat2Tensor`` output it: uint8 3×SIDE×SIDE, RGB."""
    picture = cv2.resize(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), (SIDE, SIDE))
    return np.ascontiguousarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB).transpose(2, 0, 1))


def build_network() -> nn.Sequential:
    """Normalised float32 N×3×64×64 → logits N×8; about 92,000 parameters, 14 million multiplications."""
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(pairwise((3, 16, 32, 32, 48, 64, 64)), (2, 1, 2, 2, 1, 2), strict=True):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(LABELS)))


def train_network(images: torch.Tensor, classes: torch.Tensor, epochs: int, seed: int) -> nn.Module:
    """AdamW with a one-cycle rate. Batches are mirrored, turned, shifted by up to 4 pixels, and exchange colours."""
    torch.manual_seed(seed)
    network = build_network().to(memory_format=torch.channels_last)  # twice as fast to train on a CPU
    steps = epochs * (len(images) // BATCH)
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
            axes = [axis for axis in (2, 3) if torch.rand(()) < 0.5]
            batch = images[chosen].rot90(int(torch.randint(2, ())), (2, 3)).flip(axes)
            batch = batch.roll(torch.randint(-4, 5, (2,)).tolist(), (2, 3))[:, torch.randperm(3)]
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(NORMALISE(batch)), classes[chosen]).backward()
            optimiser.step()
            schedule.step()
    return network.eval()


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written, 1 when written but less accurate than ``ENOUGH``."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("configs/demo"), help="folder (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=32, help="passes over the pictures (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of pictures and training (default: %(default)s)")
    parser.add_argument("--images-per-class", type=int, default=500, help="to train on (default: %(default)s)")
    args = parser.parse_args(argv)
    jpegs, classes = draw_set(args.seed, TRAIN, args.images_per_class)
    images = torch.from_numpy(np.stack([preprocess(jpeg) for jpeg in jpegs]))
    network = train_network(images, classes, args.epochs, args.seed)

    (args.out / "images").mkdir(parents=True, exist_ok=True)
    (args.out / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS), encoding="utf-8")
    model = args.out / "model.onnx"
    checked = export_checked(network, model, size=SIDE, opset=17, batches=(1, 5), tolerance=1e-4)
    held_out, expected = draw_set(args.seed, HELD_OUT, HELD_OUT_PER_CLASS)
    for place, jpeg in enumerate(held_out[: KEPT_PER_CLASS * len(LABELS)]):
        number, index = divmod(place, len(LABELS))
        (args.out / "images" / f"{LABELS[index]}_{number:02d}.jpg").write_bytes(jpeg)
    session = open_session(model)
    inputs = [NORMALISE(torch.from_numpy(preprocess(jpeg))[None]).numpy() for jpeg in held_out]
    named = torch.tensor([int(session.run(["logits"], {"input": one})[0].argmax()) for one in inputs])
    accuracy = float((named == expected).double().mean())
    print(f"{model}: {model.stat().st_size / 1e3:.0f} kB, within {checked.difference:.1g} of PyTorch")
    print(f"held out: accuracy {accuracy:.4f} of {len(held_out)} pictures")
    if accuracy < ENOUGH:
        print(f"demo: held-out accuracy is below {ENOUGH}: more --epochs or --images-per-class?", file=sys.stderr)
    return 0 if accuracy >= ENOUGH else 1

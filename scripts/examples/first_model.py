"""Train a ResNet-18 a little on textures, as a user of PyTorch does, or hold its logits against those of a pipe.

python scripts/run.py first_model train|compare FOLDER      (the steps of scripts/first_model.sh that need PyTorch)
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from examples.textures import class_name, write_set
from torchpipe_py import parse_toml, pipe
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.export.models import torchvision_models

CLASSES, TRAIN, VAL = 8, 20, 13  # 104 images to compare
EPOCHS, BATCH = 3, 16
TOLERANCE = 1e-3  # of the largest logit


def main(argv: Sequence[str] | None = None) -> int:
    """0 when done; 1 where the pipe differs from PyTorch."""
    parser = ArgumentParser(description="Train a ResNet-18, or compare a pipe of it with PyTorch.")
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    return train(args.folder) if args.what == "train" else compare(args.folder)


def train(folder: Path) -> int:
    """Writes ``data``, ``labels.txt`` and ``mine.pt``, as a distributed training saves it."""
    models = torchvision_models()
    write_set(folder / "data", TRAIN, VAL, CLASSES, seed=0)
    names = [class_name(kind) for kind in range(CLASSES)]
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    transform = models.get_model_weights("resnet18").DEFAULT.transforms()
    samples = [(path, names.index(path.parent.name)) for path in sorted((folder / "data" / "train").rglob("*.jpg"))]
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    torch.manual_seed(0)
    model = models.get_model("resnet18", weights=None, num_classes=CLASSES)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        print(f"epoch {epoch}: loss {float(loss.detach()):.3f}", flush=True)
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": EPOCHS, "model": state, "optimizer": optimiser.state_dict()}, folder / "mine.pt")
    return 0


def compare(folder: Path) -> int:
    """The pipe of ``served/model.toml`` on every image of ``data/val``, beside torchvision's transform and model."""
    models = torchvision_models()
    transform = models.get_model_weights("resnet18").DEFAULT.transforms()
    state = torch.load(folder / "mine.pt", weights_only=True)["model"]
    model = models.get_model("resnet18", weights=None, num_classes=CLASSES).eval()
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    files = [path.read_bytes() for path in sorted((folder / "data" / "val").rglob("*.jpg"))]

    tables = parse_toml(folder / "served" / "model.toml")
    del tables["model"]["postprocessor"], tables["model"]["labels"]
    with pipe(tables) as run:
        run(items := [{"data": data} for data in files])
    served = torch.cat([item["result"] for item in items])
    decoders: dict[str, Any] = {
        "OpenCV": lambda data: Image.fromarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)),
        "Pillow": lambda data: Image.open(BytesIO(data)).convert("RGB"),
    }
    is_same = {}
    for name, decode in decoders.items():
        with torch.inference_mode():
            expected = torch.cat([model(transform(decode(data))[None]) for data in files])
        apart, largest = float((served - expected).abs().max()), float(expected.abs().max())
        agree = float((served.argmax(1) == expected.argmax(1)).double().mean())
        print(
            f"{len(files)} images, for PyTorch decoded by {name}: logits of up to {largest:.3g} differ by {apart:.2g} "
            f"at most, top-1 agreement {agree:.2%} ({len(expected.argmax(1).unique())} classes named)"
        )
        is_same[name] = apart <= TOLERANCE * largest and agree == 1.0
    return 0 if is_same["OpenCV"] else 1

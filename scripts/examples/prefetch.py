"""Any training loop, faster: threads that make batches, and batches on the GPU before the model asks for them.

    python scripts/examples/prefetch.py

``BatchFeeder`` has threads load and decode (OpenCV lets go of the GIL), without worker processes. ``CudaPrefetcher``
copies the next batch to the GPU and normalises it there, on a stream of its own, while the model works on this one.
Both take any iterable, each is of use without the other, and on a CPU the second is plain iteration.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn

from torchpipe_py.training import BatchFeeder, CudaPrefetcher

IMAGES = Path(__file__).resolve().parents[2] / "configs" / "demo" / "images"
CLASSES = sorted({path.stem.rsplit("_", 1)[0] for path in IMAGES.glob("*.jpg")})  # of <class>_<number>.jpg
SIDE = 64
Batch = tuple[torch.Tensor, torch.Tensor]


def chunks(paths: list[Path], size: int, epoch: int) -> Iterator[list[Path]]:
    """All paths in another order each epoch; only one thread at a time is in here."""
    order = random.Random(epoch).sample(paths, len(paths))
    yield from (order[start : start + size] for start in range(0, len(order), size))


def load(paths: list[Path]) -> Batch:
    """On a feeder's thread: uint8 N×3×64×64, pinned where there is a GPU, and labels int64 N."""
    mats = [cv2.resize(cv2.imread(str(path)), (SIDE, SIDE))[:, :, ::-1].transpose(2, 0, 1) for path in paths]
    labels = torch.tensor([CLASSES.index(path.stem.rsplit("_", 1)[0]) for path in paths])
    images = torch.from_numpy(np.stack(mats))
    return (images.pin_memory(), labels.pin_memory()) if torch.cuda.is_available() else (images, labels)


def normalise(batch: Batch) -> Batch:
    """On the GPU, on the prefetcher's stream."""
    images, labels = batch
    return images.float().div_(127.5).sub_(1.0), labels


def main(epochs: int = 5) -> None:
    torch.manual_seed(0)
    paths = sorted(IMAGES.glob("*.jpg"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(len(CLASSES))).to(device)
    model(torch.zeros(1, 3, SIDE, SIDE, device=device))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(epochs):
        losses = []
        with BatchFeeder(chunks(paths, 8, epoch), load, threads=2, depth=4) as batches:
            for images, labels in CudaPrefetcher(batches, device, normalise):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.detach())
        print(f"epoch {epoch}: {len(losses)} batches, loss {torch.stack(losses).mean():.2f}")


if __name__ == "__main__":
    main()

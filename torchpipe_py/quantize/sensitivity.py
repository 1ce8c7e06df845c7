"""Which layers lose most in int8, and how few of them must stay in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchpipe_py.export.onnx_file import open_session
from torchpipe_py.quantize.quantiser import Quantiser


def search(quantiser: Quantiser, fp32: Sequence[str], most: int, max_drop: float) -> list[str]:
    """Up to ``most`` layers to keep in fp32 besides ``fp32``: the fewest that leave the classes as they are.

    Layers are ranked by how far the outputs move when that layer alone is in int8; 1, 2, 4 … of them are kept, until no
    more than ``max_drop`` of 100 images change their class. These are the images to calibrate with: those that the
    model is checked with have no say in what it is.
    """
    if not most:
        return []
    trial = quantiser.model.with_name("trial.onnx")
    wanted = _outputs(quantiser, quantiser.model)

    def changes(kept: Sequence[str]) -> float:
        quantiser.write(trial, fp32=[*fp32, *kept])
        return float(100 * np.mean(_outputs(quantiser, trial).argmax(1) != wanted.argmax(1)))

    if changes([]) <= max_drop:
        return []
    moves = {}
    for layer in quantiser.layers:
        if layer not in fp32:
            quantiser.write(trial, only=[layer])
            moves[layer] = float(np.linalg.norm(_outputs(quantiser, trial) - wanted))
    ranked = sorted(moves, key=lambda layer: -moves[layer])[:most]
    count = 1
    while count < len(ranked) and changes(ranked[:count]) > max_drop:
        count *= 2
    return ranked[:count]


def _outputs(quantiser: Quantiser, model: Path) -> np.ndarray:
    """The first output for each image, a row each."""
    session = open_session(model)
    feeds = [dict(zip(quantiser.input_names, arrays, strict=True)) for arrays in quantiser.inputs]
    return np.concatenate([session.run(None, feed)[0].reshape(1, -1) for feed in feeds])

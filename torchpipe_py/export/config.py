"""The configuration that serves an exported model: preprocessing, then the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.export.errors import ExportError
from torchpipe_py.export.files import Files
from torchpipe_py.export.transforms import Transform
from torchpipe_py.plan.config import GLOBAL, parse_toml
from torchpipe_py.runtime.pipe import pipe

ENGINE = "SyncTensor[FirstAvailable[TensorrtTensor,OnnxTensor]]"
MOST = 8  # items of a batch
TRIALS = ((240, 320), (375, 250))  # height and width of images that tell what a preprocessing makes of any


def model_node(
    files: Files, transform: Transform, has_labels: bool, postprocessor: str = "SoftmaxMax"
) -> dict[str, Any]:
    """The node of the model, whose files lie beside the TOML."""
    node = {
        "backend": ENGINE,
        "model": files.model.name,
        "model::cache": files.engine.name,
        "max": MOST,
        "batching_timeout": 2,
        "mean": _of_255(transform.mean),
        "std": _of_255(transform.std),
    }
    if postprocessor:
        node["postprocessor"] = postprocessor
    if has_labels:
        node["labels"] = files.labels.name
    return node


def _of_255(values: Sequence[float]) -> str:
    return ", ".join(f"{255 * value:.10g}" for value in values)


def followed_by(tables: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with ``node`` behind the one that ends; ``ExportError`` where several do."""
    nodes = {name: dict(table) for name, table in tables.items() if isinstance(table, Mapping) and name != GLOBAL}
    ends = [name for name, table in nodes.items() if not table.get("next")]
    if len(ends) != 1:
        raise ExportError(f"the TOML ends in {len(ends)} nodes ({', '.join(ends)}); a model follows one")
    name = "model"
    while name in nodes:
        name += "_"
    nodes[ends[0]]["next"] = name
    return {GLOBAL: dict(tables.get(GLOBAL, {})), **nodes, name: dict(node)}


def read_preprocessing(path: Path) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The tables of a TOML file, and channels, height and width of the images that it makes of JPEGs of any size.

    ``ExportError`` where it makes something else, or images of several sizes.
    """
    tables = parse_toml(path)
    sizes = set()
    with pipe(tables) as run:
        for height, width in TRIALS:
            run(data := {"data": _jpeg(height, width)})
            result = data.get("result")
            shape = tuple(getattr(result, "shape", ()))
            if isinstance(result, np.ndarray) and len(shape) == 3:
                shape = (1, shape[2], *shape[:2])
            if len(shape) != 4 or shape[0] != 1:
                kind = shown_dims(shape) if shape else str(data.get("error", type(result).__name__))
                raise ExportError(f"{path}: makes {kind} of a JPEG; expected a Mat or a Tensor 1xCxHxW")
            sizes.add((int(shape[1]), int(shape[2]), int(shape[3])))
    if len(sizes) > 1:
        found = " and ".join(map(shown_dims, sorted(sizes)))
        raise ExportError(f"{path}: makes images of several sizes, {found} for two; the model takes one")
    return tables, sizes.pop()


def _jpeg(height: int, width: int) -> bytes:
    import cv2

    done, encoded = cv2.imencode(".jpg", np.full((height, width, 3), 128, np.uint8))
    assert done
    return bytes(encoded.tobytes())

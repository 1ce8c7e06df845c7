"""Images to calibrate with, and what the model is given for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.parity.results import is_tensor, refusal
from torchpipe_py.parity.run import PipeRunner, shown_name
from torchpipe_py.plan.config import Tables
from torchpipe_py.quantize.errors import QuantizeError

FEWEST = 8
"""Images to calibrate with, and to check with, below which neither means anything."""

Arrays = list[np.ndarray]
"""The inputs of a model for one image, each 1×…, in the model's order."""


def divide(paths: Sequence[Path], most: int) -> tuple[list[Path], list[Path]]:
    """Images to calibrate with, ``most`` or half of them, spread over all, and the others, to check with."""
    count = min(most, len(paths) // 2)
    chosen = {index * len(paths) // count for index in range(count)} if count else set()
    return (
        [path for index, path in enumerate(paths) if index in chosen],
        [path for index, path in enumerate(paths) if index not in chosen],
    )


def model_inputs(tables: Tables, img_dir: str, paths: Sequence[Path]) -> tuple[list[Arrays], list[str]]:
    """What ``tables`` give for each image, and a line for each that they give nothing for.

    ``QuantizeError`` for results that are no Tensors.
    """
    given: list[Arrays] = []
    refused: list[str] = []
    with ExitStack() as stack:
        runner = PipeRunner(tables.source, tables, stack)
        for start in range(0, len(paths), runner.batch):
            names, requests = [], []
            for path in paths[start : start + runner.batch]:
                try:
                    requests.append({TASK_DATA_KEY: Path(img_dir, path).read_bytes()})
                    names.append(shown_name(path))
                except OSError as error:
                    refused.append(f"{shown_name(path)}: {error.strerror}")
            for name, item in zip(names, runner.start(requests)(), strict=True):
                reason = refusal(item)
                if reason:
                    refused.append(f"{name}: {reason}")
                else:
                    given.append(_arrays(item[TASK_RESULT_KEY], tables.source))
    return given, refused


def _arrays(value: object, config: str) -> Arrays:
    values: list[Any] = value if isinstance(value, list) else [value]
    if not all(map(is_tensor, values)):
        raise QuantizeError(f"{config}: the model is given a {type(value).__name__}, expected a Tensor")
    return [each.detach().cpu().numpy() for each in values]

"""``--torchvision``: the transform of torchvision's weights instead of a second configuration."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, ItemBackend
from torchpipe_py.backends.params import Param
from torchpipe_py.errors import without_warnings
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.tools.export.models import find_weights

MODELS = ("OnnxTensor", "TensorrtTensor", "TorchTensor")


class TorchvisionTransform(ItemBackend):
    """A Tensor 1×3×H×W from 0 to 255: the transform of an image opened by Pillow, without mean and std.

    A configuration gives those to the model.
    """

    weights = Param(str, doc="their full name, such as ResNet18_Weights.IMAGENET1K_V1")

    def setup(self) -> None:
        self._transform: Any = find_weights(self.weights, "--torchvision").transforms()
        self._transform.mean, self._transform.std = [0.0] * 3, [1 / 255] * 3

    def forward_item(self, item: Data) -> None:
        from PIL import Image

        image = Image.open(BytesIO(item[TASK_DATA_KEY])).convert("RGB")
        item.update({TASK_RESULT_KEY: self._transform(image)[None], TASK_COLOR_KEY: "rgb"})


def before_model(config: str, weights: str) -> tuple[Tables, list[str]]:
    """The configuration without the model at its end; and notes if the model has another mean or std.

    Raises ``ToolError`` if torchvision or the ``weights`` are missing, ``ConfigError`` for a bad configuration.
    """
    preset = find_weights(weights, "--torchvision").transforms()
    with without_warnings():  # what is compared is planned again
        tables, plans, notes = parse_toml(config), plan_pipeline(config).plans, []
    name, plan = next((name, plan) for name, plan in reversed(list(plans.items())) if not plan.spec.next)
    first = next(part for part in plan.backends[0].parts() if not part.children)
    if len(plans) > 1 and first.cls.__name__ in MODELS:
        del tables[name]
        for key, table in tables.items():
            tables[key] = {k: v for k, v in table.items() if (k, v) != ("next", name)}
        for key in ("mean", "std"):
            wanted = tuple(round(255 * value, 3) for value in getattr(preset, key))
            if not np.allclose(first.params[key] or np.nan, wanted, atol=0.01):
                notes.append(f"{name}: {key} is {first.params[key]}; torchvision's, times 255, is {wanted}")
    return tables, notes

"""What a configuration is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchpipe_py import ConfigError
from torchpipe_py.plan.build import plan_pipeline


def refusal(config: Any, read: Callable[[Any], object] = plan_pipeline) -> str:
    """The text of the ``ConfigError`` that ``read`` raises: before anything is set up, if it is not told otherwise."""
    with pytest.raises(ConfigError) as caught:
        read(config)
    return str(caught.value)

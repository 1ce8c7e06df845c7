from __future__ import annotations

import pytest

import torchpipe_py.ray


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(AttributeError, match=r"^module 'torchpipe_py.ray' has no attribute 'App'$"):
        _ = torchpipe_py.ray.App

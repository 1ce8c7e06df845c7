from __future__ import annotations

import subprocess
import sys

import pytest

import torchpipe_py.ray


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(AttributeError, match=r"^module 'torchpipe_py.ray' has no attribute 'App'$"):
        _ = torchpipe_py.ray.App


def test_the_library_is_not_imported_before_a_name_is_used() -> None:
    code = "import sys, torchpipe_py.ray; print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")

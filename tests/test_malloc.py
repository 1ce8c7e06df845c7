"""Memory that an image took is there for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import cv2, numpy as np
from torchpipe_py.malloc import keep_freed_memory

if sys.argv[1] == "keeps":
    keep_freed_memory()
encoded = cv2.imencode(".jpg", np.zeros((1080, 1920, 3), np.uint8))[1]
for _ in range(4):
    cv2.imdecode(encoded, cv2.IMREAD_COLOR)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    cv2.imdecode(encoded, cv2.IMREAD_COLOR)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> int:
    """How often the system was asked for a page while 8 images of 6 MB were decoded."""
    command = [sys.executable, "-c", FAULTS, how]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_large_image_takes_the_memory_of_the_one_before() -> None:
    usual = faults("gives back")
    if usual < 8 * 1000:
        pytest.skip("this C library keeps it anyway, or the system counts nothing")
    assert faults("keeps") < usual / 10
    assert faults("keeps", MALLOC_TRIM_THRESHOLD_="131072") > usual / 2

"""The backend alone, then the whole pipeline: no service, no port."""

from pathlib import Path

import backends
import cv2
import numpy as np
import pytest

from torchpipe_py import ConfigError, pipe

FOLDER = Path(__file__).parent
IMAGES = FOLDER / "../../configs/demo/images"


def checkered(blur=0):
    """A picture of 64x64 pixels, blurred by a Gaussian of so many pixels."""
    image = np.kron(np.indices((8, 8)).sum(0) % 2, np.ones((8, 8)))[:, :, None] * np.full(3, 255)
    return cv2.GaussianBlur(image, None, blur).astype(np.uint8) if blur else image.astype(np.uint8)


def test_passes_on_a_sharp_picture_and_writes_its_sharpness():
    with pipe({"backend": "Sharpness"}) as run:
        data = run({"data": checkered()})
    assert data["sharpness"] > 1000
    assert np.array_equal(data["result"], checkered())


def test_a_blurred_picture_among_sharp_ones_has_an_error_and_they_have_results():
    with pipe({"backend": "Sharpness", "least": 100}) as run:
        items = run([{"data": checkered()}, {"data": checkered(blur=9)}, {"data": checkered()}])
        counted = run.stats()["metrics"]["blurred"]["samples"]
    assert ["result" in item for item in items] == [True, False, True]
    assert isinstance(items[1]["error"], backends.Blurred)
    assert counted == [{"labels": {}, "value": 1.0}]


def test_refuses_a_negative_bound():
    with pytest.raises(ConfigError, match="'least'"):
        pipe({"backend": "Sharpness", "least": -1})


@pytest.fixture(scope="module")
def run():
    with pipe(str(FOLDER / "sharp.toml")) as run:
        yield run


def test_classifies_a_sharp_file(run):
    data = run({"data": (IMAGES / "ring_00.jpg").read_bytes()})
    assert data["result"][0] == "ring"


def test_a_batch_gives_what_single_calls_give(run):
    files = [path.read_bytes() for path in sorted(IMAGES.glob("*.jpg"))[:16]]
    alone = [run({"data": file})["result"] for file in files]
    together = [item["result"] for item in run([{"data": file} for file in files])]
    assert [label for label, _ in together] == [label for label, _ in alone]
    assert np.allclose([score for _, score in together], [score for _, score in alone], atol=1e-3)

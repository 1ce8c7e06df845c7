"""Results that are images, as files."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch

from torchpipe_py.errors import NoResult
from torchpipe_py.wire.pictures import Accepted, NotAcceptableError, accepted_image, to_image

PIXELS = np.arange(2 * 5 * 3, dtype="u1").reshape(2, 5, 3)


@pytest.mark.parametrize(
    ("accept", "kind", "is_only"),
    [
        ("image/png", "image/png", True),
        ("image/jpeg", "image/jpeg", True),
        ("Image/JPG", "image/jpeg", True),
        ("image/*", "image/png", True),
        ("image/png, application/json", "image/png", False),
        ("application/json, image/png", "image/png", False),
        ("image/png, */*", "image/png", False),
        ("image/png, */*;q=0", "image/png", True),
        ("image/png;q=0.5, image/jpeg", "image/jpeg", True),
        ("image/avif,image/webp,image/png,*/*;q=0.8", "image/png", False),
        ("image/webp, image/png;q=0.1", "image/png", True),
        ("image/webp, image/*;q=0.1", "image/png", True),
        ("image/*, image/png;q=0", "image/jpeg", True),
        ("image/*, image/png;q=0.5", "image/jpeg", True),
        ("image/jpeg, image/*", "image/jpeg", True),
        ("image/jpeg, image/png", "image/jpeg", True),
        ("image/png, application/json;q=0, */*", "image/png", True),
        ("image/jpeg, application/*;q=0.1", "image/jpeg", False),
        ("image/png;q=7, application/json", "image/png", False),
        ("image/jpeg;level=1; q=0.3, image/png ; q=0.2", "image/jpeg", True),
    ],
)
def test_accepted_image_is_the_preferred_one(accept: str, kind: str, is_only: bool) -> None:
    assert accepted_image(accept) == Accepted(kind, is_only)


@pytest.mark.parametrize(
    "accept",
    [
        "", "*/*", "application/json", "text/html", "image/png;q=0", "image/png;q=x", "image/png;q=nan",
        "application/json, image/png;q=0.5", "image/png;q=0.5, */*", "image/webp, */*;q=0.1", "image/webp;q=0",
        "image/avif, application/*", "image/*;q=0.2, application/json;q=0.3",
    ],
)  # fmt: skip
def test_others_accept_no_image(accept: str) -> None:
    assert accepted_image(accept) is None


@pytest.mark.parametrize(
    "accept",
    [
        "image/webp", "image/svg+xml, text/html", "image/webp, image/png;q=0", "image/webp, */*;q=0",
        "image/avif, application/json;q=0, */*",
    ],
)  # fmt: skip
def test_images_of_other_types_are_not_acceptable(accept: str) -> None:
    with pytest.raises(NotAcceptableError, match="neither image/png nor image/jpeg, nor application/json"):
        accepted_image(accept)


@pytest.mark.parametrize(
    ("value", "color", "expected"),
    [
        (PIXELS, "", PIXELS),
        (PIXELS, "bgr", PIXELS),
        (PIXELS[..., ::-1], "RGB", PIXELS),
        (PIXELS[None], "", PIXELS),
        (torch.from_numpy(PIXELS), "", PIXELS),
        (PIXELS[..., 0], "gray", PIXELS[..., 0]),
        (PIXELS[..., :1], "", PIXELS[..., 0]),
        (PIXELS[None, ..., 0], "rgb", PIXELS[..., 0]),
    ],
)
def test_image_is_a_file_of_the_same_pixels(value: Any, color: str, expected: np.ndarray) -> None:
    file = to_image(value, color, "image/png")
    assert file is not None
    found = cv2.imdecode(np.frombuffer(file, "u1"), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(found, expected)
    jpeg = to_image(value, color, "image/jpeg")
    assert jpeg is not None
    assert jpeg.startswith(b"\xff\xd8")


@pytest.mark.parametrize(
    "value",
    [
        None, b"x", "x", 3, ("ring", 0.5), [PIXELS], PIXELS.astype("f4"), PIXELS.astype("i1"), PIXELS[0, 0],
        np.zeros((3, 4, 5), "u1"), np.zeros((2, 4, 5, 3), "u1"), np.zeros((0, 4, 3), "u1"),
        np.array(["a"], object), torch.zeros(2, 2, 3),
    ],
)  # fmt: skip
def test_other_values_are_no_image(value: Any) -> None:
    assert to_image(value, "", "image/png") is None


def test_too_wide_image_is_not_a_jpeg() -> None:
    with pytest.raises(NoResult, match="an image of 70000x1 pixels cannot be image/jpeg"):
        to_image(np.zeros((1, 70_000, 3), "u1"), "", "image/jpeg")

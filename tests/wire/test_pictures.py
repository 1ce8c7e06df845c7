"""Results that are images, as files."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch

from torchpipe_py.errors import NoResult
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError
from torchpipe_py.wire.pictures import JPEG, PNG, NotAcceptableError, Picture, accepted_image, picture_of

MOST = Bound(2**20, "--max-reply-bytes")
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
    accepted = accepted_image(accept)
    assert accepted is not None
    assert (accepted.kinds[0], accepted.is_only) == (kind, is_only)


def test_file_is_sent_as_any_of_the_accepted_types() -> None:
    files = {PNG: cv2.imencode(".png", PIXELS)[1].tobytes(), JPEG: cv2.imencode(".jpg", PIXELS)[1].tobytes()}
    sent = {
        "image/*": (PNG, JPEG),
        "image/png, image/jpeg": (PNG, JPEG),
        "image/jpeg, image/png;q=0.5": (PNG, JPEG),
        "image/png, image/*;q=0.1": (PNG, JPEG),
        "image/png": (PNG,),
        "image/*, image/png;q=0": (JPEG,),
        "image/png, application/json;q=0.5, image/jpeg;q=0.1": (PNG,),
    }
    for accept, kinds in sent.items():
        accepted = accepted_image(accept)
        assert accepted is not None
        pictures = {kind: picture_of(file, "", accepted.kinds) for kind, file in files.items()}
        assert tuple(kind for kind, picture in pictures.items() if picture is not None) == kinds, accept
        assert all(picture is None or picture.kind == kind for kind, picture in pictures.items()), accept


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
    picture, jpeg = picture_of(value, color, ["image/png"]), picture_of(value, color, ["image/jpeg"])
    assert picture is not None
    assert jpeg is not None
    found = cv2.imdecode(np.frombuffer(picture.encode(MOST), "u1"), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(found, expected)
    assert picture.size == expected.size
    assert jpeg.encode(MOST).startswith(b"\xff\xd8")


@pytest.mark.parametrize(
    "value",
    [
        None, b"x", "x", 3, ("ring", 0.5), [PIXELS], PIXELS.astype("f4"), PIXELS.astype("i1"), PIXELS[0, 0],
        np.zeros((3, 4, 5), "u1"), np.zeros((2, 4, 5, 3), "u1"), np.zeros((0, 4, 3), "u1"),
        np.array(["a"], object), torch.zeros(2, 2, 3),
    ],
)  # fmt: skip
def test_other_values_are_no_image(value: Any) -> None:
    assert picture_of(value, "", ["image/png"]) is None


def test_too_wide_image_is_not_a_jpeg() -> None:
    with pytest.raises(NoResult, match="an image of 70000x1 pixels cannot be image/jpeg"):
        Picture(np.zeros((1, 70_000, 3), "u1"), (1, 70_000, 3), "", "image/jpeg").encode(MOST)


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 3), (7, 9), (16, 16, 3), (640, 480, 3), (3000, 2000, 3), (2048, 4096), (1, 60_000, 3)]
)
def test_the_bound_of_a_file_is_below_any_file(kind: str, shape: tuple[int, ...]) -> None:
    for value in (0, 128, 255):
        picture = Picture(np.full(shape, value, "u1"), shape, "", kind)
        picture.check(Bound(len(picture.encode(MOST)), MOST.name))
    with pytest.raises(ReplyTooLargeError, match="ask for image/jpeg, or for a smaller image"):
        Picture(None, (5000, 5000, 3), "", kind).check(Bound(4096, MOST.name))


def test_file_beyond_the_limit_is_too_large() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), "u1")
    picture = picture_of(noise, "", ["image/png"])
    assert picture is not None
    size = len(picture.encode(MOST))
    assert len(picture.encode(Bound(size, MOST.name))) == size
    with pytest.raises(ReplyTooLargeError, match=f"the result has {size} bytes"):
        picture.encode(Bound(size - 1, MOST.name))


def test_file_of_the_kind_is_passed_on() -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    for kind, other, ending in ((PNG, JPEG, ".png"), (JPEG, PNG, ".jpg")):
        file = cv2.imencode(ending, pixels)[1].tobytes()
        picture = picture_of(file, "rgb", [kind])
        assert picture is not None
        assert picture.size == len(file)
        picture.check(MOST)
        assert picture.encode(MOST) == file
        with pytest.raises(ReplyTooLargeError):
            picture.encode(Bound(len(file) - 1, MOST.name))
        assert picture_of(file, "", [other]) is None
    assert picture_of(b"", "", [PNG]) is None

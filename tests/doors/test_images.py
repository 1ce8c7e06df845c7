"""Images over HTTP: as text in JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from kit import doors
from kit.clients import ask
from kit.doors import House
from kit.services import LocalServer, serving

PIXELS = np.arange(2 * 3 * 3, dtype="u1").reshape(2, 3, 3)


def png(pixels: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", pixels)[1])


def text_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A root that decodes, and one that takes anything."""
    with doors.house({"decoder": {"backend": "DecodeMat"}, "any": {"backend": "Identity"}}) as house:
        yield house


TEXT = text_of(png(PIXELS))
FORMS: dict[str, Any] = {
    "b64": {"b64": TEXT},
    "b64 data URI": {"b64": f"data:image/png;base64,{TEXT}"},
    "base64": TEXT,
    "base64 in lines": base64.encodebytes(png(PIXELS)).decode().replace("\n", "\r\n"),
    "data URI": f"data:image/png;base64,{TEXT}",
    "data URI with a name": f"DATA:image/png;name=a.png;Base64,{TEXT}",
}
WRONG: dict[str, tuple[Any, str]] = {
    "a file's name": ("ring_00.jpg", "the text of an image is neither base64 nor a data URI"),
    "cut off": (TEXT[:-1], "Incorrect padding"),
    "another coding": ("data:image/svg+xml,%3Csvg/%3E", "a data URI that is not base64"),
}


def over_infer(value: Any, root: str) -> doors.Http:
    body = {"inputs": {"data": value}, "node_name": root}
    return doors.Http("/infer", json.dumps(body).encode(), {"content-type": "application/json"}, doors._read_infer)


def over_oip(value: Any, root: str) -> doors.Http:
    given = {"name": "data", "datatype": "BYTES", "shape": [1], "data": [value]}
    return doors.Http(f"/v2/models/{root}/infer", json.dumps({"inputs": [given]}).encode(), {}, doors._read_oip)


def asking(house: House, door: str, value: Any, root: str = "decoder") -> doors.Answer:
    form = over_oip if "oip" in door else over_infer
    way = doors.over_ray if door.startswith("ray") else doors.over_http
    return way(lambda asked: form(value, root))(house, doors.Asked(root, {}, []))


every_json_door = pytest.mark.parametrize("door", ["infer", "oip", "ray_infer", "ray_oip"])


@every_json_door
@pytest.mark.parametrize("form", FORMS)
def test_image_as_text_is_decoded(house: House, door: str, form: str) -> None:
    answer = asking(house, door, FORMS[form])
    assert answer.code == "ok", answer.message
    assert doors.same(answer.values["result"], PIXELS)


@every_json_door
@pytest.mark.parametrize("wrong", WRONG)
def test_text_that_is_not_an_image_is_refused(house: House, door: str, wrong: str) -> None:
    value, said = WRONG[wrong]
    answer = asking(house, door, value)
    assert answer.code == "invalid_request"
    assert said in answer.message


@every_json_door
def test_text_stays_text_where_no_image_is_declared(house: House, door: str) -> None:
    answer = asking(house, door, FORMS["data URI"], "any")
    assert np.asarray(answer.values["result"]).tolist() in (FORMS["data URI"], [FORMS["data URI"]])


@pytest.fixture(scope="module")
def decoder() -> Iterator[LocalServer]:
    with serving("DecodeMat") as server:
        yield server


def test_image_as_text_may_be_larger_than_texts(decoder: LocalServer) -> None:
    large = np.random.default_rng(0).integers(0, 256, (700, 700, 3), "u1")
    body = {"inputs": {"data": f"data:image/png;base64,{text_of(png(large))}"}, "outputs": ["color"]}
    assert len(json.dumps(body)) > 2**20
    assert ask(decoder.port, body, Content_Type="application/json") == (200, {"color": "bgr"})

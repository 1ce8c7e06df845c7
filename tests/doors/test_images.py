"""Images over HTTP: as text in JSON, several in one call, as results."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
from kit import doors
from kit.clients import HttpClient, ask, fetch
from kit.doors import House
from kit.services import LocalServer, serving
from kit.waits import WAIT

from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.pictures import Picture

PIXELS = np.arange(2 * 3 * 3, dtype="u1").reshape(2, 3, 3)


def png(pixels: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", pixels)[1])


def text_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


NODES = {
    "decoder": {"backend": "DecodeMat"}, "crop": {"backend": "S[DecodeMat,CropMat]"}, "any": {"backend": "Identity"},
    "rgb": {"backend": "S[DecodeMat]", "color": "rgb"},
}  # fmt: skip


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A root that decodes, and one that takes anything."""
    with doors.house(NODES) as house:
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


@pytest.mark.parametrize("door", doors.DOORS)
def test_tensor_for_a_decoder_is_refused(house: House, door: str) -> None:
    for shape in ((1, 3, 4, 4), (1, 4, 4, 3)):
        answer = doors.DOORS[door](house, doors.Asked("decoder", {"data": np.zeros(shape, "f4")}, ["result"]))
        assert answer.code == "invalid_request"
        said = f"a tensor of {'x'.join(map(str, shape))}; send the bytes of a file"
        assert ("is the dict one of an earlier call" if door.startswith("python") else said) in answer.message
        assert ("Python" in answer.message) == door.startswith("python")


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


@pytest.mark.parametrize("size", [128, 700, 5_000])
@pytest.mark.parametrize("accept", ["application/json", "image/png"])
def test_stream_of_an_image_of_undeclared_length_is_read(decoder: LocalServer, size: int, accept: str) -> None:
    image = png(np.random.default_rng(0).integers(0, 256, (40, 40, 3), "u1"))
    head = f"POST /infer HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with HttpClient(decoder.port) as client:
        client.send(head + doors.in_chunks(image, size) + head)  # the next one follows at once
        answer = client.read()
        assert (answer.status, answer.fields["content-type"]) == (200, accept)
        client.send(doors.in_chunks(b"no image", size))
        answer = client.read()
        assert (answer.status, json.loads(answer.body)["code"]) == (400, "decode_error")


@pytest.mark.parametrize("is_complete", [False, True])
def test_stream_beyond_the_limit_is_refused_before_its_end(is_complete: bool) -> None:
    with serving("DecodeMat", max_message_bytes=10_000) as server, HttpClient(server.port) as client:
        client.send(b"POST /infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = doors.in_chunks(bytes(10_001), 500)
        client.send(body if is_complete else body.removesuffix(b"0\r\n\r\n"))
        answer = client.read()
        assert (answer.status, json.loads(answer.body)["code"]) == (413, "too_large")


# -- several in one call ----------------------------------------------------------------------------------------------


def form_of(files: list[bytes], **fields: str) -> tuple[bytes, str]:
    parts = [b'; name="images[]"; filename="a.png"\r\n\r\n' + file for file in files]
    parts += [f'; name="{name}"\r\n\r\n{text}'.encode() for name, text in fields.items()]
    body = b"".join([b"--xyz\r\nContent-Disposition: form-data" + part + b"\r\n" for part in parts])
    return body + b"--xyz--\r\n", "multipart/form-data; boundary=xyz"


def as_form(files: list[bytes], **fields: Any) -> doors.Http:
    body, kind = form_of(files, node_name="crop", **{name: json.dumps(value) for name, value in fields.items()})
    return doors.Http("/infer", body, {"content-type": kind}, lambda body, fields: json.loads(body))


def as_list(files: list[bytes], **fields: Any) -> doors.Http:
    inputs = [{"data": text_of(file), **fields} for file in files]
    body = json.dumps({"inputs": inputs, "node_name": "crop"}).encode()
    kind = {"content-type": "application/json"}
    return doors.Http("/infer", body, kind, lambda body, fields: json.loads(body))


@pytest.mark.parametrize("form", [as_form, as_list])
@pytest.mark.parametrize("way", [doors.over_http, doors.over_ray])
def test_each_of_several_images_has_its_outcome(house: House, way: Any, form: Any) -> None:
    files = [png(PIXELS), b"\0 no image", png(PIXELS[::-1]), b"", png(PIXELS)]
    answer = way(lambda asked: form(files, box=[0, 0, 2, 1]))(house, doors.Asked("crop", {}, []))
    assert answer.code == "ok", answer.message
    outcomes = answer.values["outcomes"]
    assert [outcome.get("code", "ok") for outcome in outcomes] == ["ok", "decode_error", "ok", "decode_error", "ok"]
    assert all(outcome["error"] for outcome in outcomes if "code" in outcome)
    for index, pixels in ((0, PIXELS), (2, PIXELS[::-1]), (4, PIXELS)):
        assert outcomes[index].keys() == {"outputs"}
        found = doors._from_json_array(outcomes[index]["outputs"]["result"])
        assert doors.same(found, pixels[:1, :2])


def test_items_with_wrong_inputs_fail_alone(house: House) -> None:
    good = {"data": TEXT}
    items = [good, {"data": "a.jpg"}, {"dat": TEXT}, 3, {"data": TEXT, "x": {"y": 1}}, {}, good]
    status, answer = ask(house.server.port, {"inputs": items, "node_name": "decoder"}, Content_Type="application/json")
    assert status == 200
    codes = [outcome.get("code", "ok") for outcome in answer["outcomes"]]
    assert codes == ["ok", *["invalid_request"] * 5, "ok"]


def test_list_of_one_is_a_batch_and_of_none_has_no_outcome(house: House) -> None:
    for inputs in ([], [{"data": TEXT}]):
        body = {"inputs": inputs, "node_name": "decoder"}
        status, answer = ask(house.server.port, body, Content_Type="application/json")
        assert (status, len(answer["outcomes"])) == (200, len(inputs))


def test_outcomes_beyond_the_size_of_an_answer_are_too_large(house: House) -> None:
    large = {"data": text_of(png(np.zeros((100, 80, 3), "u1")))}
    body = {"inputs": [large, large], "node_name": "decoder"}
    status, answer = ask(house.server.port, body, Content_Type="application/json")
    assert status == 200
    assert sorted(outcome.get("code", "ok") for outcome in answer["outcomes"]) == ["ok", "too_large"]
    assert any("send fewer items in a call" in outcome.get("error", "") for outcome in answer["outcomes"])


def test_texts_of_all_items_are_bounded_together() -> None:
    with serving("Identity", max_text_bytes=100) as server:
        status, answer = ask(server.port, {"inputs": [{"data": "a" * 60}] * 2}, Content_Type="application/json")
    assert (status, answer["code"]) == (413, "too_large")
    assert "text of 120 characters or more" in answer["error"]


# -- images as results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["decoder", "rgb"])
@pytest.mark.parametrize("way", [doors.over_http, doors.over_ray])
def test_image_is_answered_as_file_where_accepted(house: House, way: Any, root: str) -> None:
    kind = {"content-type": "application/json", "accept": "image/png"}
    body = json.dumps({"inputs": {"data": TEXT}, "node_name": root}).encode()
    read = lambda body, fields: {"file": body}  # noqa: E731
    answer = way(lambda asked: doors.Http("/infer", body, kind, read))(house, doors.Asked(root, {}, []))
    found = cv2.imdecode(np.frombuffer(answer.values["file"], "u1"), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(found, PIXELS)


def test_content_type_is_that_of_the_file(decoder: LocalServer) -> None:
    for kind, start in (("image/png", b"\x89PNG"), ("image/jpeg", b"\xff\xd8\xff")):
        answer = fetch(decoder.port, "/infer", "POST", png(PIXELS), Accept=f"{kind}, application/json;q=0.1")
        assert (answer.status, answer.fields["content-type"]) == (200, kind)
        assert answer.body.startswith(start)


def test_other_results_are_json_or_not_acceptable(decoder: LocalServer) -> None:
    path = "/infer?outputs=color"
    assert ask(decoder.port, png(PIXELS), path, Accept="image/png, */*") == (200, {"color": "bgr"})
    status, answer = ask(decoder.port, png(PIXELS), path, Accept="image/png")
    assert (status, answer["code"]) == (406, "not_acceptable")
    assert "the result is not one image, H x W x 3 or H x W of uint8" in answer["error"]
    status, answer = ask(decoder.port, png(PIXELS), "/infer?outputs=result,color", Accept="image/png")
    assert (status, answer["code"]) == (406, "not_acceptable")
    body, kind = form_of([png(PIXELS)] * 2)
    status, answer = ask(decoder.port, body, Accept="image/png", Content_Type=kind)
    assert (status, answer["code"]) == (406, "not_acceptable")


@pytest.mark.parametrize("way", [doors.over_http, doors.over_ray])
def test_images_of_other_types_are_refused(house: House, way: Any) -> None:
    def asked(accept: str) -> doors.Answer:
        fields = {"content-type": "application/json", "accept": accept}
        body = json.dumps({"inputs": {"data": TEXT}, "node_name": "decoder"}).encode()
        form = doors.Http("/infer", body, fields, lambda body, told: {"is_json": body[:1] == b"{"})
        answer: doors.Answer = way(lambda asked: form)(house, doors.Asked("decoder", {}, []))
        return answer

    refused = asked("image/webp")
    assert refused.code == "not_acceptable"
    assert "image/png" in refused.message
    assert "image/jpeg" in refused.message
    assert asked("image/webp, */*;q=0.1").values == {"is_json": True}
    assert asked("image/webp, image/*;q=0.1").values == {"is_json": False}


def test_errors_are_json_whatever_is_accepted(decoder: LocalServer) -> None:
    status, answer = ask(decoder.port, b"no image", Accept="image/png")
    assert (status, answer["code"]) == (400, "decode_error")


def as_file(pixels: np.ndarray, root: str, accept: str) -> doors.Http:
    fields = {"content-type": "application/json", "accept": accept}
    body = json.dumps({"inputs": {"data": text_of(png(pixels))}, "node_name": root}).encode()
    return doors.Http("/infer", body, fields, lambda body, told: {"file": body})


@pytest.mark.parametrize("way", [doors.over_http, doors.over_ray])
def test_others_are_answered_while_an_image_is_encoded(house: House, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, encode = threading.Event(), threading.Event(), Picture.encode

    def encode_slowly(picture: Picture, most: Bound) -> bytes:
        begun.set()
        assert may_end.wait(WAIT)
        return encode(picture, most)

    monkeypatch.setattr(Picture, "encode", encode_slowly)
    large = np.zeros((200, 200, 3), "u1")
    asked = doors.Asked("decoder", {}, [])
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(way(lambda asked: as_file(large, "decoder", "image/png")), house, asked)
        try:
            assert begun.wait(WAIT)
            assert asking(house, "infer", TEXT).code == "ok", "the same node, whose one instance has delivered"
        finally:
            may_end.set()
        assert answer.result(WAIT).values["file"].startswith(b"\x89PNG")


@pytest.mark.parametrize("accept", ["image/png", "image/jpeg"])
@pytest.mark.parametrize("way", [doors.over_http, doors.over_ray])
def test_pixels_whose_file_cannot_fit_are_not_encoded(
    tight: House, way: Any, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Picture, "encode")
    form = as_file(np.zeros((2000, 2200, 3), "u1"), "decoder", accept)
    answer = way(lambda asked: form)(tight, doors.Asked("decoder", {}, []))
    assert answer.code == "too_large"
    assert "ask for image/jpeg, or for a smaller image" in answer.message


@pytest.fixture(scope="module")
def tight() -> Iterator[House]:
    """The same with small answers."""
    with doors.house(NODES, max_reply_bytes=8192) as house:
        yield house


def test_too_large_file_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), "u1")
    with serving("DecodeMat", max_reply_bytes=4096) as server:
        status, answer = ask(server.port, png(noise), Accept="image/png")
    assert (status, answer["code"]) == (413, "too_large")

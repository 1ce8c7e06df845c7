"""Clips as cameras and phones write them: turned, mirrored, of odd sizes, with strange clocks and tags."""

from __future__ import annotations

import json
import random
import struct
import threading
from contextlib import closing, suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from kit.videos import FPS, TURNS, picture, turn_clip, web_server, write_clip, write_video

from torchpipe_py import cli
from torchpipe_py.plan.config import Place
from torchpipe_py.streams.config import read_stream
from torchpipe_py.streams.orientation import AS_STORED, Turn, turn_of_mp4
from torchpipe_py.streams.source import Picture, SourceError, read_pictures
from torchpipe_py.streams.unset import FILLS

av = pytest.importorskip("av")
cv2 = pytest.importorskip("cv2")

DECODERS = ["pyav", "opencv", "pynvvideocodec"]
"""Without a GPU, the last one decodes on the CPU, and gives RGB Tensors."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def pictures(source: object, **keys: object) -> list[Picture]:
    options = read_stream("a", {"source": str(source), "keep": "all", **keys}, Place("streams"))
    with closing(read_pictures(options, threading.Event())) as read:
        return list(read)


def mat(picture: Picture) -> np.ndarray:
    """The image of a picture, H×W×3 BGR."""
    image = picture.to_image()
    return image if picture.color == "bgr" else image[0].permute(1, 2, 0).numpy()[..., ::-1]


def stored(path: object) -> np.ndarray:
    """The first frame as OpenCV converts it, not turned."""
    capture = cv2.VideoCapture(str(path))
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
    is_read, image = capture.read()
    capture.release()
    assert is_read
    return image


CONVERTS_ALIKE = int(av.__version__.partition(".")[0]) >= 17 and int(cv2.__version__.partition(".")[0]) >= 5
"""Whether both hand FFmpeg the frame with its colour matrix and place of chroma; the older ones leave these out."""

SIZES = [(64, 48), (63, 48), (64, 47), (85, 49)]
LOSSLESS = ["yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "yuv444p10le", "gray", "gray10le", "bgr0"]
CLIPS = [
    *product(["ffv1"], LOSSLESS, SIZES, [{}]),
    *product(
        ["libx264"], ["yuv420p", "yuv420p10le"], [(64, 48), (66, 50)], [{}, {"colorspace": 1}, {"color_range": 2}]
    ),
    *product(["mpeg4"], ["yuv420p"], SIZES, [{}]),
]


@pytest.mark.parametrize(
    ("codec", "pixels", "size", "attributes"), CLIPS, ids=lambda value: str(value).replace(" ", "") or "{}"
)
def test_every_decoder_gives_same_upright_pixels(tmp_path, codec, pixels, size, attributes):
    if "10" in pixels and not CONVERTS_ALIKE:
        pytest.skip("OpenCV 4 leaves pixels at the edges undefined")
    path = write_clip(tmp_path / "a.mp4", picture(*size), codec, pixels, 2, **attributes)
    unturned = {decoder: mat(pictures(path, decoder=decoder)[0]) for decoder in DECODERS}
    for image in unturned.values():
        assert np.array_equal(image, stored(path)) or not CONVERTS_ALIKE
    for name, (matrix, upright) in TURNS.items():
        turn_clip(path, matrix)
        for decoder in DECODERS:
            found = pictures(path, decoder=decoder)
            assert len(found) == 2
            assert np.array_equal(mat(found[0]), upright(unturned[decoder])), (name, decoder)


@pytest.mark.parametrize("decoder", DECODERS)
def test_matrix_of_movie_turns_after_that_of_track(tmp_path, decoder):
    path = write_clip(tmp_path / "a.mp4", picture(64, 48))
    unturned = stored(path)
    for (track, by_track), (movie, by_movie) in product(TURNS.values(), TURNS.values()):
        turn_clip(path, track)
        turn_clip(path, movie, b"mvhd")
        assert np.array_equal(mat(pictures(path, decoder=decoder)[0]), by_movie(by_track(unturned))), (track, movie)


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
@pytest.mark.parametrize("name", ["as stored", "90 clockwise", "180", "90 counterclockwise"])
def test_clip_over_http_is_upright_and_has_its_own_clock(tmp_path, decoder, name):
    matrix, upright = TURNS[name]
    path = turn_clip(write_clip(tmp_path / "a.mp4", picture(64, 48), frames=5), matrix)
    data = path.read_bytes()

    def respond(handler, number):
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        handler.wfile.write(data[start:])

    with web_server(respond) as port:
        found = pictures(f"http://127.0.0.1:{port}/a.mp4", decoder=decoder)
    assert [each.pts for each in found] == pytest.approx([number / FPS for number in range(5)])
    assert np.array_equal(mat(found[0]), upright(stored(write_clip(tmp_path / "b.mp4", picture(64, 48)))))


INTERLACED = {"libx264": {"x264-params": "interlaced=1"}, "mpeg2video": {"flags": "+ildct+ilme"}}


@pytest.mark.parametrize("codec", INTERLACED)
def test_interlaced_frames_are_read_or_refused(tmp_path, codec):
    """OpenCV would give what was in memory before."""
    path = write_clip(tmp_path / "a.mkv", picture(64, 48), codec, frames=3, options=INTERLACED[codec])
    assert np.abs(mat(pictures(path, decoder="pyav")[0]).astype(int) - picture(64, 48)).mean() < 8
    try:
        image, refusal = mat(pictures(path, decoder="opencv")[0]), ""
    except SourceError as error:
        image, refusal = picture(64, 48), str(error)
    assert not refusal or "is it interlaced?" in refusal
    assert np.abs(image.astype(int) - picture(64, 48)).mean() < 8


@pytest.mark.parametrize("gray", FILLS)
def test_frames_of_the_gray_that_marks_unset_ones_are_read(tmp_path, gray):
    path = write_clip(tmp_path / "a.mkv", np.full((48, 64, 3), gray, np.uint8), "ffv1", "bgr0", frames=3)
    found = pictures(path, decoder="opencv")
    assert [each.pts for each in found] == pytest.approx([number / FPS for number in range(3)], abs=1e-3)
    assert all((mat(each) == gray).all() for each in found)


def test_frames_before_a_lost_connection_are_all_given(tmp_path):
    """Also those that the decoder held back to sort them."""
    path = write_clip(tmp_path / "a.ts", picture(64, 48), "libx264", frames=20, options={"bf": "3", "tune": "film"})
    data = path.read_bytes()

    def respond(handler, number):
        handler.send_response(200)
        handler.send_header("Content-Length", str(2 * len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    found = 0
    with web_server(respond) as port:
        options = read_stream("a", {"source": f"http://127.0.0.1:{port}/a.ts", "decoder": "pyav"}, Place("streams"))
        with closing(read_pictures(options, threading.Event())) as read, suppress(SourceError):
            for _ in read:
                found += 1
    assert found == 20


def test_empty_parts_of_a_camera_are_passed_over(tmp_path):
    jpeg = cv2.imencode(".jpg", picture(64, 48))[1].tobytes()
    content = b""
    for part in (jpeg, b"", jpeg, b"", b"", jpeg, jpeg):
        content += f"--b\r\nContent-Type: image/jpeg\r\nContent-Length: {len(part)}\r\n\r\n".encode() + part + b"\r\n"
    (tmp_path / "camera").write_bytes(content)
    found = 0
    options = read_stream("a", {"source": str(tmp_path / "camera"), "decoder": "pyav"}, Place("streams"))
    with closing(read_pictures(options, threading.Event())) as read, suppress(SourceError):
        for _ in read:
            found += 1
    assert found == 4


def test_ignores_matrices_that_are_no_quarter_turn():
    one = 1 << 16
    assert Turn.of_matrix((one // 2, 0, 0, 0, 3 * one, 0, 0, 0, 1 << 30)) == AS_STORED, "a scaled one"
    assert Turn.of_matrix((46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)) == AS_STORED, "by 45 degrees"
    assert Turn.of_matrix((0,) * 9) == AS_STORED
    assert Turn.of_matrix((3, one, 0, -one, -2, 0, 0, 0, 1 << 30)) == Turn.of_degrees(90), "a rounded one"
    assert [Turn.of_degrees(degrees) for degrees in (0, 45, 360, -90)] == [AS_STORED] * 3 + [Turn.of_degrees(270)]


def test_damaged_headers_of_mp4_have_no_turn_or_another(tmp_path):
    """As FFmpeg, it believes a matrix; it never fails, and ends."""
    path = turn_clip(write_clip(tmp_path / "a.mp4", picture(64, 48)), (0, 1, -1, 0))
    whole, rng = path.read_bytes(), random.Random(0)
    start = whole.index(b"moov") - 4
    for number in range(300):
        data = bytearray(whole if number % 2 else whole[: rng.randrange(start + 1, len(whole))])
        for _ in range(rng.randrange(6)):
            data[rng.randrange(start, len(data))] = rng.choice([0, 1, 8, 255, rng.randrange(256)])
        path.write_bytes(data)
        assert turn_of_mp4(str(path)) is None or isinstance(turn_of_mp4(str(path)), Turn)
    assert turn_of_mp4(str(tmp_path)) is turn_of_mp4(str(tmp_path / "gone.mp4")) is None


def box(kind: bytes, *content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + sum(map(len, content)), kind) + b"".join(content)


def header(kind: bytes, name: str, version: int = 0) -> bytes:
    """The header of a movie or track, with the matrix of this turn."""
    places = {b"tkhd": (40, 52), b"mvhd": (36, 48)}[kind]
    a, b, c, d = (value << 16 for value in TURNS[name][0])
    before = bytes([version]) + bytes(places[version] - 1)
    return box(kind, before, struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30), bytes(8))


def track(name: str, handler: bytes = b"vide", version: int = 0) -> bytes:
    return box(b"trak", header(b"tkhd", name, version), box(b"mdia", box(b"hdlr", bytes(8), handler, bytes(12))))


AS_IS, TURNED = "as stored", "90 clockwise"


@pytest.mark.parametrize(
    ("boxes", "degrees"),
    [
        ([header(b"mvhd", AS_IS), track(TURNED)], 90),
        ([header(b"mvhd", AS_IS, 1), track(TURNED, version=1)], 90),
        ([header(b"mvhd", TURNED, 1), track(AS_IS)], 90),
        ([track(TURNED), header(b"mvhd", TURNED)], 180),
        ([track("180", b"soun"), track(TURNED), track("180")], 90),
        ([track(TURNED)], 90),
        ([header(b"mvhd", TURNED)], None),
        ([track(TURNED, b"soun")], None),
        ([box(b"trak", header(b"tkhd", TURNED))], None),
        ([], None),
        ([b"\0\0\0\1free" + bytes(8), track(TURNED)], None),
        ([b"\0\0\0\4free", track(TURNED)], None),
    ],
)
def test_reads_the_turn_of_the_first_video_track(tmp_path, boxes, degrees):
    path = tmp_path / "a.mp4"
    path.write_bytes(box(b"ftyp", b"isom") + box(b"moov", *boxes))
    assert turn_of_mp4(str(path)) == (None if degrees is None else Turn.of_degrees(degrees))


def test_gives_up_on_a_file_of_too_many_boxes(tmp_path):
    path = tmp_path / "a.mp4"
    for count, turn in ((9_000, Turn.of_degrees(90)), (20_000, None)):
        path.write_bytes(count * box(b"free") + box(b"moov", track(TURNED)))
        assert turn_of_mp4(str(path)) == turn


def test_reads_headers_of_large_files_and_of_later_tracks(tmp_path):
    path = turn_clip(write_clip(tmp_path / "a.mp4", picture(64, 48)), (0, 1, -1, 0))
    whole = path.read_bytes()
    start = whole.index(b"moov") - 4
    large = b"\0\0\0\1mdat" + (16).to_bytes(8, "big") + whole[start:]
    path.write_bytes(large)
    assert turn_of_mp4(str(path)) == Turn.of_degrees(90)
    path.write_bytes(large.replace(b"vide", b"soun", 1))
    assert turn_of_mp4(str(path)) is None
    path.write_bytes(b"\0\0\0\0" + whole[start + 4 :])
    assert turn_of_mp4(str(path)) == Turn.of_degrees(90), "up to the end of the file"


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
@pytest.mark.parametrize(("format_", "codec"), [("h264", "libx264"), ("m4v", "mpeg4"), ("mjpeg", "mjpeg")])
def test_frames_without_time_stamps_have_those_of_nominal_rate(tmp_path, decoder, format_, codec):
    path = tmp_path / f"a.{format_}"
    write_clip(path, picture(64, 48), codec, "yuvj420p" if codec == "mjpeg" else "yuv420p", 10)
    assert [each.pts for each in pictures(path, decoder=decoder)] == pytest.approx([n / FPS for n in range(10)])


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_time_counts_from_the_start_of_the_stream(tmp_path, decoder, name):
    path = write_video(tmp_path / name, [(0, 100 * FPS + number**2) for number in range(5)])
    assert [each.pts for each in pictures(path, decoder=decoder)] == pytest.approx(
        [number**2 / FPS for number in range(5)], abs=0.001
    )


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_live_source_has_no_clock_of_its_own(decoder):
    """An MJPEG camera, whose time stamps FFmpeg invents."""
    jpeg = cv2.imencode(".jpg", picture(64, 48))[1].tobytes()
    part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(jpeg), jpeg)

    def respond(handler, number):
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        handler.end_headers()
        handler.wfile.write(10 * part + b"--frame--\r\n")

    with web_server(respond) as port:
        options = read_stream("a", {"source": f"http://127.0.0.1:{port}/live", "decoder": decoder}, Place("streams"))
        with closing(read_pictures(options, threading.Event())) as read:
            assert [next(read).pts for _ in range(8)] == [None] * 8


@pytest.mark.parametrize("decoder", ["pyav", "opencv"])
def test_tags_in_another_encoding_stop_no_file(tmp_path, decoder):
    for suffix in ("mp4", "mkv", "avi"):
        path = tmp_path / f"a.{suffix}"
        with av.open(str(path), "w") as container:
            container.metadata["title"] = "TITLE"
            stream = container.add_stream("mpeg4", rate=FPS)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(64, 48), format="bgr24")))
            container.mux(stream.encode())
        data = path.read_bytes()
        assert b"TITLE" in data
        path.write_bytes(data.replace(b"TITLE", "Zoë".encode("latin-1") + b"\xff\xfe"))
        assert len(pictures(path, decoder=decoder)) == 1, suffix


@pytest.mark.slow
def test_run_gives_upright_frames(tmp_path):
    clips, out = tmp_path / "clips", tmp_path / "out.ndjson"
    clips.mkdir()
    for name, (matrix, _) in TURNS.items():
        turn_clip(write_clip(clips / f"{name}.mp4", picture(64, 48), frames=2), matrix)
    (tmp_path / "resize.toml").write_text('backend = "ResizeMat"\nresize_h = 2\nresize_w = 2\n')
    assert cli.main(["run", str(tmp_path / "resize.toml"), str(clips / "*.mp4"), "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * len(TURNS)
    for line in lines:
        name = Path(line["path"]).stem
        expected = cv2.resize(TURNS[name][1](picture(64, 48)), (2, 2))
        assert line["result"]["shape"] == [2, 2, 3]
        assert np.abs(np.reshape(line["result"]["data"], (2, 2, 3)) - expected.astype(int)).max() < 16, name

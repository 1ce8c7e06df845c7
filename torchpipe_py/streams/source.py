"""Frames out of files, network streams and devices, by PyAV, OpenCV, or PyAV and a GPU; images of a folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.image.decode import FORMATS, MatDecoder
from torchpipe_py.backends.image.files import iter_images
from torchpipe_py.errors import BackendUnavailable, first_line, logger, nearest
from torchpipe_py.files import iter_matches, read_bytes
from torchpipe_py.streams.config import StreamOptions
from torchpipe_py.streams.nvdec import GpuFrames, UndecodableError, to_tensor
from torchpipe_py.streams.orientation import AS_STORED, Turn, turn_of_frame, turn_of_mp4
from torchpipe_py.streams.unset import FILLS, retrieve_first

MOST_BROKEN = 100
"""Packets in a row that cannot be decoded, after which a stream is given up."""

MOST_PIXELS = 2**25
"""Maximum pixels of a frame, a little more than 8K; several frames wait at once."""

MOST_SECONDS = 1e9
"""Maximum time stamp of a frame that is believed."""

USUAL_RATE = 25.0
"""Frames per second of a stream that has neither time stamps nor a rate, as FFmpeg assumes."""


class SourceError(Exception):
    """A stream that cannot be opened or read; its message may hold a password."""


class _UnsetError(SourceError):
    """OpenCV's first frame shows what its memory was filled with."""


class Picture(NamedTuple):
    """A decoded frame, still in the decoder's format: ``pts`` in seconds since the start of the stream.

    ``pts`` is ``None`` for a live source, whose time stamps FFmpeg may invent: its frames count by arrival.
    """

    pts: float | None
    to_image: Callable[[], Any]
    """H×W×3 ``uint8`` BGR, upright; or, for ``decoder = "pynvvideocodec"``, a Tensor 1×3×H×W ``uint8`` RGB."""
    color: str = "bgr"
    path: str = ""
    """Of a file that is an image of its own."""


class _Clock:
    """Seconds since a stream's start for each frame, by its time stamp or else by the nominal rate."""

    def __init__(self, start: float, rate: float) -> None:
        self._start, self._next = start, 0.0
        self._step = 1 / (rate if 0 < rate <= 1000 else USUAL_RATE)

    def seconds(self, stamp: float | None) -> float:
        """The time of the next frame; ``stamp`` is in seconds."""
        pts = self._next if stamp is None else stamp - self._start
        self._next = pts + self._step
        return pts


class _Decoded(NamedTuple):
    """A frame as a decoder gives it: not turned yet, with its time stamp in seconds."""

    stamp: float | None
    to_image: Callable[[], Any]
    color: str = "bgr"
    turn: Turn = AS_STORED

    def to_picture(self, clock: _Clock | None) -> Picture:
        """The upright picture; ``clock`` is ``None`` for a live source."""
        pts = None if clock is None else clock.seconds(self.stamp)
        to_image = self.to_image if self.turn == AS_STORED else lambda: self.turn.apply(self.to_image())
        return Picture(pts, to_image, self.color)


def read_pictures(options: StreamOptions, stop: threading.Event) -> Iterator[Picture]:
    """Every frame, as fast as they can be read, until it ends or ``stop`` is set; ``SourceError`` if it cannot be read.

    ``BackendUnavailable`` if PyAV is needed and missing.
    """
    if options.is_images:
        return _of_images(options.source, stop)
    if options.decoder != "opencv":
        try:
            import av
        except ImportError:
            if options.decoder != "auto":
                needs = f"decoder = {options.decoder!r} needs PyAV (pip install 'torchpipe_py[video]')"
                raise BackendUnavailable(needs) from None
        else:
            return _by_pyav(av, options, stop)
    return _by_opencv(options, stop)


def _of_images(source: str, stop: threading.Event) -> Iterator[Picture]:
    """The images of a folder, or the files that a pattern matches, in the order of their paths."""
    decode = MatDecoder("bgr", (*FORMATS, "tiff"), MOST_PIXELS)
    try:
        for path in iter_images(source) if os.path.isdir(source) else iter_matches(source):
            if stop.is_set():
                return
            yield Picture(None, partial(_decoded, decode, path), path=path)
    except OSError as error:
        raise SourceError(first_line(error)) from error


def _decoded(decode: MatDecoder, path: str) -> np.ndarray:
    mat: np.ndarray = decode(read_bytes(path))
    return mat


def _by_pyav(av: Any, options: StreamOptions, stop: threading.Event) -> Iterator[Picture]:
    settings: dict[str, Any] = {}
    if options.source.startswith("rtsp"):
        settings["options"] = {"rtsp_flags": "prefer_tcp"}
    if options.source.startswith("/dev/"):
        settings["format"] = "v4l2"
    if options.hwaccel:
        devices = av.codec.hwaccel.hwdevices_available()
        if options.hwaccel not in devices:  # PyAV would decode on the CPU without a word
            raise BackendUnavailable(
                f"hwaccel = {options.hwaccel!r}: not in this PyAV; {nearest(options.hwaccel, devices)}"
            )
        try:
            settings["hwaccel"] = av.codec.hwaccel.HWAccel(options.hwaccel, allow_software_fallback=True)
        except (ValueError, NotImplementedError) as error:
            raise BackendUnavailable(f"hwaccel = {options.hwaccel!r}: {first_line(error)}") from None
    try:
        # Tags in another encoding than UTF-8 are common in old files.
        container = av.open(options.source, timeout=options.timeout, metadata_errors="replace", **settings)
    except (av.FFmpegError, OSError, ValueError) as error:
        raise _source_error(av, options, error) from error
    with closing(container):
        if not container.streams.video:
            raise SourceError("no video in it")
        stream = container.streams.video[0]
        # Several threads read ahead, which makes a live frame old; several streams share the cores anyway.
        stream.thread_type = "NONE" if options.live else "AUTO"
        _check_size(stream.codec_context.width, stream.codec_context.height)
        stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}  # a frame may be larger than declared
        decode = _decoding(av, stream, options)
        clock = None
        if options.is_file or container.duration is not None:
            start = float(stream.start_time * stream.time_base) if stream.start_time is not None else 0.0
            clock = _Clock(start, float(stream.guessed_rate or 0))
        broken = 0
        # NOTE: ArgumentError is for a packet without content, as some cameras send among the JPEGs of MJPEG.
        undecodable = (av.error.InvalidDataError, av.error.EOFError, av.error.ArgumentError, UndecodableError)
        try:
            for packet in _packets(av, container, stream):
                if stop.is_set():
                    return
                try:
                    frames = decode(packet)
                except undecodable as error:
                    broken += 1
                    if broken > MOST_BROKEN:
                        raise SourceError(
                            f"{broken} packets in a row cannot be decoded: {first_line(error)}"
                        ) from error
                    continue
                if frames:
                    broken = 0
                for frame in frames:
                    yield frame.to_picture(clock)
        except (av.FFmpegError, OSError, ValueError) as error:
            raise _source_error(av, options, error) from error


def _packets(av: Any, container: Any, stream: Any) -> Iterator[Any]:
    """The packets of a stream, and an empty one, at which a decoder gives all that it holds: before an error too."""
    try:
        yield from container.demux(stream)
    except (av.FFmpegError, OSError):
        last = av.Packet()
        last.stream = stream
        yield last
        raise


def _decoding(av: Any, stream: Any, options: StreamOptions) -> Callable[[Any], list[_Decoded]]:
    """The function that decodes a packet."""
    is_for_gpu = options.decoder == "pynvvideocodec"
    if is_for_gpu:
        try:
            gpu = GpuFrames(av, stream, options.device_id, options.live)
            return lambda packet: [_on_gpu(*each) for each in gpu.decode(packet)]
        except BackendUnavailable as error:
            logger.warning("stream %r: decoded on the CPU: %s", options.name, error)
    # One for all frames: to make one costs more than to convert a small frame.
    # NOTE: BGR and bicubic, as OpenCV does it: otherwise frames of odd sizes and 10 bits have other pixels.
    settings: dict[str, Any] = {"format": "bgr24", "interpolation": "BICUBIC"}
    if int(av.__version__.partition(".")[0]) >= 17:  # before, there was one thread always
        settings["threads"] = 1
    reformat = partial(av.video.reformatter.VideoReformatter().reformat, **settings)

    def to_image(frame: Any) -> Any:
        mat = reformat(frame).to_ndarray()
        return to_tensor(mat, options.device_id) if is_for_gpu else mat

    def decode(packet: Any) -> list[_Decoded]:
        frames = packet.decode()
        for frame in frames:
            _check_size(frame.width, frame.height)
        color = "rgb" if is_for_gpu else "bgr"
        return [_Decoded(frame.time, partial(to_image, frame), color, turn_of_frame(frame)) for frame in frames]

    return decode


def _on_gpu(stamp: float | None, image: Any, turn: Turn) -> _Decoded:
    _check_size(image.shape[3], image.shape[2])
    return _Decoded(stamp, lambda: image, "rgb", turn)


def _source_error(av: Any, options: StreamOptions, error: Exception) -> SourceError:
    if isinstance(error, av.error.ExitError):  # FFmpeg was interrupted by the time limit
        return SourceError(f"no data for {options.timeout:g} s")
    return SourceError(first_line(error))


def _by_opencv(options: StreamOptions, stop: threading.Event) -> Iterator[Picture]:
    for fill in FILLS:
        try:
            yield from _captured(options, stop, fill)
            return
        except _UnsetError:
            # The frame may be of this gray. NOTE: a capture allocates its image once, so the source is opened again.
            if fill == FILLS[-1]:
                raise


def _captured(options: StreamOptions, stop: threading.Event, fill: int) -> Iterator[Picture]:
    """Frames by OpenCV; ``_UnsetError`` if the first one is all ``fill``."""
    import cv2

    milliseconds = round(1000 * options.timeout)
    limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
    backend = cv2.CAP_V4L2 if options.source.startswith("/dev/") else cv2.CAP_FFMPEG
    capture = cv2.VideoCapture(options.source, backend, limits if backend == cv2.CAP_FFMPEG else [])
    try:
        if not capture.isOpened():
            raise SourceError("cannot be opened by OpenCV")
        _check_size(int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT)))
        turn = AS_STORED
        if backend == cv2.CAP_FFMPEG:
            capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
            # OpenCV has the angle only: a mirrored clip would be turned by a wrong one.
            known = turn_of_mp4(options.source) if options.is_file else None
            turn = Turn.of_degrees(capture.get(cv2.CAP_PROP_ORIENTATION_META)) if known is None else known
        clock = None
        if options.is_file or capture.get(cv2.CAP_PROP_FRAME_COUNT) > 0:
            clock = _Clock(0.0, capture.get(cv2.CAP_PROP_FPS))  # it counts from the start
        is_first = True
        while not stop.is_set():
            if not capture.grab():
                return
            mat = retrieve_first(capture, fill) if is_first else capture.retrieve()[1]
            if mat is None:
                text = "OpenCV cannot convert its frames: is it interlaced? PyAV can: torchpipe_py[video]"
                raise _UnsetError(text) if is_first else SourceError(text)
            _check_size(mat.shape[1], mat.shape[0])
            stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            # OpenCV gives 0 for a frame without a time stamp, and OpenCV 4 a huge number where the start is unknown.
            is_known = abs(stamp) < MOST_SECONDS and (stamp != 0 or is_first)
            decoded = _Decoded(stamp if is_known else None, partial(np.asarray, mat), "bgr", turn)
            is_first = False
            yield decoded.to_picture(clock)
    finally:
        capture.release()


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise SourceError(f"frames of {width}x{height} pixels, more than {MOST_PIXELS}")

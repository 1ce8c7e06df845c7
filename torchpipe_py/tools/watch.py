"""``torchpipe watch``: run frames of streams through a configuration and write the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from threading import Timer
from time import monotonic
from typing import IO

from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.streams import Frame, Streams
from torchpipe_py.streams.boxes import draw_boxes
from torchpipe_py.tools.report import ToolError, aligned, check_outputs, printable

REPORT_SECONDS = 5.0


def run_watch(options: argparse.Namespace) -> int:
    """0 after the end of all streams or of the time, 1 if no frame had a result, 130 if interrupted."""
    check_outputs({"out": options.out}, [options.config, options.streams])
    show = _window() if options.show else None
    results = 0
    keep_freed_memory()
    with ExitStack() as stack:
        run = stack.enter_context(pipe(options.config))
        streams = stack.enter_context(Streams(run, options.streams))
        out = stack.enter_context(open(options.out, "wb")) if options.out else None  # once the start succeeded
        lines: IO[bytes] = out or sys.stdout.buffer
        began = seen_at = monotonic()
        if options.seconds:
            timer = Timer(options.seconds, streams.close)
            timer.start()
            stack.callback(timer.cancel)
        try:
            for frame in streams:
                results += frame.error is None
                lines.write(frame.to_line())
                lines.flush()
                if show is not None:
                    show(frame)
                now = monotonic()
                if out is not None and now - seen_at >= REPORT_SECONDS:
                    seen_at = now
                    print(summary(streams, now - began), file=sys.stderr)
            status = 0 if results else 1
        except KeyboardInterrupt:
            status = 130
        print(summary(streams, monotonic() - began), file=sys.stderr)
    return status


def summary(streams: Streams, seconds: float) -> str:
    """A table with a line for each stream; ``fps`` is results per second of the whole run."""
    columns = ("state", "decoded", "skipped", "results", "dropped", "stale", "errors", "reconnects")
    rows = []
    for name, counts in streams.stats().items():
        rate = counts["results"] / seconds if seconds else 0.0
        problem = printable(counts.get("last_error", ""))
        rows.append((name, f"{rate:.1f}", *[str(counts[key]) for key in columns], problem))
    return "\n".join(aligned(rows, ("stream", "fps", *columns, "last error")))


def _window() -> Callable[[Frame], None]:
    """A function that shows a frame in a window for its stream."""
    import cv2

    try:
        cv2.namedWindow("torchpipe watch")
        cv2.destroyAllWindows()
    except cv2.error:
        raise ToolError(
            "--show: this OpenCV cannot open windows, or there is no display; install opencv-python instead of "
            "opencv-python-headless"
        ) from None

    def show(frame: Frame) -> None:
        if frame.image is not None:
            cv2.imshow(frame.stream, draw_boxes(frame.image, frame.result))
            cv2.waitKey(1)

    return show

"""Imports for decoding workers, done once in the process that they are forked from; saves seconds per worker."""

from contextlib import suppress

with suppress(Exception):  # a worker that needs it reports the error
    import torchpipe_py.training.workers.reader  # noqa: F401
with suppress(Exception):
    import cv2  # noqa: F401
with suppress(Exception):
    import torchvision.io  # noqa: F401

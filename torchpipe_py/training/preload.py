"""What workers that decode need, imported once in the process that they are forked from: it saves each some seconds."""

from contextlib import suppress

with suppress(Exception):  # a worker that needs it says what is wrong with it
    import torchpipe_py.training.workers  # noqa: F401
with suppress(Exception):
    import cv2  # noqa: F401
with suppress(Exception):
    import torchvision.io  # noqa: F401

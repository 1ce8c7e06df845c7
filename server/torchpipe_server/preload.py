"""Imported once, by the process that the workers are forked from: they share its memory and start at once.

Nothing here may start a thread or touch a GPU.
"""

import contextlib
import gc
import signal

with contextlib.suppress(ImportError):
    import onnxruntime  # noqa: F401
import cv2  # noqa: F401
import torch  # noqa: F401

import torchpipe_py  # noqa: F401
import torchpipe_server.handler
import torchpipe_server.idl
import torchpipe_server.server
import torchpipe_server.worker  # noqa: F401

# A service manager signals every process of the group; this one ends with the supervisor.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
gc.freeze()

"""Imported by the fork server, so that workers share its memory and start quickly.

Nothing here may start a thread or touch a GPU.
"""

import atexit
import contextlib
import gc
import os
import shutil
import signal

# A service manager signals the whole process group; this process ends with the supervisor.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)

supervisor, folder = os.getppid(), os.environ.pop("TORCHPIPE_FORK_FOLDER", "")


def remove_folder() -> None:
    """Remove the folder of the socket if the supervisor was killed and could not."""
    if os.getppid() != supervisor:
        shutil.rmtree(folder, ignore_errors=True)


if folder:
    atexit.register(remove_folder)

gc.disable()  # saves a fifth of the time of the imports, which leave hardly any garbage

# It was meant for this process, not for programs that backends start.
if os.environ.get("PYTHONSAFEPATH") == "torchpipe-serve":
    del os.environ["PYTHONSAFEPATH"]

# From 1.29 on, ONNX Runtime would start a thread that reports to its maker which models it loads.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
with contextlib.suppress(ImportError):
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
import cv2  # noqa: E402, F401
import torch  # noqa: E402, F401

import torchpipe_server.front.server  # noqa: E402
import torchpipe_server.methods.thrift  # noqa: E402
import torchpipe_server.worker.worker  # noqa: E402, F401
from torchpipe_py import Registry  # noqa: E402
from torchpipe_py.serving import Inference, load_idl  # noqa: E402, F401

with contextlib.suppress(ImportError):
    import uvloop  # noqa: F401

# Nearly every worker needs these, and importing them takes longer than building them.
for name in ("DecodeMat", "Mat2Tensor", "OnnxTensor"):
    with contextlib.suppress(ImportError):
        Registry().find_backend(name)
with contextlib.suppress(ImportError):
    load_idl()

gc.freeze()
gc.enable()

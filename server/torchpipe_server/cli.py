"""``torchpipe-serve CONFIG``: build the pipe, listen, serve until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchpipe_server.options import Options, parse_options

if TYPE_CHECKING:
    from torchpipe_py import pipe

logger = logging.getLogger("torchpipe_server")

LISTEN_BACKLOG = 1024
SWITCH_SECONDS = 0.0005
CLOSE_SECONDS = 2.0  # for a backend to return once every request is answered or given up


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a stop by signal, 1 where the service could not start or lost a request; wrong arguments exit with 2."""
    # Until there is a server to stop, a signal ends the process at once: nothing was accepted yet.
    _on_stop_signal(lambda *_: os._exit(0))
    options = parse_options(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # NOTE: imported only now, under the signal handler: it takes seconds.
    from torchpipe_py import TorchpipeError

    if find_spec("thriftpy2") is None:
        print("torchpipe-serve: thriftpy2 is not installed (pip install 'torchpipe_py[server]')", file=sys.stderr)
        return 1

    try:
        listener = socket.create_server((options.host, options.port), backlog=LISTEN_BACKLOG)
    except OSError as error:
        print(f"torchpipe-serve: cannot listen on {options.host}:{options.port}: {error.strerror}", file=sys.stderr)
        return 1
    with listener:
        try:
            run = build_pipe(options)
        except TorchpipeError as error:
            print(f"torchpipe-serve: {error}", file=sys.stderr)
            return 1
        answered = serve(listener, run, options)
    if not run.close(CLOSE_SECONDS):
        logger.error("a backend does not return; leaving it behind")
        _leave(1)
    return 0 if answered else 1


def build_pipe(options: Options) -> pipe:
    """The pipe of the configuration file, its libraries told that the instances are the parallelism."""
    import cv2
    import torch

    from torchpipe_py import import_code, parse_toml, pipe

    for name in filter(None, (part.strip() for part in options.import_code.split(","))):
        import_code(name)
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    # A thread that comes back from OpenCV waits this long at most for the interpreter lock (default: 5 ms).
    sys.setswitchinterval(SWITCH_SECONDS)
    if not options.max_inflight:
        return pipe(options.config)
    config: dict[str, Any] = parse_toml(options.config)
    config["global"]["max_inflight"] = options.max_inflight
    return pipe(config)


def serve(listener: socket.socket, run: pipe, options: Options) -> bool:
    """Serve on the calling thread, the main one, until a signal; whether everything accepted was answered."""
    from torchpipe_server.handler import InferenceHandler
    from torchpipe_server.idl import load_idl
    from torchpipe_server.server import Server

    server = Server(listener, InferenceHandler(run, load_idl()), options)
    _on_stop_signal(lambda *_: server.stop())
    host, port = listener.getsockname()[:2]
    gc.freeze()  # what was loaded stays; the collector need not look at it again and again
    print(f"serving {options.config} on {host}:{port} (pid {os.getpid()})", flush=True)
    answered = server.serve()
    if answered:
        logger.info("stopped; every accepted request is answered")
    return answered


def _on_stop_signal(handler: Callable[..., object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _leave(status: int) -> None:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)

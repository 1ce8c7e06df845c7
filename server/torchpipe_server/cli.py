"""``torchpipe-serve CONFIG``: build the pipe, listen, serve until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py import TorchpipeError, parse_toml, pipe
from torchpipe_server.handler import InferenceHandler
from torchpipe_server.idl import load_idl
from torchpipe_server.options import Options, parse_options
from torchpipe_server.server import Server

logger = logging.getLogger("torchpipe_server")

LISTEN_BACKLOG = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a stop by signal, 1 where the service could not start; wrong arguments exit with 2."""
    options = parse_options(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Until there is a server to stop, a signal ends the process: nothing was accepted yet.
    _on_stop_signal(lambda *_: sys.exit(0))
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
        with run:
            serve(listener, run, options)
    return 0


def build_pipe(options: Options) -> pipe:
    """The pipe of the configuration file, its libraries told that the instances are the parallelism."""
    import cv2
    import torch

    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    config: dict[str, Any] = parse_toml(options.config)
    if not options.max_inflight:
        return pipe(options.config)
    config["global"]["max_inflight"] = options.max_inflight
    return pipe(config)


def serve(listener: socket.socket, run: pipe, options: Options) -> None:
    """Serve on the calling thread, which must be the main one, until a signal; then finish what was accepted."""
    server = Server(listener, InferenceHandler(run, load_idl()), options)
    _on_stop_signal(lambda *_: server.stop())
    host, port = listener.getsockname()[:2]
    print(f"serving {options.config} on {host}:{port} (pid {os.getpid()})", flush=True)
    server.serve()
    logger.info("stopped; every accepted request is answered")


def _on_stop_signal(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)

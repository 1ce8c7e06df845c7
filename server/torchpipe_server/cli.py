"""``torchpipe-serve CONFIG``: open the port, start the workers, serve until SIGTERM or SIGINT."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchpipe_py import ConfigError, TorchpipeError
from torchpipe_py.serving import NVIDIA, counted, to_strings
from torchpipe_server.front.hosts import is_loopback
from torchpipe_server.logs import set_up_logging
from torchpipe_server.logs.handler import FLUSH_SECONDS
from torchpipe_server.logs.stderr import open_standard_streams, print_line, take_over_stderr
from torchpipe_server.options import Options, parse_options
from torchpipe_server.supervisor.connection_limits import http_connections, most_connections

logger = logging.getLogger("torchpipe_server")


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a stop by signal, 1 if the service could not start or lost a request; wrong arguments exit with 2."""
    # Until the service starts, a signal ends the process at once: nothing was accepted yet.
    _on_signals(lambda *_: os._exit(0), signal.SIGTERM, signal.SIGINT)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nothing to reload yet
    open_standard_streams()
    options = parse_options(argv)
    set_up_logging(options)
    take_over_stderr()
    try:
        return _serve(options)
    except TorchpipeError as error:
        logging.shutdown()
        print_line(2, f"torchpipe-serve: {error}").join(FLUSH_SECONDS)
        return 1
    finally:
        # NOTE: at exit Python restores the default handlers, with which another SIGTERM would change the exit code.
        _on_signals(signal.SIG_IGN, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _serve(options: Options) -> int:
    _require_libraries(options)
    # NOTE: import these under the signal handler, because it takes a moment.
    import torchpipe_py
    from torchpipe_py.serving import load_idl, used_backends
    from torchpipe_server.supervisor.forker import look_at_working_directory, prepare_fork_server
    from torchpipe_server.supervisor.supervisor import Supervisor

    look_at_working_directory()
    # Allow as many open files as the system does: each connection is one.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if files == resource.RLIM_INFINITY:
        files = sys.maxsize
    read = partial(_read_folder if os.path.isdir(options.config) else _read_file, options)
    tables = read()
    libraries = ["tensorrt"] if tables and "TensorrtTensor" in used_backends(tables) else []
    options = _fit(replace(options, workers=options.workers or _usual_workers(options, tables, files)), files)
    if options.http_port > 0 and options.http_port == options.port:
        raise ConfigError(f"--http-port {options.http_port} is --port, too: monitoring needs its own port")
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(options.host, options.port, "--port"))
        options = replace(options, host=listener.getsockname()[0])  # --host may be a name
        http = None
        if options.http_port >= 0:
            http = stack.enter_context(_listen(options.http_host, options.http_port, "--http-port"))
            options = replace(options, http_port=http.getsockname()[1])
        if options.grpc_port >= 0:
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc would log what clients send
            # NOTE: only reserved here: each worker listens there itself.
            rpc = stack.enter_context(reserve(listener, options.grpc_port))
            options = replace(options, grpc_port=rpc.getsockname()[1])
        idl = None if options.handler else load_idl()
        supervisor = Supervisor(listener, options, tables, read, idl)
        if http is not None:
            from torchpipe_server.supervisor.monitoring.status import StatusServer

            images_port, most = listener.getsockname()[1], http_connections(files)
            supervisor.monitoring = StatusServer(supervisor.loop, http, supervisor, images_port, options, most)
        prepare_fork_server(libraries)
        _on_signals(lambda *_: supervisor.stop(), signal.SIGTERM, signal.SIGINT)
        _on_signals(lambda *_: supervisor.reload(), signal.SIGHUP)
        lines = _start_lines(options, listener, http)
        if options.grpc_port >= 0:
            lines.append(f"gRPC on {_address(rpc)}")

        def announce() -> None:
            gc.freeze()
            print_line(1, "\n".join(lines))

        if options.log_format == "json":  # for text, `announce` prints it
            workers = counted(options.workers, "worker")
            logger.info("torchpipe_py %s starts %s with %s", torchpipe_py.__version__, options.config, workers)
        if not supervisor.run(announce):
            return 1
        logger.info("stopped; every accepted request is answered")
        return 0


def _read_file(options: Options) -> Any:
    """The tables of a TOML file. ``ConfigError`` if it is wrong, or not what ``--require-certificate`` certifies.

    NOTE: a reload calls it in the supervisor, on a thread. Workers check the files that the tables name.
    """
    from torchpipe_py import parse_toml
    from torchpipe_py.serving import read_certified

    if not options.require_certificate:
        return parse_toml(options.config)
    code = [("--import", name) for name in to_strings(options.import_code)]
    if options.handler:
        code.append(("--handler", options.handler.partition(":")[0]))
    return read_certified(options.require_certificate, options.config, code)


def _read_folder(options: Options) -> Any:
    """The models of a folder. ``ConfigError`` if it has none to serve, or a wrong one with ``--exit-on-error``."""
    from torchpipe_py.serving import NO_MODEL, read_folder

    if options.require_certificate:
        raise ConfigError(f"--require-certificate: certifies one TOML file, and {options.config} is a folder")
    folder = read_folder(options.config)
    if folder.problems and (options.exit_on_error or not (folder or options.repository_control)):
        raise ConfigError("\n".join(folder.problems.values()))
    if not (folder or options.repository_control):
        raise ConfigError(f"{options.config}: {NO_MODEL}")
    for key, problem in folder.problems.items():
        logger.error("model %s is not served: %s", key, problem)
    return folder


def _require_libraries(options: Options) -> None:
    """Raise ``ConfigError`` if a library that the options need is missing."""
    for is_needed, flag, library, extra in (
        (True, "", "thriftpy2", "server"),
        (True, "", "httptools", "server"),
        (True, "", "multipart", "server"),
        (True, "", "msgspec", "server"),
        (options.http_port >= 0, "--http-port: ", "prometheus_client", "server"),
        (options.grpc_port >= 0, "--grpc-port: ", "grpc", "grpc"),
        (options.grpc_port >= 0, "--grpc-port: ", "google", "grpc"),  # NOTE: a package comes before its parts
        (options.grpc_port >= 0, "--grpc-port: ", "google.protobuf", "grpc"),
        (options.trace_ratio >= 0, "--trace-ratio: ", "opentelemetry", "otel"),
        (options.trace_ratio >= 0, "--trace-ratio: ", "opentelemetry.sdk", "otel"),
    ):
        if is_needed and find_spec(library) is None:
            name = {"otel": "opentelemetry-sdk", "grpc": "grpcio"}.get(extra, library)
            raise ConfigError(f"{flag}{name} is not installed (pip install 'torchpipe_py[{extra}]')")


def _start_lines(options: Options, listener: socket.socket, http: socket.socket | None) -> list[str]:
    """The lines that show where the service listens, and how to open it to others."""
    to_whom = " to this machine alone (--host 0.0.0.0 opens it)" if _is_local(listener) else ""
    lines = [f"serving {options.config}{to_whom} on {_address(listener)} (pid {os.getpid()})"]
    if http is not None:
        how = " (--http-host 0.0.0.0 opens it)" if _is_local(http) else ""
        lines.append(f"http://{_address(http)}/ is the status page{how}")
        if options.streams:
            lines.append(f"http://{_address(http)}/streams shows {options.streams}")
    return lines


def _is_local(listener: socket.socket) -> bool:
    return is_loopback(listener.getsockname()[0])


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int, flag: str) -> socket.socket:
    from torchpipe_server.supervisor.acceptor import listen

    try:
        return listen(host, port)
    except OSError as error:
        # Without the address, which Python's text may repeat.
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
        raise ConfigError(f"cannot listen on {host or repr(host)}:{port}: {reason}{_remedy(error, flag)}") from None


def _remedy(error: OSError, flag: str) -> str:
    """The remedy for an address that cannot be used; empty if it is unknown."""
    return {
        errno.EADDRINUSE: f"; another process has the port: choose another {flag}, or 0 for any free one",
        errno.EACCES: f"; ports below 1024 are for root: choose another {flag}",
    }.get(error.errno or 0, "")


def reserve(listener: socket.socket, port: int) -> socket.socket:
    """A socket bound to ``port`` at the listener's address, which only processes of this service may share."""
    family, address = listener.family, listener.getsockname()
    sock = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            )
        with socket.socket(family) as first:  # NOTE: without SO_REUSEPORT, this fails if another service has the port
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind((address[0], port, *address[2:]))
            port = first.getsockname()[1]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address[0], port, *address[2:]))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {address[0]}:{port} (--grpc-port): {os.strerror(error.errno or 0)}"
            f"{_remedy(error, '--grpc-port')}"
        ) from None
    return sock


def _fit(options: Options, files: int) -> Options:
    """Reduce the number of connections to what the descriptors allow."""
    most = most_connections(files, options.workers)
    if most >= options.max_connections:
        return options
    if not most:
        workers = counted(options.workers, "worker")
        raise ConfigError(f"only {files} files may be open (ulimit -n), too few for {workers}")
    logger.warning(
        "--max-connections is %d instead of %d: only %d files may be open (ulimit -n)",
        most, options.max_connections, files,
    )  # fmt: skip
    return replace(options, max_connections=most)


def _usual_workers(options: Options, tables: Any, files: int) -> int:
    """The default number of workers; a custom handler may keep state."""
    from torchpipe_py.serving import usable_cores, usual_workers

    workers = 1 if options.handler else usual_workers(tables, usable_cores(), NVIDIA.exists())
    while workers > 1 and most_connections(files, workers) < options.max_connections:
        workers -= 1  # keep the connections instead
    return workers


def _on_signals(handler: Callable[..., object] | signal.Handlers, *numbers: int) -> None:
    for number in numbers:
        signal.signal(number, handler)

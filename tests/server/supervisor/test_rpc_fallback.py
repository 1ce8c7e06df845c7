"""gRPC while no worker listens: the service is live and not ready, and says when to come again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.compressed import PIECES
from kit.contract import Asked, as_rpc
from kit.services import SteeredProcess, reserved_port
from kit.waits import WAIT, eventually

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
messages = pytest.importorskip("torchpipe_py.methods.rpc.messages")

OIP = "/inference.GRPCInferenceService"
HEALTH = {
    f"{OIP}/ServerLive": ("inference.ServerLiveResponse", {"live": True}),
    f"{OIP}/ServerReady": ("inference.ServerReadyResponse", {"ready": False}),
    f"{OIP}/ModelReady": ("inference.ModelReadyResponse", {"ready": False}),
    "/grpc.health.v1.Health/Check": ("grpc.health.v1.HealthCheckResponse", {"status": "NOT_SERVING"}),
}
OTHERS = ["ModelInfer", "ModelMetadata", "ServerMetadata", "ModelStatistics", "RepositoryIndex"]


def channel(port: int) -> Any:
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def ask(port: int, path: str, is_patient: bool = True) -> Any:
    """The bytes of the answer, or the error."""
    with channel(port) as on:
        try:
            return on.unary_unary(path)(b"", timeout=WAIT, wait_for_ready=is_patient)
        except grpc.RpcError as error:
            return error


def expect_fallback(port: int) -> None:
    for path, (kind, fields) in HEALTH.items():
        assert messages.message(kind).FromString(ask(port, path)) == messages.message(kind)(**fields), path
    for name in OTHERS:
        error = ask(port, f"{OIP}/{name}")
        assert error.code() is grpc.StatusCode.UNAVAILABLE, name
        trailing = dict(error.trailing_metadata())
        assert (trailing["error-code"], trailing["grpc-retry-pushback-ms"]) == ("unavailable", "500")
    long = as_rpc(Asked(PIECES)).SerializeToString()
    for data, coding in ((b"", None), (long, None), (long, grpc.Compression.Gzip)):
        with channel(port) as on:
            once = on.unary_unary(f"{OIP}/ModelInfer").future(data, timeout=WAIT, compression=coding)
            answers = on.stream_stream(f"{OIP}/ModelStreamInfer")(iter([data]), timeout=WAIT, compression=coding)
            for ask_again in (once.result, answers.__next__):
                with pytest.raises(grpc.RpcError) as raised:
                    ask_again()
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def is_ready(port: int) -> bool:
    answer = ask(port, f"{OIP}/ServerReady")
    return bool(messages.message("inference.ServerReadyResponse").FromString(answer).ready)


def has_become_ready(port: int) -> bool:
    """Whether a worker says that it is ready; a call fails, unrun, while its connection goes to another process."""
    try:
        return is_ready(port)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return False
        raise


def test_live_not_ready_and_unavailable_while_models_load(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with (
        reserved_port() as port,
        SteeredProcess(tmp_path, "--workers", "2", "--grpc-port", str(port)) as service,
        channel(port) as kept,
    ):
        service.wait_entered()
        expect_fallback(port)
        watch = kept.stream_stream("/grpc.health.v1.Health/Watch")(iter([b""]), timeout=WAIT)
        assert next(watch) == b"\x08\x02"  # NOT_SERVING
        service.open()
        service.wait_started()
        assert is_ready(port), "the first client of a service that is ready finds a worker"
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        live = kept.unary_unary(f"{OIP}/ServerReady")(b"", timeout=WAIT, wait_for_ready=True)
        assert messages.message("inference.ServerReadyResponse").FromString(live).ready, "on the same channel"


def test_live_not_ready_and_unavailable_while_the_only_worker_is_replaced(tmp_path: Path) -> None:
    with reserved_port() as port, SteeredProcess(tmp_path, "--grpc-port", str(port)) as service:
        service.wait_started()
        assert is_ready(port)
        (tmp_path / "open").unlink(missing_ok=True)
        (tmp_path / "hold").touch()
        for worker in service.workers:
            os.kill(worker, signal.SIGKILL)
        service.wait_entered()
        expect_fallback(port)
        service.open()
        eventually(lambda: has_become_ready(port))


def test_signal_ends_a_service_that_no_worker_serves(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with reserved_port() as port, SteeredProcess(tmp_path, "--grpc-port", str(port)) as service:
        service.wait_entered()
        assert not is_ready(port)
        service.signal()
        assert (service.wait(), "Traceback" in service.stderr) == (0, False), service.stderr

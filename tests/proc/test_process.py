"""``Process``: what a backend in a worker process gives, what crosses over, when a worker dies, and its limits."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
import torch
from conftest import Register, picture
from kit import process_backends
from kit.inside import backend_of, node_of, runtime_of
from kit.leftovers import nothing_left  # noqa: F401
from kit.steered import Steered
from kit.waits import WAIT, error_of, eventually, outcome, run

from torchpipe_py import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    Signature,
    TensorSpec,
    WorkerDied,
    import_code,
    pipe,
)
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.control.basic import Identity, Sequential
from torchpipe_py.errors import WorkerTraceback
from torchpipe_py.plan.binding import FilterPlan
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc import backends, child, restarter
from torchpipe_py.proc.backends import Process
from torchpipe_py.runtime.request import Links, Request

Data = dict[str, Any]


def backend(cls: type, label: str = "Process[X]", **params: Any) -> Process:
    """A ``Process`` that is not set up, without a node around it."""
    inner = cls(BackendConfig(params=params, label="X"))
    unlimited = {"max_seconds": 0.0, "max_memory": 0}
    return Process(BackendConfig(params=unlimited, children=(inner,), label=label))


@pytest.fixture(scope="module")
def obedient() -> Iterator[Process]:
    """One for all tests: a process takes a second to start, and is replaced where it died."""
    process = backend(process_backends.Obedient)
    process.setup()
    yield process
    process.close()


def forward(process: Process, data: Any, **more: Any) -> Data:
    item = {"data": data, **more}
    process.forward([item])
    return item


def pid_of(process: Process) -> int:
    return int(forward(process, "pid")["result"][0])


# -- the same as without ------------------------------------------------------------------------------------------


def test_class_with_init_and_forward_runs_in_a_process(register: Register) -> None:
    name = register(process_backends.Duck)
    items = [{"data": number} for number in range(4)]
    with pipe({"backend": f"Process[{name}]", "a": 1, f"{name}::b": [2]}) as p:
        p(items)
        assert (p.min(), p.max()) == (1, 3)
    for number, item in enumerate(items):
        pid, data, config, count = item["result"]  # type: ignore[misc]
        assert (data, config) == (number, {"a": 1, "b": [2]})
        assert pid != os.getpid()
        assert 1 <= count <= 3


def test_process_may_run_a_process() -> None:
    mat = picture(120, 160)
    with pipe({"backend": "Process[Process[FirstAvailable[Identity]]]"}) as p:
        np.testing.assert_array_equal(p({"data": mat})["result"], mat)
        assert p.setup_choices() == {"node": ["FirstAvailable[Identity]: Identity"]}, "not from the process inside"


def test_batch_is_one_call(obedient: Process) -> None:
    items: list[Data] = [{"data": number} for number in range(4)]
    obedient.forward(items)
    assert [item["result"][1:] for item in items] == [(4, number) for number in range(4)]
    assert (obedient.min(), obedient.max()) == (1, 4)
    assert obedient.signature() == Signature(outputs=(TensorSpec("pid"),))


def test_wait_for_a_process_counts_at_later_nodes() -> None:
    """They refuse a request that has waited too long in all."""
    with pipe({"backend": "Process[Identity]"}) as p:
        ended = threading.Event()
        request = Request({"data": 1}, lambda data, error: ended.set(), "node")
        request.arrived, request.links = perf_counter() - 60, Links(is_inner=True)
        runtime_of(p).inflight.add_inner([request])
        node_of(p).put(request)
        assert ended.wait(WAIT)
        assert 60 <= request.waited < 60 + WAIT


def test_starts_while_another_thread_imports_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV's folder, which has a module called typing, is the first one meanwhile."""
    folder = os.path.dirname(os.path.realpath(cv2.__file__))
    monkeypatch.setattr(sys, "path", [os.path.join(folder, ""), folder, *sys.path])
    started = backend(process_backends.Obedient)
    started.setup()
    started.close()


def test_answer_that_cannot_be_unpickled_fails_its_request(obedient: Process) -> None:
    pid = pid_of(obedient)
    with pytest.raises(TypeError, match=r"the answer of its worker process: .*missing 1 required"):
        forward(obedient, "give_stubborn")
    assert pid_of(obedient) == pid


# -- errors -------------------------------------------------------------------------------------------------------


def test_exception_arrives_with_its_traceback(obedient: Process) -> None:
    pid = pid_of(obedient)
    with pytest.raises(ValueError, match=r"^no such value$") as info:
        forward(obedient, "raise_value_error")
    assert isinstance(info.value.__cause__, WorkerTraceback)
    assert "in raise_value_error" in str(info.value.__cause__)
    with pytest.raises(BackendError, match=r"^StubbornError: two parts$"):
        forward(obedient, "raise_stubborn")
    assert pid_of(obedient) == pid


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("unavailable", BackendUnavailable, "^not on this machine$"),
        ("stubborn", BackendUnavailable, "^not on this machine$"),
        ("config", ConfigError, "^not on this machine$"),
        ("else", OSError, "^not on this machine$"),
        ("die", WorkerDied, r"Process\[X\]: its worker process \d+ died: exit status 5"),
    ],
)
def test_error_of_setup_keeps_its_type(how: str, kind: type[Exception], message: str) -> None:
    unfit = backend(process_backends.Unfit, how=how)
    with pytest.raises(kind, match=message):
        unfit.setup()
    unfit.close()


def test_refuses_classes_that_cannot_be_imported(register: Register) -> None:
    class Local(Identity):
        """Stands in a function."""

    with pytest.raises(ConfigError, match=r"X: .*'.*Local'.* must be at the top level of a module"):
        backend(Local).setup()
    stray = type("Stray", (Identity,), {"__module__": "stray"})
    module = type(sys)("stray")
    module.Stray = stray  # type: ignore[attr-defined]
    sys.modules["stray"] = module
    try:
        with pytest.raises(ConfigError, match="No module named 'stray'; a class must be at the top level"):
            backend(stray).setup()
    finally:
        del sys.modules["stray"]


def test_refuses_filters_and_parameters_that_cannot_be_pickled(register: Register) -> None:
    with pytest.raises(ConfigError, match="'how' cannot go to a worker process"):
        backend(process_backends.Unfit, how=threading.Lock()).setup()
    filters = (FilterPlan(lambda data: data),)
    sequence = Sequential(BackendConfig(children=(Identity(BackendConfig()),), filters=filters))
    with pytest.raises(ConfigError, match=r"filter .* cannot go to a worker process"):
        Process(BackendConfig(children=(sequence,))).setup()


# -- workers that die ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "ending"),
    [("die", r"killed by signal 9 \(SIGKILL\)"), ("leave", "exit status 3")],
)
def test_dead_process_fails_its_batch_and_is_replaced(obedient: Process, word: str, ending: str) -> None:
    pid = pid_of(obedient)
    with pytest.raises(WorkerDied, match=rf"^Process\[X\]: its worker process {pid} died: {ending}$"):
        forward(obedient, word)
    assert pid_of(obedient) != pid


def test_killing_an_idle_process_fails_no_request(obedient: Process) -> None:
    for _ in range(2):
        pid = pid_of(obedient)
        os.kill(pid, signal.SIGKILL)  # it may still be dying when the next request comes
        assert pid_of(obedient) not in (pid, os.getpid())


@pytest.mark.parametrize("cls", [process_backends.Obedient, process_backends.Single])
def test_only_requests_that_kill_their_process_fail(register: Register, cls: type) -> None:
    with pipe({"backend": f"Process[{register(cls)}]", "instance_num": 2, "batching_timeout": 50}) as p:
        words = ["plain"] * 60
        words[7], words[33] = "leave", "die"
        errors = [error_of(future) for future in [p.submit({"data": word}) for word in words]]
    assert [index for index, error in enumerate(errors) if error is not None] == [7, 33]
    assert isinstance(errors[7], WorkerDied)
    assert errors[7].code == "worker_died"
    assert "SIGKILL" in str(errors[33])


@pytest.mark.parametrize("is_late", [False, True])
def test_process_in_place_of_another_may_be_refused(register: Register, is_late: bool) -> None:
    """Before it loads anything, or once it has."""

    @contextmanager
    def reloading() -> Iterator[None]:
        if is_late:
            yield
        raise ConfigError("another model")

    plan = plan_pipeline({"backend": f"Process[{register(process_backends.Obedient)}]"})
    plan = replace(plan, plans={"node": replace(plan.plans["node"], reloading=reloading)})
    with pipe(plan) as p:
        assert p({"data": "plain"})["result"][2] == "plain"
        with pytest.raises(WorkerDied, match="SIGKILL"):
            p({"data": "die"})
        with pytest.raises(WorkerDied, match="cannot be started again: another model"):
            p({"data": "plain"})


def test_process_that_cannot_be_restarted_fails_requests(tmp_path: Path) -> None:
    unfit = backend(process_backends.Unfit, how=f"once {tmp_path / 'seen'}")
    unfit.setup()
    with pytest.raises(WorkerDied, match="exit status 7"):
        forward(unfit, 1)
    with pytest.raises(WorkerDied, match=r"cannot be started again: .* died: exit status 6"):
        forward(unfit, 1)
    unfit.close()


@pytest.mark.parametrize("missing", ["memory", "processes"])
def test_process_is_restarted_once_memory_or_processes_are_available(
    obedient: Process, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """``/dev/shm`` would say the first, RLIMIT_NPROC the second."""

    def fail(*args: Any, **options: Any) -> Any:
        number = errno.ENOSPC if missing == "memory" else errno.EAGAIN
        raise OSError(number, os.strerror(number))

    with pytest.raises(WorkerDied):
        forward(obedient, "die")
    with monkeypatch.context() as patched:
        if missing == "memory":
            patched.setattr(os, "ftruncate", fail)
        else:
            patched.setattr(child.subprocess, "Popen", fail)
        with pytest.raises(WorkerDied, match=r"started again: \[Errno \d+\] (No space left|Resource temp)"):
            forward(obedient, "x")
    assert forward(obedient, "x")["result"][2] == "x"


# -- the end ------------------------------------------------------------------------------------------------------


def test_close_closes_the_backend_and_ends_the_process(tmp_path: Path) -> None:
    for word, ends in (("closed", nullcontext()), ("raise", pytest.raises(ValueError, match="will not close"))):
        closing = backend(process_backends.Closing, file=str(tmp_path / word))
        closing.setup()
        pid = forward(closing, 1)["result"]
        with ends:
            closing.close()
        closing.close()
        assert (tmp_path / word).read_text() == "closed"
        assert not psutil.pid_exists(pid)
    backend(process_backends.Closing, file="never").close()


def test_close_ends_a_process_that_hangs_or_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarter, "CLOSE_SECONDS", 0.1)
    for file, number in (("hang", 0), ("stopped", signal.SIGSTOP), ("gone", signal.SIGKILL)):
        closing = backend(process_backends.Closing, file=str(tmp_path / file))
        closing.setup()
        pid = forward(closing, 1)["result"]
        os.kill(pid, number)
        closing.close()
        assert not psutil.pid_exists(pid)


def test_signals_of_the_group_do_not_end_the_process(obedient: Process) -> None:
    pid = pid_of(obedient)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert pid_of(obedient) == pid


PROGRAM = """
import os, sys
from torchpipe_py import ItemBackend, pipe, register_backend

class Mine(ItemBackend):
    '''Stands in __main__.'''

    def forward_item(self, item):
        item["result"] = Value(os.getpid())

class Value:
    def __init__(self, pid):
        self.pid = pid

register_backend(Mine, "Mine")

def main():
    with pipe({"backend": sys.argv[1]}) as p:
        item = {"data": 1}
        p(item)
        if sys.argv[1] == "Process[Mine]":
            assert type(item["result"]) is Value
        print("done", flush=True)
"""


GUARD = "if __name__ == '__main__':\n    "


@pytest.mark.parametrize(
    ("backend", "guard", "error"),
    [
        ("Process[Mine]", GUARD, ""),
        ("Process[Identity]", "", ""),
        ("Process[Mine]", "", 'put that under `if __name__ == "__main__":`'),
    ],
)
def test_class_in_the_main_script_needs_a_main_guard(tmp_path: Path, backend: str, guard: str, error: str) -> None:
    (tmp_path / "app.py").write_text(f"{PROGRAM}\n{guard}main()\n", encoding="utf-8")
    done = run(sys.executable, "-W", "error", tmp_path / "app.py", backend)
    assert (done.returncode, done.stdout) == ((1, "") if error else (0, "done\n")), done.stderr
    assert error in done.stderr if error else not done.stderr


@pytest.mark.usefixtures("restored")
def test_class_of_a_file_imported_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it lies a module that it imports, in the worker as well."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_it.py").write_text("FACTOR = 3\n", encoding="utf-8")
    text = """
import neighbour_of_it
from torchpipe_py import register_backend

@register_backend
class Triple:
    def forward(self, items):
        for item in items:
            item["result"] = item["data"] * neighbour_of_it.FACTOR
"""
    file = tmp_path / "imported_by_path.py"
    file.write_text(text, encoding="utf-8")
    import_code(str(file))
    try:
        with pipe({"backend": "Process[Triple]"}) as p:
            assert p({"data": 2})["result"] == 6
        import_code(str(file))  # once is enough
        other = tmp_path / "other" / "imported_by_path.py"
        other.parent.mkdir()
        other.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="'imported_by_path' is imported already; rename"):
            import_code(str(other))
    finally:
        for name in ("imported_by_path", "neighbour_of_it"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_module_at_all", "cannot be imported: No module named 'no_such"),
        ("x = ", "SyntaxError"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        (None, "no such"),
    ],
)
def test_failed_import_is_reported_and_undone(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "fails_to_import.py"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        import_code(str(file))
    assert "fails_to_import" not in sys.modules


# -- limits: seconds for a batch, memory for its process --------------------------------------------------------------


@pytest.mark.parametrize("cls", [process_backends.Obedient, process_backends.Single])
def test_batch_longer_than_max_seconds_fails_and_its_process_is_replaced(
    register: Register, cls: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, the process would never answer; what is to be answered has a minute, on a busy machine too."""
    monkeypatch.setattr(backends, "loaded_torch", lambda: None)  # importing it takes each process two seconds
    with pipe({"backend": f"Process[{register(cls)}]", "max_seconds": WAIT}) as p:
        backend = backend_of(p)
        assert backend._restarter.max_seconds == WAIT
        pid = p({"data": "pid"})["result"][0]
        os.kill(pid, signal.SIGSTOP)
        backend._restarter.max_seconds = 0.2
        with pytest.raises(WorkerDied, match=r"took longer than 0\.2 s and was ended"):
            p({"data": "pid"})
        backend._restarter.max_seconds = WAIT
        assert p({"data": "pid"})["result"][0] != pid


def test_memory_beyond_max_memory_is_refused(register: Register) -> None:
    """PyTorch is imported before the limit holds: it maps more than any limit that suits a backend."""
    with pipe({"backend": f"Process[{register(process_backends.Obedient)}]", "max_memory": 64}) as p:
        assert p({"data": "plain", "tensor": torch.ones(2)})["tensor"].tolist() == [1, 1]
        p({"data": "allocate", "mebibytes": 16})
        with pytest.raises(BackendError, match="MemoryError"):
            p({"data": "allocate", "mebibytes": 128})
        assert p({"data": "plain"})["result"][2] == "plain"


@pytest.fixture
def held(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[pipe]:
    """A pipe whose process has died, and the setup of the next one does not end while there is a file ``hold``.

    The parameter, if there is one, is how long a start may take.
    """
    monkeypatch.setattr(backends, "START_SECONDS", getattr(request, "param", backends.START_SECONDS))
    with pipe({"backend": f"Process[{register(Steered)}]", "folder": str(tmp_path)}) as p:
        (tmp_path / "hold").touch()
        with pytest.raises(WorkerDied):
            p({"data": "die"})
        yield p


def test_start_of_a_replacement_is_not_a_hung_batch(held: pipe, tmp_path: Path) -> None:
    future = held.submit({"data": "x"})
    eventually((tmp_path / "entered").exists)
    node = held.stats()["nodes"]["node"]
    assert (node["busy"], node["oldest_batch_s"]) == (1, 0.0)
    (tmp_path / "hold").unlink()
    assert outcome(future)["result"] == ("x", 1.0)


@pytest.mark.parametrize("held", [0.05], indirect=True)
def test_start_of_a_replacement_is_limited(held: pipe) -> None:
    with pytest.raises(WorkerDied, match=r"cannot be started again: .* took longer than 0\.05 s and was ended"):
        held({"data": "x"})

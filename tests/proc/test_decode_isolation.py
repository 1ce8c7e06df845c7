"""``decode_isolation``: what decoders give in processes of their own, what they cannot do there, and how they end."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest
from conftest import Register, picture
from kit import hostile_decoders
from kit.inside import backend_of
from kit.leftovers import nothing_left  # noqa: F401
from kit.waits import PROGRAM_WAIT, WAIT, eventually, is_alive

from torchpipe_py import BackendError, ConfigError, DecodeError, WorkerDied, pipe, registry
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc import raw, zygote
from torchpipe_py.proc.codec import Packed
from torchpipe_py.proc.link import DONE, NOT_RUN, GarbledError, Link, create_memory

Data = dict[str, Any]

PROCESS = {"decode_isolation": "process"}
LIMIT = 0.2
"""Seconds that an image may take which takes too long; on a busy machine any other may take as long."""


@pytest.fixture(scope="module")
def hostile() -> Iterator[pipe]:
    with registry.default.restored(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_KEY", "0123456789abcdef" * 4)
        registry.register_backend(hostile_decoders.Hostile)
        with pipe({"backend": "Hostile", "max_seconds": WAIT, "max_memory": 64, "instance_num": 1, **PROCESS}) as p:
            yield p


def ask(p: pipe, data: bytes | str, **more: Any) -> Data:
    item = {"data": data.encode() if isinstance(data, str) else data, **more}
    p(item)
    return item


def ask_in_haste(p: pipe, data: str) -> Data:
    """The same of the decoder that is there, which has no longer than the limit."""
    restarter = backend_of(p)._restarter
    assert restarter.max_seconds == WAIT  # as the node says
    restarter.max_seconds = LIMIT
    try:
        return ask(p, data)
    finally:
        restarter.max_seconds = WAIT


def said(p: pipe, data: str) -> str:
    """What a hostile decoder has to tell."""
    return bytes(ask(p, data)["result"].reshape(-1)).decode()


# -- what is isolated -------------------------------------------------------------------------------------------------


def labels(backend: str) -> list[str]:
    """The backend as it is built: its label, and those of its children."""
    params = {"ResizeMat": {"resize_h": 8, "resize_w": 8}, "AlignMat": {"max_w": 64}, "cvtColor": {"color": "rgb"}}
    config = {"backend": backend, **PROCESS}
    for name, needed in params.items():
        config.update(needed if name in backend else {})
    (plan,) = plan_pipeline(config).plans["node"].backends
    return [plan.label, *(child.label for child in plan.children)]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("DecodeMat", "Isolated[DecodeMat] DecodeMat"),
        ("Isolated[DecodeMat]", "Isolated[DecodeMat] DecodeMat"),
        ("S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]", "S Isolated[S[DecodeMat,ResizeMat,cvtColorMat]] Mat2Tensor"),
        ("S[DecodeMat,(or)cvtColorMat,Mat2Tensor]", "S Isolated[DecodeMat] cvtColorMat Mat2Tensor"),
        ("S[Identity,DecodeMat,AlignMat,ResizeMat]", "S Identity Isolated[DecodeMat] AlignMat ResizeMat"),
        ("Process[DecodeMat]", "Process[DecodeMat] Isolated[DecodeMat]"),
    ],
)
def test_decoder_is_isolated_with_the_backends_after_it(backend: str, expected: str) -> None:
    label, *children = labels(backend)
    first, *others = expected.split()
    assert label == (backend if first == "S" else first)
    assert children == others


def test_filters_and_limits_with_isolation() -> None:
    """A filter stays in front of its decoder; the node's key comes first; limits may stay where it is off."""
    config = {"backend": "S[Identity,(or)DecodeMat,ResizeMat]", "resize_h": 8, "resize_w": 8, **PROCESS}
    (plan,) = plan_pipeline(config).plans["node"].backends
    assert [filter_ is None for filter_ in plan.filters] == [True, False]
    assert plan.children[1].children[0].filters == (None, None)
    limits = {"max_seconds": 3, "Isolated::max_memory": 100}
    tables = {"global": PROCESS, "a": {"backend": "DecodeMat", "next": "b", **limits}, "b": {"backend": "DecodeMat"}}
    tables["b"] |= {"decode_isolation": "none", "map": "a[data:data]", **limits}
    a, b = (plan.backends[0] for plan in plan_pipeline(tables).plans.values())
    assert (a.label, b.label) == ("Isolated[DecodeMat]", "DecodeMat")
    assert a.params == {"max_seconds": 3.0, "max_memory": 100}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "DecodeMat", "decode_isolation": "thread"}, "'decode_isolation': expected one of none, process"),
        ({"backend": "S[DecodeTensor,ResizeTensor]", "resize_h": 8, "resize_w": 8, **PROCESS}, "DecodeTensor .* GPU"),
        ({"backend": "DecodeMat", "max_second": 3}, "did you mean 'max_seconds'"),
    ],
)
def test_refuses_backends_that_cannot_be_isolated(config: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_pipeline(config)


def test_warns_if_nothing_is_isolated(caplog: pytest.LogCaptureFixture) -> None:
    plan_pipeline({"backend": "DecodeMat", **PROCESS})
    assert caplog.text == ""
    plan_pipeline({"backend": "Identity", **PROCESS})
    assert "no backend declares that it decodes" in caplog.text


@pytest.mark.parametrize("backend", ["DecodeMat,ResizeMat,cvtColorMat", "DecodeMat,ResizeMat,CropMat,cvtColorMat"])
def test_results_equal_those_without_isolation(jpeg: bytes, backend: str) -> None:
    """Also the color that a backend behind the decoder's process prefers reaches the decoder."""
    png = cv2.imencode(".png", picture(20, 30)[:, :, 0])[1].tobytes()
    backend, params = f"S[{backend}]", {"resize_h": 24, "resize_w": 32, "color": "rgb", "DecodeMat::color": "bgr"}
    outcomes: list[list[Data]] = []
    for form in ({"backend": backend}, {"backend": backend, **PROCESS}, {"backend": f"Process[{backend}]"}):
        with pipe({**form, **params}) as p:
            outcomes.append([ask(p, data, box=[1, 2, 9, 9]) for data in (jpeg, png, b"no image", b"")])
    for here, *elsewhere in zip(*outcomes, strict=True):
        for there in elsewhere:
            assert here.keys() == there.keys()
            assert repr(here.get("error")) == repr(there.get("error"))
            assert here.get("color") == there.get("color")
            if "result" in here:
                np.testing.assert_array_equal(here["result"], there["result"], strict=True)


# -- what a decoder does costs its own image --------------------------------------------------------------------------

ENDS = {
    "segfault": "killed by signal 11",
    "abort": "killed by signal 6",
    "leave": "exit status 3",
    "say 00": "gave an answer of kind 0, 1 bytes and was ended",
    "say other number": "gave an answer without a request and was ended",
}


@pytest.mark.parametrize("act", ENDS)
def test_dead_decoder_fails_one_image(hostile: pipe, act: str) -> None:
    items: list[Data] = [{"data": data.encode()} for data in ("plain", act, "plain")]
    hostile(items)
    assert [bytes(item["result"]) if "result" in item else None for item in items] == [b"'plain'", None, b"'plain'"]
    assert isinstance(items[1]["error"], WorkerDied)
    assert ENDS[act] in str(items[1]["error"])
    assert len(str(items[1]["error"])) < 200


@pytest.mark.parametrize("act", ["spin", "plain"])
def test_decoder_beyond_max_seconds_fails_one_image(hostile: pipe, act: str) -> None:
    pid = int(said(hostile, "pid"))
    if act == "plain":
        os.kill(pid, signal.SIGSTOP)
    item = ask_in_haste(hostile, act)
    assert "result" not in item
    assert isinstance(item["error"], WorkerDied)
    assert "took longer than 0.2 s and was ended" in str(item["error"])
    assert said(hostile, "plain") == "'plain'"
    wait_dead(pid)


def test_decoder_beyond_max_memory_fails_one_image(hostile: pipe) -> None:
    pid = said(hostile, "pid")
    for data in ("allocate 200", "large 200000", b"plain " + bytes(65 * 2**20)):
        item = ask(hostile, data)
        assert isinstance(item["error"], DecodeError)
        assert "max_memory" in str(item["error"])
    assert said(hostile, "pid") == pid
    assert ask(hostile, "large 10000")["result"].sum() == 7 * 10000 * 1024 * 4


def test_exception_is_a_defect_and_an_error_is_reported(hostile: pipe) -> None:
    with pytest.raises(BackendError, match="ValueError: no such thing") as info:
        ask(hostile, "defect no such thing " + "x" * 5000)
    assert len(str(info.value)) < 2000
    with pytest.raises(BackendError, match=r"expected a Mat .*float32"):
        ask(hostile, "floats")
    assert "gave no result" in str(ask(hostile, "no_result")["error"])
    assert str(ask(hostile, "refuse nothing here")["error"]) == "nothing here"


@pytest.mark.parametrize("act", [f"open {__file__}", "connect", "run", "fork", "kill", "shrink", "unlink /no/such"])
def test_decoder_reaches_no_file_socket_or_process(hostile: pipe, act: str) -> None:
    act = f"kill {os.getpid()}" if act == "kill" else act
    assert said(hostile, act) == "'PermissionError'"


def test_decoder_cannot_lift_a_limit(hostile: pipe) -> None:
    with pytest.raises(BackendError, match="not allowed to raise maximum limit"):
        ask(hostile, "capabilities")
    status = Path(f"/proc/{said(hostile, 'pid')}/status").read_text(encoding="ascii")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (int(fields["CapEff"], 16), int(fields["CapPrm"], 16), fields["NoNewPrivs"]) == (0, 0, "1")


def test_decoder_has_no_key_of_a_model(hostile: pipe) -> None:
    """Its memory is a copy of that of the process which forks it."""
    environment = parent_of(int(said(hostile, "pid"))).environ()
    assert "PATH" in environment
    assert "MODEL_KEY" not in environment


def test_answer_of_a_decoder_is_never_unpickled(hostile: pipe, tmp_path: Path) -> None:
    path = tmp_path / "owned"
    assert isinstance(ask(hostile, f"say_pickle {path}")["error"], WorkerDied)
    assert not path.exists()


@pytest.mark.parametrize(
    ("kind", "numbers", "text"),
    [
        (DONE, (0, 1, 2, 2), b""),
        (NOT_RUN, (0, 1, 2, 2, 3), b""),
        (DONE, (0, 1, 2, 2, 3), bytes(2000)),
        (DONE, (3, 1, 2, 2, 3), b""),
        (DONE, (0, 4, 2, 2, 3), b""),
        (DONE, (0, 1, 0, 2, 3), b""),
        (DONE, (0, 1, 2, 2, 0), b""),
        (DONE, (0, 1, 2**32 - 1, 1, 1), b""),
        (DONE, (0, 1, 2**20, 2**20, 512), b""),
        (DONE, (0, 1, 500_000, 1, 1), b""),
        (DONE, (0, 1, 2, 2, 3, 0, 5, 1.0, 1.0, 0.0, 0.0), b""),
        (DONE, (0, 1, 2, 2, 3, 2**20 + 1, 5, 1.0, 1.0, 0.0, 0.0), b""),
        (DONE, (0, 1, 2, 2, 3, 5, 5, float("nan"), 1.0, 0.0, 0.0), b""),
    ],
)
def test_refuses_invalid_numbers_in_an_answer(kind: int, numbers: tuple[Any, ...], text: bytes) -> None:
    room = raw.room_for(1000)
    fd = create_memory(room)
    link = Link(fd, room, [fd])
    for answered, kind_of_it, content in ((numbers, kind, text), ((0, 1, 1000, 1, 1), DONE, b"")):
        complete = (*answered, *[0] * 6) if len(answered) == 5 else answered
        head = struct.pack("<BB" + "I" * min(len(complete) - 2, 5) + "d" * (len(complete) - 7), *complete)
        link.answer(0, 1, Packed(head, content, (), 0), kind_of_it, 0.0)
        if answered is numbers:
            with pytest.raises(GarbledError):
                raw.read(link, 0, link.reply(0))
    image = raw.read(link, 0, link.reply(0))
    assert isinstance(image, raw.Image)
    assert (image.mat.shape, image.keys) == ((1000, 1, 1), {"color": "bgr"})


def test_shared_memory_cannot_be_truncated() -> None:
    """Whoever read it then would be killed."""
    fd = create_memory(raw.room_for(2**20))
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


# -- processes that are killed and stopped ----------------------------------------------------------------------------


def parent_of(pid: int) -> psutil.Process:
    """The process that the decoder was forked from."""
    return psutil.Process(pid).parent()


def wait_dead(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        eventually(lambda: not is_alive(process), f"process {pid} is still there")


def test_works_without_releasing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_REMOVE", 9999)
    image = np.zeros((2500, 2500, 3), np.uint8)
    encoded = cv2.imencode(".png", image)[1].tobytes()
    with pipe({"backend": "DecodeMat", **PROCESS}) as run:
        for _ in range(2):
            assert np.array_equal(run({"data": encoded})["result"], image)


def test_killing_idle_processes_fails_no_image(hostile: pipe) -> None:
    """A decoder, and the process that decoders come from."""
    pid = int(said(hostile, "pid"))
    os.kill(pid, signal.SIGKILL)
    assert int(said(hostile, "pid")) != pid
    pid = int(said(hostile, "pid"))
    parent_of(pid).kill()
    wait_dead(pid)  # or else it would decode on, and nobody could end it
    assert int(said(hostile, "pid")) != pid


def test_stopped_processes_are_replaced_and_end(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "ANSWER_SECONDS", WAIT)
    with pipe({"backend": register(hostile_decoders.Hostile), **PROCESS}) as p:
        parent_of(int(said(p, "pid"))).suspend()
        control = backend_of(p)._zygote._control
        assert control.gettimeout() == WAIT
        control.settimeout(LIMIT)  # that one does not answer at all, the next one may take its time
        assert said(p, "plain") == "'plain'"
        assert isinstance(ask(p, "segfault")["error"], WorkerDied)
        pid = int(said(p, "pid"))
        stopped = [parent_of(pid), psutil.Process(pid)]
        for process in stopped:
            process.suspend()
    for process in stopped:
        wait_dead(process.pid)


PROGRAM = """
import os, signal, sys
from kit import hostile_decoders, process_backends
from torchpipe_py import pipe, register_backend

if __name__ == "__main__":
    register_backend(hostile_decoders.Hostile)
    register_backend(process_backends.Obedient)
    isolated = pipe({"backend": "Hostile", "decode_isolation": "process"})
    process = pipe({"backend": "Process[Obedient]"})
    first, second = {"data": b"pid"}, {"data": "pid"}
    isolated(first), process(second)
    pids = [int(bytes(first["result"]).decode()), second["result"][0]]
    print(*pids, flush=True)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stopped_children_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "app.py")], stdout=subprocess.PIPE, timeout=PROGRAM_WAIT, check=False, env=env
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        wait_dead(pid)


def test_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jpeg: bytes
) -> None:
    for name in ("cv2", "numpy", "pickle", "socket"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    for config in ({"backend": "DecodeMat", **PROCESS}, {"backend": "Process[DecodeMat]"}):
        with pipe(config) as p:
            assert "result" in ask(p, jpeg)

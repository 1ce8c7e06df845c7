"""The worker processes of a DataLoader: how they are started, asked for planned batches, and ended."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchpipe_py.errors import first_line
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.plan import WORKERS, PlannedBatch, key_of
from torchpipe_py.training.samples import BatchKey

WHY_WORKERS_END = "it was killed, for want of memory perhaps, or could not start and said why above"
GUARD = '; a script does what it does under: if __name__ == "__main__":'  # where workers import it
SAFE_PATH = "torchpipe_py.training"  # any text is a yes to Python; this one tells that it is not the user's
PIPE_BYTES = 2**20  # what Linux allows everybody


class BatchReader:
    """Planned batches through ``dataset``, by workers as the user's DataLoader has them.

    ``dataset`` takes a list with one ``BatchKey``, and what it gives comes back as it is. The workers are started once,
    and kept until ``close``; they hold no thread or lock of a pipe, if it is built later. ``start_method`` and
    ``worker_init_fn`` take the place of those of the DataLoader.
    """

    def __init__(
        self,
        dataloader: Any,
        dataset: Any,
        seed: int,
        start_method: str | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._keys = _Keys()
        context = start_method or dataloader.multiprocessing_context
        method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
        self._hint = "" if method == "fork" else GUARD
        workers = dataloader.num_workers
        several: dict[str, Any] = {
            "persistent_workers": True,
            "prefetch_factor": dataloader.prefetch_factor,
            "multiprocessing_context": context,
            "timeout": dataloader.timeout,
        }
        generator = torch.Generator()
        generator.manual_seed(key_of(WORKERS, seed))
        self._loader: Any = DataLoader(
            dataset,
            batch_sampler=self._keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_begin_worker, worker_init_fn or dataloader.worker_init_fn),
            generator=generator,
            **(several if workers else {}),
        )
        if workers:
            # NOTE: on the main thread PyTorch installs a handler that raises wherever that thread happens to be when a
            # worker dies; without it the thread that reads finds out, within five seconds.
            with _safe_path() if start_method else nullcontext():
                _run_aside(lambda: iter(self._loader))
            # More goes through the workers' pipe at once: each 64 KiB, Linux' default, cost a system call and the GIL.
            with suppress(AttributeError, OSError):
                pipe = self._loader._iterator._worker_result_queue._reader
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self, epoch: int, plan: Sequence[PlannedBatch], generation: int = 0) -> Iterator[Any]:
        """What the dataset gave for each batch. ``TrainingError`` for a worker that died."""
        self._keys.keys = [BatchKey(epoch, planned, generation) for planned in plan]
        given = 0
        try:
            for batch in self._loader:
                given += 1
                yield batch
        except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
            ended = _end_of_a_worker(error)
            if not ended:
                raise
            raise TrainingError(f"{ended}; {WHY_WORKERS_END}{'' if given else self._hint}") from error
        if given < len(plan):
            raise TrainingError(f"the workers gave {given} of {len(plan)} batches")

    def drain(self, seconds: float) -> None:
        """Receive what the workers still send for batches that nobody wants; not for longer than ``seconds``."""
        self._keys.keys = []
        with suppress(Exception):  # a worker that died
            _run_aside(lambda: iter(self._loader), seconds)

    def close(self) -> None:
        """End the workers."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:
            iterator._shutdown_workers()


class _Keys:
    """A batch sampler of the batches that are planned now."""

    keys: Sequence[BatchKey] = ()

    def __iter__(self) -> Iterator[list[BatchKey]]:
        return ([key] for key in self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def _as_it_is(made: Any) -> Any:
    return made


def _begin_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """The ``worker_init_fn`` of all workers.

    NOTE: Ctrl-C comes to the workers too. They stay, for the loop may go on after it, in a notebook say; and with a
    handler that does nothing, since a program that is started would inherit that the signal is ignored.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]  # it is not meant for programs that a transform starts
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


@contextmanager
def _safe_path() -> Iterator[None]:
    """What is started meanwhile imports nothing from the working directory, where `python -c` looks first.

    The workers' environment keeps the variable until ``_begin_worker``. Python 3.10 does not know it.
    """
    is_set = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", SAFE_PATH)
    try:
        yield
    finally:
        if not is_set:
            del os.environ["PYTHONSAFEPATH"]


def _end_of_a_worker(error: Exception) -> str:
    """What ``error`` says of a worker that has ended; nothing where it is an error in a worker, or another mistake."""
    if "in DataLoader worker process" in str(error):
        return ""
    if not isinstance(error, RuntimeError):  # Tensors that a worker has sent are fetched from it
        return "a DataLoader worker exited unexpectedly"
    return first_line(error) if "exited unexpectedly" in str(error) else ""


def _run_aside(function: Callable[[], object], timeout: float | None = None) -> None:
    """``function()`` on another thread; its error, or ``TimeoutError`` after so many seconds, is raised here."""
    done: Future[object] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="torchpipe-aside", daemon=True).start()
    done.result(timeout)

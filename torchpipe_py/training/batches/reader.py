"""Batches from the worker processes of a DataLoader of ours."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchpipe_py.errors import first_line
from torchpipe_py.training.data.planner import PlannedBatch
from torchpipe_py.training.data.randomness import WORKERS, key_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.prefetch.background import run_aside

WHY_WORKERS_END = "it was killed, for want of memory perhaps, or could not start and said why above"
GUARD = '; a script does what it does under: if __name__ == "__main__":'  # where workers import it
SAFE_PATH = "torchpipe_py.training"  # any text is a yes to Python; this one tells that it is not the user's
PIPE_BYTES = 2**20  # what Linux allows everybody


class BatchReader:
    """Planned batches through ``dataset``, by workers as the user's DataLoader has them.

    The workers are started once, and kept until ``close``; they hold no thread or lock of a pipe, if it is built later.
    ``collated`` makes of a batch's samples what comes back. ``start_method`` and ``worker_init_fn`` take the place of
    those of the DataLoader.
    """

    def __init__(
        self,
        dataloader: Any,
        dataset: Any,
        collated: Callable[[Any], Any],
        seed: int,
        start_method: str | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._plan = _Plan()
        context = start_method or dataloader.multiprocessing_context
        self._hint = GUARD if _imports_the_script(context) else ""
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
            batch_sampler=self._plan,
            num_workers=workers,
            collate_fn=collated,
            worker_init_fn=partial(_begin_worker, worker_init_fn or dataloader.worker_init_fn),
            generator=generator,
            **(several if workers else {}),
        )
        if workers:
            # NOTE: on the main thread PyTorch installs a handler that raises wherever that thread happens to be when a
            # worker dies; without it the thread that reads finds out, within five seconds.
            with _safe_path() if start_method else nullcontext():
                run_aside(lambda: iter(self._loader))
            _widen(getattr(self._loader, "_iterator", None))

    def read(self, plan: Sequence[PlannedBatch], keys: Callable[[PlannedBatch], list[Any]]) -> Iterator[Any]:
        """What ``collated`` made of each batch; ``keys`` gives what the dataset is asked for.

        A worker that died is a ``TrainingError``.
        """
        self._plan.batches, self._plan.keys = plan, keys
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
        self._plan.batches = ()
        with suppress(Exception):  # a worker that died
            run_aside(lambda: iter(self._loader), seconds)

    def close(self) -> None:
        """End the workers."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:
            iterator._shutdown_workers()


def _imports_the_script(context: Any) -> bool:
    """Whether processes of ``context``, a start method or what the DataLoader has, import it anew."""
    method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
    return bool(method != "fork")


def _begin_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """For ``worker_init_fn``.

    NOTE: Ctrl-C comes to the workers too. They stay, for the loop may go on after it, in a notebook say; and with a
    handler that does nothing, since a program that is started would inherit that the signal is ignored.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


@contextmanager
def _safe_path() -> Iterator[None]:
    """What is started meanwhile imports nothing from the working directory, where `python -c` looks first.

    The workers' environment keeps the variable until ``start_worker``. Python 3.10 does not know it.
    """
    is_set = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", SAFE_PATH)
    try:
        yield
    finally:
        if not is_set:
            del os.environ["PYTHONSAFEPATH"]


def _widen(iterator: Any) -> None:
    """Let more through the workers' pipe at once: each 64 KiB, Linux' default, cost a system call and the GIL."""
    try:
        reader = iterator._worker_result_queue._reader
        fcntl.fcntl(reader.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (AttributeError, OSError):
        pass  # slower, and no worse than that


def _end_of_a_worker(error: Exception) -> str:
    """What ``error`` says of a worker that has ended; nothing where it is what a worker met, or another mistake."""
    if "in DataLoader worker process" in str(error):
        return ""
    if not isinstance(error, RuntimeError):  # Tensors that a worker has sent are fetched from it
        return "a DataLoader worker exited unexpectedly"
    return first_line(error) if "exited unexpectedly" in str(error) else ""


class _Plan:
    """A batch sampler of what is planned now."""

    def __init__(self) -> None:
        self.batches: Sequence[PlannedBatch] = ()
        self.keys: Callable[[PlannedBatch], list[Any]] = lambda planned: list(planned.indices)

    def __iter__(self) -> Iterator[list[Any]]:
        return map(self.keys, self.batches)

    def __len__(self) -> int:
        return len(self.batches)

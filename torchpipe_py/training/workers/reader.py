"""The worker processes of a DataLoader: how they process a planned batch, and how they are started and ended."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from torchpipe_py.backends.cuda import no_collection
from torchpipe_py.errors import Failure, first_line
from torchpipe_py.malloc import keep_freed_memory
from torchpipe_py.training.batcher import Batch, Batcher, LoaderStatistics
from torchpipe_py.training.decode import Config, Decoder, plans_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import WORKERS, PlannedBatch, key_of
from torchpipe_py.training.prefetch import moved_to
from torchpipe_py.training.samples import Sample, SampleReader
from torchpipe_py.training.workers.transfer import ON_THEIR_WAY, ReadResult, Sent, Slots

KEPT_BYTES = 2**28
"""Freed memory that each malloc heap keeps at its end: enough for the files of a batch."""

WHY_WORKERS_END = "it was killed, for want of memory perhaps, or could not start and said why above"
GUARD = '; a script does what it does under: if __name__ == "__main__":'  # for scripts that workers import
PRELOADED = "torchpipe_py.training.workers.preload"
SAFE_PATH = "torchpipe_py.training"  # Python accepts any text; this one shows that the user did not set it
SENDABLE = "workers_decode needs what can be pickled: functions and classes at the top of a module"
PIPE_BYTES = 2**20  # maximum on Linux without privileges


class BatchKey(NamedTuple):
    """A request to a worker: a batch of ``epoch``."""

    epoch: int
    planned: PlannedBatch


class ReadBatches:
    """The dataset of workers that read: maps a ``BatchKey`` to its samples.

    A worker returns ``Sent``, also for errors; in the training process it becomes ``ReadResult``.
    """

    worker_init_fn: Callable[[int], None] | None = None

    def __init__(self, samples: SampleReader, worker_init_fn: Callable[[int], None] | None) -> None:
        self.dataset, self.worker_init_fn, self._samples = samples.dataset, worker_init_fn, samples

    def start(self, worker_id: int) -> None:
        """Called in the worker before its first batch.

        NOTE: Ctrl-C reaches the workers too. They continue, as the loop may go on after it, for example in a notebook.
        The handler does nothing; an ignored signal would be inherited by programs that the worker starts.
        """
        signal.signal(signal.SIGINT, lambda *_: None)
        # NOTE: a forked worker must not collect what was garbage of the training: freeing a Tensor on a GPU aborts it.
        gc.freeze()
        gc.enable()
        self._statistics = LoaderStatistics()
        if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
            del os.environ["PYTHONSAFEPATH"]  # not meant for programs that a transform starts
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)

    def __getitem__(self, key: BatchKey) -> ReadResult | Sent:
        if get_worker_info() is None:
            return self._read_batch(key)
        try:
            result = self._read_batch(key)
        except Exception as error:
            result = ReadResult(failure=Failure.of(error))
        result.figures = self._statistics.taken()
        try:
            return Sent.of(result)
        except Exception as error:
            problem = f"batch {key.planned.number} cannot be sent to the training process"
            failure = TrainingError(f"{problem}: {type(error).__name__}: {first_line(error)}")
            return Sent.of(ReadResult(failure=Failure.of(failure)))

    def _read_batch(self, key: BatchKey) -> ReadResult:
        return ReadResult(list(self._samples.read(key.epoch, key.planned)))


class DecodedBatches(ReadBatches):
    """The dataset of workers that decode: maps a ``BatchKey`` to the whole batch.

    It is sent to the workers unchanged, and creates pipes there. ``sent``: samples, options and the user's
    ``worker_init_fn``, pickled. A worker uses the same devices as the training process, with its own CUDA contexts and
    memory.
    """

    def __init__(self, sent: bytes, toml_path: Config, devices: Sequence[Any], slots: int) -> None:
        self._sent, self._toml_path, self._devices = sent, toml_path, list(devices)
        self._slots = Slots(slots)
        self._error: Exception | None = None

    def start(self, worker_id: int) -> None:
        """Build the pipes, so that the first batch does not wait for them; an error is raised with that batch."""
        keep_freed_memory(KEPT_BYTES)
        threading.Thread(target=_end_with_the_training, name="torchpipe-watch", daemon=True).start()
        try:
            samples, options, worker_init_fn = pickle.loads(self._sent)
            super().__init__(samples, worker_init_fn)
        except Exception as error:
            problem = f"dataset or transforms cannot be made in a worker ({type(error).__name__}: {first_line(error)})"
            self._error = TrainingError(f"{problem}; {SENDABLE}")
        super().start(worker_id)
        if self._error is not None:
            return
        # If batches are gathered on one device, each device decodes whole batches instead of a share of each.
        devices = [self._devices[worker_id % len(self._devices)]] if options.gather else self._devices
        try:
            if devices[0].type == "cuda":
                torch.cuda.set_device(devices[0])  # no context on another one
            self._decoder = Decoder(plans_of(self._toml_path, devices, get_worker_info().num_workers))
            self._batcher = Batcher(options, devices, samples, self._statistics, self._decoder.trial)
        except Exception as error:
            self._error = error

    def _read_batch(self, key: BatchKey) -> ReadResult:
        if self._error is not None:
            raise self._error
        planned, streams = key.planned, self._batcher.streams
        with self._statistics.stage("decode"):
            samples = self._decoded(key)
            stacks = self._batcher.stacked(planned, samples)
        if all(sample.kind for sample in samples):
            return ReadResult(samples)  # for the training process, which has the last label as a template
        with self._statistics.stage("transform"), streams.active():
            batch = self._batcher.batch(key.epoch, planned, samples, stacks)
            assert batch is not None
            images = moved_to(batch.images, self._written)
            labels = moved_to(batch.labels, lambda tensor: tensor.detach().cpu())
            streams.synchronize()
        return ReadResult(batch=Batch(images, labels, **vars(batch)), label=self._batcher.label)

    def _written(self, tensor: Any) -> Any:
        return self._slots.write(tensor.detach()) if tensor.is_cuda else tensor

    def _decoded(self, key: BatchKey) -> list[Sample]:
        """Read and decode the samples; reading overlaps with decoding earlier ones."""
        samples = self._samples.read(key.epoch, key.planned)
        if key.planned.on_cpu:
            return list(samples)
        size = self._decoder.chunk or max(1, len(key.planned.indices))
        started = [self._decoder.start(chunk) for chunk in iter(lambda: list(islice(samples, size)), [])]
        return [sample for finish in started for sample in finish()]


def _end_with_the_training() -> None:
    # NOTE: PyTorch's own watchdog checks the parent, which is the fork server and lives as long as its children.
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


# -- the training process ---------------------------------------------------------------------------------------------


class BatchReader:
    """Runs planned batches through ``dataset``, with workers configured like those of the user's DataLoader.

    The workers are started once and kept until ``close``; if pipes are built later, the workers hold none of their
    locks. ``start_method`` replaces that of the DataLoader.
    """

    def __init__(self, dataloader: Any, dataset: ReadBatches, seed: int, start_method: str | None = None) -> None:
        self._keys: list[BatchKey] = []
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
            dataset,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=dataset.start,  # pickled together with the dataset, so that they stay one object
            generator=generator,
            **(several if workers else {}),
        )
        if workers:
            # NOTE: on the main thread PyTorch installs a signal handler that raises at any place in that thread when a
            # worker dies; without it the reading thread notices within five seconds.
            with no_collection(), _safe_path() if start_method else nullcontext():
                _run_aside(lambda: iter(self._loader))
            # Enlarge the workers' pipe: each 64 KiB (the Linux default) would cost a system call and the GIL.
            with suppress(AttributeError, OSError):
                pipe = self._loader._iterator._worker_result_queue._reader
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read(self, epoch: int, plan: Sequence[PlannedBatch]) -> Iterator[ReadResult]:
        """Yield the outcome of each batch. ``TrainingError`` for a worker that died."""
        self._keys[:] = [BatchKey(epoch, planned) for planned in plan]
        given = 0
        try:
            for result in self._loader:
                given += 1
                yield result.received() if isinstance(result, Sent) else result
        except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
            ended = _end_of_a_worker(error)
            if not ended:
                raise
            raise TrainingError(f"{ended}; {WHY_WORKERS_END}{'' if given else self._hint}") from error

    def drain(self, seconds: float) -> None:
        """Receive and drop batches that the workers still send, for at most ``seconds``."""
        self._keys.clear()
        with suppress(Exception):  # a worker that died
            _run_aside(lambda: iter(self._loader), seconds)

    def close(self) -> None:
        """End the workers."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:
            iterator._shutdown_workers()


def decoding_reader(
    dataloader: Any, samples: SampleReader, toml_path: Config, devices: Sequence[Any], options: LoaderOptions
) -> tuple[BatchReader, int]:
    """A reader whose workers create whole batches, and the slots of each; ``TrainingError`` if no worker starts."""
    method = _start_method(dataloader)
    sent = samples, options, dataloader.worker_init_fn
    slots = len(devices) * (dataloader.prefetch_factor + ON_THEIR_WAY)
    try:
        dataset = DecodedBatches(pickle.dumps(sent), toml_path, devices, slots)
    except Exception:
        parts = {"the dataset": samples.dataset, "worker_init_fn": dataloader.worker_init_fn, **vars(options)}
        for name, part in {**parts, "what goes to the workers": sent}.items():
            try:
                pickle.dumps(part)
            except Exception as error:
                problem = f"{name} cannot be sent to the workers ({first_line(error)}); {SENDABLE}"
                raise TrainingError(problem) from error
        raise
    return BatchReader(dataloader, dataset, options.seed, method), slots


def _start_method(dataloader: Any) -> str:
    if not dataloader.num_workers:
        problem = "workers_decode: the DataLoader has no workers (num_workers=0)"
        raise TrainingError(f"{problem}; give it some, or leave workers_decode out")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        problem = "workers_decode: a worker, which imports this script, would start workers of its own"
        raise TrainingError(f'{problem}; put what the script does under: if __name__ == "__main__":')
    context = dataloader.multiprocessing_context
    if context is None:
        # NOTE: without the default "__main__": a script that uses the GPU at module level would be forked.
        others = getattr(forkserver._forkserver, "_preload_modules", [])
        kept = [module for module in others if module not in (PRELOADED, "__main__")]
        multiprocessing.set_forkserver_preload([PRELOADED, *kept])
        return "forkserver"
    method: str = context.get_start_method()
    if method == "fork":
        raise TrainingError("workers_decode: CUDA and pipes do not survive a fork; use multiprocessing_context='spawn'")
    return method


def _as_it_is(result: Any) -> Any:
    return result


@contextmanager
def _safe_path() -> Iterator[None]:
    """A context in which new processes do not import from the working directory, where `python -c` looks first.

    The workers keep the environment variable until they ``start``. Python 3.10 does not support it.
    NOTE: used inside ``no_collection``, which lets one thread in at a time: all threads have one environment.
    """
    is_set = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", SAFE_PATH)
    try:
        yield
    finally:
        if not is_set:
            del os.environ["PYTHONSAFEPATH"]


def _end_of_a_worker(error: Exception) -> str:
    """The message of ``error`` about a worker that has ended; empty for an error in a worker, or any other error."""
    if "in DataLoader worker process" in str(error):
        return ""
    if not isinstance(error, RuntimeError):  # a Tensor could not be fetched from the worker that sent it
        return "a DataLoader worker exited unexpectedly"
    return first_line(error) if "exited unexpectedly" in str(error) else ""


def _run_aside(function: Callable[[], object], timeout: float | None = None) -> None:
    """Run ``function()`` on another thread; raises its error, or ``TimeoutError`` after ``timeout`` seconds."""
    # NOTE: not a thread of an executor: a worker that is forked from one fails when it ends, since it waits for itself.
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="torchpipe-aside", daemon=True).start()
    outcome.result(timeout)

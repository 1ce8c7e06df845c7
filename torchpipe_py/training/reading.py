"""Encoded bytes from the dataset, in the worker processes of a DataLoader of ours."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from torchpipe_py.errors import DecodeError, first_line
from torchpipe_py.training.ahead.background import run_aside
from torchpipe_py.training.data.epoch import PlannedBatch
from torchpipe_py.training.data.randomness import SAMPLE, WORKERS, forked, key_of
from torchpipe_py.training.data.readers import decode_rgb
from torchpipe_py.training.errors import TrainingError, UnreadableFile

WHY_WORKERS_END = "it was killed, for want of memory perhaps, or could not start and said why above"
GUARD = '; a script does what it does under: if __name__ == "__main__":'  # where workers import it
PIPE_BYTES = 2**20  # what Linux allows everybody

UNREADABLE, EMPTY, CORRUPT, WRONG = "unreadable", "empty", "corrupt", "wrong"


@dataclass(frozen=True)
class Sample:
    """One sample on its way: ``image`` is encoded bytes, or a Tensor where ``transforms_cpu`` have run.

    Without an image ``kind`` and ``reason`` say why; ``WRONG`` is the program's mistake, and no policy covers it.
    """

    index: int
    image: Any = None
    label: Any = None
    kind: str = ""
    reason: str = ""

    def with_image(self, image: Any) -> Sample:
        """The same sample with another image; ``dataclasses.replace`` takes three times as long, for each image."""
        return Sample(self.index, image, self.label, self.kind, self.reason)

    def failed(self, kind: str, reason: str) -> Sample:
        """The same sample without an image."""
        return Sample(self.index, None, self.label, kind, reason)


class Ask(NamedTuple):
    """What a worker is asked for: a sample, in ``epoch``."""

    epoch: int
    sample: int
    on_cpu: bool


class SampleReader:
    """The user's dataset, so that a sample which cannot be read comes back as one that says why."""

    def __init__(self, dataset: Any, transforms_cpu: Callable[[Any], Any] | None, seed: int) -> None:
        self.dataset, self._transforms_cpu, self._seed = dataset, transforms_cpu, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, ask: Ask) -> Sample:
        sample = Sample(ask.sample)
        try:
            item = self.dataset[ask.sample]
        except Exception as error:
            is_file = not isinstance(error, TrainingError) or isinstance(error, UnreadableFile)
            return sample.failed(UNREADABLE if is_file else WRONG, f"{type(error).__name__}: {first_line(error)}")
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            return sample.failed(WRONG, f"the dataset yields (encoded bytes, label), got {_type_name(item)}")
        encoded, label = item
        if not isinstance(encoded, (bytes, bytearray, memoryview)):
            return sample.failed(WRONG, _not_bytes(encoded))
        sample = Sample(ask.sample, bytes(encoded), label)
        if not sample.image:
            return sample.failed(EMPTY, "the dataset gave no bytes")
        # NOTE: random transforms need the global generators, which in this process belong to the training loop.
        return self.transformed(sample, ask.epoch) if ask.on_cpu and get_worker_info() is not None else sample

    def transformed(self, sample: Sample, epoch: int) -> Sample:
        """The sample decoded and through ``transforms_cpu``, under its key. Not from a thread beside the training's."""
        assert self._transforms_cpu is not None
        try:
            picture = decode_rgb(sample.image)
        except DecodeError as error:
            return sample.failed(CORRUPT, str(error))
        try:
            with forked() as fork:
                fork.seed(key_of(SAMPLE, self._seed, epoch, sample.index))
                image = self._transforms_cpu(picture)
        except Exception as error:
            return sample.failed(WRONG, f"transforms_cpu raised {type(error).__name__}: {error}")
        if not isinstance(image, torch.Tensor):
            problem = f"transforms_cpu must give a Tensor, got {_type_name(image)}; end them with ToTensor"
            return sample.failed(WRONG, problem)
        return sample.with_image(image)


def collate(samples: list[Sample]) -> tuple[list[Sample], Any]:
    """The samples, and in one piece what tensors they hold: each would take a file descriptor to another process."""
    images = [one.image for one in samples if isinstance(one.image, torch.Tensor)]
    if len(images) != len(samples) or len({(one.shape, one.dtype) for one in images}) != 1:
        return samples, None
    return [one.with_image(None) for one in samples], torch.stack(images)


def unpacked(samples: list[Sample], images: Any) -> list[Sample]:
    """What ``collate`` was given."""
    if images is None:
        return samples
    return [one.with_image(image) for one, image in zip(samples, images, strict=True)]


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
        self._asked, self._hint = _Asked(), GUARD if start_method else ""
        workers = dataloader.num_workers
        several: dict[str, Any] = {
            "persistent_workers": True,
            "prefetch_factor": dataloader.prefetch_factor,
            "multiprocessing_context": start_method or dataloader.multiprocessing_context,
            "timeout": dataloader.timeout,
        }
        generator = torch.Generator()
        generator.manual_seed(key_of(WORKERS, seed))
        self._loader: Any = DataLoader(
            dataset,
            batch_sampler=self._asked,
            num_workers=workers,
            collate_fn=collated,
            worker_init_fn=worker_init_fn or dataloader.worker_init_fn,
            generator=generator,
            **(several if workers else {}),
        )
        if workers:
            # NOTE: on the main thread PyTorch installs a handler that raises wherever that thread happens to be when a
            # worker dies; without it the thread that reads finds out, within five seconds.
            run_aside(lambda: iter(self._loader))
            _widen(getattr(self._loader, "_iterator", None))

    def read(self, plan: Sequence[PlannedBatch], ask: Callable[[PlannedBatch], list[Any]]) -> Iterator[Any]:
        """What ``collated`` made of each batch; ``ask`` gives what the dataset is asked for.

        A worker that died is a ``TrainingError``.
        """
        self._asked.plan, self._asked.ask = plan, ask
        given = 0
        try:
            for found in self._loader:
                given += 1
                yield found
        except (RuntimeError, ConnectionError, EOFError) as error:
            ended = _end_of_a_worker(error)
            if not ended:
                raise
            raise TrainingError(f"{ended}; {WHY_WORKERS_END}{'' if given else self._hint}") from error
        if given < len(plan):
            raise TrainingError(f"the workers gave {given} of {len(plan)} batches")

    def drain(self, seconds: float) -> None:
        """Receive what the workers still send for batches that nobody wants; not for longer than ``seconds``."""
        self._asked.plan = ()
        with suppress(Exception):  # a worker that died
            run_aside(lambda: iter(self._loader), seconds)

    def close(self) -> None:
        """End the workers."""
        iterator: Any = getattr(self._loader, "_iterator", None)
        self._loader = None
        if iterator is not None:
            iterator._shutdown_workers()


def namer(dataset: Any) -> Callable[[int], str]:
    """From an index to what an error message calls the sample: the path too, where the dataset has ``samples``."""

    def name_of(index: int) -> str:
        path = _path(dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"

    return name_of


def _path(dataset: Any, index: int) -> str | None:
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # a Subset
        dataset, index = dataset.dataset, dataset.indices[index]
    try:
        found = dataset.samples[index]
    except Exception:
        return None
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    return str(found) if isinstance(found, str) or hasattr(found, "__fspath__") else None


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


class _Asked:
    """A batch sampler of whatever is asked for now."""

    def __init__(self) -> None:
        self.plan: Sequence[PlannedBatch] = ()
        self.ask: Callable[[PlannedBatch], list[Any]] = lambda planned: list(planned.indices)

    def __iter__(self) -> Iterator[list[Any]]:
        ask = self.ask
        for planned in self.plan:
            yield ask(planned)

    def __len__(self) -> int:
        return len(self.plan)


def check(dataloader: Any) -> None:
    """``TrainingError`` for what cannot be wrapped."""
    if not isinstance(dataloader, DataLoader):
        raise TrainingError(f"expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}")
    if isinstance(dataloader.dataset, IterableDataset):
        raise TrainingError("the dataset has no indices (IterableDataset), by which randomness is keyed")
    if dataloader.batch_sampler is None:
        raise TrainingError("the DataLoader forms no batches (batch_size=None)")
    if dataloader.collate_fn is not default_collate:
        raise TrainingError("the DataLoader's collate_fn is not used; pass collate_labels=, for the list of labels")


def _not_bytes(found: Any) -> str:
    hint = "leave its transform out and pass loader=cv2_loader"
    return f"the dataset yields decoded images ({_type_name(found)}), not encoded bytes; {hint}"


def _type_name(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__

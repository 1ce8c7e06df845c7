"""The parts of a loader, made in the order in which they may be started, and ended together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torchpipe_py.training.agreement import Agreement
from torchpipe_py.training.assembly import Assembler
from torchpipe_py.training.data.epoch import Planner
from torchpipe_py.training.decoding import Config, Decoder
from torchpipe_py.training.devices import choose_devices
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.reading import BatchReader, SampleReader, check, collate, namer
from torchpipe_py.training.source import DecodedHere, Source
from torchpipe_py.training.statistics import LoaderStatistics
from torchpipe_py.training.workers.loans import Borrower
from torchpipe_py.training.workers.maker import BatchMaker, start_worker
from torchpipe_py.training.workers.remote import DecodedByWorkers, start_method
from torchpipe_py.training.workers.sending import packed


class Parts:
    """What a loader is made of. Whatever is wrong is raised here, and nothing is left running then."""

    def __init__(
        self,
        parallel_type: str,
        dataloader: Any,
        toml_path: Config,
        options: LoaderOptions,
        local_rank: int | None,
        devices: Any,
        agreement: Agreement | None,
    ) -> None:
        self.options = options
        self.devices = choose_devices(parallel_type, local_rank, devices)
        self.statistics = LoaderStatistics()
        check(dataloader)
        samples = SampleReader(dataloader.dataset, options.transforms_cpu, options.seed)
        with ExitStack() as stack:
            # NOTE: the workers before the pipe: a fork copies no thread, but every lock that one holds.
            if options.workers_decode:
                borrower = Borrower(dataloader.num_workers)
                reader = _making(dataloader, samples, toml_path, self.devices, options, borrower)
            else:
                reader = BatchReader(dataloader, samples, collate, options.seed)
            stack.callback(reader.close)
            if agreement is not None:
                _check_ranks(dataloader, agreement)
            self.planner = Planner(dataloader, options.seed, options.cpu_percentage)
            decoder = Decoder(toml_path, self.devices)
            stack.callback(decoder.close)
            name_of = namer(dataloader.dataset)
            self.assembler = Assembler(options, self.devices, samples, name_of, self.statistics, decoder.trial)
            self.source: Source
            if options.workers_decode:
                decoder.close()  # which has shown that the pipes can be built
                remote = DecodedByWorkers(
                    reader, self.devices, self.assembler, self.statistics, borrower, options.gather
                )
                stack.callback(remote.close)
                self.source = remote
            else:
                self.source = DecodedHere(reader, decoder, self.assembler, self.statistics)
            self._stack = stack.pop_all()
        self.batches = length_of(dataloader.batch_sampler)
        self.identity: dict[str, Any] = {
            "seed": options.seed,
            "cpu_percentage": options.cpu_percentage,
            "samples": len(dataloader.dataset),
            "batches": self.batches,
        }

    def close(self) -> None:
        """End workers and pipes. Idempotent."""
        self._stack.close()


def _making(
    dataloader: Any,
    samples: SampleReader,
    toml_path: Config,
    devices: Sequence[Any],
    options: LoaderOptions,
    borrower: Borrower,
) -> BatchReader:
    """A reader whose workers make whole batches."""
    method = start_method(dataloader)
    names = {"the dataset": dataloader.dataset, "worker_init_fn": dataloader.worker_init_fn}
    names |= {field.name: getattr(options, field.name) for field in fields(options)}
    sent = packed((samples, options, dataloader.worker_init_fn), names)
    maker = BatchMaker(sent, toml_path, devices, borrower.lent)
    return BatchReader(dataloader, maker, as_it_is, options.seed, method, start_worker)


def as_it_is(made: Any) -> Any:
    """For ``collate_fn``."""
    return made


def agree_on(agreement: Agreement, make: Callable[[], Parts]) -> tuple[Parts, int | None]:
    """The parts, if every rank could make its own and all are of one training; batches of the rank with most."""
    parts: Parts | None = None
    failure: Exception | None = None
    try:
        parts = make()
    except Exception as error:
        failure = error
    try:
        facts = {} if parts is None else {**parts.identity, "bad_samples": parts.options.bad_samples}
        gathered = agreement.settle(failure, facts)
        for key in ("seed", "samples", "cpu_percentage", "bad_samples"):
            values = [one[key] for one in gathered]
            if len(set(values)) > 1:
                raise TrainingError(f"the ranks differ in {key}: {', '.join(map(str, values))}")
    except BaseException:
        if parts is not None:
            parts.close()
        raise
    assert parts is not None
    counts = [one["batches"] for one in gathered]
    return parts, None if None in counts else max(counts)


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or ``None`` where it has none."""
    try:
        return len(sized)
    except TypeError:
        return None


def _check_ranks(dataloader: Any, agreement: Agreement) -> None:
    if len(dataloader.dataset) < agreement.ranks:
        raise TrainingError(f"the dataset has {len(dataloader.dataset)} samples for {agreement.ranks} ranks")
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    sampler = next((one for one in samplers if hasattr(one, "num_replicas")), None)
    if sampler is None:
        problem = "the DataLoader's sampler gives every rank all samples"
        raise TrainingError(f"{problem}; in 'ddp' use DistributedSampler, or DistributedEvalSampler to validate")
    if (sampler.rank, sampler.num_replicas) != (agreement.rank, agreement.ranks):
        found = f"rank {sampler.rank} of {sampler.num_replicas}"
        raise TrainingError(f"the sampler is for {found}, this is rank {agreement.rank} of {agreement.ranks}")

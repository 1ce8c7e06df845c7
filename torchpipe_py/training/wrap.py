"""From a DataLoader of encoded images to a loader of batches on the device, decoded as the service decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchpipe_py.errors import counted, nearest
from torchpipe_py.training.batches.batcher import Batcher
from torchpipe_py.training.batches.decoder import Config, Decoder
from torchpipe_py.training.batches.reader import BatchReader
from torchpipe_py.training.batches.sample import SampleReader, collate, namer
from torchpipe_py.training.batches.statistics import LoaderStatistics
from torchpipe_py.training.data.planner import Planner, length_of, samplers_of
from torchpipe_py.training.devices import checked_parallel_type, choose_devices
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.loader import LoaderParts, TorchpipeLoader
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.ranks import RankGroup
from torchpipe_py.training.sources import DecodedByWorkers, DecodedHere, Source, worker_reader
from torchpipe_py.training.workers.slots import SlotReader


def wrap_dataloader_torchpipe(
    parallel_type: str,
    dataloader: Any,
    toml_path: Config,
    transforms_gpu: Callable[[Any], Any] | None = None,
    transforms_cpu: Callable[[Any], Any] | None = None,
    cpu_percentage: float = 0.0,
    local_rank: int | None = None,
    devices: Any = None,
    **options: Any,
) -> TorchpipeLoader:
    """A loader of ``(images, labels)`` on the device, from a DataLoader of ``(encoded bytes, label)``.

    ``parallel_type``: "single", "dp" (each of ``devices`` decodes its share) or "ddp" (one device, ``local_rank``, and
    the process group must exist; all ranks make the call). ``toml_path``: what ``pipe`` takes; its result is a Tensor
    1×C×H×W. See ``choose_devices`` for ``local_rank`` and ``devices``: on a machine without CUDA, "single" and "ddp"
    use the CPU.

    ``options``, and the transforms: see ``LoaderOptions``. They are ``seed``, ``prefetch``, ``bad_samples``,
    ``ignore_index``, ``transforms_batch``, ``gather``, ``workers_decode`` and ``collate_labels``.

    Raises ``TypeError`` for an option that there is none of, ``ValueError`` and ``TrainingError`` for options that do
    not fit, and what ``pipe`` raises; in "ddp" on all ranks.
    """
    kind = checked_parallel_type(parallel_type)
    with ExitStack() as stack:
        ranks: RankGroup | None = None
        parts: LoaderParts | None = None
        failure: Exception | None = None
        if kind == "ddp":
            ranks = RankGroup()
            stack.callback(ranks.close)
        try:
            check_names(options)
            checked = LoaderOptions(transforms_gpu, transforms_cpu, cpu_percentage, **options)
            chosen = choose_devices(kind, local_rank, devices)
            check(dataloader)
            parts = _started(dataloader, toml_path, checked, chosen, ranks)
            stack.callback(parts.close)
        except Exception as error:
            if ranks is None:
                raise
            failure = error
        batches = None if ranks is None else _agreed_batches(ranks, parts, failure)
        assert parts is not None
        stack.pop_all()
    return TorchpipeLoader(parts, ranks, batches if ranks is not None else parts.identity["batches"])


def check_names(options: Mapping[str, Any]) -> None:
    """``TypeError`` for an option that there is none of, with the nearest name."""
    names = {field.name for field in fields(LoaderOptions)}
    for name in options.keys() - names:
        raise TypeError(
            f"wrap_dataloader_torchpipe() got an unexpected keyword argument {name!r}; {nearest(name, names)}"
        )


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


def _started(
    dataloader: Any, toml_path: Config, options: LoaderOptions, devices: list[Any], ranks: RankGroup | None
) -> LoaderParts:
    """Workers, then pipes, then what makes batches of them. Nothing is left running where something is wrong."""
    statistics, slots = LoaderStatistics(), None
    samples = SampleReader(dataloader.dataset, options.transforms_cpu, options.seed)
    with ExitStack() as stack:
        # NOTE: the workers before the pipe: a fork copies no thread, but every lock that one holds.
        if options.workers_decode:
            slots = SlotReader(dataloader.num_workers)
            reader = worker_reader(dataloader, samples, toml_path, devices, options, slots.in_use)
        else:
            reader = BatchReader(dataloader, samples, collate, options.seed)
        stack.callback(reader.close)
        if ranks is not None:
            _check_ranks(dataloader, ranks)
        planner = Planner(dataloader, options.seed, options.cpu_percentage)
        decoder = Decoder(toml_path, devices)
        stack.callback(decoder.close)
        batcher = Batcher(options, devices, samples, namer(dataloader.dataset), statistics, decoder.trial)
        source: Source
        if slots is not None:
            decoder.close()  # it has shown that the pipes can be built
            source = DecodedByWorkers(reader, devices, batcher, statistics, slots, options.gather)
            stack.callback(source.close)
        else:
            source = DecodedHere(reader, decoder, batcher, statistics)
        identity = {
            "seed": options.seed,
            "cpu_percentage": options.cpu_percentage,
            "samples": length_of(dataloader.dataset),
            "batches": length_of(dataloader.batch_sampler),
        }
        close = stack.pop_all().close
        return LoaderParts(options, dataloader.dataset, devices, planner, source, batcher, statistics, identity, close)


def _agreed_batches(ranks: RankGroup, parts: LoaderParts | None, failure: Exception | None) -> int | None:
    """Batches of the rank that has most; raises on all ranks where one failed, or they are not of one training."""
    facts = {} if parts is None else {**parts.identity, "bad_samples": parts.options.bad_samples}
    gathered = ranks.settle(failure, facts)
    for key in ("seed", "samples", "cpu_percentage", "bad_samples"):
        values = [facts[key] for facts in gathered]
        if len(set(values)) > 1:
            raise TrainingError(f"the ranks differ in {key}: {', '.join(map(str, values))}")
    counts = [facts["batches"] for facts in gathered]
    return None if None in counts else max(counts)


def _check_ranks(dataloader: Any, ranks: RankGroup) -> None:
    samples = length_of(dataloader.dataset)
    if samples is not None and samples < ranks.count:
        raise TrainingError(f"the dataset has {counted(samples, 'sample')} for {ranks.count} ranks")
    sampler = next((sampler for sampler in samplers_of(dataloader) if hasattr(sampler, "num_replicas")), None)
    if sampler is None:
        problem = "the DataLoader's sampler gives every rank all samples"
        raise TrainingError(f"{problem}; in 'ddp' use DistributedSampler, or DistributedEvalSampler to validate")
    if (sampler.rank, sampler.num_replicas) != (ranks.rank, ranks.count):
        problem = f"the sampler is for rank {sampler.rank} of {sampler.num_replicas}"
        raise TrainingError(f"{problem}, this is rank {ranks.rank} of {ranks.count}")

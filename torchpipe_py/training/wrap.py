"""Turns a DataLoader of encoded images into a loader of batches on the device, decoded as in the service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.errors import counted, nearest
from torchpipe_py.training.batcher import Batcher, LoaderStatistics
from torchpipe_py.training.decode import Config, Decoder, plans_of
from torchpipe_py.training.errors import TrainingError
from torchpipe_py.training.loader import Source, TorchpipeLoader
from torchpipe_py.training.options import LoaderOptions, choose_devices
from torchpipe_py.training.plan import length_of, samplers_of
from torchpipe_py.training.ranks import RankGroup
from torchpipe_py.training.samples import SampleReader
from torchpipe_py.training.workers.reader import BatchReader, ReadBatches, decoding_reader


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

    ``parallel_type``: "single", "dp" (each of ``devices`` decodes its share) or "ddp" (one device, ``local_rank``; the
    process group must exist, and all ranks must make the call). ``toml_path``: any configuration that ``pipe`` takes;
    its result must be a Tensor 1×C×H×W. See ``choose_devices`` for ``local_rank`` and ``devices``: on a machine without
    CUDA, "single" and "ddp" use the CPU.

    For the transforms and ``options`` see ``LoaderOptions``. The options are ``seed``, ``prefetch``, ``bad_samples``,
    ``ignore_index``, ``transforms_batch``, ``gather``, ``workers_decode`` and ``collate_labels``.

    Raises ``TypeError`` for an unknown option, ``ValueError`` and ``TrainingError`` for invalid options, and the errors
    of ``pipe``; in "ddp" on all ranks.
    """
    kind = str(parallel_type).lower()
    with ExitStack() as stack:
        ranks: RankGroup | None = None
        failure: Exception | None = None
        facts: dict[str, Any] = {}
        if kind == "ddp":
            ranks = RankGroup()
            stack.callback(ranks.close)
        try:
            names = {field.name for field in fields(LoaderOptions)}
            for name in options.keys() - names:
                problem = f"wrap_dataloader_torchpipe() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{problem}; {nearest(name, names)}")
            checked = LoaderOptions(transforms_gpu, transforms_cpu, cpu_percentage, **options)
            chosen = choose_devices(kind, local_rank, devices)
            _check(dataloader, ranks)
            source = _started(dataloader, toml_path, checked, chosen)
            stack.callback(source.close)
            facts = {
                "seed": checked.seed,
                "cpu_percentage": checked.cpu_percentage,
                "samples": length_of(dataloader.dataset),
                "batches": length_of(dataloader.batch_sampler),
                "bad_samples": checked.bad_samples,
            }
        except Exception as error:
            if ranks is None:
                raise
            failure = error
        batches = facts["batches"] if ranks is None else _agreed_batches(ranks, facts, failure)
        stack.pop_all()
    del facts["bad_samples"]  # training may continue with another policy
    return TorchpipeLoader(dataloader, source, facts, ranks, batches)


def _check(dataloader: Any, ranks: RankGroup | None) -> None:
    """Raise ``TrainingError`` for a DataLoader that cannot be wrapped."""
    if not isinstance(dataloader, DataLoader):
        raise TrainingError(f"expected a torch.utils.data.DataLoader, got {type(dataloader).__name__}")
    if isinstance(dataloader.dataset, IterableDataset):
        raise TrainingError("the dataset has no indices (IterableDataset), by which randomness is keyed")
    if dataloader.batch_sampler is None:
        raise TrainingError("the DataLoader forms no batches (batch_size=None)")
    if dataloader.collate_fn is not default_collate:
        raise TrainingError("the DataLoader's collate_fn is not used; pass collate_labels=, for the list of labels")
    if ranks is None:
        return
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


def _started(dataloader: Any, toml_path: Config, options: LoaderOptions, devices: list[Any]) -> Source:
    """Start workers, then pipes, then create the batcher. If anything fails, nothing is left running."""
    plans = plans_of(toml_path, devices)
    decoders = Decoders.of(plans[0])
    if options.cpu_percentage > 0 and any(plan.params.get("at_least") for plan in decoders.plans):
        problem = "transforms_cpu gets whole images, and at_least decodes reduced ones for the other batches"
        raise TrainingError(f"{problem}: leave at_least out of the TOML, or cpu_percentage")
    samples = SampleReader(dataloader.dataset, options.transforms_cpu, options.seed, decoders)
    slots = 0
    with ExitStack() as stack:
        # NOTE: start the workers before the pipe: a fork copies no threads, but all locks that they hold.
        if options.workers_decode:
            reader, slots = decoding_reader(dataloader, samples, toml_path, devices, options)
        else:
            reader = BatchReader(dataloader, ReadBatches(samples, dataloader.worker_init_fn), options.seed)
        stack.callback(reader.close)
        decoder = Decoder(plans)
        stack.callback(decoder.close)
        batcher = Batcher(options, devices, samples, LoaderStatistics(), decoder.trial)
        if options.workers_decode:
            decoder.close()  # it only served to check that the pipes can be built
        stack.pop_all()
    return Source(reader, None if options.workers_decode else decoder, batcher, slots * dataloader.num_workers)


def _agreed_batches(ranks: RankGroup, facts: dict[str, Any], failure: Exception | None) -> int | None:
    """Batches of the rank with the most; raises on all ranks if one failed, or if their trainings differ."""
    gathered = ranks.settle(failure, facts)
    for key in ("seed", "samples", "cpu_percentage", "bad_samples"):
        values = [facts[key] for facts in gathered]
        if len(set(values)) > 1:
            raise TrainingError(f"the ranks differ in {key}: {', '.join(map(str, values))}")
    counts = [facts["batches"] for facts in gathered]
    return None if None in counts else max(counts)

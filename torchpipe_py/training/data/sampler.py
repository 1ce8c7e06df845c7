"""Which rank validates which sample."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torchpipe_py.training.errors import TrainingError


class DistributedEvalSampler:
    """Deals the samples out to the ranks, each to exactly one: rank r has r, r + ranks, r + 2·ranks, …

    ``DistributedSampler`` repeats some samples so that all ranks have as many, which counts those twice in a
    validation. Here some ranks have one sample less; ``wrap_dataloader_torchpipe`` evens out the steps with batches
    that are masked as a whole. Without ``num_replicas`` and ``rank``, those of the process group.
    """

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None) -> None:
        if num_replicas is None or rank is None:
            import torch.distributed as dist

            if not (dist.is_available() and dist.is_initialized()):
                raise TrainingError("DistributedEvalSampler needs num_replicas and rank, or a process group")
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not in 0..{num_replicas - 1}")
        self.num_replicas, self.rank = num_replicas, rank
        self._count = len(dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self._count, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, self._count, self.num_replicas))

"""From a DataLoader of encoded images to one of batches on the device, decoded as the service decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from torchpipe_py.training.agreement import Agreement
from torchpipe_py.training.composition import Parts, agree_on
from torchpipe_py.training.decoding import Config
from torchpipe_py.training.devices import checked_parallel_type
from torchpipe_py.training.loader import TorchpipeLoader
from torchpipe_py.training.options import LoaderOptions


def wrap_dataloader_torchpipe(
    parallel_type: str,
    dataloader: Any,
    toml_path: Config,
    transforms_gpu: Callable[[Any], Any] | None = None,
    transforms_cpu: Callable[[Any], Any] | None = None,
    cpu_percentage: float = 0.0,
    local_rank: int | None = None,
    devices: Any = None,
    *,
    seed: int = 0,
    prefetch: int = 2,
    bad_samples: str = "raise",
    ignore_index: int = -100,
    transforms_batch: Callable[[Any], Any] | None = None,
    gather: bool = True,
    workers_decode: bool = False,
    collate_labels: Callable[[list[Any]], Any] = default_collate,
) -> TorchpipeLoader:
    """A loader of ``(images, labels)`` on the device, from a DataLoader of ``(encoded bytes, label)``.

    ``parallel_type``: "single", "dp" (each of ``devices`` decodes its share) or "ddp" (one device, ``local_rank``, and
    the process group must exist; all ranks make the call). ``toml_path``: what ``pipe`` takes; its result is a Tensor
    1×C×H×W. See ``choose_devices`` for ``local_rank`` and ``devices``: on a machine without CUDA, "single" and "ddp"
    use the CPU.

    ``transforms_gpu`` is called for each sample with what the pipe gave, on its device, and gives a Tensor C×H×W.
    ``transforms_batch`` is called after that with the whole batch, N×C×H×W. A share ``cpu_percentage`` (0..1) of the
    batches takes another way: ``transforms_cpu`` is called for each sample with an RGB ``PIL.Image`` that OpenCV
    decoded, in the DataLoader's workers, and gives a Tensor C×H×W.

    Random transforms draw from the global generators of Python, NumPy and PyTorch (and of the CUDA device). Those are
    seeded before each sample from ``seed``, the epoch and the sample's index, and put back after the batch. So batches
    are the same for any number of workers, ``prefetch`` and instances, and the program's own random numbers are left
    alone. A dataset that draws random numbers itself is not covered.

    ``prefetch``: decoded batches that a background thread keeps ready, beside two on their way; 0: none, and no
    thread. ``bad_samples``:
    "raise" a ``BadSample``; "skip" drops the sample, and a batch of nothing else (in "ddp" that one is masked, since
    all ranks make equally many steps); "mask" keeps its place, with an image of zeros, the label ``ignore_index`` and
    ``False`` in the batch's ``mask``. ``gather``: in "dp" one Tensor on the first device, as ``DataParallel`` takes
    it; otherwise a list with a Tensor for each device that has samples. ``collate_labels`` is called with the list of
    labels.

    ``workers_decode``: each of the DataLoader's workers has pipes of its own and makes whole batches, bit for bit the
    same, transforms included; the training process copies them out of the worker's GPU memory. For where one process
    decodes less than the GPU could. Each worker takes a CUDA context of GPU memory, and some batches. In "dp" with
    ``gather``, workers take the devices in turn. Workers have copies of dataset and transforms as they are now, and
    what belongs to a process (the default dtype, TF32, the environment) is their own; images carry no gradient. They
    are started by "forkserver", whose process stays until the program ends, or by "spawn" where the DataLoader's
    ``multiprocessing_context`` says so. So dataset and transforms must be what can be pickled, and a script needs
    ``if __name__ == "__main__":``.

    Raises ``ValueError`` and ``TrainingError`` for options that do not fit, and what ``pipe`` raises; in "ddp" on all
    ranks.
    """
    kind = checked_parallel_type(parallel_type)

    def make(agreement: Agreement | None) -> Parts:
        options = LoaderOptions(
            transforms_gpu=transforms_gpu,
            transforms_cpu=transforms_cpu,
            transforms_batch=transforms_batch,
            cpu_percentage=cpu_percentage,
            seed=seed,
            prefetch=prefetch,
            bad_samples=bad_samples,
            ignore_index=ignore_index,
            gather=gather,
            workers_decode=workers_decode,
            collate_labels=collate_labels,
        )
        return Parts(kind, dataloader, toml_path, options, local_rank, devices, agreement)

    if kind != "ddp":
        parts = make(None)
        return TorchpipeLoader(parts, None, parts.batches)
    agreement = Agreement()
    try:
        parts, batches = agree_on(agreement, lambda: make(agreement))
    except BaseException:
        agreement.close()
        raise
    return TorchpipeLoader(parts, agreement, batches)

"""Training on exactly the served preprocessing: DataLoaders whose images are decoded by a pipe."""

from torchpipe_py.training.batcher import Batch
from torchpipe_py.training.data import (
    ImageFiles,
    ImageFolder,
    LmdbImages,
    TensorToTensor,
    cv2_loader,
    cv2Resize,
    pack_folder,
)
from torchpipe_py.training.errors import BadSample, PeerFailed, TrainingError, UnreadableFile
from torchpipe_py.training.loader import TorchpipeLoader
from torchpipe_py.training.options import LoaderOptions
from torchpipe_py.training.plan import DistributedEvalSampler
from torchpipe_py.training.prefetch import BackgroundIterator, BatchFeeder, CudaPrefetcher
from torchpipe_py.training.wrap import wrap_dataloader_torchpipe

__all__ = [
    "BackgroundIterator",
    "BadSample",
    "Batch",
    "BatchFeeder",
    "CudaPrefetcher",
    "DistributedEvalSampler",
    "ImageFiles",
    "ImageFolder",
    "LmdbImages",
    "LoaderOptions",
    "PeerFailed",
    "TensorToTensor",
    "TorchpipeLoader",
    "TrainingError",
    "UnreadableFile",
    "cv2Resize",
    "cv2_loader",
    "pack_folder",
    "wrap_dataloader_torchpipe",
]

"""Training on exactly the served preprocessing: DataLoaders whose images are decoded by a pipe."""

from torchpipe_py.training.augment import (
    Augmentation,
    ColorTwist,
    Compose,
    CutOut,
    GridMask,
    RandomResizedCrop,
    uniforms,
)
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
    "Augmentation",
    "BackgroundIterator",
    "BadSample",
    "Batch",
    "BatchFeeder",
    "ColorTwist",
    "Compose",
    "CudaPrefetcher",
    "CutOut",
    "DistributedEvalSampler",
    "GridMask",
    "ImageFiles",
    "ImageFolder",
    "LmdbImages",
    "LoaderOptions",
    "PeerFailed",
    "RandomResizedCrop",
    "TensorToTensor",
    "TorchpipeLoader",
    "TrainingError",
    "UnreadableFile",
    "cv2Resize",
    "cv2_loader",
    "pack_folder",
    "uniforms",
    "wrap_dataloader_torchpipe",
]

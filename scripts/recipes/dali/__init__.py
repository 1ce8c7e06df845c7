"""Training on images from NVIDIA DALI: ``DaliLoader`` for classes, ``PairLoader`` for pairs of images."""

from recipes.dali.loader import DaliLoader, DaliLoaders
from recipes.dali.pairs import PairLoader, PairOptions
from recipes.dali.pipeline import DaliOptions

__all__ = ["DaliLoader", "DaliLoaders", "DaliOptions", "PairLoader", "PairOptions"]

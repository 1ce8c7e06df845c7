"""Compares two versions of a model or of a pipe: images in, differences of pixels, classes and outputs out."""

"""Video: frames of files, cameras and network streams through a pipe, newest first if configured."""

from torchpipe_py.streams.streams import Frame, Streams

__all__ = ["Frame", "Streams"]

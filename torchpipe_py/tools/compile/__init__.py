"""Choose cheaper pixels and precision within a tolerance, and certify the file that comes out."""

from torchpipe_py.tools.compile.command import compile_config

__all__ = ["compile_config"]

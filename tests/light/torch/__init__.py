"""In place of PyTorch, for services whose pipe needs none: importing it takes each of them two seconds.

They start with this folder in PYTHONPATH. The other two modules here are as if they were not installed.
"""


class Tensor:
    """Nothing is one."""


class cuda:
    @staticmethod
    def is_initialized() -> bool:
        return False

    is_available = is_initialized


def set_num_threads(count: int) -> None:
    """There are none."""

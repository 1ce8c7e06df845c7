"""Choose the settings of a configuration by measurement: ``torchpipe tune``, and ``tune`` from Python."""

from torchpipe_py.tools.tune.command import tune

__all__ = ["tune"]

"""The names of ``kit`` in one."""

from kit.clients import *  # noqa: F403
from kit.services import *  # noqa: F403
from kit.waits import eventually as eventually

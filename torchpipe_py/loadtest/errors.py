"""Why a run did not take place."""

from __future__ import annotations


class CannotRunError(Exception):
    """The run did not start; the message is one line for the person who started it."""

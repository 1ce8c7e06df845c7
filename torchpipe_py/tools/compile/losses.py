"""The loss of changed files: pictures to choose by, others to certify with, and a tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from torchpipe_py.errors import counted
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools.compare_models.images import Pictures, Recorded, ResultSource
from torchpipe_py.tools.compare_models.run import Comparison, compare
from torchpipe_py.tools.compare_models.sequence import ConfidenceSequence
from torchpipe_py.tools.compare_models.tolerance import Tolerance, Verdict
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.candidates import Candidate


def least_pictures(tolerance: Tolerance) -> int:
    """How many pictures show that a tolerance is kept if no result differs."""
    sequence = ConfidenceSequence()
    sequence.add([0.0])
    return max(sequence.values_needed(limit.allowed) or 1 for limit in tolerance.limits)


@dataclass(frozen=True)
class Halves:
    """The pictures of a folder in a random order, the same each time: one half to choose by, one to certify with."""

    img_dir: str
    choosing: Sequence[Path]
    certifying: Sequence[Path]

    @classmethod
    def of(cls, img_dir: str, tolerance: Tolerance) -> Halves:
        """Raises ``ToolError`` if the pictures are too few for the tolerance."""
        paths = Pictures(img_dir).shuffled()
        needed = 2 * least_pictures(tolerance)
        if len(paths) < needed:
            why = f"one half chooses, the other certifies, and both need {needed} even if no result differs"
            found = f"{counted(len(paths), 'picture')}, too few to show {tolerance}"
            raise ToolError(f"--img_dir {img_dir}: {found}: {why}; add pictures, or allow more")
        half = len(paths) // 2
        return cls(img_dir, paths[:half], paths[half:])


class Losses:
    """Compares candidates with the file on ``paths``; its results are computed once, and kept until ``close``.

    Those that every candidate needs are computed now, within ``seconds``. Raises ``ToolError`` if the tolerance does
    not fit the results.
    """

    def __init__(self, file: Tables, tolerance: Tolerance, img_dir: str, paths: Sequence[Path], seconds: float) -> None:
        self._tolerance, self._pictures, self._stack = tolerance, Pictures(img_dir, paths), ExitStack()
        try:
            self._file = Recorded(ResultSource(file.source, file), self._stack)
            compare(self._file, self._file, self._pictures, tolerance, until=monotonic() + seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def of(self, candidate: Candidate, seconds: float) -> Comparison:
        """How far results differ, as soon as the tolerance is decided, or after so many seconds.

        Raises ``TorchpipeError`` if the candidate cannot run.
        """
        source = ResultSource(candidate.shape, candidate.config)
        return compare(self._file, source, self._pictures, self._tolerance, until=monotonic() + seconds)


def is_within(comparison: Comparison) -> bool:
    """Whether the tolerance is shown to be kept; what is undecided is not."""
    return comparison.verdict is Verdict.WITHIN

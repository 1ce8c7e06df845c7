"""Chooses changes of pixels and precision: measures the loss of each, the gain of those allowed, and combines them."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchpipe_py.errors import TorchpipeError, first_line
from torchpipe_py.plan.build import NodePlan
from torchpipe_py.tools.compare_models.report import answer
from torchpipe_py.tools.compare_models.run import Comparison
from torchpipe_py.tools.compile.losses import Losses, is_within
from torchpipe_py.tools.options import CALIBRATE
from torchpipe_py.tools.parity.command import tolerance_json
from torchpipe_py.tools.quantize.command import calibrated
from torchpipe_py.tools.quantize.target import TAKES_ONNX, find_target
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.candidates import Candidate, as_served, with_other_sharing
from torchpipe_py.tools.tune.engine import Bench
from torchpipe_py.tools.tune.pixels import (
    ALTERNATIVES,
    NO_GPU,
    Alternative,
    shapes_with,
    with_alternative,
    with_alternatives,
)
from torchpipe_py.tools.tune.search import MARGIN, NO_TIME, Budget, Trial

INT8 = ".int8.onnx"
"""Ending of the name of an int8 model."""

LEAST_PAIRS, PAIRS = 3, 8
"""Pairs of loops of each change beside the file: no more, once it surely gains or does not."""


class ChangeOutcome(enum.Enum):
    """The fate of a change."""

    USED = "used"
    NOT_USED = "allowed, not used"
    REFUSED = "refused"
    NOT_POSSIBLE = "not possible"


@dataclass(frozen=True)
class MeasuredChange:
    """A change as it is reported: ``gain`` and its ``interval`` are factors, ``ms`` are saved (see ``saved_ms``)."""

    name: str
    part: str
    outcome: ChangeOutcome
    why: str
    gain: float | None
    interval: tuple[float, float] | None
    ms: float | None
    ms_interval: tuple[float, float] | None
    loss: Comparison | None

    def to_json(self) -> dict[str, Any]:
        """For the JSON file and the certificate."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        loss = None if self.loss is None else tolerance_json(self.loss)
        return fields | {"outcome": self.outcome.value, "loss": loss}


@dataclass
class Change:
    """An alternative, and what was found of it alone: its loss and, if that is allowed, its gain."""

    alternative: Alternative
    candidate: Candidate | None = None
    outcome: ChangeOutcome = ChangeOutcome.NOT_POSSIBLE
    why: str = ""
    comparison: Comparison | None = None
    trial: Trial | None = None

    @property
    def name(self) -> str:
        return self.alternative.name

    @property
    def loss(self) -> float:
        """The sum over the limits of how far pictures are beyond them."""
        findings = () if self.comparison is None else self.comparison.findings
        return math.fsum(finding.found for finding in findings if not math.isnan(finding.found))

    def measured(self, bench: Bench) -> MeasuredChange:
        """What is known of it so far."""
        gain = interval = ms = ms_interval = None
        if (trial := self.trial) is not None and trial.gains:
            gain, ms = math.exp(trial.gain), saved_ms(trial, bench, trial.gain)
            if len(trial.gains) > 2:
                low, high = trial.interval
                interval = math.exp(low), math.exp(high)
                ms_interval = saved_ms(trial, bench, low), saved_ms(trial, bench, high)
        return MeasuredChange(
            self.name, self.alternative.part, self.outcome, self.why, gain, interval, ms, ms_interval, self.comparison
        )


def saved_ms(trial: Trial, bench: Bench, gain: float) -> float:
    """Milliseconds that a gain, a logarithm, saves: of a core for each request or, with a rate, of the p99."""
    cores = bench.known.cores if bench.goal.rate is None else 1
    own = 1000 * cores / statistics.median(trial.figures)
    return own * math.exp(trial.gain) * (1 - math.exp(-gain))


class Chooser:
    """The ``choose`` of a compilation: returns the shapes with the best allowed changes.

    ``folder`` keeps int8 models. ``changes`` has all that were offered, in the order in which their loss was measured,
    and ``used`` those that the shapes have.
    """

    def __init__(self, losses: Losses, img_dir: str, paths: Sequence[Path], folder: Path) -> None:
        self._losses, self._img_dir, self._paths, self._folder = losses, img_dir, paths, folder
        self.changes: list[Change] = []
        self.used: list[Change] = []

    def __call__(self, bench: Bench) -> Sequence[Candidate]:
        """Measure all changes, and return the shapes with those that are used."""
        bench.clock.show("losses")
        file = bench.shapes[0]
        self.changes += [self._offered(file, each, bench.service.has_gpu) for each in ALTERNATIVES]
        models = [(node, model) for node, plan in file.nodes.items() if (model := _onnx_model(plan))]
        possible = [change for change in self.changes if change.candidate is not None]
        for number, change in enumerate(possible):
            self._measure_loss(change, len(possible) - number + len(models), bench)
        for number, (node, model) in enumerate(models):  # NOTE: last, as it takes time to make an int8 model
            name = "int8" if len(models) == 1 else f"int8 of {node}"
            self.changes.append(change := self._in_int8(file, node, model, name, bench.clock))
            self._measure_loss(change, len(models) - number, bench)
        allowed = [change for change in self.changes if change.outcome is ChangeOutcome.NOT_USED]
        for number, change in enumerate(allowed):
            self._measure_gain(change, bench, 1 / (len(allowed) - number + 1))
            bench.clock.show("changes")
        self._combine(allowed, bench)
        return shapes_with(bench.shapes, [change.alternative for change in self.used]) if self.used else bench.shapes

    def with_fewer(self, best: Candidate, bench: Bench, why: str) -> Candidate | None:
        """The best candidate without the change that lost most, which is refused because of ``why``.

        ``None`` if it has no change.
        """
        if not self.used:
            return None
        used = [change.alternative for change in self.used]
        plain = next(
            shape for shape in bench.shapes if any(each.shape == best.shape for each in shapes_with([shape], used))
        )
        most = max(self.used, key=lambda change: change.loss)
        self.used.remove(most)
        most.outcome, most.why = ChangeOutcome.REFUSED, why
        fewer = with_alternatives(plain, [change.alternative for change in self.used])
        if bool(best.heads) != bool(fewer.heads):
            fewer = with_other_sharing(fewer) or fewer
        fewer = replace(fewer, workers=best.workers, engines=best.engines)
        for setting, value in best.settings:
            node, _, key = setting.rpartition(".")
            fewer = fewer.changed(node, key, value)
        return fewer

    def undo(self) -> None:
        """Use none of the changes: the file is as good without them."""
        for change in self.used:
            change.outcome, change.why = ChangeOutcome.NOT_USED, "the file is as good without it"
        self.used.clear()

    @staticmethod
    def _offered(file: Candidate, alternative: Alternative, has_gpu: bool) -> Change:
        """The change; without a candidate, it says why."""
        change = Change(alternative)
        try:
            if alternative.needs_gpu and not has_gpu:
                raise ToolError(NO_GPU)
            change.candidate = with_alternative(file, alternative)
        except TorchpipeError as error:
            change.why = first_line(error)
        return change

    def _in_int8(self, file: Candidate, node: str, model: str, name: str, clock: Budget) -> Change:
        """The change of a node to an int8 model, which is made for it in the folder."""
        path = self._folder / f"{node}{INT8}"
        alternative = Alternative(name, f"precision of {node}", {"model": str(path)}, where={"model": model})
        try:
            if clock.left("losses") <= 0:
                raise ToolError(NO_TIME)
            (folder := self._folder / f"{node}.folder").mkdir()
            target = find_target(file.config, node)
            quantiser, _ = calibrated(target, self._img_dir, self._paths[:CALIBRATE], folder)
            quantiser.write(path, fp32=target.fp32_layers)
        except TorchpipeError as error:
            return Change(alternative, why=first_line(error))
        return self._offered(file, alternative, has_gpu=True)

    def _measure_loss(self, change: Change, left: int, bench: Bench) -> None:
        """Measure the loss of a possible change, the first of so many that are ``left``."""
        if change.candidate is None:
            return
        # Twice a fair share of the time: what is refused early leaves its own to the others.
        seconds = min(1.0, 2 / (left + 1)) * bench.clock.left("losses")
        change.outcome = ChangeOutcome.REFUSED
        try:
            change.comparison = self._losses.of(change.candidate, seconds)
        except TorchpipeError as error:
            change.why = first_line(error)
            return
        finally:
            bench.clock.show("losses")
        if is_within(change.comparison):
            change.outcome = ChangeOutcome.NOT_USED
        else:
            change.why = answer(change.comparison).removeprefix("B is ")

    @staticmethod
    def _measure_gain(change: Change, bench: Bench, share: float) -> None:
        """Measure the change beside the file in a share of the time."""
        assert change.candidate is not None
        change.trial = _measured(change.candidate, bench.known.base, change.alternative.needs_gpu, bench, share)
        change.why = _why_not(change.trial, "")

    def _combine(self, allowed: Sequence[Change], bench: Bench) -> None:
        """Use one change after the other, the best first, if it surely gains and the tolerance is still kept."""
        best: Trial | None = None
        for change in sorted(_one_of_a_part(allowed), key=_gain, reverse=True):
            trial = change.trial if best is None else self._together(change, best.candidate, bench)
            if trial is not None:
                self.used.append(change)
                change.outcome, best = ChangeOutcome.USED, trial
            bench.clock.show("changes")

    def _together(self, change: Change, best: Candidate, bench: Bench) -> Trial | None:
        """A change with those that are used, beside these alone; ``None`` if it gains nothing or loses more."""
        others = " and ".join(each.name for each in self.used)
        alternatives = [each.alternative for each in (*self.used, change)]
        try:
            candidate = with_alternatives(bench.shapes[0], alternatives)
            trial = _measured(candidate, best, any(each.needs_gpu for each in alternatives), bench, 0.5)
            change.why = _why_not(trial, f" beside {others}")
            if not change.why:
                comparison = self._losses.of(candidate, 0.5 * bench.clock.left("processes"))
                if is_within(comparison):
                    return trial
                change.why = f"together with {others} {answer(comparison).removeprefix('B is ')}"
        except TorchpipeError as error:
            change.why = f"together with {others}: {first_line(error)}"
        return None


def _onnx_model(plan: NodePlan) -> str:
    """The path of the ONNX model of a node; empty if it has none."""
    return next((str(part.params["model"]) for part in plan.parts() if part.cls.__name__ in TAKES_ONNX), "")


def _one_of_a_part(allowed: Sequence[Change]) -> list[Change]:
    """Of the changes of each part that surely gain one: what loses more must surely gain more, too."""
    found = dict[str, Change]()
    for change in allowed:
        part = change.alternative.part
        rival = found.get(part)
        if change.why or change.trial is None:
            continue
        if rival is not None and rival.trial is not None and change.trial.gain <= rival.trial.interval[1]:
            change.why = f"{rival.name} gains as much"
            continue
        if rival is not None:
            rival.why = f"{change.name} gains more"
        found[part] = change
    return [*found.values()]


def _gain(change: Change) -> float:
    return -math.inf if change.trial is None else change.trial.gain


def _measured(candidate: Candidate, beside: Candidate, uses_gpu: bool, bench: Bench, share: float) -> Trial:
    """A candidate as it would be served, after pairs of loops beside another, in a share of the time."""
    later = (1 - share) * bench.clock.left("changes")
    trial = Trial(as_served(candidate, bench.known.cores, uses_gpu or bench.known.uses_gpu))
    trial.measure(bench.loops, beside, range(LEAST_PAIRS))
    while trial.gains and len(trial.gains) < PAIRS and bench.clock.left("changes") > later:
        low, high = trial.interval
        if low > 0 or high < MARGIN:
            break
        trial.measure(bench.loops, beside, [len(trial.gains)])
    return trial


def _why_not(trial: Trial, beside: str) -> str:
    """Why a measured candidate is not used; empty if it surely gains."""
    if not trial.gains:
        return trial.failed
    if trial.gain <= MARGIN:
        return f"gains nothing{beside}"
    return "" if trial.interval[0] > 0 else f"its gain{beside} is uncertain"

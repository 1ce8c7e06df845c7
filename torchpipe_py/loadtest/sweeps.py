"""Pure: the points of `--sweep`."""

from __future__ import annotations

from dataclasses import dataclass

from torchpipe_py.loadtest.errors import CannotRunError

VARIABLES = {"clients": "request_client", "rate": "rate"}
MOST_POINTS = 1000

_VALID = "clients=1,2,5 or rate=100:400:100 (start:stop:step, stop included)"


@dataclass(frozen=True)
class Sweep:
    """One run for each value of an option; `name` is what the command line calls it."""

    name: str
    values: list[float]

    @property
    def option(self) -> str:
        return VARIABLES[self.name]


def parse_sweep(text: str) -> Sweep:
    """`NAME=VALUES`; raises `CannotRunError`. Clients are whole numbers, from 1 to 10 000; rates are above 0."""
    name, _, values = text.partition("=")
    if name not in VARIABLES or not values:
        raise CannotRunError(f"--sweep {text}: valid are {_VALID}")
    try:
        points = [point for part in values.split(",") for point in _points(part)]
    except (ValueError, OverflowError):
        raise CannotRunError(f"--sweep {text}: valid are {_VALID}") from None
    if not points or len(points) > MOST_POINTS:
        raise CannotRunError(f"--sweep {text}: {len(points) or 'no'} points; 1 to {MOST_POINTS} are valid")
    return Sweep(name, [_checked(name, point) for point in points])


def _points(part: str) -> list[float]:
    if ":" not in part:
        return [float(part)]
    start, stop, step = map(float, part.split(":"))
    if step <= 0 or stop < start:
        raise ValueError(part)
    count = int((stop - start) / step + 1e-9) + 1
    if count > MOST_POINTS:
        raise OverflowError(part)
    return [start + index * step for index in range(count)]


def _checked(name: str, point: float) -> float:
    if name == "rate":
        if not 0 < point < 1e6:
            raise CannotRunError(f"--sweep rate={point:g}: must be more than 0 and less than a million")
        return point
    if point != int(point) or not 1 <= point <= 10_000:
        raise CannotRunError(f"--sweep clients={point:g}: must be a whole number between 1 and 10000")
    return int(point)

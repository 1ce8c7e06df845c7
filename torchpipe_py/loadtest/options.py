"""The options that every load test has, without anything that runs one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_options(parser: argparse.ArgumentParser, clients: str) -> None:
    """Declares them; ``clients`` says what the clients are: client processes, client threads."""
    option, default = parser.add_argument, "; default %(default)s"
    option("--img_dir", type=Path, required=True, metavar="DIR", help="images are searched in it and below")
    option(
        "--request_client",
        type=at_least(1, 10_000),
        default=20,
        metavar="N",
        help=clients + default,
    )
    option("--request_batch", type=at_least(1), default=1, metavar="N", help="images per call" + default)
    option("--total_number", type=at_least(1), default=10_000, metavar="N", help="images to send in all" + default)
    option("--warmup", type=at_least(0), metavar="N", help="calls per client, not counted; default 5 %%, 1 to 50")
    option("--labels_from_names", action="store_true", help="circle_03.jpg should get the label circle")
    option("--json", type=Path, metavar="FILE", help="write the whole report to FILE")
    option("--no-progress", dest="progress", action="store_false", help="no progress bar")


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an integer option."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            between = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{number}: must be {between}")
        return number

    parse.__name__ = "integer"
    return parse

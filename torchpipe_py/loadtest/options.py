"""The options of ``torchpipe bench`` and ``torchpipe load``, without anything that runs one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.loadtest.errors import CannotRunError

DEFAULT_TOTAL = 10_000
MOST_IMAGES = 10**9
ARRIVALS = ("closed", "constant", "poisson", "replay")
DEFAULT_PROBE_S = 10.0
_CLIENTS, _IMAGES = "clients are --request_client here", "images are counted by --total_number here"
_SERVER = "the server is --host and --port here, and --transport http for HTTP"
ELSEWHERE = {
    "--concurrency": _CLIENTS,
    "--connections": _CLIENTS,
    "--requests": _IMAGES,
    "--url": _SERVER,
    "-c": _CLIENTS,
    "-n": _IMAGES,
    "-u": _SERVER,
}
"""Flags of other load testers, and what there is here in their place."""


_STATUSES = """\
exit status: 0 every image has a result, the run was stable and the SLO, if there is one, was met; 1 it could not run;
2 some images have no result, or an open loop was unstable (or the arguments are wrong); 3 the SLO was missed, or
--search found no rate that meets it; 130 interrupted. A sweep has the status of its worst run, 2 before 3 before 0;
that of what stopped it, if something did."""


def add_options(parser: argparse.ArgumentParser, clients: str) -> None:
    """Declares those of both; ``clients`` says what the clients are: client processes, client threads."""
    option, default = parser.add_argument, "; default %(default)s"
    option("--img_dir", type=Path, required=True, metavar="DIR", help="images are searched in it and below")
    option(
        "--request_client",
        type=at_least(1, 10_000),
        default=20,
        metavar="N",
        help=clients + default,
    )
    option("--request_batch", type=at_least(1, 10_000), default=1, metavar="N", help="images per call" + default)
    option(
        "--total_number",
        type=at_least(1, MOST_IMAGES),
        default=DEFAULT_TOTAL,
        metavar="N",
        help="images to send in all" + default,
    )
    option(
        "--warmup",
        type=at_least(0, MOST_IMAGES),
        metavar="N",
        help="calls per client, not counted; default 5 %%, 1 to 50",
    )
    option(
        "--labels_from_names",
        action="store_true",
        help="count right answers: the label of circle/03.jpg and of circle_03.jpg is circle",
    )
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


# --- torchpipe load


def parse_arguments(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """The command line, settings that follow from others filled in; wrong ones end the process with status 2.

    Raises `CannotRunError` for options that contradict each other.
    """
    description = f"Load tester of the inference service. `{program} compare A.json B.json` compares two reports."
    parser = ArgumentParser(prog=program, description=description, epilog=_STATUSES, elsewhere=ELSEWHERE)
    add_options(parser, clients="client processes")
    option, default = parser.add_argument, "; default %(default)s"
    option("--host", default="127.0.0.1", help="where the service is" + default)
    option("--port", type=at_least(1, 65535), default=8888, metavar="PORT", help="that takes images" + default)
    option("--transport", choices=("buffered", "framed", "http"), default="buffered", help="two of Thrift, or HTTP")
    option("--path", metavar="PATH", help="where images are POSTed over HTTP; default /infer")
    limit = "seconds for a call, and for a connection"
    option("--timeout", type=above_zero("seconds"), default=10.0, metavar="S", help=limit + default)
    option(
        "--server_pid",
        type=at_least(1),
        metavar="PID",
        help="whose CPU use is reported; default: who listens on the port here",
    )
    option(
        "--http-port",
        type=at_least(1, 65535),
        metavar="PORT",
        help="the service's own --http-port: its nodes, and the hand-over to its engine processes, are reported",
    )
    option("--csv", type=Path, metavar="FILE", help="write a line for each run to FILE")
    option("--html", type=Path, metavar="FILE", help="write a page with plots, which needs nothing but itself, to FILE")
    option = parser.add_argument_group("when calls are sent").add_argument
    option(
        "--rate",
        type=above_zero("images per second"),
        metavar="R",
        help="images per second of all clients together, whatever the server answers: an open loop; with "
        "--request_batch B these are R/B calls per second. Rescales a --replay",
    )
    option("--arrivals", choices=ARRIVALS, help="default: closed; with --rate constant, with --replay replay")
    option("--replay", type=Path, metavar="FILE", help="send times in seconds since the start, one a line")
    option("--replay_column", metavar="NAME", help="--replay is a CSV file, and this its column of times")
    option("--seed", type=int, default=0, help="of Poisson arrivals; default %(default)s")
    option(
        "--duration",
        type=above_zero("seconds"),
        metavar="S",
        help="seconds to send for, in place of --total_number; of --search for each probe, default 10",
    )
    option = parser.add_argument_group("judgement and several runs").add_argument
    limit = "99 %% of the calls must be answered within MS, from when they were due"
    option("--slo-p99", dest="slo_p99", type=above_zero("ms"), metavar="MS", help=limit)
    option("--search", action="store_true", help="find the highest rate with --slo-p99 met, stable, no errors")
    option(
        "--sweep",
        metavar="WHAT=VALUES",
        help="a run for each value: clients=1,2,5 or rate=100:400:100 (start:stop:step, stop included)",
    )
    return complete(parser.parse_args(arguments, argparse.Namespace(total_number=None)))


def above_zero(what: str) -> Callable[[str], float]:
    """The type of a number of ``what``."""

    def parse(text: str) -> float:
        number = float(text)
        if not 0 < number < 1e6:
            raise argparse.ArgumentTypeError(f"{text}: must be more than 0 {what}, and less than a million")
        return number

    parse.__name__ = "number"
    return parse


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Fills in what follows from other options; raises `CannotRunError` for a contradiction."""
    for is_wrong, why in _contradictions(options):
        if is_wrong:
            raise CannotRunError(why)
    sweeps_rates = options.sweep is not None and options.sweep.startswith("rate=")
    if options.path is None:
        options.path = "/infer"
    if options.arrivals is None:
        paced = options.rate is not None or options.search or sweeps_rates
        options.arrivals = "replay" if options.replay is not None else "constant" if paced else "closed"
    if options.search and options.duration is None:
        options.duration = DEFAULT_PROBE_S
    if options.total_number is None and options.duration is None and options.arrivals != "replay":
        options.total_number = DEFAULT_TOTAL
    return options


def _contradictions(options: argparse.Namespace) -> list[tuple[bool, str]]:
    is_http = options.transport == "http"
    paced, arrivals = options.rate is not None, options.arrivals
    sweeps_rates = options.sweep is not None and options.sweep.startswith("rate=")
    several = options.search or sweeps_rates
    return [
        (is_http and options.request_batch > 1, "--request_batch: over HTTP a request has one image"),
        (options.path is not None and not is_http, "--path: is for --transport http"),
        (
            options.replay is not None and arrivals not in (None, "replay"),
            f"--replay: does not go with --arrivals {arrivals}",
        ),
        (paced and arrivals == "closed", "--rate: a closed loop has no rate; --arrivals constant or poisson"),
        (arrivals in ("constant", "poisson") and not (paced or several), f"--arrivals {arrivals}: needs a --rate"),
        (arrivals == "replay" and options.replay is None, "--arrivals replay: needs a --replay FILE"),
        (options.replay_column is not None and options.replay is None, "--replay_column: needs a --replay FILE"),
        (
            options.total_number is not None and options.duration is not None,
            "--duration: takes the place of --total_number; give one of them",
        ),
        (options.search and options.slo_p99 is None, "--search: needs the --slo-p99 MS that shall hold"),
        (options.search and options.sweep is not None, "--search: does not go with --sweep; give one of them"),
        (options.search and options.total_number is not None, "--search: its probes take a --duration"),
        (several and paced, "--rate: the rate is what --search and --sweep rate= look for; leave it out"),
        (
            several and (options.replay is not None or arrivals in ("closed", "replay")),
            "--search and --sweep rate=: need --arrivals constant or poisson",
        ),
    ]

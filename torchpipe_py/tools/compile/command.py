"""``torchpipe compile``, and the same from Python: choose, tune, certify, write."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchpipe_py import certificate
from torchpipe_py.errors import without_warnings
from torchpipe_py.files import output_problem, replace_file
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.plan.files import file_hash
from torchpipe_py.registry import import_code
from torchpipe_py.tools.compare_models.report import answer
from torchpipe_py.tools.compare_models.run import Comparison
from torchpipe_py.tools.compare_models.tolerance import Tolerance, number_text, read_tolerance
from torchpipe_py.tools.compile import report as text
from torchpipe_py.tools.compile.changes import INT8, Chooser
from torchpipe_py.tools.compile.losses import Halves, Losses, is_within, least_pictures
from torchpipe_py.tools.compile.report import CompileReport
from torchpipe_py.tools.load.judge import EXIT_INTERRUPTED
from torchpipe_py.tools.report import ToolError, check_outputs, json_text, progress_bar, replace_text, write_json
from torchpipe_py.tools.tune.candidates import Candidate, copied
from torchpipe_py.tools.tune.command import check_out, serve_command, wanted_of
from torchpipe_py.tools.tune.engine import MOST_IMAGES, Bench, Hooks, Wanted, measure, require
from torchpipe_py.tools.tune.report import Report, tuned_text
from torchpipe_py.tools.tune.search import Progress, Trial
from torchpipe_py.tools.tune.verify import TuningVerdict, verify

DEFAULT_BUDGET_S = 240.0

HASH_DIGITS = 12
"""Digits of its SHA-256 in the name of an int8 model."""

ENDS = {"losses": 0.36, "changes": 0.54, "processes": 0.61, "settings": 0.66, "verify": 1.0}
"""Share of the time, without that for the profile and for the certificate, at which each phase ends."""

CERTIFY_TIMES, CERTIFY_S = 2.5, 3.0
"""The certificate takes so many times what the file takes for the least number of pictures, and so many seconds."""

LEAST_TO_CERTIFY, MOST_TO_CERTIFY = 0.15, 0.4
"""Share of the budget that it may take in any case, as a loss takes more pictures to bound; and the most."""


def compile_config(
    config: str | os.PathLike[str],
    img_dir: str | os.PathLike[str],
    tolerance: str | Tolerance,
    out: str | os.PathLike[str],
    *,
    slo_p99: float | None = None,
    rate: float | None = None,
    cores: int | None = None,
    gpu_memory: int | None = None,
    budget: float = DEFAULT_BUDGET_S,
    imports: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find what serves a file fastest within a tolerance, and certify it; returns the report that ``--json`` writes.

    ``tolerance`` is that of ``torchpipe parity``, as ``"top1=0.999, score=0.01"``. One half of the pictures in
    ``img_dir`` chooses, the other certifies. The other arguments are those of ``tune``. If ``report["certified"]``, the
    file ``out`` is written, an int8 model beside it if it has one, and its certificate, as JSON and as a page; their
    paths are ``report["written"]``.
    Raises ``ToolError``, ``TeamDied`` and ``ConfigError``, which explain in one line why it cannot be compiled; of a
    wrong argument, ``ToolError`` says the name and what is expected.
    """
    for name, value in {"config": config, "img_dir": img_dir, "out": out}.items():
        require(name, value, isinstance(value, (str, os.PathLike)), "a path")
    require("tolerance", tolerance, isinstance(tolerance, (str, Tolerance)), "limits, as 'top1=0.999, score=0.01'")
    try:
        limits = read_tolerance(tolerance) if isinstance(tolerance, str) else tolerance
    except ValueError as error:
        raise ToolError(f"tolerance: {error}") from error
    wanted = Wanted(slo_p99, rate, cores, gpu_memory, budget, None, imports, progress)
    return compiled(os.fspath(config), os.fspath(img_dir), limits, Path(out), wanted).to_json()


def compiled(path: str, img_dir: str, tolerance: Tolerance, out: Path, wanted: Wanted) -> CompileReport:
    """``compile_config``, but it returns the report as it is."""
    wanted.usable_cores()  # NOTE: wrong arguments are reported before files that cannot be read
    for name in wanted.imports:
        import_code(name)
    check_out(Path(path), out, {})  # NOTE: before long work
    for file in _certificate_of(out):
        if problem := output_problem(file, replaces=True):
            raise ToolError(f"--out {out}: {file} cannot be written: {problem}")
    with _reading():
        sha256 = file_hash(path) if os.path.isfile(path) else ""  # NOTE: before anything else reads it
    tables, halves = Tables.of(path), Halves.of(img_dir, tolerance)
    with without_warnings():
        plan = plan_pipeline(tables)
    with _reading():
        reference = certificate.described(plan, path, sha256, wanted.imports)
    search = Report(path, wanted.slo_p99, wanted.rate, slo_given=wanted.slo_p99 is not None, img_dir=img_dir)
    report = CompileReport(search, tolerance, halves, gpu_names())
    with TemporaryDirectory(prefix="torchpipe-compile-") as folder:
        run = _Compilation(tables, Path(folder), report)
        measure(tables, run.images(), wanted, search, Hooks(run.choose, run.confirm, shares_more=True))
        if search.verdict not in ("better", "as good"):
            report.certified = False
        if report.certified:
            with _reading():
                found = certificate.described(plan, path, file_hash(path), wanted.imports)
            if found != reference:
                raise ToolError(f"{path}: it, or a file that it names, changed meanwhile; compile it again")
            report.reference, report.pictures = reference, pictures_of(halves)
            _write(report, search.tuned or tables, out, wanted, Path(folder))
    return report


@contextmanager
def _reading() -> Iterator[None]:
    """A context in which a file that cannot be read is a ``ToolError``."""
    try:
        yield
    except OSError as error:
        raise ToolError(f"{error.filename}: cannot be read: {error.strerror}") from error


class _Compilation:
    """The hooks of one compilation in the tuner's engine; ``report`` gets what they find."""

    def __init__(self, tables: Tables, folder: Path, report: CompileReport) -> None:
        self._tables, self._folder, self._report, self._halves = tables, folder, report, report.halves
        self._chooser: Chooser | None = None
        self._seconds_to_certify = 0.0

    def images(self) -> dict[str, bytes]:
        """The pictures that are measured with."""
        paths = sorted(self._halves.choosing)
        files = [Path(self._halves.img_dir, path) for path in paths[:: -(-len(paths) // MOST_IMAGES)]]
        with _reading():
            return {os.fspath(file): file.read_bytes() for file in files}

    def choose(self, bench: Bench) -> Sequence[Candidate]:
        """The shapes with the changes that gain most within the tolerance."""
        self._share_out(bench)
        halves = self._halves
        with closing(self._losses(halves.choosing, bench.clock.left("losses") / 2)) as losses:
            chooser = Chooser(losses, halves.img_dir, halves.choosing, self._folder)
            try:
                shapes = chooser(bench)
            finally:  # also after Ctrl-C
                self._report.changes = [change.measured(bench) for change in chooser.changes]
        self._chooser = chooser
        return shapes

    def confirm(self, bench: Bench, verdict: TuningVerdict) -> TuningVerdict:
        """The verdict, if the other half of the pictures shows that the best file keeps the tolerance.

        Else that of the file without the change that lost most. This is done only once, so that a file beyond the
        tolerance is certified in at most 5 % of all cases.
        """
        if verdict.kind not in ("better", "as good"):
            return verdict
        assert self._chooser is not None
        bench.clock.show("certify")
        # NOTE: also if the other phases took longer than they should: without a certificate all was in vain.
        seconds = max(self._seconds_to_certify, bench.clock.left("certify"))
        with closing(self._losses(self._halves.certifying, seconds)) as losses:
            comparison = losses.of(verdict.best.candidate, seconds)
            if not is_within(comparison) and verdict.kind == "better":
                fewer = self._chooser.with_fewer(verdict.best.candidate, bench, _on_others(comparison))
                if fewer is not None:
                    bench.trials.append(trial := Trial(fewer))
                    trial.measure(bench.loops, bench.known.base, range(2))
                    verdict = verify(bench.trials[0], [trial], bench.loops, bench.goal, bench.clock)
                    comparison = losses.of(verdict.best.candidate, seconds)
        if verdict.kind == "as good":
            self._chooser.undo()
        self._report.changes = [change.measured(bench) for change in self._chooser.changes]
        self._report.loss, self._report.choices = comparison, dict(comparison.choices)
        self._report.certified = is_within(comparison)
        if not self._report.certified:
            return TuningVerdict("cannot tell", bench.trials[0], why=f"the best file is {_on_others(comparison)}")
        return verdict

    def _losses(self, paths: Sequence[Path], seconds: float) -> Losses:
        return Losses(self._tables, self._report.tolerance, self._halves.img_dir, paths, seconds)

    def _share_out(self, bench: Bench) -> None:
        """Set the ends of the phases. ``ToolError`` if there is too little time to certify anything."""
        least, budget = least_pictures(self._report.tolerance), bench.clock.seconds
        seconds, spent = CERTIFY_TIMES * least / bench.known.answers + CERTIFY_S, bench.clock.spent
        if seconds > MOST_TO_CERTIFY * (1 - spent) * budget:
            enough = math.ceil(spent * budget + seconds / MOST_TO_CERTIFY)
            why = f"{least} pictures, the least for {self._report.tolerance}, take about {seconds:.0f} s to certify"
            raise ToolError(f"--budget {budget:g}: {why}; --budget {enough} is enough")
        self._seconds_to_certify = seconds = max(seconds, LEAST_TO_CERTIFY * budget)
        # NOTE: the profile takes long where an engine is built for it.
        rest = max(0.0, 1 - seconds / budget - spent)
        ends = {name: spent + end * rest for name, end in ENDS.items()}
        bench.clock.ends = {"profile": spent, **ends, "certify": 1.0}


def _on_others(comparison: Comparison) -> str:
    """What the pictures that chose nothing show about a file."""
    return f"{answer(comparison).removeprefix('B is ')}, on the other half of the pictures"


def pictures_of(halves: Halves) -> dict[str, Any]:
    """How many pictures there are, and the hash of their names and contents."""
    found = hashlib.sha256()
    for path in sorted([*halves.choosing, *halves.certifying]):
        found.update(f"{file_hash(Path(halves.img_dir, path))}  {path.as_posix()}\n".encode())
    counts = {"choosing": len(halves.choosing), "certifying": len(halves.certifying)}
    return {"folder": halves.img_dir, "count": sum(counts.values()), **counts, "sha256": found.hexdigest()}


def _certificate_of(out: Path) -> tuple[Path, Path]:
    """The paths of the certificate of a file, as JSON and as a page."""
    proof = Path(f"{out.with_suffix('')}{certificate.ENDING}")
    return proof, proof.with_suffix(".html")


def gpu_names() -> list[str]:
    """The names of the CUDA devices."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


# --- files


def _write(report: CompileReport, tables: Mapping[str, Any], out: Path, wanted: Wanted, folder: Path) -> None:
    """Write the compiled file with its int8 models, the certificate and its page; names them in ``report``.

    The models are those that this run has made in ``folder``.

    The TOML file is written last. If writing stops before, the TOML file is missing or not the certified one.
    """
    stem, written = out.with_suffix(""), copied(tables, os.fspath(out))
    try:
        for name, table in written.items():
            for key, value in table.items():
                if isinstance(value, str) and Path(value).parent == folder:
                    # NOTE: another model has another name: a service that runs may use the one of an earlier file.
                    found = file_hash(value)
                    model = Path(f"{stem}.{name}.{found[:HASH_DIGITS]}{INT8}")
                    if not model.is_file() or file_hash(model) != found:
                        replace_file(model, Path(value).read_bytes())
                    table[key] = model.name  # beside the TOML file
                    report.written.append(os.fspath(model))
    except OSError as error:
        raise ToolError(f"{error.filename}: cannot be written: {error.strerror}") from error
    proof, page = _certificate_of(out)
    serve = serve_command(out, report.search, wanted.imports)
    report.search.command = f"{serve} --require-certificate {shlex.quote(str(proof))}"
    toml = tuned_text(report.search, written, "compiled by torchpipe compile")
    sha256 = hashlib.sha256(toml.encode("utf-8", "backslashreplace")).hexdigest()
    content = text.new_certificate(report, written, sha256, _commands(report, out, wanted), wanted.imports)
    certified = {each["sha256"] for each in content["compiled"]["files"]}
    for path in report.written:
        if file_hash(path) not in certified:
            found = os.path.basename(path)
            raise ToolError(f"{found}: a file of this name in the working directory comes before {path}: remove it")
    replace_text(proof, json_text(content))
    replace_text(page, text.page(content, report))
    replace_text(out, toml)
    report.written += [os.fspath(out), os.fspath(proof), os.fspath(page)]


def _commands(report: CompileReport, out: Path, wanted: Wanted) -> dict[str, str]:
    """The commands that check the figures of the loss, renew the certificate, and serve the file."""
    pictures = ["--img_dir", report.halves.img_dir, "--tolerance", str(report.tolerance)]
    imports = [part for name in wanted.imports for part in ("--import", name)]
    goal = [] if wanted.slo_p99 is None else ["--slo-p99", number_text(1000 * wanted.slo_p99)]
    goal += [] if wanted.rate is None else ["--rate", number_text(wanted.rate)]
    goal += [] if wanted.cores is None else ["--cores", str(wanted.cores)]
    goal += [] if wanted.gpu_memory is None else ["--gpu-memory", str(wanted.gpu_memory)]
    goal += [] if wanted.budget == DEFAULT_BUDGET_S else ["--budget", number_text(wanted.budget)]
    renew = ["torchpipe", "compile", report.search.config, *pictures, "--out", os.fspath(out), *goal, *imports]
    check = ["torchpipe", "parity", report.search.config, os.fspath(out), *pictures, *imports]
    return {"check": shlex.join(check), "renew": shlex.join(renew), "serve": report.search.command}


# --- the command


def run_compile(args: argparse.Namespace) -> int:
    """0 once a file is certified, 1 if none is, 130 after Ctrl-C. Raises ``TorchpipeError`` if it cannot compile."""
    path = Path(args.config)
    out = args.out or path.with_name(f"{path.stem}.compiled.toml")
    proof, page = _certificate_of(out)
    files = {"json": args.json, "out, its certificate": proof, "out, its page": page}
    check_outputs({"out": out, **files}, [path])
    with progress_bar(args.progress, has_lines=True) as show:
        wanted = wanted_of(args, lambda phase, share, left: show(phase, share, f"about {left:.0f} s left"))
        report = compiled(args.config, os.fspath(args.img_dir), args.tolerance, out, wanted)
    print("\n".join([*text.lines_of(report), text.verdict_line(report)]), flush=True)
    if report.certified:
        print("\n".join([*report.written, report.search.command]), flush=True)
    if args.json is not None:
        write_json(args.json, report.to_json())
    return EXIT_INTERRUPTED if report.search.verdict == "interrupted" else 0 if report.certified else 1

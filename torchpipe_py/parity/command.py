"""``torchpipe parity``: options in, a report out, an exit status that a CI job can stand on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torchpipe_py.errors import counted
from torchpipe_py.parity.compare import agreement, judge
from torchpipe_py.parity.page import html_report
from torchpipe_py.parity.record import Parity, ParityError
from torchpipe_py.parity.report import text_report, to_json
from torchpipe_py.parity.run import Settings, compare_configs


def run_parity(args: argparse.Namespace) -> int:
    """0 if all is well, 1 for a missed bar or nothing to compare; ``TorchpipeError`` for what cannot be run."""
    settings = Settings(args.a, args.b, args.img_dir, args.model, args.limit, args.worst, args.html is not None)
    parity = compare_configs(settings)
    parity.bars = judge(parity, args.max_mean, args.min_agreement, args.max_drop)
    print("\n".join(text_report(parity)))
    if args.html is not None:
        _write(args.html, html_report(parity))
    if args.json is not None:
        _write(args.json, json.dumps(to_json(parity), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    problem = _problem(parity)
    if problem:
        print(f"torchpipe: {problem}", file=sys.stderr)
    return 0 if not problem and all(bar.ok for bar in parity.bars) else 1


def _problem(parity: Parity) -> str:
    """Why this report says nothing; empty where it does."""
    if not parity.compared:
        listed = f"{counted(len(parity.refused), 'image')} refused, {len(parity.shapes_differ)} of different shapes"
        return f"nothing could be compared: {listed}"
    if parity.model is not None and agreement(parity.compared) is None:
        return f"{parity.model}: no image has a class on both sides"
    return ""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a path may be no UTF-8
    except OSError as error:
        raise ParityError(f"{path}: cannot be written: {error.strerror}") from None

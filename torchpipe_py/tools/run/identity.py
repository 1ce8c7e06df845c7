"""The identity of a run: configuration, files, code and arguments, which must be the same to resume it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.plan.files import file_hash, files_of
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.sources import is_url


def identity_of(args: argparse.Namespace, tables: Tables, plan: Pipeline, kind: str) -> dict[str, dict[str, Any]]:
    """All that must be the same to resume a run: hashes of the configuration, its files and code, and arguments."""
    is_anywhere = os.path.isabs(args.source) or is_url(args.source)
    return {
        "configuration": {args.config: _digest(json.dumps(tables, default=str, sort_keys=True).encode())},
        "file": {path: _digest_of_file(path) for path in sorted(_files(plan, args.imports or ()))},
        "argument": {
            "SOURCE": args.source,
            "working directory": "" if is_anywhere else os.getcwd(),
            "--out": kind,
            "--by": args.by,
            "--ordered": args.ordered,
            "--node_name": args.node_name,
            "--outputs": list(args.outputs),
            "--param": dict(args.param or ()),
            "--import": list(args.imports or ()),
        },
    }


def _files(plan: Pipeline, imports: Iterable[str]) -> set[str]:
    """Models with their weights, labels, keys and code."""
    named = [path for each in files_of(plan) for path in (each.path, *each.beside())]
    code = [name for name in imports if name.endswith(".py")]
    return {os.path.abspath(path) for path in (*filter(os.path.isfile, named), *code)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_file(path: str) -> str:
    try:
        return file_hash(path)
    except OSError as error:
        raise ToolError(f"{path}: cannot be read: {error.strerror}") from error

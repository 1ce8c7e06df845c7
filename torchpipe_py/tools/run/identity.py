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
    """Models, labels and code: the files that parameters name, and those beside them that begin with their names.

    Caches, which backends write, are not among them.
    """
    files = {os.path.abspath(name) for name in imports if name.endswith(".py")}
    for node in plan.plans.values():
        for part in (part for backend in node.backends for part in backend.parts()):
            params = part.cls.parameters()
            kept = {os.path.abspath(str(part.params.get(name))) for name, param in params.items() if param.kept}
            for name, param in params.items():
                if param.file and isinstance(path := part.params.get(name), str) and os.path.isfile(path):
                    folder, start = os.path.split(os.path.abspath(path))
                    beside = (os.path.join(folder, each) for each in os.listdir(folder) if each.startswith(start))
                    files |= {each for each in beside if os.path.isfile(each)} - kept
    return files


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_file(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
    except OSError as error:
        raise ToolError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()

"""Certificates that are made by hand, of files that need no compilation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.certificate import DIGEST, SCHEMA, described, digest, versions
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import parse_toml
from torchpipe_py.plan.files import file_hash


def certify(config: Path, code: Sequence[str] = (), choices: Mapping[str, Any] | None = None) -> Path:
    """Write the certificate of a TOML file beside it."""
    path, name = config.with_suffix(".certificate.json"), str(config)
    content = {
        "schema": SCHEMA,
        "commands": {"renew": "torchpipe compile own.toml"},
        "versions": versions(parse_toml(name)),
        "compiled": described(plan_pipeline(name), name, file_hash(name), code) | {"choices": choices or {}},
    }
    path.write_text(json.dumps({**content, DIGEST: digest(content)}), encoding="utf-8")
    return path

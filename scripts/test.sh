#!/usr/bin/env bash
# Everything that must hold: lint, format, types, tests. Makes .venv first where there is none.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"

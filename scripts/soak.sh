#!/usr/bin/env bash
# The reliability table in its long form, about an hour: bash scripts/soak.sh [NAME] [--minutes 30 ...]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
[[ $# -gt 0 ]] || set -- all
"$bin/python" scripts/soak.py "$@"

#!/usr/bin/env bash
# The tests that need a CUDA device. PYTHON names the interpreter (default: .venv's, else python3); further arguments
# go to pytest. Without a device every test is skipped, with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
[[ -n $python ]] || { [[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3; }
PYTHONPATH=".:server${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest "${@:-tests/gpu}"

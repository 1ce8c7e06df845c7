#!/usr/bin/env bash
# Everything that must hold: lint, format, types, tests. Makes .venv first (VENV names another) where there is none.
#   bash scripts/test.sh [pytest arguments]
# Without arguments all tests run, in six processes and beside mypy: most of the time they wait. With a folder or -k add
# -n 6 --dist worksteal for the same.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # else some hundred processes would each compile the package
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
echo ruff
"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
if [[ $# -gt 0 ]]; then
  echo mypy
  "$bin/mypy"
  echo tests
  exec "$bin/python" -m pytest "$@"
fi

echo 'mypy; tests, a few minutes'
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$bin/mypy" > "$types" 2>&1 & checked=$!
status=0
"$bin/python" -m pytest -p no:cacheprovider -n 6 --dist worksteal --durations=10 tests || status=$?
wait $checked || status=$?
cat "$types"
exit $status

#!/usr/bin/env bash
# What must hold: lint, format, types, tests. Makes .venv first (VENV names another) where there is none.
#   bash scripts/test.sh [slow] [pytest arguments]
# Without arguments all tests run but the slow ones, in four processes and beside mypy.
# `slow` runs those alone: examples of the pages, a service under faults, whole trainings and runs of tools, a compiler.
# With a folder or -k add -n 4 --dist worksteal for the same.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # else some hundred processes would each compile the package
bash scripts/setup.sh
bin=${VENV:-.venv}/bin
run_tests() { # in several processes; the arguments go to pytest
  "$bin/python" -m pytest -p no:cacheprovider -n 4 --dist worksteal --durations=10 "$@"
}
if [[ ${1:-} == slow ]]; then
  mapfile -t files < <(grep -rl --include='test_*.py' 'pytest.mark.slow' tests)
  run_tests -m slow "${@:2}" "${files[@]}"
  exit
fi

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
# Else each of the processes would compile all test modules at the first run.
[[ -d tests/__pycache__ ]] || "$bin/python" -m pytest -p no:cacheprovider --collect-only tests > /dev/null || true
run_tests -m 'not slow' tests || status=$?
wait $checked || status=$?
cat "$types"
exit $status

#!/usr/bin/env bash
# Everything that must hold: lint, format, types, tests. Makes .venv first where there is none.
#   bash scripts/test.sh [pytest arguments]
# Without arguments all tests run, in three parts side by side: most of the time they wait.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
if [[ $# -gt 0 ]]; then exec .venv/bin/python -m pytest "$@"; fi

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
chaos=(tests/server/test_chaos.py tests/server/test_chaos_judges.py tests/server/test_supervision.py)
run() { .venv/bin/python -m pytest -p no:cacheprovider "${@:2}" > "$logs/$1" 2>&1; }
# NOTE: tests/test_process.py looks for shared memory that is left over, and training has some of its own.
run slow "${chaos[@]}" tests/training tests/test_process.py & first=$!
run server tests/server "${chaos[@]/#/--ignore=}" & second=$!
status=0
run rest tests --ignore=tests/server --ignore=tests/training --ignore=tests/test_process.py || status=$?
wait $first || status=$?
wait $second || status=$?
cat "$logs"/slow "$logs"/server "$logs"/rest
exit $status

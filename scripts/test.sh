#!/usr/bin/env bash
# Everything that must hold: lint, format, types, tests. Makes .venv first (VENV names another) where there is none.
#   bash scripts/test.sh [pytest arguments]
# Without arguments all tests run, in four parts side by side and beside mypy: most of the time they wait.
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

echo mypy
echo 'tests, some 6 minutes'
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() { "$bin/python" -m pytest -p no:cacheprovider "${@:2}" > "$logs/$1" 2>&1; }
supervision=tests/server/supervisor/test_supervision.py
pages=tests/test_docs.py
"$bin/mypy" > "$logs/types" 2>&1 & types=$!
run slow tests/chaos tests/training tests/scripts tests/fuzz $supervision & first=$!
run server tests/server --ignore=$supervision & second=$!
run pages $pages tests/test_working_directory.py tests/tools & third=$!
status=0
run rest tests --ignore=tests/{server,tools,chaos,training,scripts,fuzz} --ignore=$pages \
  --ignore=tests/test_working_directory.py || status=$?
wait $first || status=$?
wait $second || status=$?
wait $third || status=$?
wait $types || status=$?
cat "$logs"/{slow,server,pages,rest,types}
exit $status

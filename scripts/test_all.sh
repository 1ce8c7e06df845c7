#!/usr/bin/env bash
# Runs scripts/test.sh on every Python from 3.10 to 3.14 that is on PATH or in ~/.pyenv/versions, one after the other, each
# in an environment of its own (.venv-3.12), and prints a line for each.
#   bash scripts/test_all.sh [pytest arguments]      VERSIONS="3.10 3.13" runs these only
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local candidate
  for candidate in "python$1" $(printf '%s\n' ~/.pyenv/versions/"$1".*/bin/"python$1" | sort -rV); do
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  return 1
}

logs=$(mktemp -d)
failed=0
for version in ${VERSIONS:-3.10 3.11 3.12 3.13 3.14}; do
  if ! python=$(find_python "$version"); then summary+=("$version: no interpreter"); continue; fi
  log=$logs/$version.log
  echo "test_all: $("$python" --version), $log"
  outcome=passed
  if ! VENV=.venv-$version PYTHON=$python bash scripts/test.sh "$@" >"$log" 2>&1; then
    outcome=FAILED failed=1
    grep -E '^(FAILED|ERROR|setup:|.*error:)' "$log" || tail -20 "$log"
  fi
  counts=$(grep -E '^[0-9]+ (passed|failed|skipped).* in [0-9.]+s' "$log" | sed 's/ in .*//' | paste -sd';' || true)
  summary+=("$("$python" -c 'import platform; print(platform.python_version())'): $outcome${counts:+ ($counts)}")
done
printf '%s\n' "${summary[@]}"
exit $failed

#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and this checkout installed in it. Does nothing if that is done already.
#   PYTHON=/path/to/python3   which Python (3.10 to 3.14); default: the first suitable one found
#   VENV=folder               where, and what the other scripts here run with; default: .venv
set -euo pipefail
cd "$(dirname "$0")/.."

suitable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.14 python3.10}; do
    if command -v "$candidate" >/dev/null && suitable "$candidate"; then echo "$candidate"; return; fi
  done
  echo "setup: no Python 3.10 to 3.14 found; set PYTHON=/path/to/python3" >&2
  return 1
}

# Of what pip prints: the downloads that take time, and the installation, which is silent.
progress() {
  local what name rest size
  while read -r what name rest; do
    case "$what $rest" in
      Downloading\ *MB* | Downloading\ *GB*)
        size=${rest#(}
        echo "setup: downloading ${name%%-*}, ${size%)*}" ;;
      Installing\ *) rest=${rest//[^,]/}; echo "setup: installing $((${#rest} + 1)) packages" ;;
    esac
  done
}

venv=${VENV:-.venv}
stamp=$venv/installed
wanted=$(cat requirements.txt pyproject.toml | cksum)
if [[ -x $venv/bin/python && -e $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi

# A .venv without pip is one that was not finished: Debian's Python makes such, without its package python3-venv.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  "$python" -m venv "$venv"
fi
echo "setup: $venv with $("$venv/bin/python" --version), one to three minutes"
# Of ten thousand files some two thousand are ever imported, which compiles them.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile -r requirements.txt 2> >(grep -v '^WARNING: ' >&2) | progress
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
echo "$wanted" > "$stamp"
echo "setup: ready; source $venv/bin/activate"

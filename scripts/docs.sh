#!/usr/bin/env bash
# The documentation as a site, with search: bash scripts/docs.sh [FOLDER], by default build/site.
# Needs the extra docs: pip install -e '.[docs]'. Every broken link is an error, and no page loads from another host.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
site=$(realpath -m "${1:-build/site}")
if [[ ! -x $bin/mkdocs ]]; then
  echo "docs: no $bin/mkdocs; install it by: $bin/pip install -e '.[docs]'" >&2
  exit 1
fi
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
"$bin/python" scripts/site_pages.py "$pages"
"$bin/mkdocs" build --strict --config-file "$pages/mkdocs.yml" --site-dir "$site"
# The theme's search, lunr, writes a node of its word graph as letters and numbers in a row, so with digits in words it
# takes different nodes for one, and some searches fail ("Invalid query"). A comma after each number keeps them apart.
search=("$site"/assets/javascripts/workers/search.*.js)
sed -i -E 's/([a-z])=\1\+([a-z])\+([a-z])\.id/&+","/' "${search[@]}"
grep -qF '.id+","' "${search[@]}" || echo "docs: the theme has another search; look for 'Invalid query' in the browser's log" >&2
if grep -rlE '(src|href)="(https?:)?//' "$site" --include='*.html' | xargs -r grep -hoE '<(script|link|img)[^>]+(src|href)="(https?:)?//[^"]*"' | grep .; then
  echo "docs: a page loads from another host" >&2
  exit 1
fi
echo "$site/index.html"

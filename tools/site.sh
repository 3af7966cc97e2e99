#!/usr/bin/env bash
# site.sh: builds the site of docs/ into build/site (mkdocs.yml), by MkDocs in a virtual environment under build/, and asks its search what newcomers ask.
set -u
cd "$(dirname "$0")/.." || exit 2
venv=build/site-venv
want=$(cksum <tools/site_requirements.txt)
fail() { echo "docs: $1" >&2; exit 1; }

if [ "$(cat $venv/installed 2>/dev/null)" != "$want" ]; then
  command -v python3 >/dev/null || fail "python3: not found"
  rm -rf $venv
  python3 -m venv $venv >/dev/null 2>&1 || fail "python3 -m venv: not available: install the package python3-venv"
  said=$($venv/bin/pip install -q --disable-pip-version-check -r tools/site_requirements.txt 2>&1) ||
    fail "pip cannot install tools/site_requirements.txt: $(tail -n 1 <<<"$said")"
  echo "$want" >$venv/installed
fi
said=$(NO_MKDOCS_2_WARNING=1 $venv/bin/mkdocs build --strict 2>&1) ||
  { grep -v '^INFO' <<<"$said"; fail "the site has faults"; }
if command -v node >/dev/null; then
  node tools/site_search.mjs build/site tools/site_questions.tsv || fail "the search does not find what newcomers ask for"
else
  echo "docs: node is not installed: the search was not asked"
fi
echo "Open in a browser: build/site/index.html; with search: python3 -m http.server -d build/site"

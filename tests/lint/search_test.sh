#!/usr/bin/env bash
# search_test.sh SOURCE_DIR: the search of the site finds the pages of tools/site_questions.tsv, where `make docs` has built the site;
# an expectation that does not hold fails it. The pages that are expected exist.
set -u
cd "$1" || exit 2
fail() { echo "search_test.sh: $1" >&2; exit 1; }
[ "$(grep -c . tools/site_questions.tsv)" -ge 10 ] || fail 'fewer than ten questions'
for page in $(cut -f 2 tools/site_questions.tsv); do
  [ -f "docs/${page%.html}.md" ] || fail "$page: no such page"
done
skip() { echo "$1: the search is not asked"; exit 77; }
command -v node >/dev/null || skip 'node is not installed'
index=build/site/search/search_index.json
[ -f $index ] || skip 'make docs has not built the site'
[ -z "$(find docs mkdocs.yml tools/site_questions.tsv -newer $index -print -quit)" ] || skip 'the site is older than docs/'
node tools/site_search.mjs build/site tools/site_questions.tsv || fail 'a page is not found'
wrong=$(mktemp)
trap 'rm -f "$wrong"' EXIT
sed '1s/\t.*/\tguide\/moe.html/' tools/site_questions.tsv >"$wrong"
node tools/site_search.mjs build/site "$wrong" >/dev/null 2>&1 && fail 'a page that is not found is not noticed'
exit 0

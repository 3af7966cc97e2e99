#!/usr/bin/env bash
# lint.sh [ROOT]: checks formatting, the rules of tools/lint.py, that tables and pictures match
# bench/results, and the page of C++ the headers. Prints one line per finding; exit 1 if there is one.
set -u
tools=$(cd "$(dirname "$0")" && pwd)
cd "${1:-$tools/..}" || exit 2
status=0

# Files that git would commit, or all files of a folder that git does not know.
list() {
  { git ls-files -co --exclude-standard -- "$@" 2>/dev/null || find . -type f | sed 's|^\./||'; } |
    sort -u | while read -r file; do [ -f "$file" ] && printf '%s\n' "$file"; done
}

if command -v clang-format >/dev/null; then
  list '*.h' '*.cc' '*.cu' '*.cuh' | grep -E '\.(h|cc|cu|cuh)$' |
    xargs -r -P 4 -n 16 clang-format --dry-run -Werror 2>&1 | grep -E 'error:' && status=1
else
  echo "lint: clang-format is not installed: formatting not checked" >&2
fi
for script in $(list '*.sh' | grep '\.sh$'); do
  bash -n "$script" || status=1
done
list | python3 "$tools/lint.py" || status=1
if [ "$PWD" = "$(dirname "$tools")" ]; then
  python3 -B "$tools/rewrite_serial.py" --check || status=1
  python3 -B "$tools/tables.py" --check || status=1
  python3 -B "$tools/reference_pages.py" --check || status=1
  list | python3 -B "$tools/unused.py" || status=1
fi
[ "$status" = 0 ] && echo "lint: clean"
exit "$status"

# Read by tests of the program `$tandem` in a new folder `$dir`, which is the current one: `expect`, `fail`, `failures`.
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache
cd "$dir" || exit 1

# expect CODE 'PATTERN' ARG...: what the program says is `$text` then.
expect() {
  local code=$1 pattern=$2 status
  shift 2
  text=$("$tandem" "$@" 2>&1)
  status=$?
  if [ "$status" != "$code" ] || ! [[ $text =~ $pattern ]]; then
    printf '%s\n' "tandem $*" "  exit $status, expected $code" "  said: $text" "  expected: $pattern" >&2
    failures=$((failures + 1))
  fi
}
fail() { echo "$(basename "$0"): $1" >&2; failures=$((failures + 1)); }

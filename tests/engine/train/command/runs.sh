# Sourced by tests of runs: a separate folder in $dir, a failure counter, and waits for a run.
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache

complain() {
  printf '%s\n' "$@" >&2
  failures=$((failures + 1))
}
wait_for() { # FILE PATTERN
  for ((i = 0; i < 600; ++i)); do
    grep -qs "$2" "$1" && return
    sleep 0.05
  done
  complain "$1 never had $2"
}

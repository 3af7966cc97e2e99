#!/usr/bin/env bash
# output_test.sh TANDEM SOURCE_DIR: unwritable output ends every command with a named error, a reader that
# closes its pipe ends it quietly, and system limits are named.
set -u
tandem=$1 source=$2
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_CACHE_DIR=$dir/cache TANDEM_THREADS=1
"$tandem" train "$source/configs/tiny.toml" --tp 2 --set train.steps=3 --set trace.enabled=true \
  --out "$dir/run" >"$dir/log" 2>&1 || { cat "$dir/log"; exit 1; }

fail() { printf '%s\n' "$@" >&2; failures=$((failures + 1)); }

# full PATTERN ARG...: with standard output (or $to) on a full device, exit 3 and a last line that matches.
full() {
  local pattern=$1 text status
  shift
  text=$("$tandem" "$@" 2>&1 >"${to:-/dev/full}" </dev/null)
  status=$?
  [ $status = 3 ] && [[ $(tail -n 1 <<<"$text") =~ $pattern ]] ||
    fail "tandem $* >${to:-/dev/full}: exit $status, expected 3 and '$pattern':" "$text"
}
said='error: standard output: cannot write: No space left on device'
full "$said" info
full "$said" --help
full "$said" --version
full "$said" bench --help
full "$said" bench all_gather --m 32 --n 8 --repeats 2
full "$said" bench all_gather --m 32 --n 8 --repeats 2 --json -
full "$said" generate "$dir/run" --prompt x --max-tokens 4
full "$said" generate "$dir/run" --prompt x --max-tokens 4 --json -
full "$said" eval "$dir/run" --data "$source/configs"
full "$said" eval "$dir/run" --data "$source/configs" --json -
full "$said" report "$dir/run"
full "$said" trace "$dir/run/trace.json"
to=/dev/null
full '/dev/full: cannot' bench all_gather --m 32 --n 8 --repeats 2 --json /dev/full
full '/dev/full: cannot' bench all_gather --m 32 --n 8 --repeats 2 --timeline /dev/full
full '/dev/full: cannot write: No space' eval "$dir/run" --data "$source/configs" --json /dev/full
full '/dev/full: cannot write: No space' trace "$dir/run/trace.json" --svg /dev/full

# Results may be written to other than regular files.
text=$("$tandem" eval "$dir/run" --data "$source/configs" --json >(cat >"$dir/piped") 2>&1) ||
  fail "eval --json into a pipe: $text"
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -s "$dir/piped" ] && break; sleep 0.1; done
grep -q bits_per_byte "$dir/piped" || fail "eval --json into a pipe wrote nothing"

# gone ARG...: the reader has closed the pipe before anything is written.
gone() {
  "$tandem" "$@" 2>"$dir/gone" | true
  local status=${PIPESTATUS[0]}
  [ "$status" = 141 ] && ! grep -q error "$dir/gone" ||
    fail "tandem $* | true: exit $status, expected 141:" "$(cat "$dir/gone")"
}
gone eval "$dir/run" --data "$source/configs"
(
  trap '' PIPE
  gone eval "$dir/run" --data "$source/configs"
  exit "$failures"
) || failures=$((failures + 1))

# A limit on file size.
text=$( (ulimit -f 64; "$tandem" train "$source/configs/tiny.toml" --set train.steps=2 \
  --out "$dir/limited") 2>&1)
status=$?
[ $status = 3 ] && [[ $(tail -n 1 <<<"$text") =~ "$dir/limited/".*": cannot write: File too large" ]] ||
  fail "train with ulimit -f: exit $status:" "$text"

# Out of memory. (A sanitizer reserves its memory at start.)
if ! "$tandem" info | grep -q sanitizers; then
  text=$( (ulimit -v 2000000; exec "$tandem" bench all_gather --m 16384 --n 16384 --repeats 2) 2>&1)
  status=$?
  [ $status = 4 ] && [[ $text =~ "error: not enough memory: no room for "[0-9]+" bytes (bench all_gather)" ]] ||
    fail "bench with ulimit -v: exit $status:" "$text"
fi

# An unwritable log does not end training.
"$tandem" train "$source/configs/tiny.toml" --set train.steps=2 --out "$dir/quiet" 2>/dev/full ||
  fail "train 2>/dev/full: exit $?"
[ -e "$dir/quiet/final/model.safetensors" ] || fail "train 2>/dev/full wrote no model"
exit $((failures > 0))
